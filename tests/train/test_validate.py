"""What `omniloom train validate` finds before a training starts."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from typer.testing import CliRunner

from schemas.errors import ConfigError
from tests.train.tiny import omni_config, write_data
from train.cli import app
from train.config import OmniConfig
from train.ops.registry import OPS
from train.validate import Findings, validate_config

HALF = {"fsdp_config": {"mixed_precision": {"enable": True}}}


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> OmniConfig:
    folder = tmp_path_factory.mktemp("validate")
    return omni_config(folder, write_data(folder))


def changed(config: OmniConfig, **train: Any) -> OmniConfig:
    values = config.model_dump()
    values["train"] |= train
    return OmniConfig.model_validate(values)


def test_all_facts_of_a_training_that_can_start(config: OmniConfig) -> None:
    found = validate_config(config, 2)
    facts = dict(found.facts)
    assert found.faults == []
    assert facts["ranks"] == "1 replicas x 2 shards x 1 slices"
    assert "qwen3_omni_moe_thinker" in facts["model"]
    assert facts["weights"] == "random, seed 42"
    assert facts["data source clips"] == "12 rows"
    assert facts["micro-batches"] == "2 of each rank per step"
    assert facts["steps"].endswith("5 in all")
    assert "parameters" in facts["memory of each GPU"]
    assert any("fused_triton" in how or "grouped_mm" in how for what, how in found.facts if what.startswith("oper"))


def test_the_optimizer_is_checked(config: OmniConfig) -> None:
    muon = {"type": "muon", "muon_head_group_size": 3, "muon_head_split_modules": ["q_proj"]}
    (fault,) = validate_config(changed(config, optimizer=muon), 2, data=False).faults
    assert "muon_head_group_size: 3 does not divide" in str(fault)
    facts = dict(validate_config(changed(config, optimizer={"type": "muon"}), 2, data=False).facts)
    adamw, muon_part = facts["optimizer"].split("; ")[0].split(", ")
    assert adamw.startswith("adamw of ")
    assert muon_part.startswith("muon of ")
    assert facts["optimizer"].endswith("parameters fp32, averages fp32")


@pytest.mark.parametrize(
    ("keep", "names", "said"),
    [
        ("attention", {"attn_implementation": "flex_attention"}, "attn_implementation flex_attention cannot be kept"),
        ("mlp", {"moe_implementation": "grouped_mm"}, "moe_implementation grouped_mm cannot be kept"),
    ],
)
def test_what_blocks_cannot_keep_is_told(config: OmniConfig, keep: str, names: dict[str, str], said: str) -> None:
    values = config.model_dump()
    values["train"]["gradient_checkpointing"] |= {"keep": keep}
    values["model"]["ops_implementation"] |= {"attn_implementation": "sdpa", **names}
    (fault,) = validate_config(OmniConfig.model_validate(values), 2, data=False).faults
    assert said in str(fault)
    values["train"]["gradient_checkpointing"]["enable"] = False
    assert validate_config(OmniConfig.model_validate(values), 2, data=False).faults == []


def chosen(config: OmniConfig, names: dict[str, str] | None = None, **train: Any) -> Findings:
    values = changed(config, **train).model_dump()
    values["model"]["ops_implementation"] |= names or {}
    return validate_config(OmniConfig.model_validate(values), 1, data=False)


def test_operations_are_those_of_the_run(config: OmniConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a GPU: for a Hopper one, and where results must be the same at every run, one that can give them."""
    pytest.importorskip("triton")
    for name in ("flash_attn", "flash_attn.cute", "flash_attn.flash_attn_interface", "flash_attn_interface"):
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for deterministic, attention in ((False, "cudnn"), (True, "torch_varlen")):
        found = chosen(config, accelerator=HALF, deterministic=deterministic)
        facts = dict(found.facts)
        assert found.faults == []
        assert facts["operations on a Hopper GPU"].startswith(f"attn {attention}, ")
        assert facts["chosen by auto"].endswith("none of them loaded; the GPU machine may differ")
    by_name = {"attn_implementation": "cudnn"}
    assert chosen(config, by_name, accelerator=HALF).faults == []
    (fault,) = chosen(config, by_name, accelerator=HALF, deterministic=True).faults
    assert "cudnn is not available on cuda of capability 9.0: its results differ from run to run" in str(fault)
    assert "chosen by auto" not in dict(chosen(config, {entry.key: "eager" for entry in OPS.values()}).facts)


