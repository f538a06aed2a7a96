"""Rows, shards and sources as the plan counts them: one running number over all sources for each.

Row r of a source is its r-th sample in the order of its index; shard s holds `shard_rows[s]` rows that follow one
another. Sources stand one after the other, so that a plan is arrays of plain row numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from schemas.errors import ConfigError


@dataclass(frozen=True)
class SourceRows:
    """What the plan knows of one source.

    tokens: int32 [rows], length of each row in tokens, 0 for a row that cannot be used; shard_rows: int64 [shards],
    rows per shard (a text file counts blocks of rows as shards); weight: how often a row is used per epoch: 1 = once,
    2 = twice, 0.5 = in every second epoch; fingerprint: changes whenever the rows or their order do.
    """

    name: str
    tokens: np.ndarray
    shard_rows: np.ndarray
    weight: float = 1.0
    fingerprint: str = ""

    def __post_init__(self) -> None:
        if int(self.shard_rows.sum()) != len(self.tokens):
            raise ConfigError(
                f"data source {self.name!r}: lengths of {len(self.tokens)} rows, but its shards hold "
                f"{int(self.shard_rows.sum())}; make the lengths again (omniloom train lengths)"
            )
        if not (np.isfinite(self.weight) and self.weight > 0):
            raise ConfigError(f"data source {self.name!r}: weight {self.weight} must be over 0")


@dataclass(frozen=True)
class RowPlace:
    """Where rows lie, arrays of one length. source, shard: running numbers, shard over all sources; index: in the
    shard."""

    source: np.ndarray
    shard: np.ndarray
    index: np.ndarray


@dataclass(frozen=True)
class RowTable:
    """All sources side by side."""

    sources: tuple[SourceRows, ...]

    def __post_init__(self) -> None:
        names = [source.name for source in self.sources]
        if not names:
            raise ConfigError("data.sources is empty; training needs at least one source")
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ConfigError(f"data.sources: several sources have the name {twice[0]!r}; give each its own")

    @cached_property
    def tokens(self) -> np.ndarray:
        """int32 [rows]."""
        if len(self.sources) == 1:
            return self.sources[0].tokens
        return np.concatenate([source.tokens for source in self.sources])

    @cached_property
    def row_starts(self) -> np.ndarray:
        """int64 [shards + 1], first row of each shard."""
        counts = np.concatenate([source.shard_rows for source in self.sources])
        return np.concatenate([[0], np.cumsum(counts, dtype=np.int64)])

    @cached_property
    def shard_starts(self) -> np.ndarray:
        """int64 [sources + 1], first shard of each source."""
        return np.concatenate([[0], np.cumsum([len(source.shard_rows) for source in self.sources], dtype=np.int64)])

    @property
    def num_rows(self) -> int:
        return int(self.row_starts[-1])

    @property
    def num_shards(self) -> int:
        return int(self.shard_starts[-1])

    def usable(self, rows: np.ndarray | slice, max_seq_len: int) -> np.ndarray:
        """bool: which of these rows fit a sequence and are not empty."""
        tokens = self.tokens[rows]
        return (tokens > 0) & (tokens <= max_seq_len)

    def place(self, rows: np.ndarray | Sequence[int]) -> RowPlace:
        """Where these rows lie. IndexError for a row that does not exist."""
        numbers = np.asarray(rows, np.int64)
        if numbers.size and (numbers.min() < 0 or numbers.max() >= self.num_rows):
            raise IndexError(f"rows {numbers.min()} to {numbers.max()} of {self.num_rows}")
        shard = np.searchsorted(self.row_starts, numbers, side="right") - 1
        source = np.searchsorted(self.shard_starts, shard, side="right") - 1
        return RowPlace(source, shard, numbers - self.row_starts[shard])

    def rows_of_shards(self, shards: np.ndarray) -> np.ndarray:
        """Row numbers of these shards, shard after shard."""
        starts, counts = self.row_starts[shards], self.row_starts[shards + 1] - self.row_starts[shards]
        return ranges(starts, counts)


def ranges(starts: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """int64: starts[0] .. starts[0] + counts[0] - 1, then the same of the next."""
    ends = np.cumsum(counts)
    total = int(ends[-1]) if len(ends) else 0
    return np.arange(total, dtype=np.int64) + np.repeat(starts - (ends - counts), counts)


_ALL_BITS = (1 << 64) - 1


def scramble(numbers: np.ndarray, *seeds: int) -> np.ndarray:
    """uint64: a hash of each number under these seeds (splitmix64). Unlike a generator of numpy it is the same in every
    version and on every machine, and so is an order made by sorting it."""
    state = numbers.astype(np.uint64)
    for seed in (*seeds, 0x5EED):
        state = _mix(state + np.uint64((seed + 1) * 0x9E3779B97F4A7C15 & _ALL_BITS))
    return state


def _mix(state: np.ndarray) -> np.ndarray:
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return state ^ (state >> np.uint64(31))


def shuffled(count: int, *seeds: int) -> np.ndarray:
    """int64 [count]: a permutation that depends on the seeds alone."""
    return np.argsort(scramble(np.arange(count), *seeds), kind="stable")
