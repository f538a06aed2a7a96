"""The learning rate of each step, as a closed form of the step's number."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from torch.optim import Optimizer

from schemas.errors import ConfigError
from train.config_trainer import OptimizerConfig


@dataclass(frozen=True)
class Schedule:
    """Linear warm-up over `warmup` steps from `start`, then decay to `end`, which is reached at step `last`; all as
    parts of the learning rate."""

    style: str
    warmup: int
    last: int
    start: float
    end: float

    @classmethod
    def of(cls, config: OptimizerConfig, total_steps: int) -> Schedule:
        """ConfigError when warm-up is longer than the training."""
        warmup = config.lr_warmup_steps
        if warmup is None:
            warmup = round(config.lr_warmup_ratio * total_steps)
        if warmup > total_steps:
            raise ConfigError(f"train.optimizer.lr_warmup_steps: {warmup} steps of a training of {total_steps}")
        last = max(warmup, round(config.lr_decay_ratio * total_steps))
        return cls(config.lr_decay_style, warmup, last, config.lr_start / config.lr, config.lr_min / config.lr)

    def factor(self, step: int) -> float:
        """Part of the learning rate at a step, counted from 0."""
        if step < self.warmup:
            return self.start + (1 - self.start) * step / self.warmup
        if self.style == "constant":
            return 1.0
        if step >= self.last:
            return self.end
        share = (step - self.warmup) / (self.last - self.warmup)
        left = 1 - share if self.style == "linear" else 0.5 * (1 + math.cos(math.pi * share))
        return self.end + (1 - self.end) * left


class LrScheduler:
    """Sets every group's learning rate to its own base rate times the schedule's factor, so that rates of modules keep
    their proportions."""

    def __init__(self, optimizer: Optimizer, schedule: Schedule) -> None:
        self.optimizer, self.schedule = optimizer, schedule
        self.steps = 0
        self._apply()

    def step(self) -> None:
        """To be called after each optimizer step."""
        self.steps += 1
        self._apply()

    def rates(self) -> dict[str, float]:
        """Learning rate by name of the group."""
        return {group["name"]: group["lr"] for group in self.optimizer.param_groups}

    def state_dict(self) -> dict[str, Any]:
        """JSON."""
        return {"steps": self.steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.steps = int(state["steps"])
        self._apply()

    def _apply(self) -> None:
        factor = self.schedule.factor(self.steps)
        for group in self.optimizer.param_groups:
            group["lr"] = group["base_lr"] * factor
