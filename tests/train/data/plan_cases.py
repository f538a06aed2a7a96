"""Row tables and plans that several tests use."""

from __future__ import annotations

import numpy as np

from train.data.lanes import PlanBudget
from train.data.plan import Planner
from train.data.rows import RowTable, SourceRows


def mixed_lengths(count: int, seed: int = 0) -> np.ndarray:
    """int32 [count]: lengths like those of text, pictures and clips, some of them over 4096 tokens."""
    rng = np.random.default_rng(seed)
    clips = rng.random(count) < 0.4
    return np.where(clips, rng.lognormal(6.8, 0.8, count), rng.lognormal(5, 0.8, count)).astype(np.int32) + 8


def source(name: str, lengths: np.ndarray | list[int], per_shard: int, weight: float = 1.0) -> SourceRows:
    count = len(lengths)
    shards = [per_shard] * (count // per_shard) + ([count % per_shard] if count % per_shard else [])
    return SourceRows(name, np.asarray(lengths, np.int32), np.asarray(shards, np.int64), weight, f"{name}@1")


def planner(*sources: SourceRows, **budget: int) -> Planner:
    settings = {"max_seq_len": 4096, "global_batch_size": 8, "lanes": 4, "window_rows": 64} | budget
    return Planner.make(RowTable(sources), PlanBudget(**settings))
