"""A tensor written down as boxes of source tensors, and the rearrangements of such tensors.

`Piece` says: this box of a source, its dimensions in this order, stands in that box of the target. Every conversion
here is a set of pieces, so a target can be made alone, row range by row range, from exactly the bytes it needs. Nothing
is read in this module; shapes are checked as the pieces are made.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from convert.tensors import Box, box_shape, full_box


@dataclass(frozen=True)
class Piece:
    """axes: for each dimension of the target the source's dimension that runs along it, None for one of size 1 that the
    source does not have. Source dimensions that no axis names have size 1 in the box."""

    source: str
    box: Box
    axes: tuple[int | None, ...]
    at: Box

    @property
    def numel(self) -> int:
        return math.prod(box_shape(self.box))

    def clipped(self, dim: int, start: int, stop: int) -> Piece | None:
        """The part whose target box lies in [start, stop) of `dim`, in the same coordinates; None when nothing does."""
        first, last = self.at[dim]
        low, high = max(first, start), min(last, stop)
        if low >= high:
            return None
        if (low, high) == (first, last):
            return self
        box, axis = self.box, self.axes[dim]
        if axis is not None:
            begin = box[axis][0] + low - first
            box = _put(box, axis, (begin, begin + high - low))
        return replace(self, box=box, at=_put(self.at, dim, (low, high)))

    def moved(self, dim: int, by: int) -> Piece:
        start, stop = self.at[dim]
        return replace(self, at=_put(self.at, dim, (start + by, stop + by)))


@dataclass(frozen=True)
class Assembly:
    """A tensor that its pieces tile without gap or overlap."""

    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]


def whole(name: str, shape: tuple[int, ...]) -> Assembly:
    """A source tensor as it is."""
    box = full_box(shape)
    return Assembly(shape, (Piece(name, box, tuple(range(len(shape))), box),))


def cut(tensor: Assembly, dim: int, start: int, stop: int) -> Assembly:
    """[start, stop) of one dimension."""
    if not 0 <= start <= stop <= tensor.shape[dim]:
        raise ValueError(f"[{start}, {stop}) lies not within dimension {dim} of {list(tensor.shape)}")
    clipped = (piece.clipped(dim, start, stop) for piece in tensor.pieces)
    pieces = tuple(piece.moved(dim, -start) for piece in clipped if piece is not None)
    return Assembly(_put(tensor.shape, dim, stop - start), pieces)


def join(tensors: Sequence[Assembly], dim: int) -> Assembly:
    """Concatenation along one dimension; ValueError unless the other dimensions agree."""
    first = tensors[0].shape
    pieces: list[Piece] = []
    end = 0
    for tensor in tensors:
        if _put(tensor.shape, dim, 0) != _put(first, dim, 0):
            raise ValueError(f"{list(tensor.shape)} cannot be joined to {list(first)} along dimension {dim}")
        pieces.extend(piece.moved(dim, end) for piece in tensor.pieces)
        end += tensor.shape[dim]
    return Assembly(_put(first, dim, end), tuple(pieces))


def stack(tensors: Sequence[Assembly]) -> Assembly:
    """A new first dimension over tensors of one shape; ValueError when they differ."""
    shape = tensors[0].shape
    pieces: list[Piece] = []
    for i, tensor in enumerate(tensors):
        if tensor.shape != shape:
            raise ValueError(f"{list(tensor.shape)} cannot be stacked on {list(shape)}")
        pieces.extend(replace(p, axes=(None, *p.axes), at=((i, i + 1), *p.at)) for p in tensor.pieces)
    return Assembly((len(tensors), *shape), tuple(pieces))


def unstack(tensor: Assembly) -> list[Assembly]:
    """One tensor per index of the first dimension."""
    rows: list[list[Piece]] = [[] for _ in range(tensor.shape[0])]
    for piece in tensor.pieces:
        for i in range(*piece.at[0]):
            row = piece.clipped(0, i, i + 1)
            if row is not None:
                rows[i].append(replace(row, axes=row.axes[1:], at=row.at[1:]))
    return [Assembly(tensor.shape[1:], tuple(pieces)) for pieces in rows]


def transpose(tensor: Assembly, dim0: int, dim1: int) -> Assembly:
    order = list(range(len(tensor.shape)))
    order[dim0], order[dim1] = order[dim1], order[dim0]
    pieces = tuple(
        replace(p, axes=tuple(p.axes[d] for d in order), at=tuple(p.at[d] for d in order)) for p in tensor.pieces
    )
    return Assembly(tuple(tensor.shape[d] for d in order), pieces)


def split(tensor: Assembly, dim: int, sizes: Sequence[int], groups: int) -> list[Assembly]:
    """One tensor per size; with groups the parts take turns along `dim`, each in `groups` equal pieces."""
    if sum(sizes) != tensor.shape[dim] or any(size % groups for size in sizes):
        turns = f" in {groups} groups" if groups > 1 else ""
        raise ValueError(f"dimension {dim} of {list(tensor.shape)} is not {' + '.join(map(str, sizes))}{turns}")
    parts: list[list[Assembly]] = [[] for _ in sizes]
    start = 0
    for _ in range(groups):
        for part, size in zip(parts, sizes, strict=True):
            part.append(cut(tensor, dim, start, start + size // groups))
            start += size // groups
    return [join(part, dim) for part in parts]


def fuse(parts: Sequence[Assembly], dim: int, sizes: Sequence[int], groups: int) -> Assembly:
    """The inverse of `split`."""
    for part, size in zip(parts, sizes, strict=True):
        if part.shape[dim] != size or size % groups:
            turns = f" in {groups} groups" if groups > 1 else ""
            raise ValueError(f"dimension {dim} of {list(part.shape)} is not {size}{turns}")
    if groups == 1:
        return join(parts, dim)
    steps = [part.shape[dim] // groups for part in parts]
    turns_ = [
        cut(part, dim, g * step, (g + 1) * step) for g in range(groups) for part, step in zip(parts, steps, strict=True)
    ]
    return join(turns_, dim)


def usage(pieces: Iterable[Piece]) -> dict[str, int]:
    """Source name -> elements that the pieces take from it."""
    used: dict[str, int] = {}
    for piece in pieces:
        used[piece.source] = used.get(piece.source, 0) + piece.numel
    return used


def _put(values: tuple, index: int, value: object) -> tuple:
    return (*values[:index], value, *values[index + 1 :])
