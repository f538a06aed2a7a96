"""A step that is due to be saved is saved before it is evaluated: an evaluation that fails, or is killed, costs no
step, is done when training goes on, and what it found is in the checkpoint of its step."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch import nn

from schemas.errors import ResumableError
from tests import dist as processes
from tests.train.test_trainer import Watch
from tests.train.tiny import omni_config, write_data
from train.callbacks.base import Callback
from train.checkpoint import Checkpointer
from train.checkpoint_io import StepWriter
from train.checkpoint_layout import saved_steps
from train.config import OmniConfig
from train.evaluation import Evaluator
from train.metric_writers import JsonlWriter, read_metrics
from train.state import TrainerState
from train.trainer import BaseTrainer, make_trainer

STEPS = 4


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return write_data(tmp_path_factory.mktemp("data"))


def config_of(
    folder: Path, sources: list[dict[str, Any]], every: int = 0, steps: int = STEPS, **checkpoint: Any
) -> OmniConfig:
    """every: steps between evaluations."""
    values = {"output_dir": str(folder / "output"), "save_steps": 0, "save_hf_weights": False, **checkpoint}
    evaluation = {"sources": sources[1:], "steps": every, "max_batches": 1}
    return omni_config(folder, sources, max_steps=steps, evaluation=evaluation, checkpoint=values)


def course(config: OmniConfig) -> tuple[Watch, TrainerState]:
    watch = Watch()
    return watch, make_trainer(config, callbacks=[watch]).train()


def failing_course(config: OmniConfig) -> Watch:
    watch = Watch()
    with pytest.raises(RuntimeError, match="no evaluation today"):
        make_trainer(config, callbacks=[watch]).train()
    return watch


def fail(evaluator: Evaluator, model: nn.Module) -> dict[str, float]:
    raise RuntimeError("no evaluation today")


def steps_of(folder: Path) -> list[int]:
    return [saved.step for saved in saved_steps(folder / "output")]


def noted(folder: Path, step: int) -> dict[str, Any]:
    """What the checkpoint of a step says of the training."""
    found: dict[str, Any] = json.loads((folder / "output" / f"step_{step}" / "state.json").read_text())["trainer"]
    return found


def test_a_failure_at_the_end_loses_no_step(
    tmp_path: Path, sources: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_of(tmp_path, sources)
    with monkeypatch.context() as patched:
        patched.setattr(Evaluator, "run", fail)
        assert len(failing_course(config).losses) == STEPS
    assert steps_of(tmp_path) == [STEPS] and noted(tmp_path, STEPS)["evaluated_step"] is None
    again, state = course(config)
    assert again.losses == [] and len(again.evaluated) == 1
    assert noted(tmp_path, STEPS) == state.to_json()
    assert (state.best_step, state.best_loss) == (STEPS, again.evaluated[0]["loss"])
    assert course(config)[0].evaluated == []  # it is known now


def test_at_the_last_step_the_save_comes_first_whatever_else_is_due(
    tmp_path: Path, sources: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is a multiple of the steps between evaluations, and not of those between saves."""
    config = config_of(tmp_path, sources, every=2)
    fails = [False, True]
    run = Evaluator.run
    monkeypatch.setattr(Evaluator, "run", lambda *given: fail(*given) if fails.pop(0) else run(*given))
    assert len(failing_course(config).losses) == STEPS
    assert steps_of(tmp_path) == [STEPS] and fails == []


def wait_for(happens: Callable[[], bool]) -> None:
    end = time.monotonic() + 20
    while not happens():
        assert time.monotonic() < end
        time.sleep(0.01)


@pytest.mark.parametrize("between", ["before its line", "behind its line"])
def test_every_evaluation_has_one_line(
    tmp_path: Path, sources: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch, between: str
) -> None:
    """Also where the training ends between the line and the note in the checkpoint, or before both."""
    config = config_of(tmp_path, sources, 2, save_steps=2, save_async=False)
    write, amend = JsonlWriter.write, Checkpointer.amend

    def ends_before(writer: JsonlWriter, step: int, metrics: Mapping[str, Any]) -> None:
        if step == 2 and "eval/loss" in metrics:
            raise RuntimeError("no evaluation today")
        write(writer, step, metrics)

    def ends_behind(checkpointer: Checkpointer, step: int, state: Mapping[str, Any]) -> None:
        if step == 2:
            raise RuntimeError("no evaluation today")
        amend(checkpointer, step, state)

    with monkeypatch.context() as patched:
        if between == "before its line":
            patched.setattr(JsonlWriter, "write", ends_before)
        else:
            patched.setattr(Checkpointer, "amend", ends_behind)
        failing_course(config)
    course(config)
    lines = read_metrics(tmp_path / "output" / "metrics.jsonl")
    assert [line["step"] for line in lines if "eval/loss" in line] == [2, 4]
    assert [line["step"] for line in lines if "loss" in line] == [1, 2, 3, 4]


DUE: dict[str, dict[str, Any]] = {
    "save_steps": {"save_steps": 2},
    "save_steps, in the foreground": {"save_steps": 2, "save_async": False},
    "hf_save_steps": {"hf_save_steps": 2},
    "save_epochs": {"save_epochs": 2},
}


