"""The comparison finds nothing in equal models and exactly the module that is wrong in others."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from schemas.errors import ConfigError, UnsupportedError, VerificationError
from tests.convert.models import edit_config, make_omni
from tests.train.models.checkpoints import save_model
from tests.train.models.families import FAMILIES, Pair, make_pair
from train.models.compare import Comparison, compare, compare_directory, load_reference
from train.models.compare_inputs import Case, kinds_of, make_case
from train.models.compare_record import Recording, record_native, record_reference
from train.models.spec import read_model, spec_of
from train.ops.registry import eager_ops

KINDS = {"vl": ("text", "image", "video"), "omni": ("text", "image", "video", "audio"), "vl_moe": ("image",)}


@cache
def recorded(name: str) -> tuple[Pair, tuple[Case, ...], Recording]:
    pair = make_pair(name)
    spec = spec_of(pair.ours)
    cases = tuple(make_case(kind, spec, pair.config, 5) for kind in KINDS.get(name, ("text",)))
    return pair, cases, record_reference(pair.reference, spec, cases)


def compared(name: str) -> Comparison:
    pair, cases, theirs = recorded(name)
    return compare(record_native(pair.ours, cases), theirs, 1e-4)


@pytest.mark.parametrize("name", ["dense", "tied", "mixed_moe", "vl", "vl_moe", "omni"])
def test_equal_models_do_not_differ(name: str) -> None:
    found = compared(name)
    found.check()
    assert found.first is None and found.finished is None and not found.weights
    assert max(row.relative for row in found.rows) < 2e-5
    assert {row.kind for row in found.rows} == set(KINDS.get(name, ("text",)))


def test_every_module_with_weights_is_compared() -> None:
    """But for those whose weights an op takes: the norms of q and k, and the learned positions."""
    pair, _, _ = recorded("omni")
    paths = {row.path for row in compared("omni").rows}
    own = {path for path, module in pair.ours.named_modules() if list(module.parameters(recurse=False))}
    left = {path for path in own - paths if not path.endswith((".q_norm", ".k_norm", "pos_embed"))}
    assert not left
    assert {"model.layers.2", "model.layers.0.mlp", "visual.merger", "audio_tower.layers.1.self_attn"} <= paths


WRONG = {
    "model.layers.1.self_attn.k_proj.weight": "model.layers.1.self_attn.k_proj",
    "model.layers.1.self_attn.q_norm.weight": "model.layers.1.self_attn",
    "model.layers.2.mlp.experts.down_proj": "model.layers.2.mlp.experts",
    "model.layers.0.mlp.gate.weight": "model.layers.0.mlp.gate",
    "model.layers.2.post_attention_layernorm.weight": "model.layers.2.post_attention_layernorm",
    "model.norm.weight": "model.norm",
    "lm_head.weight": "lm_head",
    "visual.patch_embed.proj.weight": "visual.patch_embed.proj",
    "visual.blocks.1.attn.qkv.bias": "visual.blocks.1.attn.qkv",
    "visual.merger_list.1.mlp.2.weight": "visual.merger_list.1.mlp.2",
    "audio_tower.conv2d2.weight": "audio_tower.conv2d2",
    "audio_tower.layers.1.fc1.weight": "audio_tower.layers.1.fc1",
    "audio_tower.proj2.bias": "audio_tower.proj2",
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_weight_is_found_where_it_is(name: str) -> None:
    pair, _, _ = recorded("omni")
    parameter = pair.ours.get_parameter(name)
    before = parameter.detach().clone()
    try:
        with torch.no_grad():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
        found = compared("omni")
    finally:
        with torch.no_grad():
            parameter.copy_(before)
    assert found.first is not None and found.first.path == WRONG[name]
    assert found.weights == (name,)
    with pytest.raises(VerificationError, match=f"^{WRONG[name]} is the first module that differs") as raised:
        found.check()
    assert name in str(raised.value) and f"{found.first.difference:.3g}" in str(raised.value)


def test_a_wrong_computation_is_found_where_it_is() -> None:
    """Without a wrong weight: the attention op of one layer, slightly and with NaN."""
    pair, _, _ = recorded("omni")
    attention = pair.ours.model.layers[1].self_attn  # type: ignore[union-attr, index]
    right = attention.attention
    try:
        attention.attention = lambda q, *rest, **how: right(q * 1.05, *rest, **how)
        found = compared("omni")
        attention.attention = lambda q, *rest, **how: right(q, *rest, **how) * float("nan")
        broken = compared("omni")
    finally:
        attention.attention = right
    for one in (found, broken):
        assert one.first is not None and one.finished is not None
        assert one.first.path == "model.layers.1.self_attn" and not one.weights
        assert one.finished.path == "model.layers.1.self_attn.o_proj"


def test_a_difference_between_two_blocks_names_what_is_around_them() -> None:
    pair, cases, theirs = recorded("omni")
    text = pair.ours.text
    layer = text.layers[1]
    handle = layer.register_forward_pre_hook(lambda _, given: (given[0] + 0.01, *given[1:]))
    found = compare(record_native(pair.ours, cases), theirs, 1e-4)
    handle.remove()
    assert found.first is not None and found.finished is not None
    assert found.first.path == "model" and found.finished.path == "model.layers.1.input_layernorm"


@pytest.mark.parametrize(("name", "layout"), [("moe", "per-expert"), ("vl_moe", "hub"), ("omni", "per-expert")])
def test_a_directory(tmp_path: Path, name: str, layout: str) -> None:
    save_model(name, tmp_path, layout)
    found = compare_directory(tmp_path, eager_ops())
    found.check()
    assert found.rows and not found.weights
    assert {row.kind for row in found.rows} == set(kinds_of(read_model(tmp_path).spec))


def test_a_whole_omni(tmp_path: Path) -> None:
    folder = make_omni(tmp_path)
    edit_config(folder, "thinker_config", "audio_config", n_window=50, n_window_infer=200)
    found = compare_directory(folder, eager_ops(), kinds=["text", "audio"])
    found.check()
    assert not found.weights and {row.kind for row in found.rows} == {"text", "audio"}


@pytest.mark.parametrize("name", ["dense", "moe", "omni"])
def test_sixteen_bits_are_compared_with_their_own_tolerance(tmp_path: Path, name: str) -> None:
    """And with the same choice of experts: one that falls the other way would differ by a whole expert."""
    save_model(name, tmp_path)
    found = compare_directory(tmp_path, eager_ops(), dtype=torch.bfloat16)
    found.check()
    assert 1e-4 < max(row.relative for row in found.rows) < found.tolerance


def test_what_cannot_be_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_model("dense", tmp_path)
    with pytest.raises(ConfigError, match="a qwen3 takes no input of the kind 'audio'"):
        compare_directory(tmp_path, eager_ops(), kinds=["audio"])
    monkeypatch.setattr("train.models.compare.available_memory", lambda: 1000)
    with pytest.raises(UnsupportedError, match=r"needs 0\.0 GB of memory"):
        compare_directory(tmp_path, eager_ops())


def test_what_transformers_lacks_is_named(tmp_path: Path) -> None:
    save_model("dense", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.norm.weight"]
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(VerificationError, match=r"without model\.norm\.weight"):
        load_reference(read_model(tmp_path), torch.float32)


def test_the_input_follows_from_the_seed() -> None:
    config = FAMILIES["omni"].make_config()
    spec = spec_of(recorded("omni")[0].ours)
    cases = [make_case("video", spec, config, seed) for seed in (1, 1, 2)]
    assert torch.equal(cases[0].inputs.ids, cases[1].inputs.ids)
    assert not torch.equal(cases[0].inputs.ids, cases[2].inputs.ids)
    assert isinstance(recorded("omni")[0].reference, nn.Module)
    positions = cases[0].inputs.position_ids
    assert (positions % 1 != 0).any() and (positions.diff(dim=1)[1] < 0).any()  # fractions of seconds, rows of grids
