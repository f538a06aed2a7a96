"""Where a training run stands."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from schemas.errors import IncompleteSourceError
from train.config import BatchConfig


@dataclass
class TrainerState:
    """Counted after each optimizer step, over all ranks. step: optimizer steps done; epoch: passes over the data that
    are complete; tokens: without padding; samples: rows of the data; best_loss, best_step: of the evaluations, None
    before the first; evaluated_step: of the last evaluation."""

    step: int = 0
    epoch: int = 0
    tokens: int = 0
    samples: int = 0
    best_loss: float | None = None
    best_step: int | None = None
    evaluated_step: int | None = None

    def count(self, tokens: int, samples: int, *, epoch_ends: bool) -> None:
        """After a step with so many tokens and samples."""
        self.step += 1
        self.tokens += tokens
        self.samples += samples
        self.epoch += epoch_ends

    def evaluated(self, loss: float) -> None:
        """Notes the loss of an evaluation after the current step."""
        self.evaluated_step = self.step
        if self.best_loss is None or loss < self.best_loss:
            self.best_loss, self.best_step = loss, self.step

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> TrainerState:
        """IncompleteSourceError when a value is missing; ValueError for counts that are none."""
        names = [field.name for field in fields(cls)]
        values = {"evaluated_step": None, **values}  # which older checkpoints do not have
        if missing := [name for name in names if name not in values]:
            raise IncompleteSourceError(f"trainer state: {', '.join(missing)} are missing")
        for name in ("step", "epoch", "tokens", "samples"):
            if type(values[name]) is not int or values[name] < 0:
                raise ValueError(f"trainer.{name} is {values[name]!r}")
        return cls(**{name: values[name] for name in names})


def finished_note(step: int, total: int, batch: BatchConfig) -> str | None:
    """What to say of a training that goes on after step `step` of `total`, when that was its last one."""
    if step < total:
        return None
    if batch.max_steps is not None:
        key, asked = "train.max_steps", f"train.max_steps is {total}"
    else:
        key, asked = "train.num_train_epochs", f"train.num_train_epochs {batch.num_train_epochs} are {total} steps"
    return (
        f"nothing is left to train: step {step} is done and {asked}; raise {key} to go on, or set another "
        "train.checkpoint.output_dir to start anew"
    )
