"""Every form in which Megatron writes these families: built from hub weights by an independent hand, brought back
bit for bit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from convert.directions import omni_to_text_conversion, omni_to_vl_conversion
from convert.job import Options, run
from convert.megatron import find_layout
from convert.megatron_to_hf import megatron_to_hf_conversion
from convert.tensors import TensorInfo
from convert.verify import verify_conversion
from schemas.errors import UnsupportedError
from tests.convert.dcp_factory import grid, one_chunk, save_megatron
from tests.convert.megatron_factory import Weights, grouped_qkv, hub_tower, language_model, vision_blocks
from tests.convert.models import edit_config, read_weights, rewrite_weights

KV_HEADS, VISION_HEADS, ROWS = 2, 2, 384
OPTIONS = Options(workers=2)


@pytest.fixture(scope="module")
def vl(omni: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("vl") / "vl"
    run(omni_to_vl_conversion(omni), folder, OPTIONS, lambda n: None)
    return folder


@pytest.fixture(scope="module")
def text(omni: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("text") / "text"
    run(omni_to_text_conversion(omni), folder, OPTIONS, lambda n: None)
    return folder


def trained(base: Path, tmp_path: Path) -> tuple[Path, Weights]:
    """A base with other weights than the checkpoint's, and the weights that the checkpoint is made of."""
    weights = read_weights(base)
    other = tmp_path / "base"
    other.mkdir()
    for path in base.iterdir():
        if path.suffix == ".json":
            (other / path.name).write_bytes(path.read_bytes())
    rewrite_weights(other, {name: tensor * 0.5 + 0.25 for name, tensor in weights.items()})
    return other, weights


def converted(source: Path, base: Path, output: Path, **options: bool) -> Weights:
    conversion = megatron_to_hf_conversion(source, base, **options)
    run(conversion, output, OPTIONS, lambda n: None, verify_conversion)
    return read_weights(output)


def assert_equal(found: Weights, wanted: Weights) -> None:
    assert found.keys() == wanted.keys()
    different = [name for name, tensor in wanted.items() if not torch.equal(found[name], tensor)]
    assert different == []


@pytest.mark.parametrize("form", ["stacked", "per layer", "singleton"])
@pytest.mark.parametrize("norms", ["engine", "local", "plain"])
@pytest.mark.parametrize("prefix", ["", "module.", "module.module.language_model."])
def test_text_models(text: Path, tmp_path: Path, form: str, norms: str, prefix: str) -> None:
    base, weights = trained(text, tmp_path)
    tensors = language_model(weights, "model.", "", KV_HEADS, form=form, norms=norms, rows=ROWS, prefix=prefix)
    save_megatron(tmp_path / "source", tensors, grid(2, 2, 2))
    assert_equal(converted(tmp_path / "source", base, tmp_path / "out"), weights)


@pytest.mark.parametrize("form", ["stacked", "per layer", "singleton"])
@pytest.mark.parametrize("tower", ["stacked blocks", "single blocks", "hub names", "old hub names", "absent"])
def test_qwen3_vl_moe(vl: Path, tmp_path: Path, form: str, tower: str) -> None:
    base, weights = trained(vl, tmp_path)
    tensors = language_model(
        weights, "model.language_model.", "", KV_HEADS, form=form, rows=ROWS, prefix="language_model."
    )
    if tower.endswith("blocks"):
        stacked = tower.startswith("stacked")
        tensors |= vision_blocks(weights, "model.visual.", VISION_HEADS, stacked=stacked, prefix="vision_model.")
    elif tower != "absent":
        tensors |= hub_tower(weights, "model.visual.", "visual." if tower == "hub names" else "vision_model.")
    else:
        weights |= {name: tensor for name, tensor in read_weights(base).items() if name.startswith("model.visual.")}
    save_megatron(tmp_path / "source", tensors, grid(1, 2))
    assert_equal(converted(tmp_path / "source", base, tmp_path / "out"), weights)


@pytest.mark.parametrize("towers", ["both", "vision only", "none", "vision as blocks"])
@pytest.mark.parametrize("root", ["thinker.", "module.thinker.", ""])
def test_omni_thinker_into_a_whole_omni(omni: Path, tmp_path: Path, towers: str, root: str) -> None:
    base, weights = trained(omni, tmp_path)
    kept = read_weights(base)
    tensors = language_model(
        weights, "thinker.model.", "thinker.", KV_HEADS, rows=ROWS, prefix=f"{root}language_model."
    )
    made = ["thinker.model.", "thinker.lm_head."]
    if towers == "vision as blocks":
        tensors |= vision_blocks(weights, "thinker.visual.", VISION_HEADS, prefix=f"{root}vision_model.")
    elif towers != "none":
        tensors |= hub_tower(weights, "thinker.visual.", f"{root}visual.")
    made += ["thinker.visual."] if towers != "none" else []
    if towers == "both":
        tensors |= hub_tower(weights, "thinker.audio_tower.", f"{root}audio_model.")
        made.append("thinker.audio_tower.")
    save_megatron(tmp_path / "source", tensors, grid(1, 2))
    found = converted(tmp_path / "source", base, tmp_path / "out")
    wanted = {name: (weights if name.startswith(tuple(made)) else kept)[name] for name in weights}
    assert_equal(found, wanted)


def test_the_towers_of_the_base_on_request(omni: Path, tmp_path: Path) -> None:
    base, weights = trained(omni, tmp_path)
    tensors = language_model(weights, "thinker.model.", "thinker.", KV_HEADS, prefix="thinker.language_model.")
    tensors |= hub_tower(weights, "thinker.visual.", "thinker.visual.")
    save_megatron(tmp_path / "source", tensors)
    found = converted(tmp_path / "source", base, tmp_path / "out", keep_base_towers=True)
    name = "thinker.visual.blocks.0.attn.qkv.weight"
    assert torch.equal(found[name], read_weights(base)[name])


