"""Models of transformers on packed documents against the same weights in plain transformers, one document at a time."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from schemas.errors import UnsupportedError
from train.model_build import set_gradient_checkpointing
from train.models import hub_model
from train.models.checkpointing import CheckpointPolicy, keep_attention, keep_projections
from train.models.hub_model import HubModel, build_hub_model, capped_cross_entropy, check_config
from train.models.inputs import ModelInputs, text_inputs
from train.models.spec import build_foundation_model
from train.ops import chunk_loss
from train.ops.device import describe_device
from train.ops.registry import Device, Ops, bind_ops, eager_ops, resolve
from train.ops.token_objective import TokenTerms

TINY: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "pad_token_id": 0,
    "initializer_range": 0.2,  # large enough that a mistake shows
}
GEMMA: dict[str, Any] = TINY | {"sliding_window": 6, "query_pre_attn_scalar": 8, "final_logit_softcapping": 3.0}
BOTH_LAYERS = ["sliding_attention", "full_attention"]
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3": ("Qwen3Config", TINY),
    "qwen3 tied": ("Qwen3Config", TINY | {"tie_word_embeddings": True}),
    "qwen3 window": (
        "Qwen3Config",
        TINY | {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1, "layer_types": None},
    ),
    "llama": ("LlamaConfig", TINY),
    "gemma2": ("Gemma2Config", GEMMA | {"attn_logit_softcapping": 2.0, "layer_types": BOTH_LAYERS}),
    "gemma3": ("Gemma3TextConfig", GEMMA | {"layer_types": BOTH_LAYERS}),
    "granite": ("GraniteConfig", TINY | {"logits_scaling": 4.0, "attention_multiplier": 0.3}),
    "cohere": ("CohereConfig", TINY | {"logit_scale": 0.25}),
}
LENGTHS = [5, 1, 13, 7]


def config_folder(folder: Path, family: str) -> str:
    name, keys = FAMILIES[family]
    getattr(transformers, name)(**keys).save_pretrained(folder)
    return str(folder)


def built(folder: Path, family: str, ops: Ops | None = None) -> HubModel:
    model = build_hub_model(config_folder(folder, family), ops or fitting_ops(family))
    model.initialize(3)
    return model


def fitting_ops(family: str = "llama") -> Ops:
    """What `auto` picks on a CPU, but for models whose attention scores have a cap."""
    name = "eager" if family == "gemma2" else "auto"
    return bind_ops(resolve({"attn_implementation": name}, Device("cpu")), Device("cpu"))


def plain(model: HubModel, folder: Path) -> transformers.PreTrainedModel:
    """The same weights in transformers' own implementation."""
    config = transformers.AutoConfig.from_pretrained(folder)
    found = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    found.load_state_dict(model.hub.state_dict())
    return found.eval()


def documents() -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(1, 97, (length,), generator=generator) for length in LENGTHS]


def labelled(ids: list[Tensor]) -> list[Tensor]:
    return [torch.where(torch.arange(len(row)) % 4 == 3, -100, row) for row in ids]


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_loss_and_gradients_equal_plain_transformers(family: str, tmp_path: Path) -> None:
    ours, ids = built(tmp_path, family), documents()
    theirs = plain(ours, tmp_path)
    labels = labelled(ids)
    found = ours(text_inputs(ids, labels), logits=True)
    assert found.loss is not None and found.logits is not None and found.token_loss is not None
    alone = [theirs(input_ids=row[None], use_cache=False).logits[0] for row in ids]
    torch.testing.assert_close(found.logits, torch.cat(alone), atol=1e-5, rtol=0)
    count = sum(int((row[1:] != -100).sum()) for row in labels)
    loss = sum(
        torch.nn.functional.cross_entropy(out[:-1], row[1:], reduction="sum")
        for out, row in zip(alone, labels, strict=True)
        if len(row) > 1
    )
    wanted = torch.as_tensor(loss) / count
    torch.testing.assert_close(found.loss, wanted, atol=1e-5, rtol=0)
    torch.testing.assert_close(found.token_loss.sum() / count, wanted.detach(), atol=1e-5, rtol=0)
    wanted.backward()
    found.loss.backward()
    reference = {name: p.grad for name, p in theirs.named_parameters() if p.grad is not None}
    assert {name for name, _ in ours.named_parameters()} == set(reference)
    largest = max(float(grad.abs().max()) for grad in reference.values())
    for name, parameter in ours.named_parameters():
        assert parameter.grad is not None
        limit = 1e-5 * float(reference[name].abs().max()) + 1e-6 * largest
        assert float((parameter.grad - reference[name]).abs().max()) <= limit, name


