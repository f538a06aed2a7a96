"""The loss of each data source since the start, which is steadier than that of one interval."""

from __future__ import annotations

from train.callbacks.base import Callback
from train.metrics import Interval


class SourceLossCallback(Callback):
    """A listener of the metrics; it needs no collective call of its own."""

    def __init__(self) -> None:
        self.totals: dict[str, tuple[float, int]] = {}  # source -> sum of losses, labelled tokens

    def observe(self, step: int, interval: Interval) -> dict[str, float]:
        """source/loss/<name> and source/tokens/<name>, where there are several sources."""
        for name, (loss, tokens) in interval.source_loss.items():
            before = self.totals.get(name, (0.0, 0))
            self.totals[name] = (before[0] + loss, before[1] + tokens)
        if len(self.totals) < 2:
            return {}
        found: dict[str, float] = {}
        for name, (loss, tokens) in self.totals.items():
            found |= {f"source/loss/{name}": loss / tokens, f"source/tokens/{name}": tokens}
        return found
