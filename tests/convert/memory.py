"""Tensors in memory as a source, to test rules without files."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import torch

from convert.engine import resolve
from convert.fill import SLAB, slabs
from convert.geometry import Geometry
from convert.ledger import check_ledger, recipes
from convert.rules import Rule
from convert.tensors import Box, TensorInfo, check_box, full_box


class MemoryReader:
    def __init__(self, values: Mapping[str, torch.Tensor]) -> None:
        self.values = dict(values)
        self.tensors = {name: TensorInfo(tuple(value.shape), value.dtype) for name, value in values.items()}
        self.skipped: dict[str, str] = {}
        self.fingerprint = "memory"
        self.bytes_read = 0

    def read(self, name: str, box: Box | None = None) -> torch.Tensor:
        value = self.values[name]
        box = full_box(tuple(value.shape)) if box is None else box
        check_box(name, box, tuple(value.shape))
        part = value[tuple(slice(start, stop) for start, stop in box)].clone()
        self.bytes_read += part.nbytes
        return part

    def changed(self) -> Iterable[Path]:
        return ()

    def location(self, name: str) -> tuple[str, int]:
        return name, 0


def apply(
    rules: Sequence[Rule], values: Mapping[str, torch.Tensor], geometry: Geometry, limit: int = SLAB
) -> dict[str, torch.Tensor]:
    """The targets of some rules, in slabs of `limit` bytes, with the ledger's account of what was used."""
    reader = MemoryReader(values)
    resolution = resolve(rules, reader.tensors, geometry)
    check_ledger(resolution, reader.tensors, {name: made.shape for name, made in resolution.made.items()})
    made = {recipe.target: recipe for recipe in recipes(resolution, reader.tensors, {}, whole_numbers=resolution.made)}
    return {name: _joined(list(slabs(recipe, reader, limit))) for name, recipe in made.items()}


def _joined(parts: list[torch.Tensor]) -> torch.Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)
