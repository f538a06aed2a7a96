"""How evenly each layer's experts are used, every `moe_load_balance_monitor_interval` steps."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

from torch import Tensor

from train.callbacks.base import Callback
from train.metrics import Interval

LOAD_FILE = "moe_load.jsonl"

log = logging.getLogger("omniloom.train")


class MoeLoadCallback(Callback):
    """A listener of the metrics. interval: steps that are summed, rounded up to whole log intervals; 0 = off.

    Rank 0 writes all counts to output_dir/moe_load.jsonl, {"step", "steps", "tokens": [layers][E]}, and warns of
    experts that got nothing.
    """

    def __init__(self, interval: int, output_dir: Path, *, rank: int = 0) -> None:
        self.interval, self.path, self.rank = interval, output_dir / LOAD_FILE, rank
        self._counts: Tensor | None = None
        self._steps = 0

    def observe(self, step: int, interval: Interval) -> dict[str, float]:
        """moe/max/<layer> and moe/min/<layer> when the interval is over."""
        if not self.interval or interval.expert_counts is None:
            return {}
        self._counts = interval.expert_counts if self._counts is None else self._counts + interval.expert_counts
        self._steps += interval.steps
        if self._steps < self.interval:
            return {}
        counts, steps = self._counts, self._steps
        self._counts, self._steps = None, 0
        if self.rank == 0:
            self._write({"step": step, "steps": steps, "tokens": counts.long().tolist()})
            _warn_of_idle(step, steps, counts)
        load = counts / counts.mean(1, keepdim=True).clamp(min=1e-9)
        found = {f"moe/max/{layer}": value for layer, value in enumerate(load.amax(1).tolist())}
        return found | {f"moe/min/{layer}": value for layer, value in enumerate(load.amin(1).tolist())}

    def _write(self, line: dict[str, Any]) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


def _warn_of_idle(step: int, steps: int, counts: Tensor) -> None:
    idle = (counts == 0).sum(1)
    layers = [f"{layer} ({count})" for layer, count in enumerate(idle.tolist()) if count]
    if layers:
        log.warning(
            "step %d: experts without a token in the last %d steps, by layer: %s", step, steps, ", ".join(layers[:8])
        )
