"""Metrics and the check of gradients where the host runs ahead of the device: what is told, when and in which order."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from schemas.errors import OmniloomError, ResumableError
from tests import dist as processes
from tests.train.fake_device import FakeDevice, HangError
from tests.train.metric_steps import SOURCES
from tests.train.stand_in import Trainer
from train.callbacks.base import Callback
from train.callbacks.checkpoint import CheckpointCallback
from train.callbacks.evaluation import EvaluationCallback
from train.callbacks.finite import FiniteCallback
from train.callbacks.metrics import MetricsCallback, MetricsEnd
from train.config import CheckpointConfig, EvaluationConfig, LoggingConfig
from train.host_copy import HostCopy
from train.metric_writers import read_metrics
from train.metrics import Interval, Meter

STEP = 4.0  # s of the device
NAN = torch.tensor(float("nan"))


@dataclass
class Told:
    """A writer and listener that notes what it hears of, and how far the device was."""

    device: FakeDevice
    heard: list[int] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)
    done: list[bool] = field(default_factory=list)  # whether the device had nothing left to do

    def observe(self, step: int, interval: Interval) -> Mapping[str, float]:
        self.heard.append(step)
        self.losses.append(interval.metrics["loss"])
        return {"moe/max/0": float(step)}

    def write(self, step: int, metrics: Mapping[str, Any]) -> None:
        self.lines.append(f"{'eval' if 'eval/loss' in metrics else 'step'} {step}")
        self.done.append(self.device.reached(self.device.mark()))

    def close(self) -> None:
        self.lines.append("closed")


class Work(Callback):
    """Gives the device what a step is. Comes last, as the step does after `on_step_begin`."""

    def __init__(self, device: FakeDevice) -> None:
        self.device = device

    def on_step_begin(self, trainer: Any) -> None:
        self.device.host(0.5)
        self.device.give(STEP)


class Run:
    """A stand-in trainer with a device of its own. told: by the metrics, in order."""

    def __init__(
        self, folder: Path, log_steps: int = 1, *, rank: int = 0, world_size: int = 1, **sections: Any
    ) -> None:
        self.folder, self.device = folder, FakeDevice()
        self.told = Told(self.device)
        late: dict[str, Any] = {"clock": self.device, "copy": self.device.copy}
        meter = Meter(SOURCES, torch.device("cpu"), rank=rank, world_size=world_size, **late)
        config = LoggingConfig(log_steps=log_steps, plots=False)
        told = {"listeners": [self.told.observe], "writers": [self.told]}
        self.metrics = MetricsCallback(meter, config, folder, **told)  # type: ignore[arg-type]
        self.finite = FiniteCallback(log_steps, copy=self.device.copy)
        ends = [EvaluationCallback(), MetricsEnd(self.metrics), CheckpointCallback()]
        self.trainer = Trainer(folder, [self.metrics, self.finite, *ends, Work(self.device)], **sections)
        self.device.host(30.0)  # a checkpoint is read
        self.trainer.call("on_train_begin")

    def steps(self, count: int, **changes: Any) -> None:
        for _ in range(count):
            self.trainer.step(**changes)

    def end(self) -> None:
        self.trainer.call("on_train_end")

    @property
    def lines(self) -> list[dict[str, Any]]:
        return read_metrics(self.folder / "metrics.jsonl")


def test_a_line_comes_one_step_late_and_says_what_it_said_at_once(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.steps(1)
    assert run.told.lines == [] and run.device.time == 130.5  # nothing was waited for
    run.trainer.train_dataloader.dead.append("a row of the second step")
    run.trainer.state.epoch = 1
    run.steps(2, loss_sum=torch.tensor(60.0))
    assert run.told.lines == ["step 1", "step 2"] and run.told.heard == [1, 2]
    assert run.told.done == [False, False]  # the device has the next step to go on with
    run.end()
    assert run.told.lines == ["step 1", "step 2", "step 3", "closed"]
    lines = run.lines
    assert [line["loss"] for line in lines] == pytest.approx([3.0, 6.0, 6.0])
    assert [(line["epoch"], line["dead_samples"]) for line in lines] == [(0, 0), (1, 1), (1, 1)]
    assert [(line["tokens_total"], line["samples_total"]) for line in lines] == [(50, 4), (100, 8), (150, 12)]
    assert [line["moe/max/0"] for line in lines] == [1.0, 2.0, 3.0]
    assert [line["interval_s"] for line in lines] == pytest.approx([4.5, 4.0, 4.0])
    assert run.metrics.last["tokens_total"] == 150


def test_the_host_is_one_step_ahead_and_no_further(tmp_path: Path) -> None:
    run = Run(tmp_path)
    for step in range(1, 6):
        run.steps(1)
        assert run.device.mark() - run.device.time == STEP, step
    assert run.device.time == 130.5 + 4 * STEP  # four steps were waited for, the fifth is being computed


def test_longer_intervals_are_told_during_the_next_step(tmp_path: Path) -> None:
    run = Run(tmp_path, log_steps=3)
    run.steps(3)
    assert run.told.lines == []
    run.steps(1)
    assert run.told.lines == ["step 3"] and run.told.done == [False]
    run.end()
    assert run.told.lines == ["step 3", "step 4", "closed"]
    assert [line["tokens"] for line in run.lines] == [150, 50]
    assert [line["interval_s"] for line in run.lines] == pytest.approx([12.5, 4.0])


def test_what_is_there_at_once_is_told_at_once(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.trainer.callbacks.pop()  # no work
    run.steps(2)
    assert run.told.lines == ["step 1", "step 2"]


def test_steps_rise_from_line_to_line_with_evaluations(tmp_path: Path) -> None:
    evaluation = EvaluationConfig.model_validate({"sources": [{"path": "x"}], "steps": 2})
    run = Run(tmp_path, evaluation=evaluation)
    run.steps(3)
    run.end()
    assert run.told.lines == ["step 1", "step 2", "eval 2", "step 3", "eval 3", "closed"]


def test_a_line_is_on_disk_before_the_checkpoint_of_its_step(tmp_path: Path) -> None:
    run = Run(tmp_path, checkpoint=CheckpointConfig(output_dir=str(tmp_path), save_steps=2))
    run.trainer.did = run.told.lines  # one list of both
    run.steps(4)
    assert run.told.lines == ["step 1", "step 2", "save 2", "step 3", "step 4", "save 4"]


@pytest.mark.parametrize(("log_steps", "lines"), [(1, [1, 2, 3]), (2, [2, 3])])
def test_a_stop_tells_everything(tmp_path: Path, log_steps: int, lines: list[int]) -> None:
    run = Run(tmp_path, log_steps)
    run.steps(3)
    run.trainer.should_stop = True
    run.trainer.fail(ResumableError("stopped"))
    assert run.told.lines == [*(f"step {step}" for step in lines), "closed"]
    assert run.told.done[-1]


@pytest.mark.parametrize("stopping", [False, True])
def test_after_a_failure_nothing_is_waited_for(tmp_path: Path, stopping: bool) -> None:
    run = Run(tmp_path)
    run.steps(2)
    run.device.stuck = True
    run.trainer.should_stop = stopping
    run.trainer.fail(RuntimeError("out of memory"))
    assert run.told.lines == ["step 1", "closed"]


def test_after_a_failure_what_is_there_is_told_and_nothing_is_reduced(tmp_path: Path) -> None:
    run = Run(tmp_path, log_steps=2)
    run.steps(2)
    assert run.told.lines == []
    run.device.host(10.0)
    run.trainer.state.step = 3  # a step of which nothing was told
    run.trainer.fail(RuntimeError("failed"))
    assert run.told.lines == ["step 2", "closed"]


def test_writers_are_closed_when_the_last_line_fails(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.steps(1)
    run.device.stuck = run.trainer.should_stop = True
    with pytest.raises(HangError):
        run.metrics.on_exception(run.trainer, ResumableError("stopped"))  # type: ignore[arg-type]
    assert run.told.lines == ["closed"] and run.metrics.writers == []


@pytest.mark.parametrize(("log_steps", "told_after"), [(1, 4), (2, 5), (100, 6)])
def test_a_nan_ends_the_training_a_step_later(tmp_path: Path, log_steps: int, told_after: int) -> None:
    """At the latest before a save, here of step 6."""
    run = Run(tmp_path, log_steps, checkpoint=CheckpointConfig(output_dir=str(tmp_path), save_steps=6))
    run.steps(2)
    with pytest.raises(OmniloomError, match="step 3: the norm of the gradients is nan"):
        run.steps(10, grad_norm=NAN)
    assert run.trainer.state.step == told_after and run.trainer.did == []
    if log_steps == 1:
        assert run.told.lines[-1] == "step 3"  # its line is told first


@pytest.mark.parametrize(("hook", "did"), [("save", []), ("evaluate", ["evaluate 1"]), ("end", [])])
def test_a_nan_of_the_last_step_is_seen_before_anything_goes_on(tmp_path: Path, hook: str, did: list[str]) -> None:
    """At the end of the training before its evaluation."""
    evaluation = EvaluationConfig.model_validate({"sources": [{"path": "x"}]})
    run = Run(tmp_path, evaluation=evaluation)
    run.steps(1, grad_norm=NAN)
    with pytest.raises(OmniloomError, match="step 1: the norm of the gradients is nan"):
        {"save": run.trainer.save, "evaluate": run.trainer.evaluate, "end": run.end}[hook]()
    assert run.trainer.did == did and run.told.lines[0] == "step 1"


def test_a_nan_is_looked_at_once(tmp_path: Path) -> None:
    run = Run(tmp_path, 5)
    run.steps(7)
    run.trainer.save()
    waited = run.device.time
    run.finite.on_before_save(run.trainer)  # type: ignore[arg-type]
    assert run.device.time == waited


def test_on_a_cpu_values_are_there_at_once() -> None:
    tensor = torch.tensor([1.0, 2.5])
    copy = HostCopy(tensor)
    tensor.zero_()
    assert copy.at_once and copy.ready() and copy.get() == [1.0, 2.5]


def _of_a_rank(folder: Path) -> dict[str, Any]:
    """Devices of two ranks are not equally fast: on rank 1 all is there at once."""
    rank = dist.get_rank()
    run = Run(folder / str(rank), rank=rank, world_size=2)
    if rank:
        run.trainer.callbacks.pop()
    run.steps(2, loss_sum=torch.tensor(10.0 + rank))
    lines = list(run.told.heard)
    try:
        run.steps(3, grad_norm=NAN)
    except OmniloomError as error:
        found = {"step": run.trainer.state.step, "said": str(error).partition(";")[0]}
    dist.barrier()  # both are here
    return {**found, "at_once": lines, "heard": run.told.heard, "losses": run.told.losses}


def test_ranks_end_at_the_same_step_whatever_is_there(tmp_path: Path) -> None:
    slow, fast = processes.run(2, partial(_of_a_rank, tmp_path), timeout_s=60.0)
    assert (slow["at_once"], fast["at_once"]) == ([1], [1, 2])
    assert slow["step"] == fast["step"] == 4 and slow["said"] == fast["said"]
    assert slow["heard"] == [1, 2, 3] and fast["heard"] == [1, 2, 3, 4]
    assert slow["losses"] == pytest.approx([21 / 20, 21 / 20, 3.0]) and fast["losses"][:3] == slow["losses"]
