"""Target tensors made from their recipes, a slab of rows at a time, so that no tensor is ever in memory whole."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterator

import torch

from convert.ledger import Recipe
from convert.pieces import Piece
from convert.tensors import TensorInfo, TensorReader

# bytes of a target at once; about three times that is in use while a piece is rearranged. Larger ones are slower: the
# allocator gives them back to the system every time, and every page has to be made anew
SLAB = 1 << 20


def slabs(recipe: Recipe, reader: TensorReader, limit: int = SLAB) -> Iterator[torch.Tensor]:
    """The target as consecutive contiguous ranges of its first dimension, each of about `limit` bytes at most
    (one row at least), in the target's dtype."""
    info = recipe.info
    if not info.shape:
        yield _filled(recipe.pieces, reader, info, ())
        return
    rows = Rows(recipe)
    step = max(1, limit // max(1, row_bytes(info)))
    for start in range(0, info.shape[0], step):
        yield rows.read(reader, start, min(info.shape[0], start + step))


def row_bytes(info: TensorInfo) -> int:
    """Bytes of one index of the first dimension: the least that is made at once."""
    return info.nbytes // max(1, info.shape[0]) if info.shape else info.nbytes


class Rows:
    """Ranges of a target's first dimension; finds their pieces without looking at all of them."""

    def __init__(self, recipe: Recipe) -> None:
        self.recipe = recipe
        self._starts = [piece.at[0][0] for piece in recipe.pieces]
        self._furthest = list(itertools.accumulate((piece.at[0][1] for piece in recipe.pieces), max))

    def read(self, reader: TensorReader, start: int, stop: int) -> torch.Tensor:
        """Rows [start, stop) in the target's dtype."""
        first, last = bisect.bisect_right(self._furthest, start), bisect.bisect_left(self._starts, stop)
        near = (piece.clipped(0, start, stop) for piece in self.recipe.pieces[first:last])
        pieces = [piece.moved(0, -start) for piece in near if piece is not None]
        info = self.recipe.info
        return _filled(pieces, reader, info, (stop - start, *info.shape[1:]))


def _filled(
    pieces: tuple[Piece, ...] | list[Piece], reader: TensorReader, info: TensorInfo, shape: tuple[int, ...]
) -> torch.Tensor:
    """A tensor of this shape from the pieces that tile it."""
    if len(pieces) == 1:
        tensor = _read(pieces[0], reader)
        return tensor.to(info.dtype).contiguous()
    target = torch.empty(shape, dtype=info.dtype)
    for piece in pieces:
        target[tuple(slice(start, stop) for start, stop in piece.at)].copy_(_read(piece, reader))
    return target


def _read(piece: Piece, reader: TensorReader) -> torch.Tensor:
    """The piece's elements with the target's dimensions; a view with swapped strides where they are transposed."""
    tensor = reader.read(piece.source, piece.box)
    used = [axis for axis in piece.axes if axis is not None]
    unused = [axis for axis in range(tensor.dim()) if axis not in used]
    return tensor.permute(*used, *unused).reshape([stop - start for start, stop in piece.at])
