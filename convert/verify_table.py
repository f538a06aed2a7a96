"""A verification as a table: one line per kind of tensor, the worst of its layers and experts."""

from __future__ import annotations

import re
from collections.abc import Sequence

from rich.table import Table

from convert.compare import Comparison

_INDEX = re.compile(r"(?<=\.)\d+(?=\.)")


def kind_of(name: str) -> str:
    """The name with `*` for every index: one kind has one shape."""
    return _INDEX.sub("*", name)


def table(tensors: Sequence[Comparison]) -> Table:
    """Columns: kind, how many, dtype, shape; against a base also how many are unchanged, the lowest cosine and where it
    is, the lowest cosine of a head group, the largest difference."""
    compared = any(tensor.cosine is not None for tensor in tensors)
    result = Table(box=None, pad_edge=False)
    result.add_column("tensor", overflow="fold")
    for column in ("count", "dtype", "shape"):
        result.add_column(column, justify="right")
    for column in ("unchanged", "lowest cosine", "per head", "largest difference") if compared else ():
        result.add_column(column, justify="right")
    kinds: dict[tuple[str, str, tuple[int, ...]], list[Comparison]] = {}
    for tensor in tensors:
        key = (kind_of(tensor.name), str(tensor.info.dtype)[6:], tensor.info.shape)
        kinds.setdefault(key, []).append(tensor)
    for (kind, dtype, shape), members in kinds.items():
        cells = [kind, str(len(members)), dtype, "x".join(map(str, shape)) or "scalar"]
        result.add_row(*cells, *(_against_base(members) if compared else ()))
    return result


def _against_base(members: Sequence[Comparison]) -> tuple[str, ...]:
    there = [tensor for tensor in members if tensor.cosine is not None]
    if not there:
        return "", "", "", ""
    worst = min(there, key=lambda tensor: tensor.cosine or 0.0)
    at = ".".join(_INDEX.findall(worst.name))
    heads = min((value for tensor in there for value in tensor.groups), default=None)
    return (
        f"{sum(bool(tensor.unchanged) for tensor in there)}",
        f"{worst.cosine:.6f}" + (f" at {at}" if at and not worst.unchanged else ""),
        "" if heads is None else f"{heads:.6f}",
        f"{max(tensor.max_difference or 0.0 for tensor in there):.3g}",
    )
