"""Sets `trainer.should_stop` at the end of a step, on all ranks at the same one, after a signal."""

from __future__ import annotations

from typing import TYPE_CHECKING

from schemas.errors import StoppedError
from train.callbacks.base import Callback
from train.stopping import Stopper

if TYPE_CHECKING:
    from train.step import StepResult
    from train.trainer import BaseTrainer


class StoppingCallback(Callback):
    """Comes first, so that those after it know that a step is the last."""

    def __init__(self, stopper: Stopper) -> None:
        self.stopper = stopper

    def on_train_begin(self, trainer: BaseTrainer) -> None:
        self.stopper.__enter__()

    def on_step_begin(self, trainer: BaseTrainer) -> None:
        self.stopper.begin_step()

    def on_step_end(self, trainer: BaseTrainer, result: StepResult) -> None:
        if self.stopper.should_stop() and not trainer.should_stop:
            trainer.should_stop = True
            trainer.say(f"{self.stopper.reason}: stopping after step {trainer.state.step}")

    def on_exception(self, trainer: BaseTrainer, error: BaseException) -> None:
        self.stopper.__exit__(None, None, None)


class StoppingEnd(Callback):
    """Comes behind the last save, which a signal does not end: what would come after it is left to the next start."""

    def __init__(self, stopping: StoppingCallback) -> None:
        self.stopper = stopping.stopper

    def on_train_end(self, trainer: BaseTrainer) -> None:
        self.stopper.begin_step()
        stop = self.stopper.should_stop()
        self.stopper.hand_back()
        if stop:
            step = trainer.state.step
            raise StoppedError(
                f"{self.stopper.reason}: saved after step {step}, the last; {trainer.start_again} for what is left"
            )
