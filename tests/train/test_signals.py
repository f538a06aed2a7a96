"""Signals where no step ends: before the first, behind the last save, before ranks are there."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import yaml

from schemas.errors import StoppedError
from tests.environment import environment
from tests.train.tiny import omni_config, write_data
from train.callbacks.base import Callback
from train.signals import SIGNALS, OutsideSteps, StoppedOutsideError
from train.stopping import Stopper
from train.trainer import BaseTrainer, make_trainer

STEPS = 2


def tell(number: int = signal.SIGTERM) -> None:
    os.kill(os.getpid(), number)


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return write_data(tmp_path_factory.mktemp("signals"))


@pytest.mark.parametrize("number", SIGNALS)
def test_it_ends_what_runs_and_nobody_swallows_it(number: signal.Signals) -> None:
    before = {it: signal.getsignal(it) for it in SIGNALS}
    with pytest.raises(StoppedOutsideError, match=f"^{number.name} after all$"), OutsideSteps("after all"):
        with suppress(Exception):  # as libraries do
            tell(number)
        raise AssertionError("went on")
    assert {it: signal.getsignal(it) for it in SIGNALS} == before


def test_what_fails_because_of_it_does_not_hide_it_and_a_second_one_waits() -> None:
    with pytest.raises(StoppedOutsideError, match="SIGTERM"), OutsideSteps():
        try:
            tell()
        finally:
            tell()  # what is tidied up is brought to its end
            raise RuntimeError("a peer is gone")


def test_without_a_signal_nothing_changes() -> None:
    with OutsideSteps():
        pass
    with pytest.raises(ValueError, match="mine"), OutsideSteps():
        raise ValueError("mine")


def test_a_signal_behind_the_last_exchange_is_not_lost() -> None:
    with pytest.raises(StoppedOutsideError, match="SIGUSR1"), OutsideSteps():
        stopper = Stopper()
        stopper.__enter__()
        stopper.begin_step()
        tell(signal.SIGUSR1)
        assert not stopper.should_stop()
        stopper.hand_back()
        raise AssertionError("went on")


class AtTheEnd(Callback):
    """Comes behind all others, as a signal while the export runs would."""

    def __init__(self) -> None:
        self.heard: list[BaseException] = []

    def on_train_end(self, trainer: BaseTrainer) -> None:
        tell()

    def on_exception(self, trainer: BaseTrainer, error: BaseException) -> None:
        self.heard.append(error)


def test_behind_the_last_save(tmp_path: Path, sources: list[dict[str, Any]]) -> None:
    config, last = omni_config(tmp_path, sources, max_steps=STEPS), AtTheEnd()
    said = rf"^SIGTERM after step {STEPS}, the last, was saved; start again for what is left$"
    with pytest.raises(StoppedOutsideError, match=said):
        make_trainer(config, callbacks=[last]).train()
    assert (tmp_path / f"output/step_{STEPS}/COMPLETE").exists()
    assert len(last.heard) == 1  # so that exports are ended


def test_while_the_training_is_built(
    tmp_path: Path, sources: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = omni_config(tmp_path, sources, max_steps=STEPS)
    monkeypatch.setattr(BaseTrainer, "build_callbacks", lambda self: tell())
    with pytest.raises(StoppedOutsideError, match=r"^SIGTERM before the first step"):
        make_trainer(config).train()
    monkeypatch.undo()
    make_trainer(config).train()  # the folder is free again


@pytest.mark.parametrize("ranks", ["1", "2"])
@pytest.mark.parametrize("when", ["loading torch", " on cpu"])
def test_the_command_says_that_it_was_stopped(
    tmp_path: Path, sources: list[dict[str, Any]], ranks: str, when: str
) -> None:
    if ranks == "2" and when == "loading torch":
        when = "starting"  # torchrun is not there yet
    recipe = tmp_path / "train.yaml"
    recipe.write_text(yaml.safe_dump(omni_config(tmp_path, sources, max_steps=400).model_dump(mode="json")))
    command = [sys.executable, "-m", "jobs.cli", "train", "run", str(recipe), "--nproc", ranks]
    process = subprocess.Popen(command, cwd=tmp_path, env=environment(CUDA_VISIBLE_DEVICES=""), text=True,
                               stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)  # fmt: skip
    assert process.stderr is not None
    said = ""
    while when not in said:
        line = process.stderr.readline()
        assert line, said
        said += line
    process.send_signal(signal.SIGTERM)
    rest = process.communicate(timeout=100)[1]
    assert process.returncode == StoppedError.exit_code, said + rest
    # with its ranks begun it may have come to a step
    known = ("SIGTERM before the first step: ", "stopped and saved after step ")
    assert rest.splitlines()[-1].startswith(known) and "rror" not in rest, said + rest
