"""Python's collector of cycles, kept away from what training does not change."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING

from train.callbacks.base import Callback

if TYPE_CHECKING:
    from train.step import StepResult
    from train.trainer import BaseTrainer


class GarbageCallback(Callback):
    """Leaves out of collections what is there when training begins, and what its first step made.

    Modules, parameters and imported packages are half a million objects. Looking through them took 0.4 s on a server's
    core, every few micro-batches, on each rank at another time, and all ranks wait for the one that does. What later
    steps make is looked through as ever. What others left out before stays so when training ends.
    """

    def __init__(self) -> None:
        self._steps = 0
        self._first = True  # that leaves anything out

    def on_train_begin(self, trainer: BaseTrainer) -> None:
        self._steps, self._first = 0, gc.get_freeze_count() == 0
        self._leave_out()

    def on_step_end(self, trainer: BaseTrainer, result: StepResult) -> None:
        self._steps += 1
        if self._steps == 1:
            self._leave_out()

    def on_train_end(self, trainer: BaseTrainer) -> None:
        self._take_back()

    def on_exception(self, trainer: BaseTrainer, error: BaseException) -> None:
        self._take_back()

    def _take_back(self) -> None:
        if self._first:
            gc.unfreeze()

    @staticmethod
    def _leave_out() -> None:
        gc.collect()  # else garbage of this moment would stay
        gc.freeze()
