"""Evaluates every `evaluation.steps` steps and at the end."""

from __future__ import annotations

from typing import TYPE_CHECKING

from train.callbacks.base import Callback

if TYPE_CHECKING:
    from train.step import StepResult
    from train.trainer import BaseTrainer


class EvaluationCallback(Callback):
    """`trainer.evaluate` does it, and tells all callbacks. It comes after the step is saved, which it may fail without
    harm. A step is evaluated once, also when a training that has ended is started again."""

    def on_resume(self, trainer: BaseTrainer) -> None:
        """A failure, a kill or a stop came between the save and the evaluation of this step."""
        if trainer.state.evaluated_step != trainer.state.step:
            self._evaluate_if_due(trainer)

    def on_step_end(self, trainer: BaseTrainer, result: StepResult) -> None:
        if not trainer.should_stop:
            self._evaluate_if_due(trainer)

    def on_train_end(self, trainer: BaseTrainer) -> None:
        if trainer.args.train.evaluation.sources and trainer.state.evaluated_step != trainer.state.step:
            trainer.evaluate()

    def _evaluate_if_due(self, trainer: BaseTrainer) -> None:
        every = trainer.args.train.evaluation.steps
        if not every or trainer.state.step % every:
            return
        if trainer.state.step < trainer.train_dataloader.total_steps():  # else `on_train_end` does it, behind the save
            trainer.evaluate()
