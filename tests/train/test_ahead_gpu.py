"""On a GPU: copies and marks that the host does not wait for, and a training with a line for every step."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from jobs.bench.train_waits import host_waits
from schemas.errors import OmniloomError
from tests.train.tiny import omni_config, write_data
from train.callbacks.base import Callback
from train.callbacks.finite import FiniteCallback
from train.callbacks.metrics import MetricsCallback
from train.config import OmniConfig
from train.host_copy import HostCopy
from train.metric_writers import read_metrics
from train.step_times import StepTimes, clock_of
from train.trainer import BaseTrainer, make_trainer

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
WARM, STEPS = 4, 24


@pytest.fixture(scope="module")
def device() -> torch.device:
    found = torch.device("cuda", 0)
    HostCopy(torch.ones(3, device=found)).get()  # memory is pinned
    return found


def busy(seconds: float) -> None:
    """Keeps the current stream busy, roughly."""
    torch.cuda._sleep(int(seconds * 1.7e9))


def test_a_copy_is_waited_for_alone(device: torch.device) -> None:
    values = torch.arange(3.0, device=device)
    busy(0.3)
    copy = HostCopy(values)
    values.fill_(7.0)
    torch.cuda.set_sync_debug_mode("error")
    try:
        again = HostCopy(values)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    busy(0.3)
    last = torch.cuda.Event()
    last.record()
    assert not copy.at_once and not copy.ready()
    assert copy.get() == [0.0, 1.0, 2.0] and copy.ready()
    assert not last.query()  # what came later is not waited for
    assert again.get() == [7.0, 7.0, 7.0]


def test_pauses_that_the_device_does_not_notice(device: torch.device) -> None:
    times = StepTimes(clock_of(device))
    busy(0.4)  # a step
    times.end_step()
    time.sleep(0.1)
    times.begin_step()
    times.waited(0.05)
    hidden = times.idle()
    assert hidden.wait_s + hidden.pause_s < 0.01


def test_pauses_that_it_does(device: torch.device) -> None:
    times = StepTimes(clock_of(device))
    torch.cuda.synchronize()
    times.start()
    times.end_step()
    time.sleep(0.3)
    times.begin_step()
    times.waited(0.1)
    busy(0.2)
    idle, span = times.idle(), times.cut()
    assert idle.wait_s == pytest.approx(0.1) and idle.pause_s == pytest.approx(0.2, abs=0.05)
    assert 0.4 < span.seconds() < 0.7


def config_of(folder: Path, **train: Any) -> OmniConfig:
    """Of a model whose sizes the fastest kernels take."""
    config = omni_config(folder, write_data(folder / "data"), accelerator={}, **train)
    file = folder / "model/config.json"
    values = json.loads(file.read_text())
    values["text_config"]["moe_intermediate_size"], values["audio_config"]["d_model"] = 24, 48
    file.write_text(json.dumps(values))
    return config


class Watch(Callback):
    """Which lines of the trainer wait for the device in whole steps after the first ones, and how long steps take by
    the host's clock. Comes last."""

    def __init__(self) -> None:
        self.waits: dict[str, int] = {}
        self.step = 0
        self.began = self.took = 0.0
        self._watched: Any = None
        self._found: Any = None

    def on_train_begin(self, trainer: BaseTrainer) -> None:
        torch.cuda.synchronize()
        self.began = time.monotonic()

    def on_step_end(self, trainer: BaseTrainer, result: Any) -> None:
        if trainer.state.step == WARM:
            self._watched = host_waits(trainer.mesh.device)
            self._found = self._watched.__enter__()
        if trainer.state.step == STEPS:
            self._watched.__exit__(None, None, None)
            self.waits = {line: n for (who, line), n in self._found.items() if who == "trainer"}
            torch.cuda.synchronize()
            self.took = time.monotonic() - self.began


def test_a_line_for_every_step_without_waiting(tmp_path: Path) -> None:
    config = config_of(tmp_path, max_steps=STEPS, logging={"log_steps": 1, "plots": False})
    watch = Watch()
    trainer = make_trainer(config, callbacks=[watch])
    trainer.train()
    assert watch.waits == {}
    lines = read_metrics(tmp_path / "output" / "metrics.jsonl")
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
    seconds = sum(line["interval_s"] + line["pause_s"] for line in lines)
    assert seconds == pytest.approx(watch.took, rel=0.1)
    assert sum(line["pause_s"] for line in lines) < 0.1 * watch.took
    assert all(line["data_wait_s"] <= line["step_s"] for line in lines)


class Poison(Callback):
    """Gradients are no numbers from step 3 on."""

    def on_train_begin(self, trainer: BaseTrainer) -> None:
        def watch(_module: Any, _inputs: Any, outputs: Any) -> None:
            hidden = outputs[0]
            if hidden.requires_grad and trainer.state.step >= 2:
                hidden.register_hook(lambda gradient: gradient * float("nan"))

        model: Any = trainer.model
        model.model.norm.register_forward_hook(watch)  # FSDP runs no hooks of parameters


def test_gradients_that_are_no_numbers_end_it_a_step_later(tmp_path: Path) -> None:
    config = config_of(tmp_path, max_steps=8)
    trainer = make_trainer(config, callbacks=[Poison()])
    with pytest.raises(OmniloomError, match="step 3: the norm of the gradients is nan"):
        trainer.train()
    assert trainer.state.step == 4
    assert {MetricsCallback, FiniteCallback} <= {type(callback) for callback in trainer.callbacks}
    lines = read_metrics(tmp_path / "output" / "metrics.jsonl")
    assert [line["step"] for line in lines][:3] == [1, 2, 3]
