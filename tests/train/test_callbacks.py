"""Callbacks around a trainer that takes no real steps: what they write, when, and that they end whatever happens."""

from __future__ import annotations

import gc
import gzip
import io
import json
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from rich.console import Console

from schemas.errors import ConfigError, ResumableError
from tests.train.metric_steps import SOURCES, step_result
from tests.train.stand_in import Trainer
from train.callbacks.checkpoint import CheckpointCallback
from train.callbacks.evaluation import EvaluationCallback
from train.callbacks.export import ExportCallback
from train.callbacks.garbage import GarbageCallback
from train.callbacks.memory import MemoryCallback, is_out_of_memory
from train.callbacks.metrics import MetricsCallback, MetricsEnd
from train.callbacks.moe_load import MoeLoadCallback
from train.callbacks.profiler import ProfilerCallback
from train.callbacks.progress import ProgressCallback, summary
from train.callbacks.source_loss import SourceLossCallback
from train.callbacks.stopping import StoppingCallback
from train.config import CheckpointConfig, EvaluationConfig, LoggingConfig, ProfileConfig
from train.export import Exporter
from train.loss import SourceLoss
from train.metric_writers import read_metrics
from train.metrics import Meter
from train.stopping import Stopper

CPU = torch.device("cpu")


def metrics(folder: Path, log_steps: int = 1, **keys: Any) -> MetricsCallback:
    return MetricsCallback(Meter(SOURCES, CPU), LoggingConfig(log_steps=log_steps), folder, **keys)


def test_a_line_per_interval_and_one_for_what_is_left(tmp_path: Path) -> None:
    callback = metrics(tmp_path, log_steps=3)
    trainer = Trainer(tmp_path, [callback, MetricsEnd(callback)])
    trainer.train(7)
    lines = read_metrics(tmp_path / "metrics.jsonl")
    assert [(line["step"], line["tokens"], line["tokens_total"]) for line in lines] == [
        (3, 150, 150),
        (6, 150, 300),
        (7, 50, 350),
    ]
    assert lines[0]["loss"] == pytest.approx(3.0) and lines[0]["epoch"] == 0
    assert "<h2>Loss</h2>" in (tmp_path / "metrics.html").read_text()


def test_after_a_resume_the_file_goes_on(tmp_path: Path) -> None:
    Trainer(tmp_path, [metrics(tmp_path)]).train(5)
    again = Trainer(tmp_path, [metrics(tmp_path)])
    again.state.step = 3
    again.train(1)
    assert [line["step"] for line in read_metrics(tmp_path / "metrics.jsonl")] == [1, 2, 3, 4]


@pytest.mark.parametrize(("error", "steps"), [(ResumableError("stopped"), [2, 3]), (RuntimeError("nan"), [2])])
def test_what_is_left_is_logged_after_a_stop_and_not_after_a_failure(
    tmp_path: Path, error: Exception, steps: list[int]
) -> None:
    trainer = Trainer(tmp_path, [metrics(tmp_path, log_steps=2)])
    trainer.call("on_train_begin")
    for _ in range(3):
        trainer.step()
    trainer.should_stop = isinstance(error, ResumableError)
    trainer.fail(error)
    assert [line["step"] for line in read_metrics(tmp_path / "metrics.jsonl")] == steps


def test_other_ranks_write_nothing(tmp_path: Path) -> None:
    callback = MetricsCallback(Meter(SOURCES, CPU, rank=1), LoggingConfig(), tmp_path)
    Trainer(tmp_path, [callback]).train(2)
    assert list(tmp_path.iterdir()) == []


