"""merge-lora against the sum written out by hand, and against PEFT itself where it is installed."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import Qwen3OmniMoeForConditionalGeneration

from convert.directions import omni_to_vl_conversion
from convert.job import Conversion, Options, run
from convert.lora import merge_lora_conversion
from convert.verify import verify_conversion
from schemas.errors import ConfigError, IncompleteSourceError, UnsupportedError
from tests.convert.models import make_omni, read_weights

R, ALPHA, E, H, I = 3, 7, 8, 32, 24  # noqa: E741 - the field's letters
TEXT = "base_model.model.model.language_model.layers."  # as transformers 5 calls a thinker's modules
HUB = "thinker.model.layers."


def convert(conversion: Conversion, output: Path) -> dict[str, torch.Tensor]:
    run(conversion, output, Options(workers=2), lambda count: None, verify_conversion)
    return read_weights(output)


def adapter(folder: Path, tensors: dict[str, torch.Tensor], **config: Any) -> Path:
    folder.mkdir()
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "adapter_model.safetensors")
    settings = {"peft_type": "LORA", "r": R, "lora_alpha": ALPHA, "bias": "none", **config}
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    return folder


def factors(module: str, into: int, out: int, rank: int = R) -> dict[str, torch.Tensor]:
    return {f"{module}.lora_A.weight": torch.randn(rank, into), f"{module}.lora_B.weight": torch.randn(out, rank) * 0.1}


def product(tensors: dict[str, torch.Tensor], module: str, scale: float) -> torch.Tensor:
    return scale * (tensors[f"{module}.lora_B.weight"] @ tensors[f"{module}.lora_A.weight"])


def expert_delta(a: torch.Tensor, b: torch.Tensor, rank: int, scale: float) -> torch.Tensor:
    """PEFT's own words for [E, out, in]: einsum("o r e, e r i -> e o i")."""
    return scale * torch.einsum("o r e, e r i -> e o i", b.reshape(b.shape[0], rank, E), a.reshape(E, rank, a.shape[1]))


def check(merged: dict[str, torch.Tensor], base: Path, changes: dict[str, torch.Tensor]) -> None:
    """Exactly these tensors changed, by these deltas; all others are the base's bytes."""
    before = read_weights(base)
    assert merged.keys() == before.keys()
    for name, tensor in before.items():
        if name in changes:
            wanted = (tensor.float() + changes[name]).to(tensor.dtype)
            torch.testing.assert_close(
                merged[name], wanted, rtol=1e-6 if tensor.dtype == torch.float32 else 8e-3, atol=1e-7
            )
            assert not torch.equal(merged[name], tensor), name
        else:
            assert torch.equal(merged[name], tensor), name


