"""What `omniloom convert inspect` says of each kind of checkpoint."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

from convert.inspection import inspect_source
from jobs.cli import main
from schemas.errors import ConfigError, UnsafeInputError
from tests.convert.dcp_factory import Touch, save, save_megatron
from tests.convert.megatron_factory import hub_tower, language_model, vision_blocks
from tests.convert.models import read_weights

MEGATRON = Path(__file__).parent / "megatron"

LAYOUTS = {
    "tp1": ("qwen3_moe", ("stacked", "stacked", "pre_mlp_layernorm.weight"), 12),
    "local": ("qwen3_moe", ("stacked", "stacked", "mlp.linear_fc1.layer_norm_weight"), 12),
    "per_layer": ("qwen3_moe", ("per layer", "stacked", "mlp.linear_fc1.layer_norm_weight"), 21),
    "singleton": ("qwen3_moe", ("per layer", "one by one", "mlp.linear_fc1.layer_norm_weight"), 41),
    "dense_tied": ("qwen3", ("stacked", "none", "mlp.linear_fc1.layer_norm_weight"), 10),
    "dense_singleton": ("qwen3", ("per layer", "none", "mlp.linear_fc1.layer_norm_weight"), 21),
    "ep2_pp2": ("qwen3_omni_moe", ("stacked", "stacked", "mlp.linear_fc1.layer_norm_weight"), 12),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_genuine_megatron_checkpoints(name: str) -> None:
    family, (layers, experts, norm), count = LAYOUTS[name]
    found = inspect_source(MEGATRON / name)
    assert found.kind == "Megatron torch_dist" and found.refused is None
    assert found.family == f"{family}, by its names"
    layout = found.facts["layout"]
    assert f"layers {layers}; experts {experts}; norm before the MLP in {norm}; " in layout
    assert layout.endswith("128 vocabulary rows") and ("no head" in layout) == (name == "dense_tied")
    assert ("thinker.language_model." in layout) == (name == "ep2_pp2")
    assert len(found.tensors) == count
    assert not any("_extra_state" in tensor or "rng_state" in tensor for tensor in found.tensors)


def test_what_would_be_skipped(capsys: pytest.CaptureFixture[str]) -> None:
    found = inspect_source(MEGATRON / "opt" / "iter_0000001")
    assert found.facts["fp32 masters"] == "12 (--from-master)"
    lines = [line.split() for line in found.lines() if line.startswith("skipped: optimizer state")]
    assert lines == [["skipped:", "optimizer", "state", "36", "entries"]]
    assert json.loads(json.dumps(found.as_json()))["skipped"]["rng_state/shard_0.0_1.2"].startswith("state of")


@pytest.mark.parametrize("blocks", [True, False])
def test_towers_and_prefixes(omni: Path, tmp_path: Path, blocks: bool) -> None:
    weights = read_weights(omni)
    tensors = language_model(weights, "thinker.model.", "thinker.", 2, prefix="module.thinker.language_model.")
    if blocks:
        tensors |= vision_blocks(weights, "thinker.visual.", 2, prefix="module.thinker.vision_model.")
    else:
        tensors |= hub_tower(weights, "thinker.visual.", "module.thinker.visual.")
        tensors |= hub_tower(weights, "thinker.audio_tower.", "module.thinker.audio_model.")
    save_megatron(tmp_path, tensors)
    layout = inspect_source(tmp_path).facts["layout"]
    assert "prefix 'module.thinker.language_model.'" in layout
    assert ("vision Megatron blocks" in layout) == blocks and ("audio hub names" in layout) != blocks


def test_a_checkpoint_that_no_conversion_takes_is_shown_all_the_same(tmp_path: Path) -> None:
    save_megatron(tmp_path, {"decoder.layers.x.weight": torch.zeros(2), "mtp.layers.0.w": torch.zeros(3)})
    found = inspect_source(tmp_path)
    assert found.refused is not None and "multi-token prediction" in found.refused
    assert set(found.tensors) == {"decoder.layers.x.weight", "mtp.layers.0.w"}


def test_code_in_a_checkpoint_is_not_executed(tmp_path: Path) -> None:
    source = Path(shutil.copytree(MEGATRON / "tp1", tmp_path / "source")) / "iter_0000001"
    torch.save({"args": Touch(tmp_path / "executed")}, source / "common.pt")
    with pytest.raises(UnsafeInputError, match=r"posix\.system"):
        inspect_source(source)
    assert not (tmp_path / "executed").exists()


def test_a_training_checkpoint(tmp_path: Path) -> None:
    tensors = {
        "model.model.embed_tokens.weight": torch.zeros(8, 4),
        "model.visual.pos_embed.weight": torch.zeros(3, 4),
        "model.audio_tower.conv_out.weight": torch.zeros(2, 2),
        "optimizer.state.model.embed_tokens.weight.exp_avg": torch.zeros(8, 4),
    }
    save(tmp_path / "step_3" / "dcp", tensors)
    (tmp_path / "step_3" / "state.json").write_text("{}")
    (tmp_path / "step_3" / "COMPLETE").touch()
    (tmp_path / "LATEST").write_text("step_3")
    found = inspect_source(tmp_path)
    assert (found.kind, found.family) == ("torch distributed checkpoint", "qwen3_omni_moe, by its names")
    assert found.directory == tmp_path / "step_3" / "dcp" and len(found.tensors) == 3 and len(found.skipped) == 1


def test_hugging_face_models(omni: Path) -> None:
    found = inspect_source(omni)
    assert (found.kind, found.family) == ("Hugging Face model", "qwen3_omni_moe")
    assert found.facts["experts"] == "per-expert" and found.facts["head"] == "of its own"
    assert (
        found.facts["sizes"] == "3 layers, hidden 32, 4 heads, 2 key/value heads of 10, vocabulary 320, 8 experts of 24"
    )
    assert inspect_source(MEGATRON / "tp1" / "hf_ref").family == "qwen3_moe"


def test_something_else(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no checkpoint that is known"):
        inspect_source(tmp_path)
    with pytest.raises(ConfigError, match="no such directory"):
        inspect_source(tmp_path / "x")


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    def run(*arguments: str) -> str:
        with pytest.raises(SystemExit) as ended:
            main(["convert", "inspect", str(MEGATRON / "singleton"), *arguments])
        assert ended.value.code == 0
        return capsys.readouterr().out

    text = run()
    assert "decoder.layers.*.mlp.experts.experts.*.linear_fc1.weight_w" in text and "experts one by one" in text
    assert "decoder.layers.1.mlp.experts.experts.3.linear_fc1.weight_w" in run("--all")
    assert len(json.loads(run("--json"))["tensors"]) == 41
