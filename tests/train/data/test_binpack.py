from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from train.data.binpack import item_costs, match_costs, pack, spread

lengths_lists = st.lists(st.integers(1, 100), min_size=0, max_size=80)


def best_fit_decreasing(lengths: list[int], capacity: int) -> list[int]:
    """Room left in each bin, by the plain definition: longest first, each into the fullest bin that it fits."""
    rooms: list[int] = []
    for length in sorted(lengths, reverse=True):
        fitting = [room for room in rooms if room >= length]
        if fitting:
            rooms[rooms.index(min(fitting))] -= length
        else:
            rooms.append(capacity - length)
    return sorted(rooms)


@given(lengths_lists)
def test_pack_is_best_fit_decreasing(values: list[int]) -> None:
    lengths = np.array(values, np.int32)
    bins = pack(lengths, 100, 50)
    assert sorted(100 - bins.tokens) == best_fit_decreasing(values, 100)
    for number in range(bins.count):
        inside = lengths[bins.bin_of == number].tolist()
        assert sum(inside) == bins.tokens[number] <= 100
        assert bins.cost[number] == sum(n + n * n // 50 for n in inside)


@given(lengths_lists, st.integers(0, 10))
def test_spread_makes_exactly_so_many_bins_that_none_overflows(values: list[int], more: int) -> None:
    lengths = np.array(values, np.int32)
    count = pack(lengths, 100, 50).count + more
    bins = spread(lengths, 100, 50, count)
    assert bins.count == count
    assert (bins.tokens <= 100).all()
    assert np.array_equal(bins.tokens, np.bincount(bins.bin_of, lengths, count))


def test_spread_evens_the_costs() -> None:
    lengths = np.array([40] * 6 + [10] * 12, np.int32)
    assert pack(lengths, 100, 1000).tokens.tolist() == [100, 100, 100, 60]
    assert sorted(spread(lengths, 100, 1000, 6).tokens.tolist()) == [60] * 6


def test_costs_of_long_rows_do_not_overflow() -> None:
    assert item_costs(np.array([2_000_000], np.int32), 10_000).tolist() == [2_000_000 + 4 * 10**12 // 10_000]


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 4).flatmap(
        lambda lanes: st.lists(st.lists(st.integers(0, 20_000), min_size=3, max_size=6), min_size=lanes, max_size=lanes)
    ),
    st.integers(0, 3),
    st.booleans(),
)
def test_matched_columns_are_the_nearest_to_the_common_costs(costs: list[list[int]], count: int, hurry: bool) -> None:
    arrays = [np.array(lane, np.int64) for lane in costs]
    urgent = [(lane % 3 == 0) & hurry for lane in arrays]
    chosen = match_costs(arrays, urgent, count)
    assert chosen.shape == (len(costs), count)
    ranks = [[np.sort(lane)[(2 * i + 1) * len(lane) // (2 * count)] for i in range(count)] for lane in arrays]
    targets = np.array(ranks, np.int64).reshape(len(costs), count).sum(0) // len(costs)
    for lane, picked in zip(arrays, chosen, strict=True):
        assert len(set(picked.tolist())) == count
        mine = lane[picked]
        assert (np.diff(mine) >= 0).all()
        cheapest = min(_price(subset, targets, hurry) for subset in combinations(sorted(lane.tolist()), count))
        assert _price(mine.tolist(), targets, hurry) == cheapest


def _price(values: Sequence[int], targets: np.ndarray, hurry: bool) -> int:
    """What a choice costs; multiples of 3 are urgent."""
    price = sum((value - target) ** 2 for value, target in zip(values, targets.tolist(), strict=True))
    return price - sum((value >> 6) ** 2 for value in values if hurry and value % 3 == 0)


def test_urgent_bins_are_taken_where_costs_do_not_suffer() -> None:
    costs = [np.full(10, 6400), np.array([6400] * 5 + [6390] * 3 + [1000] * 2)]
    urgent = [np.arange(10) % 2 == 1, np.array([False] * 5 + [True] * 5)]
    first, second = match_costs(costs, urgent, 5)
    assert sorted(first) == [1, 3, 5, 7, 9]
    assert {5, 6, 7} < set(second) and not {8, 9} & set(second)


def test_many_spare_bins_are_thinned_evenly() -> None:
    costs = [np.arange(1000), np.arange(0, 1000, 100)]
    chosen = match_costs(costs, [np.zeros(len(cost), bool) for cost in costs], 10)
    assert np.array_equal(costs[1][chosen[1]], costs[1])
    assert np.abs(costs[0][chosen[0]] - costs[1]).max() < 120
