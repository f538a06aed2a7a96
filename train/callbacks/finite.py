"""Ends a training whose gradients are no numbers, before a checkpoint of what they made of the parameters is saved."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from schemas.errors import OmniloomError
from train.callbacks.base import Callback

if TYPE_CHECKING:
    from train.step import StepResult
    from train.trainer import BaseTrainer


class FiniteCallback(Callback):
    """Looks at the norm of the gradients, which is the same on all ranks, where the trainer waits for the device
    anyway: every `logging.log_steps`, and before it saves."""

    def __init__(self, log_steps: int) -> None:
        self.log_steps = log_steps
        self._norms: list[tuple[int, Tensor]] = []  # of the steps that were not looked at

    def on_step_end(self, trainer: BaseTrainer, result: StepResult) -> None:
        self._norms.append((trainer.state.step, result.grad_norm))
        if trainer.state.step % self.log_steps == 0:
            self._look(trainer)

    def on_before_save(self, trainer: BaseTrainer) -> None:
        self._look(trainer)

    def _look(self, trainer: BaseTrainer) -> None:
        norms, self._norms = self._norms, []
        if not norms:
            return
        finite = torch.stack([norm.detach() for _, norm in norms]).isfinite().tolist()
        if all(finite):
            return
        step, norm = norms[finite.index(False)]
        raise OmniloomError(
            f"step {step}: the norm of the gradients is {float(norm)}, and the parameters are no numbers since; none "
            f"of it was saved. Start again to go on from the checkpoint before it in "
            f"{trainer.checkpointer.output_dir}, with a lower rate or without the rows of that step"
        )
