"""From a configuration to the plans of its sources, and what a user should know of them."""

from __future__ import annotations

import fcntl
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from train.config import BatchConfig, DataConfig
from train.data.lanes import PlanBudget
from train.data.plan import Planner
from train.data.plan_store import PlanStore
from train.data.processor import ProcessorAssets
from train.data.sources import OpenSource, cache_folder, open_sources, row_table
from train.progress import progress

log = logging.getLogger("omniloom.train")


def open_data(
    data: DataConfig,
    batch: BatchConfig,
    assets: ProcessorAssets,
    show: bool = True,
    choose: Callable[[list[OpenSource]], list[OpenSource]] | None = None,
) -> tuple[list[OpenSource], PlanStore]:
    """The sources and their plans, the first epoch's made. show: on one rank, the progress of what takes time, and the
    `plan_notes`, through the logger omniloom.train; choose: the same sources with some of their rows left out (of 0
    tokens). Ranks of a node wait for one another, so that each row is counted once."""
    said = progress if show else _silent
    with _one_at_a_time(cache_folder(data)), said("counting tokens", None, "rows") as advance:
        sources = open_sources(data, assets, batch.seed, lambda _, count: advance(count))
    if choose is not None:
        sources = choose(sources)
    with said("planning the epoch", None, "windows") as advance:
        plans = make_plans(sources, data, batch, lambda done, of: advance(1))
        plans.steps(0)
    if show and choose is None:  # notes on rows would count those that were left out
        for note in plan_notes(plans, sources):
            log.info("%s", note)
    return sources, plans


@contextmanager
def _one_at_a_time(folder: Path) -> Iterator[None]:
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / ".opening", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # freed with the file, however this process ends
        yield


@contextmanager
def _silent(title: str, total: int | None, unit: str) -> Iterator[Callable[[int], None]]:
    yield lambda count: None


def make_plans(
    sources: Sequence[OpenSource],
    data: DataConfig,
    batch: BatchConfig,
    advance: Callable[[int, int], None] | None = None,
) -> PlanStore:
    """The plans of these sources; the same on every rank."""
    budget = PlanBudget(
        max_seq_len=data.max_seq_len,
        global_batch_size=batch.global_batch_size,
        lanes=data.lanes,
        window_rows=data.window_rows,
        attention_len=data.attention_len,
        seed=batch.seed,
    )
    planner = Planner.make(row_table(sources), budget)
    return PlanStore(planner, cache_folder(data), advance)


def plan_notes(plans: PlanStore, sources: Sequence[OpenSource]) -> list[str]:
    """What a user should know of the plan before training: one line each."""
    planner = plans.planner
    notes = [planner.lanes.note] if planner.lanes.note else []
    first = plans.epoch(0)
    if empty := int((np.diff(first.bounds) == 0).sum()):
        asked = planner.budget.global_batch_size
        few = "; the data fill less than one step: lower train.global_batch_size" if first.steps == 1 else ""
        notes.append(
            f"{empty} of {len(first.cost)} packed sequences of the first epoch hold padding alone, so that its "
            f"{first.steps} step{'s' * (first.steps > 1)} have train.global_batch_size {asked} each{few}"
        )
    for source in sources:
        name = source.rows.name
        if count := planner.too_long[name]:
            notes.append(
                f"data source {name}: {count} of {len(source.lengths)} rows are longer than data.max_seq_len "
                f"{planner.budget.max_seq_len} and are left out"
            )
        if count := planner.empty[name]:
            why = f"; the first: {source.lengths.faults[0][1]}" if source.lengths.faults else ""
            notes.append(f"data source {name}: {count} of {len(source.lengths)} rows cannot be used{why}")
        if count := source.lengths.without_labels:
            notes.append(f"data source {name}: {count} rows have no token to train on")
    return notes