@pytest.mark.parametrize("family", FAMILIES)
def test_a_document_in_a_pack_equals_itself_alone(family: str, tmp_path: Path) -> None:
    model, ids = built(tmp_path, family), documents()
    packed = model(text_inputs(ids), logits=True).logits
    alone = [model(text_inputs([row]), logits=True).logits for row in ids]
    torch.testing.assert_close(packed, torch.cat(alone), atol=1e-5, rtol=0)


def test_names_are_those_of_the_hub(tmp_path: Path) -> None:
    model = built(tmp_path, "qwen3")
    assert {name for name, _ in model.named_parameters()} == {name for name, _ in model.hub.named_parameters()}
    assert [type(block).__name__ for block in model.blocks] == ["Qwen3DecoderLayer"] * 2
    tied = built(tmp_path / "tied", "qwen3 tied")
    assert "lm_head.weight" not in dict(tied.named_parameters())
    assert tied.head_weight is tied.get_parameter("model.embed_tokens.weight")


@pytest.mark.parametrize("family", ["qwen3 tied", "gemma2", "gemma3"])
def test_from_the_meta_device(family: str, tmp_path: Path) -> None:
    """Built without memory, then filled: what no checkpoint holds is computed again."""
    wanted, ids = built(tmp_path, family), documents()
    with torch.device("meta"):
        model = build_hub_model(str(tmp_path), fitting_ops(family))
    assert {parameter.device.type for parameter in model.parameters()} == {"meta"}
    model.to_empty(device="cpu")
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.fill_(7)
    model.load_state_dict(wanted.state_dict())
    model.restore_buffers()
    expected = wanted(text_inputs(ids), logits=True).logits
    torch.testing.assert_close(model(text_inputs(ids), logits=True).logits, expected, atol=0, rtol=0)
    model.initialize(3)
    torch.testing.assert_close(model(text_inputs(ids), logits=True).logits, expected, atol=0, rtol=0)


@pytest.mark.parametrize("family", ["qwen3 tied", "gemma3", "llama"])
def test_weights_of_a_folder(family: str, tmp_path: Path) -> None:
    model, ids = built(tmp_path, family), documents()
    model.hub.save_pretrained(tmp_path)
    loaded = build_foundation_model(tmp_path, fitting_ops(family), backend="transformers")
    wanted = model(text_inputs(ids), logits=True).logits
    torch.testing.assert_close(loaded(text_inputs(ids), logits=True).logits, wanted, atol=0, rtol=0)


def test_random_weights_follow_the_seed(tmp_path: Path) -> None:
    model = built(tmp_path, "qwen3")
    first = {name: p.detach().clone() for name, p in model.named_parameters()}
    state = torch.random.get_rng_state()
    model.initialize(4)
    assert not torch.equal(first["model.layers.0.mlp.up_proj.weight"], model.get_parameter("lm_head.weight"))
    assert not torch.equal(first["lm_head.weight"], model.get_parameter("lm_head.weight"))
    model.initialize(3)
    assert all(torch.equal(first[name], p) for name, p in model.named_parameters())
    assert torch.equal(state, torch.random.get_rng_state())


