"""The order in which a lane visits its shards in one epoch, and the windows that order is cut into."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from train.data.lanes import PlanBudget
from train.data.rows import RowTable, ranges, scramble

_VISIT, _PHASE = 2, 3  # tags of the scrambles


@dataclass(frozen=True)
class Visits:
    """Rows of a lane in the order of its visits to shards. bounds: int64 [visits + 1]; sums: int64 [rows + 1], tokens
    before each row."""

    rows: np.ndarray
    bounds: np.ndarray
    sums: np.ndarray

    def cut(self, windows: int) -> np.ndarray:
        """int64 [windows + 1]: bounds in rows of windows of about equal tokens; a visit lies in one window."""
        before = self.sums[self.bounds]
        wanted = np.arange(windows + 1) * int(before[-1]) // windows
        cuts = self.bounds[np.searchsorted(before, wanted)]
        cuts[0], cuts[-1] = 0, len(self.rows)
        return cuts


def lane_visits(table: RowTable, budget: PlanBudget, shards: np.ndarray, where: tuple[int, int]) -> Visits:
    """The visits of a lane that owns `shards`. where: (epoch, lane)."""
    rows_of, shard_of, turn_of = [], [], []
    source_of = np.searchsorted(table.shard_starts, shards, side="right") - 1
    for number, source in enumerate(table.sources):
        mine = shards[source_of == number]
        mine = mine[np.argsort(scramble(mine, budget.seed, _PHASE), kind="stable")]
        rows = table.rows_of_shards(mine)
        owner = np.repeat(mine, table.row_starts[mine + 1] - table.row_starts[mine])
        usable = table.usable(rows, budget.max_seq_len)
        rows, owner = rows[usable], owner[usable]
        copies = _copies(len(rows), source.weight, where[0])
        for copy in range(int(copies.max(initial=0))):
            used = copies > copy
            rows_of.append(rows[used])
            shard_of.append(owner[used])
            turn_of.append(np.full(int(used.sum()), copy))
    rows, shard, turn = _joined(rows_of), _joined(shard_of), _joined(turn_of)
    # every (shard, turn) is one visit; its rows follow one another
    starts = np.flatnonzero(np.r_[True, (np.diff(shard) != 0) | (np.diff(turn) != 0)][: len(rows)])
    counts = np.diff(np.append(starts, len(rows)))
    chance = scramble(shard[starts] * 1_000_003 + turn[starts], budget.seed, _VISIT, *where)
    order = np.argsort(chance, kind="stable")
    rows = rows[ranges(starts[order], counts[order])]
    sums = np.concatenate([[0], np.cumsum(table.tokens[rows], dtype=np.int64)])
    dtype = np.int32 if table.num_rows < 2**31 else np.int64
    return Visits(rows.astype(dtype), np.concatenate([[0], np.cumsum(counts[order], dtype=np.int64)]), sums)


def _joined(parts: list[np.ndarray]) -> np.ndarray:
    return np.concatenate([*parts, np.zeros(0, np.int64)])


def _copies(count: int, weight: float, epoch: int) -> np.ndarray:
    """int64 [count]: how often each row of a source and lane is used in this epoch. The sum over all epochs is the
    weight times their number for every row, rounded; neighbours are used in the same epoch, so that a small weight
    needs few shards."""
    if weight == int(weight):
        return np.full(count, int(weight))
    phase = (np.arange(count) + 0.5) / max(count, 1)
    return (np.floor(weight * (epoch + 1) + phase) - np.floor(weight * epoch + phase)).astype(np.int64)


def number_of_windows(visits: list[Visits], window_rows: int) -> int:
    most_rows = max(len(lane.rows) for lane in visits)
    fewest_visits = min(len(lane.bounds) - 1 for lane in visits)
    return max(1, min(round(most_rows / window_rows), fewest_visits))