def test_a_tied_head(text: Path, tmp_path: Path) -> None:
    """No head in the checkpoint; a base that stores one all the same gets the new embedding there (handed case C09)."""
    base, weights = trained(text, tmp_path)
    edit_config(base, tie_word_embeddings=True)
    tied = {name: tensor for name, tensor in weights.items() if name != "lm_head.weight"}
    save_megatron(tmp_path / "source", language_model(tied, "model.", "", KV_HEADS, rows=ROWS))
    found = converted(tmp_path / "source", base, tmp_path / "stored")
    assert_equal(found, {**tied, "lm_head.weight": tied["model.embed_tokens.weight"]})
    rewrite_weights(base, {name: tensor for name, tensor in read_weights(base).items() if name != "lm_head.weight"})
    assert_equal(converted(tmp_path / "source", base, tmp_path / "out"), tied)


def test_mixed_dtypes_become_those_of_the_base(text: Path, tmp_path: Path) -> None:
    """Norms and router in fp32 beside bf16 weights, as Megatron keeps them."""
    base, weights = trained(text, tmp_path)
    rewrite_weights(base, {name: tensor.bfloat16() for name, tensor in read_weights(base).items()})
    tensors = {
        name: tensor if "norm" in name or "router" in name else tensor.bfloat16()
        for name, tensor in language_model(weights, "model.", "", KV_HEADS, rows=ROWS).items()
    }
    save_megatron(tmp_path / "source", tensors)
    conversion = megatron_to_hf_conversion(tmp_path / "source", base)
    run(conversion, tmp_path / "out", OPTIONS, lambda n: None, verify_conversion)
    assert_equal(read_weights(tmp_path / "out"), {name: tensor.bfloat16() for name, tensor in weights.items()})


def test_masters_are_more_precise_than_the_weights(text: Path, tmp_path: Path) -> None:
    base, weights = trained(text, tmp_path)
    tensors = language_model(weights, "model.", "", KV_HEADS, rows=ROWS)
    masters = {f"optimizer.state.fp32_param.{name}": tensor for name, tensor in tensors.items()}
    moments = {f"optimizer.state.exp_avg.{name}": torch.full_like(tensor, 7.0) for name, tensor in tensors.items()}
    halves = {name: tensor.bfloat16() for name, tensor in tensors.items()}
    save_megatron(tmp_path / "source", {**halves, **masters, **moments}, grid(2, 2))
    assert_equal(converted(tmp_path / "source", base, tmp_path / "out", from_master=True), weights)
    rounded = {name: tensor.bfloat16().float() for name, tensor in weights.items()}
    assert_equal(converted(tmp_path / "source", base, tmp_path / "rounded"), rounded)


def test_rows_of_qkv_by_group() -> None:
    """Heads 4, key/value heads 2, head_dim 16, rows filled with their number (handed case C07)."""
    rows = torch.arange(128).float()[:, None].expand(128, 32)
    q = torch.cat([rows[0:32], rows[64:96]])
    k, v = torch.cat([rows[32:48], rows[96:112]]), torch.cat([rows[48:64], rows[112:128]])
    assert torch.equal(grouped_qkv(q, k, v, 2), rows)


def test_the_numbers_of_a_handed_case(text: Path, tmp_path: Path) -> None:
    """All layers and experts in one tensor, 320 padded rows for 300 (handed case C06): [2, 4, 2*24, 32]."""
    config = {"num_hidden_layers": 2, "num_experts": 4, "vocab_size": 300}
    base = tmp_path / "base"
    base.mkdir()
    (base / "config.json").write_bytes((text / "config.json").read_bytes())
    edit_config(base, **config)
    fc1 = torch.randn(2, 4, 48, 32)
    zeros = language_model(read_weights(text), "model.", "", KV_HEADS)
    tensors = {name: tensor[:2] if name.startswith("decoder.layers.") else tensor for name, tensor in zeros.items()}
    tensors = {name: t[:, :4] if ".experts." in name else t for name, t in tensors.items()}
    tensors["decoder.layers.mlp.router.weight"] = tensors["decoder.layers.mlp.router.weight"][:, :4]
    tensors["decoder.layers.mlp.experts.experts.linear_fc1.weight"] = fc1
    tensors = {name: tensor.contiguous() for name, tensor in tensors.items()}
    embedding = torch.randn(320, 32)
    tensors |= {"embedding.word_embeddings.weight": embedding, "output_layer.weight": embedding + 1}
    save_megatron(tmp_path / "source", tensors, one_chunk)
    found = converted(tmp_path / "source", base, tmp_path / "out")
    assert torch.equal(found["model.embed_tokens.weight"], embedding[:300])
    assert torch.equal(found["lm_head.weight"], embedding[:300] + 1)
    for layer in range(2):
        for expert in range(4):
            at = f"model.layers.{layer}.mlp.experts.{expert}."
            assert torch.equal(found[f"{at}gate_proj.weight"], fc1[layer, expert, :24])
            assert torch.equal(found[f"{at}up_proj.weight"], fc1[layer, expert, 24:])


def test_two_language_models_are_refused() -> None:
    info = TensorInfo((4, 4), torch.float32)
    names = ("student.embedding.word_embeddings.weight", "teacher.embedding.word_embeddings.weight")
    with pytest.raises(UnsupportedError, match="2 language models"):
        find_layout(dict.fromkeys(names, info))
