"""Ends a training whose gradients are no numbers, before a checkpoint of what they made of the parameters is saved."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from schemas.errors import OmniloomError
from train.callbacks.base import Callback
from train.checkpoint_layout import saved_steps
from train.host_copy import HostCopy, HostValues

if TYPE_CHECKING:
    from train.step import StepResult
    from train.trainer import BaseTrainer


class FiniteCallback(Callback):
    """Looks at the norm of the gradients, which is the same on all ranks: every `logging.log_steps` it is sent to the
    host, which looks at the end of the next step, and before anything is saved or after an evaluation at once.

    When it looks is a matter of steps alone, never of whether a norm is there yet: that may differ between ranks, and
    one that ended a step earlier would leave the others in a collective call. copy: to the host.
    """

    def __init__(self, log_steps: int, *, copy: Callable[[Tensor], HostValues] = HostCopy) -> None:
        self.log_steps, self._copy = log_steps, copy
        self._norms: list[tuple[int, Tensor]] = []  # of the steps since they were last sent
        self._sent: tuple[list[int], HostValues] | None = None  # of which steps, and their norms

    def on_step_end(self, trainer: BaseTrainer, result: StepResult) -> None:
        self._look(trainer)  # at those of earlier steps
        self._norms.append((trainer.state.step, result.grad_norm))
        if trainer.state.step % self.log_steps == 0:
            self._send()
            if self._sent is not None and self._sent[1].at_once:
                self._look(trainer)

    def on_evaluate(self, trainer: BaseTrainer, metrics: dict[str, float]) -> None:
        self._look_at_all(trainer)

    def on_before_save(self, trainer: BaseTrainer) -> None:
        self._look_at_all(trainer)

    def on_train_end(self, trainer: BaseTrainer) -> None:
        self._look_at_all(trainer)

    def _look_at_all(self, trainer: BaseTrainer) -> None:
        self._look(trainer)
        self._send()
        self._look(trainer)

    def _send(self) -> None:
        norms, self._norms = self._norms, []
        if norms:
            values = self._copy(torch.stack([norm.detach() for _, norm in norms]))
            self._sent = [step for step, _ in norms], values

    def _look(self, trainer: BaseTrainer) -> None:
        sent, self._sent = self._sent, None
        if sent is None:
            return
        for step, norm in zip(sent[0], sent[1].get(), strict=True):
            if not math.isfinite(norm):
                raise OmniloomError(
                    f"step {step}: the norm of the gradients is {norm}, and the parameters are no numbers since; none "
                    f"of it was saved. {_way_on(trainer.checkpointer.output_dir)}, with a lower rate or without the "
                    "rows of that step"
                )


def _way_on(output_dir: Path) -> str:
    steps = saved_steps(output_dir)
    if not steps:
        return f"There is no checkpoint before it in {output_dir}: begin anew"
    return f"Start again to go on from the checkpoint before it, {steps[-1].path}"
