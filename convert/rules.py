"""The vocabulary of conversions: small frozen rules over name patterns, without code.

A pattern is a tensor name with placeholders. `{layer}`, `{expert}`, `{block}` and any other name match a decimal index;
`{name}` matches the rest of a name, dots included, and `{leaf}` one part of it (`weight`, `bias`). Sizes are names of
`convert.geometry.Geometry` ("hidden", "gate_up"), so one table serves every size of a model.

A rule takes its source tensors through `steps`, each a rearrangement of the *group* of tensors at hand: the sources (or
targets) of the rule are its parts, and `Stack("expert")` gathers the tensors of all experts. Steps only move elements,
so no value changes, and a rule inverts when every step does.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

Size = str | int


class NotInvertibleError(ValueError):
    """The rule throws something away, so nothing can bring it back."""


@dataclass(frozen=True)
class Fuse:
    """All parts -> one, joined along `dim`; sizes: what each part measures there. With groups (a size), every part
    is cut into that many equal pieces first and the pieces take turns: q0 k0 v0 q1 k1 v1."""

    dim: int
    sizes: tuple[Size, ...]
    groups: Size = 1

    def inverse(self) -> Split:
        return Split(self.dim, self.sizes, self.groups)


@dataclass(frozen=True)
class Split:
    """One part -> as many as there are sizes, cut along `dim`; sizes and groups as in `Fuse`."""

    dim: int
    sizes: tuple[Size, ...]
    groups: Size = 1

    def inverse(self) -> Fuse:
        return Fuse(self.dim, self.sizes, self.groups)


@dataclass(frozen=True)
class Stack:
    """The tensors of every `{index}` -> one with a new first dimension; all indices of the geometry must be there."""

    index: str

    def inverse(self) -> Unstack:
        return Unstack(self.index)


@dataclass(frozen=True)
class Unstack:
    """One tensor -> one per `{index}`, the first dimension gone; it must be as long as the geometry has indices."""

    index: str

    def inverse(self) -> Stack:
        return Stack(self.index)


@dataclass(frozen=True)
class Transpose:
    """Swaps two dimensions of every tensor at hand."""

    dim0: int = 0
    dim1: int = 1

    def inverse(self) -> Transpose:
        return self


@dataclass(frozen=True)
class Slice:
    """Keeps [0, stop) of `dim` and drops the rest for the reason given; shorter than stop is an error."""

    dim: int
    stop: Size
    reason: str

    def inverse(self) -> Any:
        raise NotInvertibleError(f"what a slice drops ({self.reason}) cannot be brought back")


Step = Fuse | Split | Stack | Unstack | Transpose | Slice


@dataclass(frozen=True)
class Map:
    """Source patterns -> target patterns through steps; without steps it only renames."""

    sources: tuple[str, ...]
    targets: tuple[str, ...]
    steps: tuple[Step, ...] = ()

    def inverse(self) -> Map:
        """The rule that brings the targets back; NotInvertibleError when a step drops something."""
        return Map(self.targets, self.sources, tuple(step.inverse() for step in reversed(self.steps)))


def rename(source: str, target: str) -> Map:
    """The map of one tensor to another name, otherwise unchanged."""
    return Map((source,), (target,))


@dataclass(frozen=True)
class Drop:
    """Source tensors that are left out, and why."""

    source: str
    reason: str

    def inverse(self) -> Any:
        raise NotInvertibleError(f"{self.source} was dropped: {self.reason}")


@dataclass(frozen=True)
class Copy:
    """Target tensors that come from the base, byte for byte, and why no source makes them."""

    target: str
    reason: str

    def inverse(self) -> Any:
        raise NotInvertibleError(f"{self.target} came from the base")


Rule = Map | Drop | Copy


def inverse(rules: tuple[Rule, ...]) -> tuple[Map, ...]:
    """The maps of a table, each inverted; drops and copies have no inverse and are left out."""
    return tuple(rule.inverse() for rule in rules if isinstance(rule, Map))


def prefixed(rules: tuple[Rule, ...], source: str = "", target: str = "") -> tuple[Rule, ...]:
    """The same rules with a prefix before every source and every target pattern."""

    def one(rule: Rule) -> Rule:
        if isinstance(rule, Drop):
            return replace(rule, source=source + rule.source)
        if isinstance(rule, Copy):
            return replace(rule, target=target + rule.target)
        return Map(
            tuple(source + pattern for pattern in rule.sources),
            tuple(target + pattern for pattern in rule.targets),
            rule.steps,
        )

    return tuple(one(rule) for rule in rules)
