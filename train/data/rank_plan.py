"""One rank's share of the plan: which rows its micro-batches hold, and which shards it reads."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

import numpy as np

from schemas.errors import ConfigError
from train.config import BatchConfig
from train.data.batch import BatchPlace
from train.data.plan import EpochPlan, rank_lanes, rank_slots
from train.data.plan_store import PlanStore
from train.data.reader import BatchRequest


@dataclass(frozen=True)
class DataRank:
    """Where a process stands. dp_rank, dp_size: which share of the sequences; sp_rank, sp_size: which slice of each
    sequence; ranks of one sequence-parallel group have the same dp_rank and read the same rows."""

    dp_rank: int = 0
    dp_size: int = 1
    sp_rank: int = 0
    sp_size: int = 1

    def __post_init__(self) -> None:
        if not (0 <= self.dp_rank < self.dp_size and 0 <= self.sp_rank < self.sp_size):
            raise ValueError(f"{self} is outside its world")


@dataclass(frozen=True)
class Position:
    """The next step to train."""

    epoch: int = 0
    step: int = 0


class RankPlan:
    """One rank's requests: the rows of its slots, in the order of training."""

    def __init__(self, plans: PlanStore, rank: DataRank, batch: BatchConfig) -> None:
        lanes = plans.planner.lanes.count
        self.plans, self.micro = plans, batch.micro_batch_size
        self.table = plans.planner.table
        self.slots = rank_slots(lanes, batch.global_batch_size, rank.dp_rank, rank.dp_size)
        self.lanes = rank_lanes(lanes, batch.global_batch_size, rank.dp_rank, rank.dp_size)
        if len(self.slots) % self.micro:
            raise ConfigError(
                f"train.global_batch_size {batch.global_batch_size} on {rank.dp_size} data-parallel ranks is "
                f"{len(self.slots)} sequences each, no multiple of train.micro_batch_size {self.micro}"
            )

    @property
    def micro_steps(self) -> int:
        """Micro-batches of a step."""
        return len(self.slots) // self.micro

    def shards(self) -> np.ndarray:
        """int64: running numbers of the shards of this rank's lanes, ascending."""
        owned = self.plans.planner.lanes.shards
        return np.sort(np.concatenate([owned[lane] for lane in self.lanes]))

    def steps(self, start: Position) -> Iterator[tuple[EpochPlan, int]]:
        """(plan of its epoch, number) of every step from a position on, without end."""
        epoch, first = start.epoch, start.step
        while True:
            plan = self.plans.epoch(epoch)
            for step in range(first, plan.steps):
                yield plan, step
            epoch, first = epoch + 1, 0

    def requests(self, start: Position, steps: int) -> Iterator[BatchRequest]:
        """Those of `steps` steps from a position on."""
        for plan, step in islice(self.steps(start), steps):
            for micro in range(self.micro_steps):
                yield self.request(plan, step, micro)

    def request(self, plan: EpochPlan, step: int, micro: int) -> BatchRequest:
        slots = self.slots[micro * self.micro : (micro + 1) * self.micro]
        rows = np.concatenate([plan.sequence(step, int(slot)) for slot in slots])
        place = self.table.place(rows)
        shard = place.shard - self.table.shard_starts[place.source]
        tokens = self.table.tokens[rows].astype(np.int64)
        return BatchRequest(BatchPlace(plan.epoch, step, micro), place.source, shard, place.index, tokens)