def test_losses_of_sources_since_the_start(tmp_path: Path) -> None:
    sources = SourceLossCallback()
    trainer = Trainer(tmp_path, [metrics(tmp_path, listeners=[sources.observe]), sources])
    trainer.call("on_train_begin")
    trainer.step(source_loss={"clips": SourceLoss(torch.tensor(6.0), 2)})
    trainer.step(source_loss={"text": SourceLoss(torch.tensor(5.0), 1), "clips": SourceLoss(torch.tensor(3.0), 1)})
    trainer.step(source_loss={})
    first, second, third = read_metrics(tmp_path / "metrics.jsonl")
    assert "source/loss/clips" not in first  # one source alone is the loss
    assert second["source/loss/clips"] == 3.0 and second["source/tokens/clips"] == 3
    assert third["source/loss/text"] == 5.0 and "loss/text" not in third


def test_the_load_of_experts(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    monitor = MoeLoadCallback(2, tmp_path)
    trainer = Trainer(tmp_path, [metrics(tmp_path, listeners=[monitor.observe]), monitor])
    trainer.train(5)
    lines = read_metrics(tmp_path / "metrics.jsonl")
    assert ["moe/max/0" in line for line in lines] == [False, True, False, True, False]
    assert (lines[1]["moe/max/0"], lines[1]["moe/min/0"], lines[1]["moe/max/1"]) == (2.0, 0.0, 1.0)
    written = [json.loads(text) for text in (tmp_path / "moe_load.jsonl").read_text().splitlines()]
    assert written[0] == {"step": 2, "steps": 2, "tokens": [[8, 0, 4, 4], [2, 2, 2, 2]]}
    assert "experts without a token in the last 2 steps, by layer: 0 (1)" in caplog.text


def console(terminal: bool) -> tuple[Console, io.StringIO]:
    text = io.StringIO()
    return Console(file=text, force_terminal=terminal, width=160, highlight=False), text


def test_plain_lines_say_where_it_is(tmp_path: Path) -> None:
    out, text = console(terminal=False)
    progress = ProgressCallback(3, console=out, status=lambda: "saving step 2: 1.0 of 4.0 GB")
    trainer = Trainer(tmp_path, [progress, metrics(tmp_path, writers=[progress])])
    trainer.train(3)
    trainer.call("on_evaluate", {"loss": 1.25})
    begun, first, last = text.getvalue().splitlines()[:3]
    assert begun == "step 1 of 3 begins; the first step also starts the loader"
    assert first.startswith("step 1 of 3, loss 3.0000, grad norm 2, ") and "tokens/s/GPU, data wait" in first
    assert first.endswith("left, saving step 2: 1.0 of 4.0 GB") and last.startswith("step 3 of 3, loss 3.0000")
    assert summary({"eval/loss": 1.25, "epoch": 0}) == "eval/loss 1.2500"


def test_a_line_of_grpo_begins_with_the_reward() -> None:
    line = {"loss": -0.01, "grad_norm": 2.0, "tokens_per_second_per_gpu": 1000.0, "data_wait": 0.25}
    assert summary(line | {"grpo/reward": 0.5}).startswith("reward 0.5000, loss -0.0100, grad norm 2, ")
    assert "reward" not in summary(line)


@pytest.mark.parametrize("ends", [True, False])
def test_a_bar_is_taken_away_at_the_end(tmp_path: Path, ends: bool) -> None:
    out, text = console(terminal=True)
    progress = ProgressCallback(2, console=out)
    trainer = Trainer(tmp_path, [progress, metrics(tmp_path, writers=[progress])])
    trainer.call("on_train_begin")
    trainer.step()
    trainer.call("on_evaluate", {"loss": 1.25})
    trainer.step()
    trainer.call("on_train_end") if ends else trainer.fail(RuntimeError())
    assert "0/2" in text.getvalue() and "the first step also starts" in text.getvalue()
    assert "2/2" in text.getvalue() and "loss 3.0000" in text.getvalue() and "eval/loss 1.2500" in text.getvalue()
    assert text.getvalue().count("\x1b[?25l") == text.getvalue().count("\x1b[?25h")  # the cursor is back


def test_when_is_saved(tmp_path: Path) -> None:
    config = CheckpointConfig(output_dir=str(tmp_path), save_steps=2, save_epochs=1)
    trainer = Trainer(tmp_path, [CheckpointCallback()], checkpoint=config)
    trainer.train(5)
    assert trainer.did == ["save 2", "save 4", "save 5 final"]
    trainer.did = []
    trainer.step()
    trainer.state.epoch += 1  # which ends with the next step
    for _ in range(3):
        trainer.step()
    assert trainer.did == ["save 6", "save 7", "save 8"]
    trainer.should_stop = True  # the trainer saves by itself then
    trainer.state.epoch += 1
    trainer.step()
    assert trainer.did[3:] == []
    trainer.fail(KeyboardInterrupt())
    assert trainer.did[3:] == []
    trainer.fail(RuntimeError())
    assert trainer.did[-1] == "wait"


def test_a_save_that_fails_with_the_training_is_noted(tmp_path: Path) -> None:
    def wait() -> None:
        raise OSError("no space")

    trainer = Trainer(tmp_path, [CheckpointCallback()])
    trainer.checkpointer.wait = wait
    error = RuntimeError("first")
    trainer.fail(error)
    assert error.__notes__ == ["the checkpoint that was being written failed, too: no space"]


class FakeExporter:
    def __init__(self) -> None:
        self.did: list[str] = []

    def start(self, path: Path) -> None:
        self.did.append(path.name)

    def poll(self) -> None:
        return None

    def wait(self) -> None:
        self.did.append("wait")

    def stop(self) -> None:
        self.did.append("stop")


def test_when_is_exported(tmp_path: Path) -> None:
    exporter = FakeExporter()
    config = CheckpointConfig(output_dir=str(tmp_path), hf_save_steps=4)
    trainer = Trainer(tmp_path, [ExportCallback(cast(Exporter, exporter))], checkpoint=config)
    trainer.call("on_train_begin")
    for step in range(1, 8):
        trainer.committed = [tmp_path / f"step_{step - 1}"]  # each is complete one step later
        trainer.step()
    assert exporter.did == ["step_0", "step_4"]
    trainer.call("on_train_end")
    assert exporter.did == ["step_0", "step_4", "step_7", "wait"]
    trainer.fail(RuntimeError())
    assert exporter.did[-1] == "stop"
    trainer.checkpointer.family = "llama"
    with pytest.raises(ConfigError, match="a llama cannot be exported"):
        trainer.call("on_train_begin")


def test_when_is_evaluated(tmp_path: Path) -> None:
    config = EvaluationConfig.model_validate({"sources": [{"path": "x"}], "steps": 2})
    callback = metrics(tmp_path)
    trainer = Trainer(tmp_path, [callback, EvaluationCallback(), MetricsEnd(callback)], evaluation=config)
    trainer.train(5)
    assert trainer.did == ["evaluate 2", "evaluate 4", "evaluate 5"]
    found = [line["step"] for line in read_metrics(tmp_path / "metrics.jsonl") if line.get("eval/loss") == 2.5]
    assert found == [2, 4, 5] and callback.writers == []
    trainer = Trainer(tmp_path, [EvaluationCallback()], evaluation=config)
    trainer.train(4)
    assert trainer.did == ["evaluate 2", "evaluate 4"]
    Trainer(tmp_path, [EvaluationCallback()]).train(4)  # without sources nothing happens


@pytest.mark.parametrize("how", ["whole", "exception", "end"])
def test_the_profiler_is_always_stopped(tmp_path: Path, how: str) -> None:
    config = ProfileConfig(enable=True, start_step=1, end_step=3 if how == "whole" else 9)
    callback = ProfilerCallback(config, tmp_path)
    trainer = Trainer(tmp_path, [callback])
    trainer.call("on_train_begin")
    for _ in range(3):
        trainer.call("on_step_begin")
        torch.ones(4).sinh()
        trainer.state.count(1, 1, epoch_ends=False)
        trainer.call("on_step_end", step_result())
    if how == "exception":
        trainer.fail(RuntimeError())
    elif how == "end":
        trainer.call("on_train_end")
    (trace,) = (tmp_path / "profile").iterdir()
    events = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    assert sum(event["name"] == "aten::sinh" for event in events) == 2  # of steps 1 and 2
    with torch.profiler.profile():  # none is left running
        pass


def test_the_profiler_runs_where_it_should(tmp_path: Path) -> None:
    for callback in (
        ProfilerCallback(ProfileConfig(), tmp_path),
        ProfilerCallback(ProfileConfig(enable=True, start_step=0, end_step=1), tmp_path, rank=1),
    ):
        Trainer(tmp_path, [callback]).train(2)
    assert not (tmp_path / "profile").exists()


def test_running_out_of_memory_is_recognised_and_a_cpu_has_nothing_to_record(tmp_path: Path) -> None:
    try:
        try:
            raise torch.OutOfMemoryError("CUDA out of memory")
        except torch.OutOfMemoryError as inner:
            raise RuntimeError("while stepping") from inner
    except RuntimeError as error:
        assert is_out_of_memory(error)
    assert not is_out_of_memory(ValueError())
    trainer = Trainer(tmp_path, [MemoryCallback(tmp_path, CPU)])
    trainer.train(1)
    trainer.fail(torch.OutOfMemoryError())
    assert list(tmp_path.iterdir()) == []


def test_the_record_of_memory_does_not_look_where_it_is_freed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """There an error may be on its way, which torch 2.11 then forgets."""
    asked: list[dict[str, Any]] = []
    monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", lambda **options: asked.append(options))
    trainer = Trainer(tmp_path, [MemoryCallback(tmp_path, torch.device("cuda"))])
    trainer.train(1)
    assert [options.get("context", "all") for options in asked[:1]] == ["alloc"] and asked[-1] == {"enabled": None}


@pytest.mark.parametrize("fails", [False, True])
def test_collections_leave_out_what_was_there(tmp_path: Path, fails: bool) -> None:
    gc.unfreeze()  # what packages left out that tests import
    trainer = Trainer(tmp_path, [GarbageCallback()])
    trainer.call("on_train_begin")
    before = gc.get_freeze_count()
    assert before > 10_000 and len(gc.get_objects()) < before / 2
    made = [[[]] for _ in range(100)]
    trainer.step()
    after = gc.get_freeze_count()
    assert after >= before + len(made)  # what the first step makes stays as long
    later = [[[]] for _ in range(100)]
    trainer.step()
    assert gc.get_freeze_count() == after and later in gc.get_objects()
    if fails:
        trainer.fail(ResumableError("stopped"))
    else:
        trainer.call("on_train_end")
    assert gc.get_freeze_count() == 0 and made in gc.get_objects()


def test_what_others_left_out_of_collections_stays_so(tmp_path: Path) -> None:
    gc.freeze()
    try:
        trainer = Trainer(tmp_path, [GarbageCallback()])
        trainer.call("on_train_begin")
        trainer.call("on_train_end")
        assert gc.get_freeze_count() > 10_000
    finally:
        gc.unfreeze()


def test_a_stop_reaches_the_trainer(tmp_path: Path) -> None:
    stopper = Stopper()
    trainer = Trainer(tmp_path, [StoppingCallback(stopper), CheckpointCallback()])
    trainer.args.train.checkpoint = CheckpointConfig(output_dir=str(tmp_path), save_steps=1)
    trainer.call("on_train_begin")
    trainer.step()
    stopper.request("SIGTERM")
    trainer.step()
    assert trainer.should_stop and trainer.did == ["save 1"]
    assert trainer.said == ["SIGTERM: stopping after step 2"]
    trainer.fail(ResumableError("stopped"))
