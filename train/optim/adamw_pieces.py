"""AdamW's parameters in portions of bounded size: many small ones together, large ones row by row."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from torch import Tensor

from train.optim.muon_plan import PORTION
from train.optim.rounding import Draws, Place
from train.parallel.loading import local_part

ADAMW_PORTION = PORTION // 2  # elements, of two averages
ROWS = 16  # that pieces are a multiple of, so that they start where kernels read many bytes at once


@dataclass(frozen=True, eq=False)
class Piece:
    """Elements start to stop of this rank's part of a parameter: whole rows."""

    parameter: Tensor
    start: int
    stop: int

    @property
    def size(self) -> int:
        return self.stop - self.start

    def of(self, tensor: Tensor) -> Tensor:
        """Its elements of a tensor that is placed as the parameter, flat, sharing its memory."""
        return local_part(tensor).view(-1)[self.start : self.stop]

    def draws(self, of_all: tuple[Draws, Draws] | None) -> tuple[Draws, Draws] | None:
        """Random bits of its elements, of those of the part."""
        if of_all is None or not self.start:
            return of_all
        first, second = (replace(draws, place=draws.place.after(self.start)) for draws in of_all)
        return first, second


def adamw_portions(parameters: Iterable[Tensor], places: Mapping[Tensor, Place], most: int) -> list[list[Piece]]:
    """most: elements of a portion, of which no more than one row is taken where it has more. A parameter's pieces come
    in their order, the first one at 0 even where a rank has no part."""
    portions: list[list[Piece]] = []
    filled = 0
    for piece in (piece for parameter in parameters for piece in _pieces(parameter, places[parameter].inner, most)):
        if not portions or filled + piece.size > most:
            portions.append([])
            filled = 0
        portions[-1].append(piece)
        filled += piece.size
    return portions


def _pieces(parameter: Tensor, row: int, most: int) -> Iterator[Piece]:
    numel = local_part(parameter).numel()
    rows = max(most // row, 1)
    step = (rows // ROWS * ROWS or rows) * row
    for start in range(0, max(numel, 1), step):
        yield Piece(parameter, start, min(start + step, numel))
