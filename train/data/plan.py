"""The plan of an epoch: which rows make which packed sequence of which global step. A pure function of the lengths, the
sources and their weights, the budget (with the seed) and the epoch.

    lane      owns shards; its visits to them are shuffled each epoch and cut into windows of equal tokens
    window    its rows fill sequences of at most max_seq_len tokens; what fills none well waits for the next window
    step      takes the same number of sequences from every lane, of about the same cost in all lanes
    rank      serves the sequences of its lanes; another world size only changes which rank serves which

The state of training is (epoch, step) and the hash of what the plan is made of.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import cached_property

import numpy as np
import xxhash

from schemas.errors import ConfigError
from train.data.binpack import Bins, match_costs, pack, spread
from train.data.lanes import Lanes, PlanBudget, make_lanes
from train.data.rows import RowTable, shuffled
from train.data.visits import lane_visits, number_of_windows

PLAN_VERSION = 1  # part of the hash: raise it whenever the same inputs give another plan
_SPARE = 10  # one of so many sequences of a window may wait for the next, so that lanes find equal costs
_STEP = 4  # tag of the shuffle


@dataclass(frozen=True)
class EpochPlan:
    """All steps of one epoch.

    Sequences are numbered step * global_batch_size + slot, slot = lane * (sequences of a lane per step) + place.
    rows: row numbers, sequence after sequence; bounds: int64 [sequences + 1], sequence i holds rows[bounds[i] :
    bounds[i + 1]] (none where data are few); cost: int64 [sequences], tokens and attention, in tokens.
    """

    epoch: int
    lanes: int
    global_batch_size: int
    rows: np.ndarray
    bounds: np.ndarray
    cost: np.ndarray

    @property
    def steps(self) -> int:
        return (len(self.bounds) - 1) // self.global_batch_size

    def sequence(self, step: int, slot: int) -> np.ndarray:
        """Row numbers of one packed sequence."""
        self._check(step)
        number = step * self.global_batch_size + slot
        return self.rows[self.bounds[number] : self.bounds[number + 1]]

    def step_rows(self, step: int) -> np.ndarray:
        """Row numbers of all sequences of a global step."""
        self._check(step)
        first = step * self.global_batch_size
        return self.rows[self.bounds[first] : self.bounds[first + self.global_batch_size]]

    def step_costs(self) -> np.ndarray:
        """int64 [steps, global_batch_size]."""
        return self.cost.reshape(self.steps, self.global_batch_size)

    def _check(self, step: int) -> None:
        if not 0 <= step < self.steps:
            raise IndexError(f"step {step} of the {self.steps} steps of epoch {self.epoch}")


def rank_slots(lanes: int, global_batch_size: int, dp_rank: int, dp_size: int) -> np.ndarray:
    """int64 [global_batch_size / dp_size]: slots that one data-parallel rank serves, in the order of its micro-steps.

    Ranks serve whole neighbouring lanes as long as there are enough; more ranks than lanes share them. ConfigError when
    the batch cannot be divided.
    """
    if global_batch_size % dp_size:
        raise ConfigError(
            f"train.global_batch_size {global_batch_size} cannot be divided among {dp_size} data-parallel ranks"
        )
    share = global_batch_size // dp_size
    slots = np.arange(dp_rank * share, (dp_rank + 1) * share)
    lane, place = np.divmod(slots, global_batch_size // lanes)
    return slots[np.lexsort((lane, place))]


def rank_lanes(lanes: int, global_batch_size: int, dp_rank: int, dp_size: int) -> np.ndarray:
    """int64: the lanes that a rank reads."""
    slots = rank_slots(lanes, global_batch_size, dp_rank, dp_size)
    return np.unique(slots // (global_batch_size // lanes))


@dataclass(frozen=True)
class Planner:
    """Plans epochs of one table of rows. too_long: rows of each source that are longer than max_seq_len; empty: rows
    of each source without tokens; both are left out."""

    table: RowTable
    budget: PlanBudget
    lanes: Lanes
    too_long: dict[str, int] = field(default_factory=dict)
    empty: dict[str, int] = field(default_factory=dict)

    @classmethod
    def make(cls, table: RowTable, budget: PlanBudget) -> Planner:
        """ConfigError when no row fits."""
        too_long = {s.name: int((s.tokens > budget.max_seq_len).sum()) for s in table.sources}
        empty = {s.name: int((s.tokens <= 0).sum()) for s in table.sources}
        return cls(table, budget, make_lanes(table, budget), too_long, empty)

    @cached_property
    def inputs(self) -> dict[str, str | int | float]:
        """What the plan is made of, by name: two plans with equal inputs are equal. For messages; `digest` is the
        hash."""
        named: dict[str, str | int | float] = {"version": PLAN_VERSION, **asdict(self.budget)}
        for source in self.table.sources:
            content = xxhash.xxh3_64(source.fingerprint.encode())
            content.update(source.tokens.astype("<i4").data)
            content.update(source.shard_rows.astype("<i8").data)
            named[f"source {source.name}"] = f"{content.hexdigest()} weight {source.weight!r}"
        return named

    def digest(self) -> str:
        """32 hex digits over `inputs`."""
        return xxhash.xxh3_128_hexdigest("\n".join(f"{k}={v}" for k, v in self.inputs.items()).encode())

    def epoch(self, epoch: int, advance: Callable[[int, int], None] | None = None) -> EpochPlan:
        """The plan of epoch `epoch`, from 0. advance: called with (windows done, windows)."""
        visits = [
            lane_visits(self.table, self.budget, self.lanes.shards[lane], (epoch, lane))
            for lane in range(self.lanes.count)
        ]
        windows = number_of_windows(visits, self.budget.window_rows)
        cuts = [visit.cut(windows) for visit in visits]
        builder = _Builder(self, epoch)
        for window in range(windows):
            news = [visit.rows[cut[window] : cut[window + 1]] for visit, cut in zip(visits, cuts, strict=True)]
            builder.add_window(news, last=window + 1 == windows)
            if advance is not None:
                advance(window + 1, windows)
        return builder.finish()


class _Builder:
    """Fills the sequences, window by window."""

    def __init__(self, planner: Planner, epoch: int) -> None:
        self.planner, self.number = planner, epoch
        self.per_lane = planner.budget.global_batch_size // planner.lanes.count
        self.waiting = [np.zeros(0, np.int64)] * planner.lanes.count  # rows that filled no sequence yet
        self.done = 0  # sequences per lane
        self.rows: list[np.ndarray] = []
        self.sizes: list[np.ndarray] = []
        self.costs: list[np.ndarray] = []

    def add_window(self, news: list[np.ndarray], last: bool) -> None:
        budget, tokens = self.planner.budget, self.planner.table.tokens
        pools = [np.concatenate([old, new]) for old, new in zip(self.waiting, news, strict=True)]
        lengths = [tokens[pool] for pool in pools]
        packed = [pack(lane, budget.max_seq_len, budget.attention_len) for lane in lengths]
        if last:
            count = self._whole_steps(max(bins.count for bins in packed), up=True)
            packed = [
                bins if bins.count == count else spread(lane, budget.max_seq_len, budget.attention_len, count)
                for bins, lane in zip(packed, lengths, strict=True)
            ]
            offered = [np.arange(count)] * len(packed)
        else:
            offered = [_without_emptiest(bins) for bins in packed]
            count = self._whole_steps(min(len(offer) - len(offer) // _SPARE for offer in offered), up=False)
        waited = [_holds_first(bins, len(old))[o] for bins, old, o in zip(packed, self.waiting, offered, strict=True)]
        picked = match_costs([b.cost[offer] for b, offer in zip(packed, offered, strict=True)], waited, count)
        taken = [offer[pick] for offer, pick in zip(offered, picked, strict=True)]
        self._emit(pools, packed, taken, count)

    def _whole_steps(self, sequences: int, up: bool) -> int:
        steps = -(-sequences // self.per_lane) if up else sequences // self.per_lane
        return steps * self.per_lane

    def _emit(self, pools: list[np.ndarray], packed: list[Bins], taken: list[np.ndarray], count: int) -> None:
        """Adds `count` sequences of every lane; column i of `taken` becomes the same place of the same step in all."""
        budget, lanes = self.planner.budget, self.planner.lanes.count
        place = shuffled(count, budget.seed, _STEP, self.number, self.done)
        step, within = np.divmod(place, self.per_lane)
        rows_of, sequence_of = [], []
        costs = np.zeros(count * lanes, np.int64)
        for lane, (pool, bins, columns) in enumerate(zip(pools, packed, taken, strict=True)):
            sequence = step * budget.global_batch_size + lane * self.per_lane + within
            target = np.full(bins.count, -1, np.int64)
            target[columns] = sequence
            costs[sequence] = bins.cost[columns]
            owner = target[bins.bin_of]
            rows_of.append(pool[owner >= 0])
            sequence_of.append(owner[owner >= 0])
            self.waiting[lane] = pool[owner < 0]
        rows, sequences = np.concatenate(rows_of), np.concatenate(sequence_of)
        self.rows.append(rows[np.lexsort((rows, sequences))])
        self.sizes.append(np.bincount(sequences, minlength=count * lanes))
        self.costs.append(costs)
        self.done += count

    def finish(self) -> EpochPlan:
        bounds = np.concatenate([[0], np.cumsum(np.concatenate(self.sizes), dtype=np.int64)])
        return EpochPlan(
            epoch=self.number,
            lanes=self.planner.lanes.count,
            global_batch_size=self.planner.budget.global_batch_size,
            rows=np.concatenate(self.rows),
            bounds=bounds,
            cost=np.concatenate(self.costs),
        )


def _without_emptiest(bins: Bins) -> np.ndarray:
    """Bins but the one with the fewest tokens, which the next window may fill."""
    kept = np.ones(bins.count, bool)
    if bins.count:
        kept[int(bins.tokens.argmin())] = False
    return np.flatnonzero(kept)


def _holds_first(bins: Bins, items: int) -> np.ndarray:
    """bool [bins]: which hold one of the first `items` items."""
    held = np.zeros(bins.count, bool)
    held[bins.bin_of[:items]] = True
    return held
