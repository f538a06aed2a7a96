from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from schemas.errors import ConfigError
from tests.train.data.plan_cases import mixed_lengths, planner, source
from train.data.lanes import PlanBudget
from train.data.plan import EpochPlan, Planner, rank_lanes, rank_slots
from train.data.rows import RowTable, SourceRows

shard_sizes = st.lists(st.integers(1, 30), min_size=1, max_size=25)


@st.composite
def tables(draw: st.DrawFn) -> RowTable:
    """One to three sources of any shard sizes and lengths (0 = unusable, 1000 and more = too long for every budget)."""
    sources = []
    for name in draw(st.sampled_from(["a", "ab", "abc"])):
        shards = np.array(draw(shard_sizes), np.int64)
        rng = np.random.default_rng(draw(st.integers(0, 2**31)))
        lengths = rng.integers(0, draw(st.sampled_from([40, 300, 1100])), int(shards.sum())).astype(np.int32)
        lengths[0] = 7  # a row that fits
        sources.append(SourceRows(name, lengths, shards, draw(st.sampled_from([1.0, 1.0, 2.0, 0.5, 1.3]))))
    return RowTable(tuple(sources))


@st.composite
def planners(draw: st.DrawFn) -> Planner:
    budget = PlanBudget(
        max_seq_len=draw(st.sampled_from([300, 512, 999])),
        global_batch_size=draw(st.sampled_from([1, 2, 6, 8, 12])),
        lanes=draw(st.sampled_from([1, 2, 4, 64])),
        window_rows=draw(st.sampled_from([1, 16, 64, 1000])),
        seed=draw(st.integers(0, 5)),
    )
    return Planner.make(draw(tables()), budget)


def sequences(plan: EpochPlan) -> list[np.ndarray]:
    return [plan.sequence(step, slot) for step in range(plan.steps) for slot in range(plan.global_batch_size)]


@settings(max_examples=60, deadline=None)
@given(planners(), st.integers(0, 3))
def test_every_row_that_fits_is_used_as_often_as_its_weight_says_and_no_sequence_overflows(
    planner: Planner, epoch: int
) -> None:
    table, limit = planner.table, planner.budget.max_seq_len
    plan = planner.epoch(epoch)
    assert len(plan.bounds) == plan.steps * planner.budget.global_batch_size + 1
    for rows in sequences(plan):
        assert table.tokens[rows].sum() <= limit
    used = np.bincount(plan.rows, minlength=table.num_rows)
    first = 0
    for part in table.sources:
        mine = used[first : first + len(part.tokens)]
        fits = (part.tokens > 0) & (part.tokens <= limit)
        assert not mine[~fits].any()
        if part.weight == int(part.weight):
            assert (mine[fits] == part.weight).all()
        else:
            assert set(mine[fits]) <= {int(part.weight), int(part.weight) + 1}
        assert planner.too_long[part.name] == (part.tokens > limit).sum()
        assert planner.empty[part.name] == (part.tokens == 0).sum()
        first += len(part.tokens)


