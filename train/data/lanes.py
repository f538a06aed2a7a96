"""Canonical lanes: which lane owns which shards.

A lane owns whole shards, and no shard is in two lanes. The deal depends on the data and the budget alone, never on the
number of ranks or the epoch, so a node that serves the same lanes reads the same shards in every epoch. Lanes get equal
tokens, and equal numbers of shards of every source.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from schemas.errors import ConfigError
from train.data.rows import RowTable, scramble

MAX_EXTRA_STEPS = 1.02  # more lanes may cost this factor of steps, because lanes are never exactly equal
_DEAL = 1  # tag of the scramble


@dataclass(frozen=True)
class PlanBudget:
    """What the plan fills.

    max_seq_len: tokens of a packed sequence; global_batch_size: packed sequences of an optimizer step; lanes: at most
    that many; window_rows: rows of a lane that are shuffled and packed together (their shards are in use at a time);
    attention_len: length in tokens of a sample whose attention costs as much as all the rest of it.
    """

    max_seq_len: int
    global_batch_size: int
    lanes: int = 64
    window_rows: int = 2048
    attention_len: int = 15_500
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("max_seq_len", "global_batch_size", "lanes", "window_rows", "attention_len"):
            if getattr(self, name) < 1:
                raise ConfigError(f"plan: {name} is {getattr(self, name)}; it must be at least 1")


@dataclass(frozen=True)
class Lanes:
    """shards: of each lane, int64 running numbers in ascending order; note: why there are fewer lanes than asked for,
    or empty."""

    shards: tuple[np.ndarray, ...]
    note: str = ""

    @property
    def count(self) -> int:
        return len(self.shards)


def make_lanes(table: RowTable, budget: PlanBudget) -> Lanes:
    """As many lanes as the budget asks for, or the most that the data fill evenly. ConfigError when no row fits."""
    loads = shard_loads(table, budget.max_seq_len)
    used = np.flatnonzero(loads)
    if not len(used):
        raise ConfigError(
            f"no row of {', '.join(s.name for s in table.sources)} fits max_seq_len {budget.max_seq_len}: "
            f"{table.num_rows} rows" + (f", the shortest has {table.tokens.min()} tokens" if table.num_rows else "")
        )
    batch = budget.global_batch_size
    candidates = [n for n in range(min(budget.lanes, batch), 0, -1) if batch % n == 0]
    accepted = int(_steps(loads.sum(keepdims=True), budget) * MAX_EXTRA_STEPS)
    note = f"{candidates[0]} is the largest number of lanes that divides global_batch_size {batch}"
    for count in candidates:
        if count > len(used):
            note = f"the data have {len(used)} shard{'s' * (len(used) > 1)} with rows"
            continue
        lane_of = deal(table, loads, count, budget.seed)
        if count == 1 or _steps(np.bincount(lane_of[used], loads[used], count), budget) <= accepted:
            break
        note = "with more lanes their shards would fill them too unevenly"
    shards = tuple(used[lane_of[used] == lane] for lane in range(count))
    lowered = f"lanes lowered from {budget.lanes} to {count}: {note}" if count < budget.lanes else ""
    return Lanes(shards, lowered)


def _steps(lane_loads: np.ndarray, budget: PlanBudget) -> int:
    """Steps that the fullest lane needs at least. lane_loads: tokens of each lane."""
    full = budget.max_seq_len * (budget.global_batch_size // len(lane_loads))
    return -(-int(lane_loads.max()) // full)


def shard_loads(table: RowTable, max_seq_len: int) -> np.ndarray:
    """int64 [shards]: tokens that each shard brings to an epoch, on average; rows that do not fit left out."""
    sums = np.zeros(len(table.tokens) + 1, np.int64)
    np.cumsum(np.where(table.usable(slice(None), max_seq_len), table.tokens, 0), dtype=np.int64, out=sums[1:])
    loads = sums[table.row_starts[1:]] - sums[table.row_starts[:-1]]
    for number, source in enumerate(table.sources):
        if source.weight != 1:
            part = slice(*table.shard_starts[number : number + 2])
            loads[part] = np.ceil(loads[part] * source.weight)
    return loads


def deal(table: RowTable, loads: np.ndarray, count: int, seed: int) -> np.ndarray:
    """int32 [shards]: the lane of each shard; -1 for a shard without a row that fits.

    Source by source, the heaviest shards first, in rounds of one shard per lane: the heaviest of a round goes to the
    lane with the least so far.
    """
    lane_of = np.full(table.num_shards, -1, np.int32)
    totals = np.zeros(count, np.int64)
    for number in range(len(table.sources)):
        first, end = table.shard_starts[number : number + 2]
        shards = first + np.flatnonzero(loads[first:end])
        chance = scramble(shards, seed, _DEAL)
        shards = shards[np.lexsort((chance, -loads[shards]))]
        for start in range(0, len(shards), count):
            chunk = shards[start : start + count]
            lanes = np.argsort(totals, kind="stable")[: len(chunk)]
            lane_of[chunk] = lanes
            totals[lanes] += loads[chunk]
    return lane_of
