"""Evaluates every `evaluation.steps` steps and at the end."""

from __future__ import annotations

from typing import TYPE_CHECKING

from train.callbacks.base import Callback

if TYPE_CHECKING:
    from train.step import StepResult
    from train.trainer import BaseTrainer


class EvaluationCallback(Callback):
    """`trainer.evaluate` does it, and tells all callbacks. A step is evaluated once, also when a training that has
    ended is started again."""

    def on_step_end(self, trainer: BaseTrainer, result: StepResult) -> None:
        every = trainer.args.train.evaluation.steps
        if every and trainer.state.step % every == 0 and not trainer.should_stop:
            trainer.evaluate()

    def on_train_end(self, trainer: BaseTrainer) -> None:
        if trainer.args.train.evaluation.sources and trainer.state.evaluated_step != trainer.state.step:
            trainer.evaluate()
