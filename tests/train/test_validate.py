"""What `omniloom train validate` finds before a training starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from schemas.errors import ConfigError
from tests.train.tiny import omni_config, write_data
from train.cli import app
from train.config import OmniConfig
from train.validate import validate_config


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
    assert "there are 2 ranks" in str(failed.exception)
