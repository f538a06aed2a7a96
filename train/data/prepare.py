"""From a configuration to the plans of its sources, and what a user should know of them."""

from __future__ import annotations

import fcntl
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from schemas.errors import ConfigError
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
    whose: str = "",
) -> tuple[list[OpenSource], PlanStore]:
    """The sources and their plans; the steps of the whole training are known, the plan of its first epoch is there.
    show: on one rank, the progress of what takes time, and the `plan_notes`, through the logger omniloom.train; choose:
    the same sources with some of their rows left out (of 0 tokens); whose: said before all that, where these are not
    the training data. Ranks of a node wait for one another, so that each row is counted once."""
    said, of = progress if show else _silent, f"{whose}: " if whose else ""
    with _one_at_a_time(cache_folder(data)), said(f"{of}counting tokens", None, "rows") as advance:
        sources = open_sources(data, assets, batch.seed, lambda _, count: advance(count))
    if choose is not None:
        sources = choose(sources)
    with said(f"{of}planning", None, "windows") as advance:
        plans = make_plans(sources, data, batch, lambda done, windows: advance(1))
        if batch.max_steps is None:
            plans.total_steps(batch.num_train_epochs)
        plans.steps(0)
    if choose is None:  # else whoever chose knows what is left
        _check_trainable(sources, plans, f"{'train.evaluation' if whose else 'data'}.sources")
    plans.advance = None  # later epochs are planned while others are trained: nobody waits for them
    if show and choose is None:  # notes on rows would count those that were left out
        for note in plan_notes(plans, sources, training=not whose):
            log.info("%s%s", of, note)
        for level, note in reward_notes(sources):
            log.log(level, "%s%s", of, note)
    return sources, plans


def _check_trainable(sources: Sequence[OpenSource], plans: PlanStore, key: str) -> None:
    """ConfigError: there is no row with a label, or none in the first epoch; the loss would be 0 of nothing."""
    if not any(bool(((source.lengths.total > 0) & (source.lengths.labels > 0)).any()) for source in sources):
        raise ConfigError(f"{key}: no row has a token to train on, which those of the assistant are")
    if not plans.steps(0):
        rows = ", ".join(f"{source.rows.name} {len(source.lengths)} rows" for source in sources)
        raise ConfigError(f"{key}: the first epoch has no row ({rows}); raise the weights of the sources")


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


def plan_notes(plans: PlanStore, sources: Sequence[OpenSource], *, training: bool = True) -> list[str]:
    """What a user should know of the plan before it is used: one line each. training: steps have the batch size of the
    configuration, which lanes must divide; an evaluation goes by ranks."""
    planner = plans.planner
    notes = [f"data.{planner.lanes.note}"] if training and planner.lanes.note else []
    first = plans.epoch(0)
    if training and (empty := int((np.diff(first.bounds) == 0).sum())):
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


def reward_notes(sources: Sequence[OpenSource]) -> list[tuple[int, str]]:
    """(level of logging, line): how many rows have responses of equal rewards, which have no advantage; a warning when
    a source has no others. Reads the rewards of all rollouts."""
    notes = []
    for source in sources:
        if source.rollouts is None:
            continue
        equal, rows, name = source.rollouts.equal_rewards(), len(source.rollouts), source.rows.name
        if rows and equal == rows:
            said = (
                f"data source {name}: the responses of each row have equal rewards, so that nothing is learned from it"
            )
            notes.append((logging.WARNING, f"{said}; see the scorer, or sample more responses to a row"))
        elif equal:
            share = f"{equal:,} of {rows:,} rows ({equal / rows:.0%})"
            notes.append((logging.INFO, f"data source {name}: {share} have responses of equal rewards: no advantage"))
    return notes
