"""Tensor names with placeholders: `layers.{layer}.mlp.experts.{expert}.up_proj.weight`; see `convert.rules`."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from convert.geometry import Geometry
from convert.printing import printable

SHOWN = 8  # names in a message
PLACEHOLDER = re.compile(r"\{(\w+)\}")


@dataclass(frozen=True)
class Pattern:
    """A compiled name pattern."""

    text: str
    regex: re.Pattern[str]
    names: tuple[str, ...]

    @classmethod
    def of(cls, text: str) -> Pattern:
        kinds = {"name": "(.+)", "leaf": r"([^.]+)"}
        parts = PLACEHOLDER.split(text)
        regex = "".join(kinds.get(p, r"(0|[1-9]\d*)") if i % 2 else re.escape(p) for i, p in enumerate(parts))
        return cls(text, re.compile(regex), tuple(parts[1::2]))

    def match(self, name: str) -> dict[str, str] | None:
        found = self.regex.fullmatch(name)
        return dict(zip(self.names, found.groups(), strict=True)) if found else None


def fill_in(pattern: str, values: Mapping[str, str]) -> str:
    """The name that a pattern means under these values."""
    return PLACEHOLDER.sub(lambda found: values[found[1]], pattern)


def placeholders(pattern: str) -> tuple[str, ...]:
    """The names in braces, each once."""
    return tuple(dict.fromkeys(PLACEHOLDER.findall(pattern)))


def expand(pattern: str, geometry: Geometry) -> Iterator[str]:
    """Every name that a pattern of index placeholders stands for, in order."""
    names = placeholders(pattern)
    for values in itertools.product(*(geometry.indices(name) for name in names)):
        yield fill_in(pattern, {name: str(value) for name, value in zip(names, values, strict=True)})


def some(names: Iterable[str]) -> str:
    """`a, b, c and 12 more`."""
    listed = sorted(names)
    more = f" and {len(listed) - SHOWN} more" if len(listed) > SHOWN else ""
    return ", ".join(map(printable, listed[:SHOWN])) + more