@pytest.mark.parametrize("due", DUE)
def test_a_failure_between_loses_no_step(
    tmp_path: Path, sources: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch, due: str
) -> None:
    """And the training that goes on comes to what one does that never failed, with the same evaluations."""
    monkeypatch.setattr("train.export.Exporter.start", lambda self, checkpoint: None)
    at = 2  # a step is an epoch
    whole, end = course(config_of(tmp_path / "whole", sources, at, at + 2))
    config = config_of(tmp_path / "parts", sources, at, at + 2, **DUE[due])
    with monkeypatch.context() as patched:
        patched.setattr(Evaluator, "run", fail)
        first = failing_course(config)
    assert len(first.losses) == at - 1 and steps_of(tmp_path / "parts") == [at]
    assert noted(tmp_path / "parts", at)["epoch"] == at
    second, state = course(config)
    assert first.losses + second.losses == whole.losses[: at - 1] + whole.losses[at:]
    assert second.evaluated == whole.evaluated and len(whole.evaluated) == 2
    assert state.to_json() == end.to_json()
    assert noted(tmp_path / "parts", at)["evaluated_step"] == at
    assert noted(tmp_path / "parts", at)["best_loss"] == whole.evaluated[0]["loss"]
    assert noted(tmp_path / "parts", at + 2) == end.to_json()


@pytest.mark.parametrize("slow", [True, False])
def test_a_checkpoint_knows_its_evaluation(
    tmp_path: Path, sources: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch, slow: bool
) -> None:
    """Whichever is ready first."""
    write = StepWriter.write_data
    evaluated: list[float] = []
    run = Evaluator.run

    def late(writer: StepWriter, *arguments: Any) -> Any:
        wait_for(lambda: len(evaluated) > 0)
        time.sleep(0.2)
        return write(writer, *arguments)

    def told(evaluator: Evaluator, model: nn.Module) -> dict[str, float]:
        if not slow:
            wait_for(lambda: steps_of(tmp_path) != [])
        found = run(evaluator, model)
        evaluated.append(found["loss"])
        return found

    monkeypatch.setattr(Evaluator, "run", told)
    if slow:
        monkeypatch.setattr(StepWriter, "write_data", late)
    _, state = course(config_of(tmp_path, sources, 2, 3, save_steps=2, save_async=True))
    for step, best in ((2, evaluated[:1]), (3, evaluated)):
        found = noted(tmp_path, step)
        assert (found["step"], found["evaluated_step"], found["best_loss"]) == (step, step, min(best))
    assert noted(tmp_path, 3) == state.to_json()


def test_the_last_step_is_one_that_is_saved_anyway(tmp_path: Path, sources: list[dict[str, Any]]) -> None:
    config = config_of(tmp_path, sources, steps=2, save_steps=2)
    first, state = course(config)
    assert len(first.evaluated) == 1 and noted(tmp_path, 2) == state.to_json()
    assert course(config)[0].evaluated == []


class Stops(Callback):
    """After step 2, which is known before it ends."""

    def on_step_begin(self, trainer: BaseTrainer) -> None:
        trainer.should_stop = trainer.state.step == 1


def test_a_stop_where_an_evaluation_is_due(tmp_path: Path, sources: list[dict[str, Any]]) -> None:
    """It is saved at once; the evaluation comes when training goes on, before the next step."""
    config = config_of(tmp_path, sources, 2)
    watch = Watch(stop_after=2)
    with pytest.raises(ResumableError, match="stopped and saved after step 2"):
        make_trainer(config, callbacks=[Stops(), watch]).train()
    assert watch.evaluated == [] and noted(tmp_path, 2)["evaluated_step"] is None
    again, _ = course(config)
    assert len(again.evaluated) == 2 and noted(tmp_path, 2)["evaluated_step"] == 2
    lines = [json.loads(text) for text in (tmp_path / "output/metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "eval/loss" in line] == [2, 4]


def _killed(config: OmniConfig) -> None:
    Evaluator.run = lambda *_: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[method-assign,assignment,return-value]
    make_trainer(config).train()


def test_a_kill_in_the_evaluation_loses_no_step(tmp_path: Path, sources: list[dict[str, Any]]) -> None:
    config = config_of(tmp_path, sources)
    with pytest.raises(RuntimeError, match="rank 0 ended without a result"):
        processes.run(1, _killed, config)
    assert steps_of(tmp_path) == [STEPS]
    again, _ = course(config)
    assert again.losses == [] and len(again.evaluated) == 1


def _one_fails(config: OmniConfig) -> None:
    if dist.get_rank() == 1:
        Evaluator.run = fail  # type: ignore[method-assign]
    make_trainer(config).train()


def _both(config: OmniConfig) -> tuple[int, int, dict[str, Any]]:
    watch, state = course(config)
    return len(watch.losses), len(watch.evaluated), state.to_json()


def test_a_failure_of_one_rank_loses_no_step(tmp_path: Path, sources: list[dict[str, Any]]) -> None:
    """It ends while the other waits in the evaluation: neither saves anything after that."""
    config = config_of(tmp_path, sources, 2, 4, save_steps=2)
    began = time.monotonic()
    with pytest.raises(AssertionError, match=r"no evaluation today|closed by peer|reset by peer"):
        processes.run(2, _one_fails, config)
    assert time.monotonic() - began < 100
    assert steps_of(tmp_path) == [2]
    found = processes.run(2, _both, config)
    assert found[0] == found[1] and found[0][:2] == (2, 2)
    assert noted(tmp_path, 2)["evaluated_step"] == 2 and noted(tmp_path, 4) == found[0][2]
