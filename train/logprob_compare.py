"""Two dumps of log-probabilities, token by token: how far apart they are, by modality and by what samples have."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from schemas.errors import SchemaError, VerificationError
from train.logprob_features import FeatureRow
from train.logprob_read import TokenTable

ALL = "all"
UNKNOWN = "unknown"  # kind of a token where neither dump tells


@dataclass(frozen=True)
class Place:
    """A token. first, second: its log-probability in each dump."""

    id: str
    index: int
    token: int | None
    first: float
    second: float


@dataclass(frozen=True)
class GroupRow:
    """Tokens of one kind; d = first - second. by: all, modality (of the token) or media (of its sample); count: tokens;
    worst_sample: with the greatest mean |d|; largest: the token with the greatest |d|."""

    by: str
    name: str
    count: int
    mean_abs: float
    max_abs: float
    mean: float
    worst_sample: str
    worst_sample_mean_abs: float
    largest: Place


@dataclass(frozen=True)
class LogprobAgreement:
    """Of two dumps. groups: all tokens first; only_first, only_second: (tokens, samples) that one dump alone has;
    untold: common tokens whose id one of them does not tell; differences: float32 [common], d; kinds: modality of each;
    features: of the towers, where both dumps have them."""

    first: str
    second: str
    groups: tuple[GroupRow, ...]
    only_first: tuple[int, int]
    only_second: tuple[int, int]
    untold: int
    differences: np.ndarray
    kinds: tuple[list[str], np.ndarray]
    features: tuple[FeatureRow, ...] = ()

    def as_json(self) -> dict[str, Any]:
        """Without the single differences."""
        names = ("tokens", "samples")
        return {
            "first": self.first,
            "second": self.second,
            "groups": [asdict(group) for group in self.groups],
            "only_first": dict(zip(names, self.only_first, strict=True)),
            "only_second": dict(zip(names, self.only_second, strict=True)),
            "tokens_without_id": self.untold,
            "features": [asdict(row) for row in self.features],
        }

    def check(
        self,
        mean_tolerance: float | None = None,
        max_tolerance: float | None = None,
        feature_tolerance: float | None = None,
    ) -> None:
        """VerificationError: every group whose mean or greatest |d| is over what is allowed, and media whose features
        are further apart, relative to their greatest value."""
        faults = []
        for group in self.groups:
            for name, value, limit in (
                ("mean |d|", group.mean_abs, mean_tolerance),
                ("max |d|", group.max_abs, max_tolerance),
            ):
                if limit is not None and not value <= limit:
                    where = group.worst_sample if name.startswith("mean") else _told(group.largest)
                    faults.append(f"{group.by} {group.name}: {name} {value:.3g} is over {limit:.3g}, most in {where}")
        for row in self.features:
            if feature_tolerance is not None and not row.relative <= feature_tolerance:
                faults.append(
                    f"features of {row.kind} {row.part}: {row.relative:.3g} of the greatest value is over "
                    f"{feature_tolerance:.3g}, most in {row.worst}"
                )
        if faults:
            raise VerificationError("the dumps do not agree\n" + "\n".join(faults))


def _told(place: Place) -> str:
    return f"{place.id} at {place.index} ({place.first:.5g} and {place.second:.5g})"


def compare_tables(first: TokenTable, second: TokenTable, features: Sequence[FeatureRow] = ()) -> LogprobAgreement:
    """Matched by id and index; by source, too, where ids of two sources are the same and both dumps tell the source.

    VerificationError: other token ids at the same place, or no token in common. SchemaError: a place twice in a dump.
    """
    keys, others, samples = _keys(first, second)
    _, ours, theirs = np.intersect1d(keys, others, assume_unique=True, return_indices=True)
    if not len(ours):
        raise VerificationError(
            f"{first.path} and {second.path} have no token in common; ids are such as {first.ids[0]!r} and "
            f"{second.ids[0]!r}"
            if first.ids and second.ids
            else f"{first.path} or {second.path} is empty"
        )
    untold = _check_tokens(first, second, ours, theirs)
    d = first.logprob[ours].astype(np.float64) - second.logprob[theirs]
    modality, media = (_labels(first, second, ours, theirs, name) for name in ("modality", "media"))
    rows = _Rows(first, second, ours, theirs, samples[ours], d)
    groups = [rows.group(ALL, ALL, np.ones(len(d), bool))]
    for by, (names, codes) in (("modality", modality), ("media", media)):
        groups += [rows.group(by, name, codes == code) for code, name in enumerate(names) if (codes == code).any()]
    return LogprobAgreement(
        first=str(first.path),
        second=str(second.path),
        groups=tuple(groups),
        only_first=_alone(keys, ours),
        only_second=_alone(others, theirs),
        untold=untold,
        differences=d.astype(np.float32),
        kinds=modality,
        features=tuple(features),
    )


def _keys(first: TokenTable, second: TokenTable) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(int64 [n] of each dump, equal where sample and index are; number of each line's sample in the first)."""
    by_source = first.source is not None and second.source is not None
    if not (by_source and (_has_twice(first) or _has_twice(second))):
        by_source = False
    numbers: dict[tuple[str, ...], int] = {}
    found = []
    for table in (first, second):
        mine = np.array([numbers.setdefault(name, len(numbers)) for name in _names(table, by_source)], np.int64)
        found.append(mine[_codes(table, by_source)])
    keys = [number << 32 | table.index for number, table in zip(found, (first, second), strict=True)]
    for key, table in zip(keys, (first, second), strict=True):
        if (line := _twice(key)) is not None:
            raise SchemaError(
                f"{table.path}: {table.place(line)} stands there twice; ids must be of one sample each, or both dumps "
                "need a column source that tells them apart"
            )
    return keys[0], keys[1], found[0]


