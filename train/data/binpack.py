"""Bin packing of lengths into sequences, and choosing bins of equal cost from several lanes. Integers only, so that
every machine finds the same answer."""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass
from heapq import heapify, heapreplace

import numpy as np

_BIN_BITS = 32
_MAX_SPARE = 64  # bins per lane that the choice may leave over
_URGENT_BITS = 6
_NEVER = np.iinfo(np.int64).max // 4


@dataclass(frozen=True)
class Bins:
    """Items in bins. bin_of: int64 [items]; tokens, cost: int64 [bins]."""

    bin_of: np.ndarray
    tokens: np.ndarray
    cost: np.ndarray

    @property
    def count(self) -> int:
        return len(self.tokens)


def item_costs(lengths: np.ndarray, attention_len: int) -> np.ndarray:
    """int64: cost of each item in tokens; an item of `attention_len` costs twice its tokens."""
    exact = lengths.astype(np.int64)
    return exact + exact * exact // attention_len


def best_fit(lengths: np.ndarray, capacity: int) -> tuple[np.ndarray, int]:
    """(bin of each item int64, number of bins): longest first, each into the fullest bin that it fits.

    All lengths are in 1..capacity. 0.8 us per item.
    """
    order = np.argsort(-lengths.astype(np.int64), kind="stable")
    smallest = int(lengths.min()) if len(lengths) else 0
    low_bits = (1 << _BIN_BITS) - 1
    open_bins: list[int] = []  # room << 32 | bin, ascending
    assigned: list[int] = []
    count = 0
    for length in lengths[order].tolist():
        place = bisect_left(open_bins, length << _BIN_BITS)
        if place == len(open_bins):
            room = (capacity << _BIN_BITS) | count
            count += 1
        else:
            room = open_bins.pop(place)
        assigned.append(room & low_bits)
        room -= length << _BIN_BITS
        if room >> _BIN_BITS >= smallest:
            insort(open_bins, room)
    bin_of = np.empty(len(lengths), np.int64)
    bin_of[order] = assigned
    return bin_of, count


def pack(lengths: np.ndarray, capacity: int, attention_len: int) -> Bins:
    """`best_fit` with what each bin holds."""
    bin_of, count = best_fit(lengths, capacity)
    return _bins(bin_of, count, lengths, attention_len)


def spread(lengths: np.ndarray, capacity: int, attention_len: int, count: int) -> Bins:
    """Exactly `count` bins of as equal a cost as can be; `count` is at least what `pack` needs. Where equal costs would
    overfill a bin, the bins of `pack` and empty ones."""
    costs = item_costs(lengths, attention_len)
    order = np.argsort(-costs, kind="stable")
    heap = [(0, number, 0) for number in range(count)]  # cost, bin, tokens
    heapify(heap)
    bin_of = np.empty(len(lengths), np.int64)
    for item, length, cost in zip(order.tolist(), lengths[order].tolist(), costs[order].tolist(), strict=True):
        spent, number, filled = heap[0]
        if filled + length > capacity:
            packed = pack(lengths, capacity, attention_len)
            return _bins(packed.bin_of, count, lengths, attention_len)
        heapreplace(heap, (spent + cost, number, filled + length))
        bin_of[item] = number
    return _bins(bin_of, count, lengths, attention_len)


def _bins(bin_of: np.ndarray, count: int, lengths: np.ndarray, attention_len: int) -> Bins:
    # float sums of integers below 2**53 are exact
    tokens = np.bincount(bin_of, lengths, count).astype(np.int64)
    return Bins(bin_of, tokens, np.bincount(bin_of, item_costs(lengths, attention_len), count).astype(np.int64))


def match_costs(costs: list[np.ndarray], urgent: list[np.ndarray], count: int) -> np.ndarray:
    """int64 [lanes, count]: which bins of each lane to take, so that column i costs about the same in every lane.

    costs: int64 [bins] per lane, each with at least `count` bins; urgent: bool [bins], bins that should not be left
    out. Lanes take their bins in the order of cost; which ones they leave out is found by dynamic programming over the
    squared distance from the lanes' common cost, where taking an urgent bin makes up for 1/64 of its cost.
    """
    lanes = len(costs)
    if count == 0:
        return np.zeros((lanes, 0), np.int64)
    orders = [_thinned(np.argsort(cost, kind="stable"), count + _MAX_SPARE) for cost in costs]
    spare = np.array([len(order) - count for order in orders])
    width = int(spare.max()) + 1
    values = np.zeros((lanes, count + width - 1), np.int64)
    wanted = np.zeros(values.shape, bool)
    for lane, (cost, flags, order) in enumerate(zip(costs, urgent, orders, strict=True)):
        values[lane, : len(order)] = cost[order]
        wanted[lane, : len(order)] = flags[order]
    shift = max(0, int(values.max()).bit_length() - 20)  # squares summed over `count` columns stay far below 2**63
    values >>= shift
    gains = np.where(wanted, (values >> _URGENT_BITS) ** 2, 0)
    targets = _common_costs(values, spare + count, count)
    chosen = _cheapest_paths(values, gains, targets, spare)
    return np.stack([order[places] for order, places in zip(orders, chosen, strict=True)])


def _thinned(order: np.ndarray, most: int) -> np.ndarray:
    """Evenly spaced ones of `order`, at most `most`."""
    if len(order) <= most:
        return order
    return order[np.arange(most) * len(order) // most]


def _common_costs(values: np.ndarray, sizes: np.ndarray, count: int) -> np.ndarray:
    """int64 [count]: mean over the lanes of their costs at equal ranks."""
    places = (2 * np.arange(count)[None, :] + 1) * sizes[:, None] // (2 * count)
    return np.take_along_axis(values, places, 1).sum(0) // len(values)


def _cheapest_paths(values: np.ndarray, gains: np.ndarray, targets: np.ndarray, spare: np.ndarray) -> np.ndarray:
    """int64 [lanes, columns]: rising places in `values`, place i for column i + (number left out before it)."""
    lanes, columns, width = len(values), len(targets), values.shape[1] - len(targets) + 1
    skipped = np.arange(width)
    impossible = skipped[None, :] > spare[:, None]
    best = np.where(impossible, _NEVER, 0)
    came_from = np.empty((columns, lanes, width), np.int16)
    for column in range(columns):
        lowest = np.minimum.accumulate(best, 1)
        came_from[column] = np.maximum.accumulate(np.where(best == lowest, skipped, 0), 1)
        distance = values[:, column : column + width] - targets[column]
        best = np.where(impossible, _NEVER, lowest + distance * distance - gains[:, column : column + width])
    chosen = np.empty((lanes, columns), np.int64)
    place = best.argmin(1)
    lane = np.arange(lanes)
    for column in range(columns - 1, -1, -1):
        chosen[:, column] = column + place
        place = came_from[column, lane, place]
    return chosen
