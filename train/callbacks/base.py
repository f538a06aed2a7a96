"""What a callback may do."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from train.step import StepResult
    from train.trainer import BaseTrainer


class Callback:
    """Hooks around training; each does nothing by default."""

    def on_train_begin(self, trainer: BaseTrainer) -> None:
        """After building, before the first step."""

    def on_resume(self, trainer: BaseTrainer) -> None:
        """Training goes on from a checkpoint; after `on_train_begin` of all callbacks. What was due after that step and
        did not come to its end can be made up for."""

    def on_step_begin(self, trainer: BaseTrainer) -> None:
        """The micro-batches are there."""

    def on_step_end(self, trainer: BaseTrainer, result: StepResult) -> None:
        """The step is counted in `trainer.state`."""

    def on_epoch_end(self, trainer: BaseTrainer) -> None:
        """After the last step of an epoch."""

    def on_evaluate(self, trainer: BaseTrainer, metrics: dict[str, float]) -> None:
        """After an evaluation."""

    def on_before_save(self, trainer: BaseTrainer) -> None:
        """A checkpoint is about to be taken, or an adapter to be exported as it is."""

    def on_save(self, trainer: BaseTrainer, path: Path) -> None:
        """A checkpoint was taken; it may still be written."""

    def on_exception(self, trainer: BaseTrainer, error: BaseException) -> None:
        """Training ends by an error."""

    def on_train_end(self, trainer: BaseTrainer) -> None:
        """After the last step."""
