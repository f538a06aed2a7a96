"""Trainings with Muon and with bfloat16 parameters: stopped ones go on bit by bit, and changed settings are told."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from schemas.errors import ResumableError
from tests import dist as processes
from tests.train.models.families import MOE
from tests.train.tiny import omni_config, write_data
from train.callbacks.base import Callback
from train.optim.build import ModelOptimizer
from train.step import StepResult
from train.trainer import BaseTrainer, make_trainer

MUON = {"type": "muon", "lr": 1e-3, "lr_warmup_steps": 1, "weight_decay": 0.1, "muon_weight_decay": 0.1}
HALF = {"master_dtype": "bf16", "state_dtype": "bf16"}
MIXED = {"accelerator": {"fsdp_config": {"mixed_precision": {"enable": True}}}}
RUNS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "muon": (MUON | {"state_dtype": "bf16"}, {}),
    "muon, bf16": (MUON | HALF, MIXED),
    "adamw, bf16": ({"type": "adamw", "lr": 1e-3} | HALF, MIXED),
}


class Watch(Callback):
    def __init__(self, stop_after: int = 0) -> None:
        self.losses: list[float] = []
        self.stop_after = stop_after

    def on_step_end(self, trainer: BaseTrainer, result: StepResult) -> None:
        self.losses.append(float(result.loss_sum / result.step_tokens))
        trainer.should_stop = trainer.state.step == self.stop_after


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return write_data(tmp_path_factory.mktemp("data"))


def run(folder: Path, sources: list[dict[str, Any]], optimizer: dict[str, Any], stop: int = 0, **train: Any) -> Any:
    """(losses, parameters at the end); experts of a width that bfloat16 products take."""
    watch = Watch(stop)
    config = omni_config(folder, sources, max_steps=4, optimizer=optimizer, **train)
    trainer = make_trainer(config, callbacks=[watch])
    if stop:
        with pytest.raises(ResumableError):
            trainer.train()
    else:
        trainer.train()
    plain = optimizer["type"] == "adamw" and optimizer.get("state_dtype", "fp32") == "fp32"
    assert isinstance(trainer.optimizer, ModelOptimizer) != plain
    return watch.losses, {name: p.detach().clone() for name, p in trainer.model.named_parameters()}


@pytest.mark.parametrize("name", RUNS)
def test_a_stopped_training_goes_on_bit_by_bit(
    tmp_path: Path, sources: list[dict[str, Any]], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(MOE, "moe_intermediate_size", 24)
    optimizer, train = RUNS[name]
    losses, parameters = run(tmp_path / "whole", sources, optimizer, **train)
    first, _ = run(tmp_path / "parts", sources, optimizer, 2, **train)
    second, found = run(tmp_path / "parts", sources, optimizer, **train)
    assert first + second == losses
    assert losses[-1] < losses[0] - 0.1
    wanted = torch.bfloat16 if "bf16" in name else torch.float32
    for key, value in parameters.items():
        assert value.dtype == wanted
        assert torch.equal(found[key], value), key


@pytest.mark.parametrize("optimizer", [{"type": "adamw", "lr": 1e-3}, MUON], ids=["adamw", "muon"])
@pytest.mark.parametrize(("then", "now"), [("bf16", "fp32"), ("fp32", "bf16")])
def test_averages_in_another_dtype_are_taken(
    tmp_path: Path, sources: list[dict[str, Any]], optimizer: dict[str, Any], then: str, now: str
) -> None:
    """As `optimizers.md` says; the losses are near those of the dtype that it began with, and not those of averages
    that begin anew."""
    whole, _ = run(tmp_path / "whole", sources, optimizer | {"state_dtype": then})
    run(tmp_path / "parts", sources, optimizer | {"state_dtype": then}, 2)
    losses, _ = run(tmp_path / "parts", sources, optimizer | {"state_dtype": now})
    assert losses == pytest.approx(whole[2:], rel=2e-4)


def test_a_changed_split_is_told_and_taken(
    tmp_path: Path, sources: list[dict[str, Any]], caplog: pytest.LogCaptureFixture
) -> None:
    whole, _ = run(tmp_path / "whole", sources, MUON)
    run(tmp_path / "parts", sources, MUON, 2)
    split = MUON | {"muon_head_group_size": 1, "muon_head_split_modules": ["q_proj"]}
    with caplog.at_level(logging.WARNING, logger="omniloom.train"):
        losses, _ = run(tmp_path / "parts", sources, split)
    assert "muon_head_group_size was 0 in the checkpoint and is 1 from here on" in caplog.text
    assert losses[0] == whole[2]  # of the same parameters
    assert losses[1] != whole[3]


def _on_ranks(folder: Path, sources: list[dict[str, Any]], layout: dict[str, int]) -> list[float]:
    """Losses of all ranks' rows in bfloat16 by Muon."""
    MOE["moe_intermediate_size"] = 24  # of this process
    watch = Watch()
    optimizer, train = RUNS["muon, bf16"]
    accelerator = {"accelerator": train["accelerator"] | layout}
    trainer = make_trainer(
        omni_config(folder, sources, max_steps=3, optimizer=optimizer, **accelerator), callbacks=[watch]
    )
    trainer.train()
    assert {parameter.dtype for parameter in trainer.model.parameters()} == {torch.bfloat16}
    found = torch.tensor(watch.losses)
    if dist.is_initialized():
        dist.all_reduce(found)
    return list(found.tolist())


@pytest.mark.parametrize("layout", [{}, {"ulysses_size": 2, "ep_size": 2}], ids=["dp", "sp, ep"])
def test_bf16_parameters_on_two_ranks(
    tmp_path: Path, sources: list[dict[str, Any]], layout: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(MOE, "moe_intermediate_size", 24)
    alone = _on_ranks(tmp_path / "one", sources, {})
    together = processes.run(2, _on_ranks, tmp_path / "two", sources, layout)
    assert together[0] == pytest.approx(alone, rel=5e-3)