def _codes(table: TokenTable, by_source: bool) -> np.ndarray:
    """int64 [n]: place of each line in `_names`."""
    if not by_source or table.source is None:
        return table.sample.astype(np.int64)
    return table.sample.astype(np.int64) * len(table.source[0]) + table.source[1]


def _names(table: TokenTable, by_source: bool) -> list[tuple[str, ...]]:
    if not by_source or table.source is None:
        return [(name,) for name in table.ids]
    return [(name, source) for name in table.ids for source in table.source[0]]


def _has_twice(table: TokenTable) -> bool:
    return _twice(table.sample.astype(np.int64) << 32 | table.index) is not None


def _twice(keys: np.ndarray) -> int | None:
    """A line whose key another line before it has."""
    order = np.argsort(keys, kind="stable")
    same = np.flatnonzero(np.diff(keys[order]) == 0)
    return int(order[same[0] + 1]) if len(same) else None


def _alone(keys: np.ndarray, common: np.ndarray) -> tuple[int, int]:
    """(tokens, samples) of a dump without a partner. A sample counts when none of its tokens has one."""
    left = np.ones(len(keys), bool)
    left[common] = False
    samples = np.setdiff1d(keys[left] >> 32, keys[common] >> 32)
    return int(left.sum()), len(samples)


def _check_tokens(first: TokenTable, second: TokenTable, ours: np.ndarray, theirs: np.ndarray) -> int:
    """How many tokens cannot be checked."""
    one, other = first.token[ours], second.token[theirs]
    told = (one >= 0) & (other >= 0)
    wrong = np.flatnonzero(told & (one != other))
    if len(wrong):
        at = wrong[0]
        raise VerificationError(
            f"{first.place(ours[at])}: token {one[at]} in {first.path}, {other[at]} in {second.path}; {len(wrong)} of "
            f"{len(one)} common tokens differ, so both did not see the same text: check processor, chat template and "
            "the places that media take"
        )
    return int((~told).sum())


def _labels(
    first: TokenTable, second: TokenTable, ours: np.ndarray, theirs: np.ndarray, name: str
) -> tuple[list[str], np.ndarray]:
    """(names, place of each common token's), from the first dump that tells."""
    for table, lines in ((first, ours), (second, theirs)):
        if (column := getattr(table, name)) is not None:
            return column[0], column[1][lines]
    return [UNKNOWN], np.zeros(len(ours), np.int32)


@dataclass(frozen=True)
class _Rows:
    """The common tokens. samples: number of each one's sample; d: float64, first - second."""

    first: TokenTable
    second: TokenTable
    ours: np.ndarray
    theirs: np.ndarray
    samples: np.ndarray
    d: np.ndarray

    def group(self, by: str, name: str, chosen: np.ndarray) -> GroupRow:
        here = np.flatnonzero(chosen)
        size = np.abs(self.d[here])
        _, owner = np.unique(self.samples[here], return_inverse=True)
        means = np.bincount(owner, size) / np.bincount(owner)
        worst = here[np.flatnonzero(owner == int(means.argmax()))[0]]
        return GroupRow(
            by=by,
            name=name,
            count=len(here),
            mean_abs=float(size.mean()),
            max_abs=float(size.max()),
            mean=float(self.d[here].mean()),
            worst_sample=self.first.ids[self.first.sample[self.ours[worst]]],
            worst_sample_mean_abs=float(means.max()),
            largest=self._place(int(here[size.argmax()])),
        )

    def _place(self, number: int) -> Place:
        line, other = self.ours[number], self.theirs[number]
        token = max(int(self.first.token[line]), int(self.second.token[other]))
        return Place(
            id=self.first.ids[self.first.sample[line]],
            index=int(self.first.index[line]),
            token=None if token < 0 else token,
            first=float(self.first.logprob[line]),
            second=float(self.second.logprob[other]),
        )
