"""The learning rate of each step, as a closed form of the step's number."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
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


MEANING = {"style": "lr_decay_style", "warmup": "steps of warm-up", "last": "step at which decay ends"}
MEANING |= {"start": "lr_start as a part of lr", "end": "lr_min as a part of lr"}


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
        return {"steps": self.steps, "schedule": asdict(self.schedule)}

    def change_since(self, state: Mapping[str, Any]) -> str | None:
        """What to say when a saved state was of another schedule; None for the same one, or when it is not known."""
        if not isinstance(saved := state.get("schedule"), Mapping) or saved.keys() != MEANING.keys():
            return None
        steps, now, then = int(state["steps"]), asdict(self.schedule), dict(saved)
        if now["style"] == then["style"] == "constant":  # has no decay
            now |= {"last": then["last"], "end": then["end"]}
        changed = [f"{said} {then[key]} then, {now[key]} now" for key, said in MEANING.items() if then[key] != now[key]]
        if not changed:
            return None
        was, will = Schedule(**saved).factor(steps), self.schedule.factor(steps)
        return (
            f"the schedule of the learning rate is not that of the checkpoint: {'; '.join(changed)}. After step "
            f"{steps} the rate is {will:.3g} of its highest; by the checkpoint's schedule it would be {was:.3g}"
        )

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.steps = int(state["steps"])
        self._apply()

    def _apply(self) -> None:
        factor = self.schedule.factor(self.steps)
        for group in self.optimizer.param_groups:
            group["lr"] = group["base_lr"] * factor