@pytest.mark.parametrize("policy", [CheckpointPolicy(), CheckpointPolicy(keep_attention)], ids=["inputs", "attention"])
def test_checkpointed_layers_give_the_same_gradients(tmp_path: Path, policy: CheckpointPolicy) -> None:
    model, ids = built(tmp_path, "gemma3"), documents()
    inputs = text_inputs(ids, labelled(ids))

    def gradients() -> dict[str, Tensor]:
        model.zero_grad()
        model(inputs).loss.backward()
        return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}

    model.train()
    wanted, calls = gradients(), 0
    attention = model.attention

    def counted(*args: Any, **kwargs: Any) -> Tensor:
        nonlocal calls
        calls += 1
        return attention(*args, **kwargs)

    model.attention = counted
    model.set_checkpointing(policy)
    torch.testing.assert_close(gradients(), wanted, atol=0, rtol=0)
    assert calls == 2 * len(model.blocks)
    model.set_checkpointing(None)
    torch.testing.assert_close(gradients(), wanted, atol=0, rtol=0)
    assert calls == 3 * len(model.blocks)
    with pytest.raises(UnsupportedError, match="projections of its own, whose results cannot be kept"):
        set_gradient_checkpointing(model, CheckpointPolicy(keep_projections))


def test_capped_loss_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(2)
    hidden = torch.randn(23, 8, generator=generator, requires_grad=True)
    weight = torch.randn(37, 8, generator=generator, requires_grad=True)
    labels = torch.where(torch.arange(23) % 5 == 0, -100, torch.arange(23))
    logits = 2.0 * torch.tanh(hidden @ weight.T / 2.0)
    wanted = torch.nn.functional.cross_entropy(logits, labels, reduction="sum") * 0.3
    gradients = torch.autograd.grad(wanted, (hidden, weight))
    monkeypatch.setitem(chunk_loss.CHUNK_BYTES, "cpu", 4 * 37 * 5)
    loss, token_loss = capped_cross_entropy(hidden, weight, labels, scale=torch.tensor(0.3), cap=2.0)
    torch.testing.assert_close(loss, wanted)
    torch.testing.assert_close(token_loss.sum() * 0.3, wanted.detach())
    torch.testing.assert_close(torch.autograd.grad(loss, (hidden, weight)), gradients)
    scales = torch.linspace(-1, 1, 23)
    logits = 2.0 * torch.tanh(hidden @ weight.T / 2.0)
    each = torch.nn.functional.cross_entropy(logits, labels, reduction="none")
    found = capped_cross_entropy(hidden, weight, labels, scale=scales, cap=2.0).loss
    torch.testing.assert_close(found, (each * scales).sum())
    wanted_each = torch.autograd.grad((each * scales).sum(), (hidden, weight))
    torch.testing.assert_close(torch.autograd.grad(found, (hidden, weight)), wanted_each)
    empty = capped_cross_entropy(hidden[:0], weight, labels[:0], scale=torch.tensor(0.3), cap=2.0)
    assert (empty.loss.item(), empty.token_loss.shape) == (0.0, (0,))


@pytest.mark.parametrize("kind", ["llama", "gemma2"])
def test_an_objective_of_log_probabilities(tmp_path: Path, kind: str) -> None:
    model, ids = built(tmp_path, kind), documents()
    inputs = text_inputs(ids, labelled(ids))
    labels = inputs.labels
    assert labels is not None
    has = labels != -100

    def cube(p: Tensor, labelled: Tensor) -> TokenTerms:
        assert torch.equal(labelled, has) and not p.requires_grad
        return TokenTerms(p**3, 3 * p**2, p.sum()[None])

    whole = model(inputs, logits=True).logits.float().log_softmax(-1)
    logprobs = whole[has].gather(1, labels[has][:, None])[:, 0]
    wanted = torch.autograd.grad((logprobs**3).sum() * 0.1, list(model.parameters()))
    output = model(dataclasses.replace(inputs, objective=cube, loss_scale=torch.tensor(0.1)))
    torch.testing.assert_close(output.loss, (logprobs**3).sum() * 0.1)
    torch.testing.assert_close(output.objective_sums, logprobs.sum()[None])
    torch.testing.assert_close(torch.autograd.grad(output.loss, list(model.parameters())), wanted, rtol=1e-4, atol=1e-4)


def test_only_the_loss_is_whole(tmp_path: Path) -> None:
    ids = documents()
    output = built(tmp_path, "llama")(text_inputs(ids, labelled(ids)))
    assert output.logits is None and output.aux_loss is None and output.loss is output.ce_loss


