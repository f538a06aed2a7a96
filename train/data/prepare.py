"""From a configuration to the plans of its sources, and what a user should know of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from train.config import BatchConfig, DataConfig
from train.data.lanes import PlanBudget
from train.data.plan import Planner
from train.data.plan_store import PlanStore
from train.data.sources import OpenSource, cache_folder, row_table


def make_plans(
    sources: Sequence[OpenSource],
    data: DataConfig,
    batch: BatchConfig,
    advance: Callable[[int, int], None] | None = None,
) -> PlanStore:
    """The plans of these sources; the same on every rank. Says what was left out and whether lanes were lowered."""
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
    for source in sources:
        name = source.rows.name
        if count := planner.too_long[name]:
            notes.append(
                f"data source {name}: {count} of {len(source.lengths)} rows are longer than data.max_seq_len "
                f"{planner.budget.max_seq_len} and are left out"
            )
        if count := planner.empty[name]:
            first = f"; the first: {source.lengths.faults[0][1]}" if source.lengths.faults else ""
            notes.append(f"data source {name}: {count} of {len(source.lengths)} rows cannot be used{first}")
        if count := source.lengths.without_labels:
            notes.append(f"data source {name}: {count} rows have no token to train on")
    return notes