def test_what_auto_passes_over_on_this_gpu_is_told(
    config: OmniConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton")
    for name in ("flash_attn", "flash_attn.cute", "flash_attn.flash_attn_interface"):
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.delitem(sys.modules, "flash_attn_interface", raising=False)
    (tmp_path / "flash_attn_interface.py").write_text("raise ImportError('libflash.so: undefined symbol')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    found = chosen(config, accelerator=HALF)
    facts = dict(found.facts)
    assert facts["operations on this GPU"].startswith("attn cudnn, ")
    assert facts["passed over by auto"].startswith("attn_implementation: flash_attention_3: the package flash_attn_int")
    assert facts["passed over by auto"].endswith("is there but does not load: libflash.so: undefined symbol")
    (fault,) = chosen(config, {"attn_implementation": "flash_attention_3"}, accelerator=HALF).faults
    assert str(fault).startswith(
        "model.ops_implementation.attn_implementation: flash_attention_3: the package flash_at"
    )
    assert str(fault).endswith("is there but does not load: libflash.so: undefined symbol")


def test_every_fault_is_told_not_only_the_first(config: OmniConfig) -> None:
    wrong = changed(config, freeze_modules=["nothing.of.it"], accelerator={"dp_replicate_size": 3})
    found = validate_config(wrong, 4)
    said = [str(fault) for fault in found.faults]
    assert len(said) == 2
    assert "4 ranks are no multiple of dp_replicate_size 3" in said[0]
    assert "nothing.of.it" in said[1]
    with pytest.raises(Exception, match="dp_replicate_size 3") as error:
        found.raise_faults()
    assert getattr(error.value, "exit_code", None) == ConfigError.exit_code


def test_what_is_needed_later_is_checked(config: OmniConfig, tmp_path: Path) -> None:
    def faults(**train: Any) -> list[str]:
        return [str(fault) for fault in validate_config(changed(config, **train), 1).faults]

    gone, clips = str(tmp_path / "gone.jsonl"), config.data.sources[0].model_dump()
    text = config.data.sources[1].model_dump() | {"name": "other", "source_name": "foo"}
    missing = {"path": gone, "source_name": "openai_messages"}
    first, second = faults(evaluation={"sources": [missing, text, clips]})
    assert first == f"train.evaluation.sources.0: data source {gone} does not exist"
    assert second.startswith("train.evaluation.sources.1: data source other: unknown preprocessor 'foo'; known: ")
    found = validate_config(changed(config, evaluation={"sources": [clips]}), 1)
    assert found.faults == [] and dict(found.facts)["evaluation source clips"] == "12 rows"
    checkpoint = config.train.checkpoint.model_dump() | {"save_hf_weights": True}
    (said,) = faults(checkpoint=checkpoint | {"hf_base": gone})
    assert said == f"train.checkpoint.hf_base: {gone}: no such directory"
    assert faults(checkpoint=checkpoint | {"hf_base": gone, "save_hf_weights": False}) == []
    (said,) = faults(checkpoint=checkpoint | {"load_path": gone})
    assert said == f"train.checkpoint.load_path: {gone} is no directory"
    optimizer = {"lr": 1e-3, "lr_warmup_steps": 6}
    (said,) = faults(optimizer=optimizer)
    assert said == "train.optimizer.lr_warmup_steps: 6 steps of a training of 5"
    (fault,) = validate_config(changed(config, optimizer=optimizer), 1, data=False).faults
    assert str(fault) == said


def test_missing_packages_are_told(config: OmniConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("wandb", "tensorboard"):
        monkeypatch.setitem(sys.modules, name, None)  # as if it were not installed
    logging = {"tensorboard": True, "wandb": {"enable": True}}
    first, second = [str(f) for f in validate_config(changed(config, logging=logging), 1, data=False).faults]
    assert first.startswith("train.logging.wandb.enable: needs the package wandb")
    assert second.startswith("train.logging.tensorboard: needs the package tensorboard")


def test_decay_of_muon_is_told(config: OmniConfig) -> None:
    found = validate_config(changed(config, optimizer={"type": "muon", "weight_decay": 0.1}), 1, data=False)
    notes = [how for what, how in found.facts if what == "note"]
    assert notes == ["weight decay: matrices of muon have muon_weight_decay 0, all other parameters weight_decay 0.1"]
    same = {"type": "muon", "weight_decay": 0.1, "muon_weight_decay": 0.1}
    assert "note" not in dict(validate_config(changed(config, optimizer=same), 1, data=False).facts)


def test_a_missing_model_is_one_fault_and_the_data_are_checked(config: OmniConfig, tmp_path: Path) -> None:
    values = config.model_dump()
    values["model"] = {"model_path": str(tmp_path / "gone")}
    values["data"]["sources"][0]["path"] = str(tmp_path / "no_clips")
    values["train"]["checkpoint"] |= {"save_hf_weights": True, "hf_base": str(tmp_path / "no_base")}
    first, base, second = [str(fault) for fault in validate_config(OmniConfig.model_validate(values), 1).faults]
    assert first.startswith(
        f"model.model_path: {tmp_path}/gone/config.json does not exist; to check without the weight"
    )
    assert base == f"train.checkpoint.hf_base: {tmp_path}/no_base: no such directory"
    assert second.startswith("data.sources.0: ") and f"{tmp_path}/no_clips" in second


def test_after_a_fault_of_the_adapters_no_memory_is_told(config: OmniConfig) -> None:
    values = config.model_dump()
    values["model"]["lora_config"] = {"target_modules": ["nothing_of_it"]}
    found = validate_config(OmniConfig.model_validate(values), 1, data=False)
    assert len(found.faults) == 1 and "nothing_of_it" in str(found.faults[0])
    assert "memory of each GPU" not in dict(found.facts)


def test_weights_that_do_not_fit_and_data_that_are_not_there(config: OmniConfig, tmp_path: Path) -> None:
    values = config.model_dump()
    (tmp_path / "empty").mkdir()
    values["model"]["model_path"] = str(tmp_path / "empty")
    values["data"]["sources"] = [{"path": str(tmp_path / "gone")}]
    found = validate_config(OmniConfig.model_validate(values), 1)
    said = "\n".join(str(fault) for fault in found.faults)
    assert len(found.faults) == 2
    assert str(tmp_path / "empty") in said
    assert str(tmp_path / "gone") in said


def test_the_command_prints_facts_and_ends_with_the_code_of_the_fault(config: OmniConfig, tmp_path: Path) -> None:
    path = tmp_path / "train.yaml"
    path.write_text(yaml.safe_dump(config.model_dump(mode="json")))
    done = CliRunner().invoke(app, ["validate", str(path), "--no-data", "--world-size", "2"])
    assert done.exit_code == 0, done.output
    assert "memory of each GPU" in done.output
    assert "data source" not in done.output
    overrides = ["train.accelerator.dp_shard_size=3"]
    failed = CliRunner().invoke(app, ["validate", str(path), "--no-data", "--world-size", "2", *overrides])
    assert re.match(rf"{path}:\d+:\d+: train\.accelerator: .*there are 2 ranks", str(failed.exception))