def expert_changes(layer: int, gate_up: torch.Tensor, down: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
    """Deltas [E, 2I, H] and [E, H, I] as those of the hub's tensors."""
    at = f"{HUB}{layer}.mlp.experts."
    changes = {f"{at}{e}.gate_proj.weight": gate_up[e, :I] for e in range(E)}
    changes |= {f"{at}{e}.up_proj.weight": gate_up[e, I:] for e in range(E)}
    return changes | ({f"{at}{e}.down_proj.weight": down[e] for e in range(E)} if down is not None else {})


def test_dense_modules_with_patterns(omni: Path, tmp_path: Path) -> None:
    """Ranks and alphas by pattern, the first that matches; the vision tower and the head, too."""
    tensors = {
        **factors(f"{TEXT}0.self_attn.q_proj", H, 40),
        **factors(f"{TEXT}1.self_attn.q_proj", H, 40, rank=2),
        **factors(f"{TEXT}1.self_attn.v_proj", H, 20),
        **factors("base_model.model.model.visual.blocks.2.mlp.linear_fc1", 16, 44),
        **factors("base_model.model.lm_head", H, 320),
    }
    patterns = {
        "rank_pattern": {"layers.1.self_attn.q_proj": 2},
        "alpha_pattern": {"v_proj": 5, "self_attn.v_proj": 50},
    }
    merged = convert(merge_lora_conversion(adapter(tmp_path / "lora", tensors, **patterns), omni), tmp_path / "out")
    changes = {
        f"{HUB}0.self_attn.q_proj.weight": product(tensors, f"{TEXT}0.self_attn.q_proj", ALPHA / R),
        f"{HUB}1.self_attn.q_proj.weight": product(tensors, f"{TEXT}1.self_attn.q_proj", ALPHA / 2),
        f"{HUB}1.self_attn.v_proj.weight": product(tensors, f"{TEXT}1.self_attn.v_proj", 5 / R),
        "thinker.visual.blocks.2.mlp.linear_fc1.weight": product(
            tensors, "base_model.model.model.visual.blocks.2.mlp.linear_fc1", ALPHA / R
        ),
        "thinker.lm_head.weight": product(tensors, "base_model.model.lm_head", ALPHA / R),
    }
    check(merged, omni, changes)


@pytest.mark.parametrize("rslora", [False, True])
def test_experts_of_their_own(omni: Path, tmp_path: Path, rslora: bool) -> None:
    """Two parameters of one module: PEFT nests its wrappers, and only the shapes tell which is which."""
    module = f"{TEXT}1.mlp.experts"
    tensors = {
        **factors(f"{module}.base_layer", H, 2 * I, rank=R * E),
        **factors(module, I, H, rank=R * E),
    }
    source = adapter(tmp_path / "lora", tensors, use_rslora=rslora)
    scale = ALPHA / (math.sqrt(R) if rslora else R)
    gate_up = expert_delta(
        tensors[f"{module}.base_layer.lora_A.weight"], tensors[f"{module}.base_layer.lora_B.weight"], R, scale
    )
    down = expert_delta(tensors[f"{module}.lora_A.weight"], tensors[f"{module}.lora_B.weight"], R, scale)
    merged = convert(merge_lora_conversion(source, omni), tmp_path / "out")
    check(merged, omni, expert_changes(1, gate_up, down))


def test_experts_of_a_vl_model_in_the_hub_layout(omni: Path, tmp_path: Path) -> None:
    convert(omni_to_vl_conversion(omni), tmp_path / "vl")
    module = f"{TEXT}2.mlp.experts"
    tensors = factors(module, H, 2 * I, rank=R * E)
    merged = convert(merge_lora_conversion(adapter(tmp_path / "lora", tensors), tmp_path / "vl"), tmp_path / "out")
    delta = expert_delta(tensors[f"{module}.lora_A.weight"], tensors[f"{module}.lora_B.weight"], R, ALPHA / R)
    check(merged, tmp_path / "vl", {"model.language_model.layers.2.mlp.experts.gate_up_proj": delta.mT})


def test_adapter_that_all_experts_share(omni: Path, tmp_path: Path) -> None:
    """The rank of the configuration tells it from one of every expert; here the key names the parameter."""
    module = "base_model.model.model.layers.0.mlp.experts.gate_up_proj"  # the trainer's names
    tensors = factors(module, H, 2 * I)
    merged = convert(merge_lora_conversion(adapter(tmp_path / "lora", tensors), omni), tmp_path / "out")
    check(merged, omni, expert_changes(0, product(tensors, module, ALPHA / R).expand(E, -1, -1)))


def test_experts_as_peft_had_them_before_it_swapped_the_dimensions(omni: Path, tmp_path: Path) -> None:
    module = f"{TEXT}0.mlp.experts"
    tensors = factors(module, 2 * I, H, rank=R * E)
    merged = convert(merge_lora_conversion(adapter(tmp_path / "lora", tensors), omni), tmp_path / "out")
    a, b = tensors[f"{module}.lora_A.weight"], tensors[f"{module}.lora_B.weight"]
    check(merged, omni, expert_changes(0, expert_delta(a, b, R, ALPHA / R).mT))


def test_modules_of_single_experts(omni: Path, tmp_path: Path) -> None:
    """Adapters of transformers 4, where every expert was a module; in a whole Omni, so with `thinker.`."""
    module = "base_model.model.thinker.model.layers.1.mlp.experts.5.down_proj"
    tensors = factors(module, I, H)
    merged = convert(merge_lora_conversion(adapter(tmp_path / "lora", tensors), omni), tmp_path / "out")
    check(merged, omni, {f"{HUB}1.mlp.experts.5.down_proj.weight": product(tensors, module, ALPHA / R)})


def test_embedding_and_replaced_modules(omni: Path, tmp_path: Path) -> None:
    embedding = "base_model.model.model.language_model.embed_tokens"
    norm = torch.randn(H)
    tensors = {
        f"{embedding}.lora_embedding_A": torch.randn(R, 320),
        f"{embedding}.lora_embedding_B": torch.randn(H, R),
        f"{TEXT}2.input_layernorm.weight": norm,
    }
    merged = convert(merge_lora_conversion(adapter(tmp_path / "lora", tensors), omni), tmp_path / "out")
    delta = ALPHA / R * (tensors[f"{embedding}.lora_embedding_B"] @ tensors[f"{embedding}.lora_embedding_A"]).T
    before = read_weights(omni)[f"{HUB}2.input_layernorm.weight"]
    changes = {"thinker.model.embed_tokens.weight": delta, f"{HUB}2.input_layernorm.weight": norm - before}
    check(merged, omni, changes)
    assert torch.equal(merged[f"{HUB}2.input_layernorm.weight"], norm)


def test_sum_is_rounded_once(tmp_path: Path) -> None:
    """In bfloat16 the change would vanish bit by bit if it were rounded before it is added."""
    base = make_omni(tmp_path / "omni", dtype=torch.bfloat16, layers=1)
    module = f"{TEXT}0.self_attn.o_proj"
    tensors = factors(module, 40, H)
    merged = convert(merge_lora_conversion(adapter(tmp_path / "lora", tensors), base), tmp_path / "out")
    name = f"{HUB}0.self_attn.o_proj.weight"
    exact = (read_weights(base)[name].float() + product(tensors, module, ALPHA / R)).bfloat16()
    assert merged[name].dtype == torch.bfloat16
    assert (merged[name] != exact).float().mean() < 0.01  # sums in another order may round to the neighbour
    check(merged, base, {name: product(tensors, module, ALPHA / R)})


Q, FUSED = f"{TEXT}0.self_attn.q_proj", f"{TEXT}0.mlp.experts"
# what is added to a valid adapter (None: taken away), its settings, the error and what it says
REFUSED: list[tuple[dict[str, torch.Tensor | None], dict[str, Any], type[Exception], str]] = [
    (factors(f"{TEXT}0.self_attn.w_proj", H, 40), {}, UnsupportedError, r"1 of the 2 adapted modules .*w_proj"),
    (factors(f"{TEXT}9.self_attn.q_proj", H, 40), {}, UnsupportedError, r"layers\.9\.self_attn\.q_proj"),
    ({f"{Q}.lora_B.weight": None}, {}, IncompleteSourceError, r"lora_A\.weight has no .*lora_B\.weight"),
    ({f"{Q}.lora_A.weight": None}, {}, IncompleteSourceError, r"lora_B\.weight has no .*lora_A\.weight"),
    ({f"{Q}.lora_A.weight": torch.zeros(R, H + 1)}, {}, UnsupportedError, r"\[3, 33\].*do not fit .*q_proj"),
    (factors(FUSED, H + 1, 2 * I, R * E), {}, UnsupportedError, "fits nothing"),
    (factors(FUSED, H, 2 * I, R * E), {"r": 5}, UnsupportedError, "fits nothing"),
    ({f"{Q}.lora_magnitude_vector": torch.ones(40)}, {}, UnsupportedError, "lora_magnitude_vector"),
    (
        {f"{TEXT}0.self_attn.k_proj.weight": torch.ones(3, H)},
        {},
        UnsupportedError,
        r"k_proj\.weight is float32 \[3, 32\]",
    ),
    ({}, {"use_dora": True}, UnsupportedError, "use_dora is True"),
    ({}, {"bias": "all"}, UnsupportedError, "bias is 'all'"),
    ({}, {"peft_type": "LOHA"}, UnsupportedError, "peft_type is 'LOHA'"),
    ({}, {"lora_alpha": None}, ConfigError, "lora_alpha: missing"),
]


@pytest.mark.parametrize(("change", "config", "error", "says"), REFUSED)
def test_what_cannot_be_merged(
    omni: Path, tmp_path: Path, change: dict, config: dict, error: type[Exception], says: str
) -> None:
    tensors = {name: tensor for name, tensor in (factors(Q, H, 40) | change).items() if tensor is not None}
    with pytest.raises(error, match=says):
        merge_lora_conversion(adapter(tmp_path / "lora", tensors, **config), omni)


def test_pickled_or_missing_adapter(omni: Path, tmp_path: Path) -> None:
    folder = adapter(tmp_path / "lora", factors(Q, H, 40))
    (folder / "adapter_model.safetensors").rename(folder / "adapter_model.bin")
    with pytest.raises(UnsupportedError, match="pickled"):
        merge_lora_conversion(folder, omni)
    with pytest.raises(ConfigError, match="no such file"):
        merge_lora_conversion(omni, omni)


@torch.no_grad()
def test_as_peft_merges(omni: Path, tmp_path: Path) -> None:
    """The real thing, where it is installed: its adapter, its logits, its merged weights."""
    peft = pytest.importorskip("peft")
    whole = Qwen3OmniMoeForConditionalGeneration.from_pretrained(omni)
    config = peft.LoraConfig(
        r=R,
        lora_alpha=ALPHA,
        target_modules=["q_proj", "v_proj", "linear_fc1", "lm_head"],
        target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
        rank_pattern={"layers.1.self_attn.q_proj": 2},
        alpha_pattern={"v_proj": 5},
        modules_to_save=["o_proj"],
    )
    model = peft.get_peft_model(whole.thinker, config)
    for name, parameter in model.named_parameters():
        if "lora_" in name or "modules_to_save" in name:
            parameter.normal_(std=0.05)
    model.save_pretrained(tmp_path / "lora")
    merged = convert(merge_lora_conversion(tmp_path / "lora", omni), tmp_path / "out")
    ids = torch.arange(30).view(1, 30)
    ours = Qwen3OmniMoeForConditionalGeneration.from_pretrained(tmp_path / "out").thinker
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    torch.testing.assert_close(ours(**inputs).logits, model(**inputs).logits, rtol=0, atol=1e-5)
    model.merge_and_unload().save_pretrained(tmp_path / "theirs")
    for name, tensor in read_weights(tmp_path / "theirs").items():
        torch.testing.assert_close(merged[f"thinker.{name}"], tensor, rtol=0, atol=1e-7)
