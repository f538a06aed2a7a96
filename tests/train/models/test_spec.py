"""config.json -> family, model, blocks, experts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from schemas.errors import ConfigError, IncompleteSourceError, OmniloomError, UnsupportedError
from tests.convert.models import edit_config, omni_config
from tests.train.models.checkpoints import save_model
from tests.train.models.families import FAMILIES, run_ours
from tests.train.models.test_text import packed
from train.models.foundation import FoundationModel
from train.models.hub_model import HubModel
from train.models.inputs import text_inputs
from train.models.omni_thinker import OmniThinker
from train.models.spec import SPECS, build_foundation_model, fsdp_blocks, fsdp_units, read_model, spec_of
from train.models.text_lm import Qwen3LM
from train.models.vl import Qwen3VL
from train.ops.registry import eager_ops

CLASSES = {"dense": Qwen3LM, "moe": Qwen3LM, "vl": Qwen3VL, "vl_moe": Qwen3VL, "omni": OmniThinker}


def _build(folder: Path, **how: Any) -> FoundationModel:
    model = build_foundation_model(folder, eager_ops(), **how)
    assert isinstance(model, FoundationModel)
    return model


@pytest.mark.parametrize("name", CLASSES)
def test_a_config_gives_its_family_on_meta(tmp_path: Path, name: str) -> None:
    config = FAMILIES[name].make_config()
    config.save_pretrained(tmp_path)
    for path in (tmp_path, tmp_path / "config.json"):
        model = _build(path, device="meta", dtype=torch.bfloat16)
        assert type(model) is CLASSES[name]
        assert all(p.is_meta and p.dtype == torch.bfloat16 for p in model.parameters())
        assert spec_of(model).family == config.model_type


def test_a_whole_omni_gives_its_thinker(tmp_path: Path) -> None:
    omni_config().save_pretrained(tmp_path)
    edit_config(tmp_path, "thinker_config", "audio_config", n_window=50, n_window_infer=200)
    model = _build(tmp_path, device="meta")
    assert isinstance(model, OmniThinker) and spec_of(model).family == "qwen3_omni_moe_thinker"
    assert model.config.position_id_per_seconds == 13
    edit_config(tmp_path, thinker_config=None)
    with pytest.raises(ConfigError, match=r"config\.json\.thinker_config: missing"):
        read_model(tmp_path)


def test_a_thinker_exported_as_vl_is_a_vl_model(tmp_path: Path) -> None:
    save_model("vl_moe", tmp_path, "hub")
    edit_config(tmp_path, omni_sideband={"position_id_per_seconds": 13, "audio_token_id": 151675})
    assert isinstance(_build(tmp_path), Qwen3VL)


def test_blocks_and_experts() -> None:
    blocks = {name: [path for path, _ in fsdp_blocks(_made(name))] for name in ("dense", "vl", "omni")}
    assert blocks["dense"] == ["model.layers.0", "model.layers.1", "model.layers.2"]
    vision = [f"model.visual.blocks.{n}" for n in range(3)]
    assert blocks["vl"] == [*vision, *(f"model.language_model.layers.{n}" for n in range(3))]
    assert blocks["omni"] == [
        *(f"visual.blocks.{n}" for n in range(3)),
        *(f"audio_tower.layers.{n}" for n in range(2)),
        *(f"model.layers.{n}" for n in range(3)),
    ]
    experts = {name: spec_of(_made(name)).expert_parameters(_made(name)) for name in ("dense", "mixed_moe", "vl_moe")}
    assert experts["dense"] == []
    assert experts["mixed_moe"] == [f"model.layers.1.mlp.experts.{part}_proj" for part in ("gate_up", "down")]
    path = "model.language_model.layers.2.mlp.experts"
    assert experts["vl_moe"][-2:] == [f"{path}.gate_up_proj", f"{path}.down_proj"] and len(experts["vl_moe"]) == 6


def _made(name: str) -> FoundationModel:
    with torch.device("meta"):
        return FAMILIES[name].ours(FAMILIES[name].make_config(), eager_ops())


def test_random_weights_follow_from_the_seed(tmp_path: Path) -> None:
    FAMILIES["omni"].make_config().save_pretrained(tmp_path)
    one, same, other = (_build(tmp_path, init="random", seed=seed) for seed in (1, 1, 2))
    pairs = [(p, same.get_parameter(n), other.get_parameter(n)) for n, p in one.named_parameters()]
    assert all(torch.equal(p, q) for p, q, _ in pairs) and not all(torch.equal(p, r) for p, _, r in pairs)
    run_ours(one, packed((7, 4)))


def test_weights_may_lie_elsewhere(tmp_path: Path) -> None:
    """The configuration of one directory, the weights of another, which must fit."""
    expected = save_model("dense", tmp_path / "weights")
    config = FAMILIES["dense"].make_config()
    config.save_pretrained(tmp_path / "same")
    model = _build(tmp_path / "same", weights_path=tmp_path / "weights")
    assert all(torch.equal(p, expected[n]) for n, p in model.named_parameters())
    config.num_hidden_layers = 2
    config.layer_types = config.layer_types[:2]
    config.save_pretrained(tmp_path / "shorter")
    with pytest.raises(UnsupportedError, match=r"no place in the model: model\.layers\.2\."):
        _build(tmp_path / "shorter", weights_path=tmp_path / "weights")
    with pytest.raises(ConfigError, match="has neither"):
        _build(tmp_path / "same")


@pytest.mark.parametrize("name", ["vl", "vl_moe"])
def test_the_outermost_statement_ties_the_head(tmp_path: Path, name: str) -> None:
    FAMILIES[name].make_config().save_pretrained(tmp_path)
    for outer, inner, tied in ((True, False, True), (False, True, False), (None, True, True)):
        edit_config(tmp_path, tie_word_embeddings=outer)
        edit_config(tmp_path, "text_config", tie_word_embeddings=inner)
        assert (_build(tmp_path, device="meta").lm_head is None) == tied


def _refused(folder: Path, content: str | None) -> OmniloomError:
    if content is not None:
        (folder / "config.json").write_text(content)
    with pytest.raises(OmniloomError) as raised:
        _build(folder, device="meta")
    return raised.value


def test_what_is_not_a_native_model_is_named(tmp_path: Path) -> None:
    assert "config.json: cannot be read" in str(_refused(tmp_path, None))
    assert "is no JSON" in str(_refused(tmp_path, "{"))
    assert "holds no object" in str(_refused(tmp_path, "[]"))
    error = _refused(tmp_path, json.dumps({"model_type": "qwen3_mo"}))
    assert isinstance(error, UnsupportedError)
    assert "'qwen3_mo' is not among the native models; did you mean 'qwen3_moe'?" in str(error)
    assert all(name in str(error) for name in SPECS) and "backend: transformers" in str(error)
    error = _refused(tmp_path, json.dumps({"model_type": "qwen3", "num_hidden_layers": "many"}))
    assert isinstance(error, ConfigError) and "num_hidden_layers" in str(error) and "\n" not in str(error)


def test_a_dense_model_of_transformers_is_loaded_by_its_own_names(tmp_path: Path) -> None:
    for tied in (False, True):
        sizes = {"hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 4}
        config = LlamaConfig(**sizes, vocab_size=211, num_key_value_heads=2, tie_word_embeddings=tied)
        reference = LlamaForCausalLM(config).eval()
        folder = tmp_path / str(tied)
        reference.save_pretrained(folder)
        model = build_foundation_model(folder, eager_ops(), backend="transformers")
        assert isinstance(model, HubModel)
        assert [path for path, _ in fsdp_blocks(model)] == ["model.layers.0", "model.layers.1"]
        ids = torch.arange(11) * 7
        with torch.no_grad():
            found = model(text_inputs([ids]), logits=True).logits
            assert torch.allclose(found, reference(ids[None]).logits[0], atol=1e-5)
    (folder / "model.safetensors").unlink()
    with pytest.raises((ConfigError, IncompleteSourceError)):
        build_foundation_model(folder, eager_ops(), backend="transformers")


@pytest.mark.parametrize(
    ("name", "towers"), [("omni", ["visual", "audio_tower"]), ("vl_moe", ["model.visual"]), ("moe", [])]
)
def test_towers_are_gathered_whole_or_by_blocks(name: str, towers: list[str]) -> None:
    model = _made(name)
    blocks = [path for path, _ in fsdp_blocks(model)]
    text = [path for path in blocks if not path.startswith(tuple(f"{tower}." for tower in towers) or ("-",))]
    assert [path for path, _ in fsdp_units(model, whole_towers=True)] == [*towers, *text]
    assert [path for path, _ in fsdp_units(model, whole_towers=False)] == blocks
    assert all(module is model.get_submodule(path) for path, module in fsdp_units(model, whole_towers=True))
