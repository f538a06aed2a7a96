"""Evaluates every `evaluation.steps` steps and at the end."""

from __future__ import annotations

from typing import TYPE_CHECKING

from train.callbacks.base import Callback

if TYPE_CHECKING:
    from train.step import StepResult
    from train.trainer import BaseTrainer


class EvaluationCallback(Callback):
    """`trainer.evaluate` does it, and tells all callbacks. A step is evaluated once."""

    def __init__(self) -> None:
        self._last: int | None = None

    def on_step_end(self, trainer: BaseTrainer, result: StepResult) -> None:
        every = trainer.args.train.evaluation.steps
        if every and trainer.state.step % every == 0 and not trainer.should_stop:
            self._evaluate(trainer)

    def on_train_end(self, trainer: BaseTrainer) -> None:
        if trainer.args.train.evaluation.sources and self._last != trainer.state.step:
            self._evaluate(trainer)

    def _evaluate(self, trainer: BaseTrainer) -> None:
        self._last = trainer.state.step
        trainer.evaluate()