@pytest.mark.parametrize(
    ("name", "keys", "said"),
    [
        ("Qwen3MoeConfig", {"num_experts": 4}, r"qwen3_moe has experts \(num_experts: 4\)"),
        ("MixtralConfig", {"num_local_experts": 2}, "mixtral has experts"),
        ("Gemma3Config", {}, "gemma3: backend transformers takes text models alone"),
        ("T5Config", {}, "t5: backend transformers takes text models alone"),
        ("Qwen3NextConfig", {"num_experts": 0}, "qwen3_next has layers of type linear_attention"),
        ("LlamaConfig", {"lm_head_multiplier": 2.0}, "llama changes its logits by lm_head_multiplier: 2.0"),
    ],
)
def test_models_that_cannot_be_trained_are_refused(name: str, keys: dict[str, Any], said: str) -> None:
    with pytest.raises(UnsupportedError, match=said):
        check_config(getattr(transformers, name)(**keys))


@pytest.mark.parametrize(
    ("name", "keys", "said"),
    [
        ("MambaConfig", {"state_size": 4}, "mamba has layers of type|MambaForCausalLM keeps a state"),
        ("BloomConfig", {"n_layer": 1, "n_head": 2}, "BloomForCausalLM does not look its attention up"),
        ("PhiConfig", TINY, "PhiForCausalLM has a head other than one matrix without bias"),
    ],
)
def test_models_that_avoid_the_hooks_are_refused(name: str, keys: dict[str, Any], said: str, tmp_path: Path) -> None:
    small = {"vocab_size": 50, "hidden_size": 16, "num_hidden_layers": 1}
    getattr(transformers, name)(**small | keys).save_pretrained(tmp_path)
    with pytest.raises(UnsupportedError, match=said):
        build_hub_model(str(tmp_path), eager_ops())


def test_what_a_layer_asks_for_in_vain_is_refused(tmp_path: Path) -> None:
    ids = documents()
    capped = built(tmp_path / "capped", "gemma2", eager_ops())
    with pytest.raises(UnsupportedError, match="attn_implementation sdpa has no softcap"):
        capped(text_inputs(ids))
    model = built(tmp_path / "model", "llama")
    layer, rows = torch.nn.Identity(), torch.zeros(1, 2, 3, 4)
    common: dict[str, Any] = {"segments": text_inputs([ids[0][:3]]).segments, "attention": fitting_ops().attention}
    for options, said in (
        (common | {"dropout": 0.1}, "attention_dropout 0.1 is not supported"),
        (common | {"s_aux": rows}, "Identity passes s_aux to its attention"),
        ({}, "does not hand keyword arguments on"),
    ):
        with pytest.raises(UnsupportedError, match=said):
            hub_model.packed_attention(layer, rows, rows, rows, None, **options)
    with pytest.raises(UnsupportedError, match="brings an attention mask"):
        hub_model.packed_attention(layer, rows, rows, rows, rows, **common)
    plain_inputs = text_inputs(ids)
    pictures = ModelInputs(**{**vars(plain_inputs), "patches": torch.zeros(4, 8), "grids": [(1, 2, 2)]})
    with pytest.raises(UnsupportedError, match="LlamaForCausalLM is a text model"):
        model(pictures)


@pytest.mark.gpu
@pytest.mark.parametrize("family", ["llama", "qwen3 window"])
def test_bfloat16_on_a_gpu(family: str, tmp_path: Path) -> None:
    """What `auto` picks there against float32 on the CPU."""
    exact, ids = built(tmp_path, family), documents()
    expected = exact(text_inputs(ids), logits=True).logits
    device = describe_device("cuda")
    ops = bind_ops(resolve({}, device, "bfloat16"), device, "bfloat16")
    model = build_hub_model(str(tmp_path), ops, dtype=torch.bfloat16).to("cuda")
    model.load_state_dict(exact.state_dict())
    output = model(text_inputs(ids, labelled(ids), "cuda"), logits=True)
    output.loss.backward()
    assert float((output.logits.float().cpu() - expected).abs().max()) <= 0.05 * float(expected.abs().max())
    assert all(bool(torch.isfinite(parameter.grad).all()) for parameter in model.parameters())