@settings(max_examples=40, deadline=None)
@given(planners())
def test_lanes_own_disjoint_shards_and_steps_take_the_same_number_of_sequences_from_each(planner: Planner) -> None:
    owned = np.concatenate(planner.lanes.shards)
    assert len(owned) == len(set(owned.tolist()))
    plan = planner.epoch(1)
    per_lane = plan.global_batch_size // plan.lanes
    assert per_lane * plan.lanes == plan.global_batch_size
    for step in range(plan.steps):
        for slot in range(plan.global_batch_size):
            shards = planner.table.place(plan.sequence(step, slot)).shard
            assert np.isin(shards, planner.lanes.shards[slot // per_lane]).all()


@settings(max_examples=40, deadline=None)
@given(planners(), st.integers(0, 2))
def test_another_world_size_only_changes_who_serves_what(planner: Planner, epoch: int) -> None:
    plan = planner.epoch(epoch)
    batch = plan.global_batch_size
    for dp_size in (n for n in range(1, batch + 1) if batch % n == 0):
        slots = [rank_slots(plan.lanes, batch, rank, dp_size) for rank in range(dp_size)]
        assert {len(mine) for mine in slots} == {batch // dp_size}  # as many micro-steps on every rank
        assert sorted(np.concatenate(slots)) == list(range(batch))
        for rank, mine in enumerate(slots):
            assert set(mine // (batch // plan.lanes)) == set(rank_lanes(plan.lanes, batch, rank, dp_size))
        if plan.lanes % dp_size == 0:
            lanes = [set(rank_lanes(plan.lanes, batch, rank, dp_size)) for rank in range(dp_size)]
            assert sum(map(len, lanes)) == plan.lanes == len(set.union(*lanes))
    assert Counter(plan.rows.tolist()) == Counter(
        row for step in range(plan.steps) for row in plan.step_rows(step).tolist()
    )


@settings(max_examples=30, deadline=None)
@given(planners())
def test_a_plan_depends_on_its_inputs_alone(planner: Planner) -> None:
    again = Planner.make(RowTable(tuple(planner.table.sources)), planner.budget)
    assert again.digest() == planner.digest()
    for epoch in (0, 2):
        one, two = planner.epoch(epoch), again.epoch(epoch)
        assert np.array_equal(one.rows, two.rows)
        assert np.array_equal(one.bounds, two.bounds)
        assert np.array_equal(one.cost, two.cost)


def test_a_frozen_plan_stays_what_it_was() -> None:
    """Resuming after an update of this package or of numpy needs the same plan: raise PLAN_VERSION when this fails."""
    lengths = np.arange(700) * 7919 % 1500 + 10
    plan = planner(source("a", lengths[:600], 20), source("b", lengths[600:], 7, 1.5)).epoch(1)
    weighed = (plan.rows.astype(np.int64) * np.arange(1, len(plan.rows) + 1)).sum()
    assert (plan.steps, len(plan.rows), int(weighed), int(plan.bounds.sum())) == FROZEN


FROZEN = (18, 749, 104863841, 53918)  # steps, rows, sum of row times place, sum of bounds


def test_epochs_and_seeds_differ() -> None:
    rows = source("a", mixed_lengths(600), 20)
    plans = [planner(rows, seed=seed).epoch(epoch) for seed, epoch in ((0, 0), (0, 1), (1, 0))]
    starts = [tuple(plan.rows[:50]) for plan in plans]
    assert len(set(starts)) == 3
    assert all(sorted(plan.rows) == sorted(plans[0].rows) for plan in plans)


@pytest.mark.parametrize(
    "change",
    [
        {"max_seq_len": 4000},
        {"global_batch_size": 16},
        {"lanes": 2},
        {"window_rows": 65},
        {"seed": 1},
        {"attention_len": 9},
    ],
)
def test_the_digest_changes_with_the_budget(change: dict[str, int]) -> None:
    rows = source("a", mixed_lengths(100), 10)
    assert planner(rows).digest() != planner(rows, **change).digest()


def test_the_digest_changes_with_rows_weights_and_fingerprints() -> None:
    lengths = mixed_lengths(100)
    other = lengths.copy()
    other[3] += 1
    first = source("a", lengths, 10)
    variants = [
        first,
        source("a", lengths, 20),
        source("a", other, 10),
        source("a", lengths, 10, 2.0),
        source("b", lengths, 10),
        SourceRows("a", lengths, first.shard_rows, 1.0, "a@2"),
    ]
    assert len({planner(rows).digest() for rows in variants}) == len(variants)


def test_three_rows_train_on_one_lane_or_many_ranks() -> None:
    made = planner(source("a", [100, 200, 5000, 300], 4), global_batch_size=64, lanes=64)
    assert made.lanes.count == 1
    assert made.lanes.note == "lanes lowered from 64 to 1: the data have 1 shard with rows"
    plan = made.epoch(0)
    assert plan.steps == 1
    assert sorted(plan.rows) == [0, 1, 3]
    per_rank = [sum(len(plan.sequence(0, slot)) for slot in rank_slots(1, 64, rank, 4)) for rank in range(4)]
    assert sum(per_rank) == 3


def test_lanes_are_lowered_when_shards_are_uneven() -> None:
    made = planner(source("a", [1000] * 900, 100), global_batch_size=8, lanes=8)  # 9 shards in 8 lanes: one has two
    assert made.lanes.count < 8
    assert made.epoch(0).steps <= 30  # 900 rows, 4 a sequence, 8 sequences a step: 28.1


def test_no_row_that_fits_is_an_error() -> None:
    with pytest.raises(ConfigError, match="no row of a fits max_seq_len 4096: 2 rows, the shortest has 5000 tokens"):
        planner(source("a", [5000, 6000], 1))


def test_a_fractional_weight_reaches_every_row_in_turn_and_few_shards_at_a_time() -> None:
    made = planner(source("a", mixed_lengths(1000), 10, 0.25), max_seq_len=10_000)
    used = []
    for epoch in range(4):
        rows = made.epoch(epoch).rows
        assert 240 <= len(rows) <= 260
        assert len(set(made.table.place(rows).shard.tolist())) <= 25 + 2 * made.lanes.count
        used.append(rows)
    assert np.array_equal(np.sort(np.concatenate(used)), np.arange(1000))


def test_packing_and_balance_at_a_size_that_matters() -> None:
    rows = source("a", mixed_lengths(40_000), 20)
    made = planner(rows, global_batch_size=16, lanes=16, window_rows=1024, attention_len=4096)
    plan = made.epoch(0)
    fits = rows.tokens[rows.tokens <= 4096]
    assert fits.sum() / (plan.steps * 16 * 4096) > 0.98
    costs = plan.step_costs().astype(float)
    assert costs.max(1).sum() / costs.mean(1).sum() < 1.03
    tokens = rows.tokens.astype(np.int64)
    for step, slot in ((0, 0), (5, 3), (plan.steps - 1, 15)):
        mine = tokens[plan.sequence(step, slot)]
        assert plan.step_costs()[step, slot] == sum(n + n * n // 4096 for n in mine.tolist())


def test_ranks_must_divide_the_batch() -> None:
    with pytest.raises(ConfigError, match="global_batch_size 8 cannot be divided among 3"):
        rank_slots(4, 8, 0, 3)


def test_sources_need_names_of_their_own_and_lengths_that_fit_their_shards() -> None:
    rows = source("a", [10, 20], 1)
    with pytest.raises(ConfigError, match="several sources have the name 'a'"):
        planner(rows, rows)
    with pytest.raises(ConfigError, match="lengths of 3 rows, but its shards hold 2"):
        SourceRows("a", np.array([1, 2, 3], np.int32), np.array([2]))
    with pytest.raises(ConfigError, match="weight 0 must be over 0"):
        SourceRows("a", np.array([1], np.int32), np.array([1]), 0)
