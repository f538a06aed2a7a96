"""Rules over the tensors of a source -> what every target tensor is assembled from.

The engine knows no names and the tables hold no code: rules are matched against the source's names, sizes come from the
geometry. What does not fit is named by its keys; that nothing is left over is for `convert.ledger` to say.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from convert.geometry import Geometry
from convert.patterns import Pattern, fill_in, some
from convert.pieces import Assembly, cut, fuse, split, stack, transpose, unstack, usage, whole
from convert.rules import Copy, Drop, Fuse, Map, Rule, Slice, Split, Stack, Step, Transpose, Unstack
from convert.tensors import TensorInfo
from schemas.errors import IncompleteSourceError, UnsupportedError


@dataclass
class Resolution:
    """made: target name -> its assembly; dropped: source name -> reason; sliced: source name -> (elements, reason).
    repeated: targets that are another target once more, so that their sources are used twice."""

    made: dict[str, Assembly] = field(default_factory=dict)
    dropped: dict[str, str] = field(default_factory=dict)
    sliced: dict[str, tuple[int, str]] = field(default_factory=dict)
    repeated: set[str] = field(default_factory=set)


def check_names(rules: Sequence[Rule], names: Iterable[str]) -> None:
    """UnsupportedError when some names of a source are known to no rule; shapes are not looked at."""
    matchers = [_Matcher.of(i, rule) for i, rule in enumerate(rules) if not isinstance(rule, Copy)]
    names = list(names)
    unknown = [name for name in names if all(matcher.find(name) is None for matcher in matchers)]
    if unknown:
        raise UnsupportedError(
            f"{len(unknown)} of {len(names)} source tensors are known to no rule of this conversion: {some(unknown)}"
        )


def resolve(rules: Sequence[Rule], tensors: Mapping[str, TensorInfo], geometry: Geometry) -> Resolution:
    """Applies every rule to the names it matches; the first rule that matches a name has it.

    UnsupportedError: names without a rule, shapes that the geometry contradicts, a target that is made twice.
    IncompleteSourceError: a stack or fuse that lacks a tensor.
    """
    result = Resolution()
    groups: dict[int, dict[tuple[str, ...], dict[tuple[int, tuple[str, ...]], str]]] = {}
    matchers = [_Matcher.of(i, rule) for i, rule in enumerate(rules) if not isinstance(rule, Copy)]
    for name in tensors:
        for matcher in matchers:
            found = matcher.find(name)
            if found is None:
                continue
            rule = rules[matcher.rule]
            if isinstance(rule, Drop):
                result.dropped[name] = rule.reason
            else:
                outer, part = found
                groups.setdefault(matcher.rule, {}).setdefault(outer, {})[part] = name
            break
        else:
            check_names(rules, tensors)
    for matcher in matchers:
        for outer, members in groups.get(matcher.rule, {}).items():
            _apply(matcher, dict(zip(matcher.outer, outer, strict=True)), members, tensors, geometry, result)
    return result


@dataclass(frozen=True)
class _Matcher:
    """The source side of one rule. stacked: the placeholders that its steps gather; outer: all others."""

    rule: int
    steps: tuple[Step, ...]
    targets: tuple[str, ...]
    patterns: tuple[Pattern, ...]
    stacked: tuple[str, ...]
    outer: tuple[str, ...]

    @classmethod
    def of(cls, number: int, rule: Map | Drop) -> _Matcher:
        if isinstance(rule, Drop):
            pattern = Pattern.of(rule.source)
            return cls(number, (), (), (pattern,), (), pattern.names)
        patterns = tuple(Pattern.of(source) for source in rule.sources)
        stacked = tuple(step.index for step in rule.steps if isinstance(step, Stack))
        outer = tuple(name for name in dict.fromkeys(patterns[0].names) if name not in stacked)
        return cls(number, rule.steps, rule.targets, patterns, stacked, outer)

    def find(self, name: str) -> tuple[tuple[str, ...], tuple[int, tuple[str, ...]]] | None:
        """(values of the outer placeholders, (part, values of the stacked ones))."""
        for part, pattern in enumerate(self.patterns):
            values = pattern.match(name)
            if values is not None:
                return tuple(values[n] for n in self.outer), (part, tuple(values[n] for n in self.stacked))
        return None


# a group of tensors on its way through the steps: (part, values of the indices at hand) -> tensor
_Group = dict[tuple[int, tuple[tuple[str, str], ...]], Assembly]


def _apply(
    matcher: _Matcher,
    outer: dict[str, str],
    members: dict[tuple[int, tuple[str, ...]], str],
    tensors: Mapping[str, TensorInfo],
    geometry: Geometry,
    result: Resolution,
) -> None:
    """Takes one group of sources through the steps of its rule."""
    here = some(members.values())
    try:
        group = _gather(matcher, outer, members, tensors, geometry)
        group = _taken(group, matcher, here, geometry, result)
    except KeyError as error:  # a size that this model does not have
        raise UnsupportedError(
            f"{here}: config.json describes a model that has no such tensors (no {error})"
        ) from error
    for (part, indices), assembly in group.items():
        target = fill_in(matcher.targets[part], outer | dict(indices))
        if target in result.made:
            raise UnsupportedError(
                f"{target} is made twice: by {here} and by {some(usage(result.made[target].pieces))}"
            )
        result.made[target] = assembly


def _taken(group: _Group, matcher: _Matcher, here: str, geometry: Geometry, result: Resolution) -> _Group:
    """The group behind all steps of its rule."""
    for step in matcher.steps:
        try:
            group = _step(step, group, geometry, result)
        except ValueError as error:
            raise UnsupportedError(f"{here}: {error}; the shape does not fit config.json") from error
    return group


def _gather(
    matcher: _Matcher,
    outer: dict[str, str],
    members: dict[tuple[int, tuple[str, ...]], str],
    tensors: Mapping[str, TensorInfo],
    geometry: Geometry,
) -> _Group:
    """The whole sources of a group; all parts and all stacked indices of the geometry must be there, and no others."""
    wanted = [
        (part, tuple(map(str, values)))
        for part in range(len(matcher.patterns))
        for values in itertools.product(*(geometry.indices(name) for name in matcher.stacked))
    ]
    missing = [key for key in wanted if key not in members]
    if missing:
        names = (
            fill_in(matcher.patterns[part].text, outer | dict(zip(matcher.stacked, values, strict=True)))
            for part, values in missing
        )
        raise IncompleteSourceError(f"{len(missing)} source tensors are missing: {some(names)}")
    surplus = [members[key] for key in members.keys() - set(wanted)]
    if surplus:
        counts = ", ".join(f"{len(geometry.indices(n))} of {{{n}}}" for n in matcher.stacked)
        raise UnsupportedError(f"the source has more than config.json says ({counts}): {some(surplus)}")
    return {
        (part, tuple(zip(matcher.stacked, values, strict=True))): whole(
            members[part, values], tensors[members[part, values]].shape
        )
        for part, values in wanted
    }


def _step(step: Step, group: _Group, geometry: Geometry, result: Resolution) -> _Group:
    """One step over the group. ValueError for a shape that does not fit."""
    match step:
        case Transpose(dim0, dim1):
            return {key: transpose(tensor, dim0, dim1) for key, tensor in group.items()}
        case Slice(dim, stop, reason):
            return {key: _sliced(tensor, dim, geometry.size(stop), reason, result) for key, tensor in group.items()}
        case Split(dim, sizes, groups):
            measures, turns = [geometry.size(s) for s in sizes], geometry.size(groups)
            return {
                (part, indices): piece
                for (_, indices), tensor in group.items()
                for part, piece in enumerate(split(tensor, dim, measures, turns))
            }
        case Fuse(dim, sizes, groups):
            measures, turns = [geometry.size(s) for s in sizes], geometry.size(groups)
            fused: _Group = {}
            for indices in dict.fromkeys(indices for _, indices in group):
                parts = [group[part, indices] for part in range(len(sizes))]
                fused[0, indices] = fuse(parts, dim, measures, turns)
            return fused
        case Stack(index):
            rows: dict[tuple[int, tuple[tuple[str, str], ...]], dict[str, Assembly]] = {}
            for (part, indices), tensor in group.items():
                rest = tuple(pair for pair in indices if pair[0] != index)
                rows.setdefault((part, rest), {})[dict(indices)[index]] = tensor
            order = [str(i) for i in geometry.indices(index)]
            return {key: stack([row[i] for i in order]) for key, row in rows.items()}
        case Unstack(index):
            order = [str(i) for i in geometry.indices(index)]
            unstacked: _Group = {}
            for (part, indices), tensor in group.items():
                if tensor.shape[0] != len(order):
                    raise ValueError(f"{list(tensor.shape)} does not hold one row for each {index} ({len(order)})")
                for i, row in zip(order, unstack(tensor), strict=True):
                    unstacked[part, (*indices, (index, i))] = row
            return unstacked


def _sliced(tensor: Assembly, dim: int, stop: int, reason: str, result: Resolution) -> Assembly:
    """The tensor without what lies behind `stop`; what was cut off is noted for the ledger."""
    if tensor.shape[dim] < stop:
        raise ValueError(f"dimension {dim} of {list(tensor.shape)} is shorter than {stop}")
    kept = cut(tensor, dim, 0, stop)
    before, after = usage(tensor.pieces), usage(kept.pieces)
    for source, elements in before.items():
        lost = elements - after.get(source, 0)
        if lost:
            earlier = result.sliced.get(source, (0, ""))[0]
            result.sliced[source] = (earlier + lost, reason)
    return kept
