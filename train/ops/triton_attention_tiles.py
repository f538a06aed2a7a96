"""Tiles of the Triton kernels of attention: sizes for each chip, the parts of a head, and which tiles a batch has.

The row `hopper` holds what was fastest without bulk copies on one H200 at 104 documents of 540 rows, 16 heads of 72,
bfloat16. With them the three kernels took 2.03 ms instead of 2.30 ms, but a training step's order of launches ended in
an illegal instruction, so no row has them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import triton
from torch import Tensor

from train.ops.segments import Segments
from train.ops.triton_tiles import Tile, pick_tile

WIDE_HEAD = 96  # columns of a head above which steps are halved: registers
SMALLEST_PART = 16  # of a matrix product


@dataclass(frozen=True)
class AttentionTile(Tile):
    """m: rows that a program owns; n: rows of a step over the others; k: of a step over their ragged end, 0: as the
    other steps; bulk: Hopper's bulk copies, n at least 32; registers: of a thread at most, None: the compiler's
    choice."""

    bulk: bool = False
    registers: int | None = None


FORWARD = {
    "hopper": AttentionTile(64, 64, 32, 4, 2),
    "default": AttentionTile(64, 64, 32, 4, 2),
    "float32": AttentionTile(32, 32, 32, 4, 1),
    "interpreter": AttentionTile(32, 32, 16, 4, 1),
}
QUERY_GRADIENT = {
    "hopper": AttentionTile(64, 32, 32, 4, 3),
    "default": AttentionTile(64, 32, 32, 4, 2),
    "float32": AttentionTile(32, 32, 32, 4, 1),
    "interpreter": AttentionTile(32, 16, 16, 4, 1),
}
KEY_GRADIENTS = {
    "hopper": AttentionTile(64, 64, 32, 4, 3),
    "default": AttentionTile(64, 32, 32, 4, 2),
    "float32": AttentionTile(32, 32, 32, 4, 1),
    "interpreter": AttentionTile(32, 16, 16, 4, 1),
}


def parts(size: int) -> tuple[int, int]:
    """(first, rest): powers of two from 16 on that hold a head of this size with the fewest columns; rest 0: none."""
    whole = max(triton.next_power_of_2(size), SMALLEST_PART)
    if whole in (size, SMALLEST_PART):
        return whole, 0
    first = whole // 2
    rest = max(triton.next_power_of_2(size - first), SMALLEST_PART)
    return (first, rest) if rest < first else (whole, 0)


def tile_map(segments: Segments, rows: int) -> Tensor:
    """int32 [tiles, 3] on the device, made once per batch: for each tile of so many rows its document's first row and
    length, and its own first row in it; long documents first, so that no multiprocessor gets one last."""
    key = ("attention tiles", rows)
    if key not in segments.cache:
        lengths = torch.tensor(segments.lengths, dtype=torch.int64)
        starts = lengths.cumsum(0) - lengths
        order = lengths.argsort(descending=True, stable=True)
        lengths, starts = lengths[order], starts[order]
        number = (lengths + rows - 1) // rows
        document = torch.repeat_interleave(torch.arange(len(number)), number)
        tile = torch.arange(len(document)) - (number.cumsum(0) - number)[document]
        made = torch.stack([starts[document], lengths[document], tile * rows], 1).to(torch.int32)
        device = segments.cu_seqlens.device
        if device.type == "cuda":
            made = made.pin_memory()  # a copy from pageable memory would wait for the device
        segments.cache[key] = made.to(device, non_blocking=True)
    found: Tensor = segments.cache[key]
    return found


def _bulk_can_copy(x: Tensor) -> bool:
    """Descriptors begin, and rows follow one another, at multiples of 16 bytes; heads do not overlap."""
    return x.data_ptr() % 16 == 0 and x.stride(0) * x.element_size() % 16 == 0 and x.stride(1) >= x.shape[2]


def pick_attention_tile(table: dict[str, AttentionTile], *inputs: Tensor) -> AttentionTile:
    """Of the chip and dtype; smaller steps for wide heads, whose accumulators leave fewer registers."""
    tile = pick_tile(table, inputs[0])
    if sum(parts(inputs[0].shape[2])) > WIDE_HEAD:
        tile = replace(tile, n=max(tile.n // 2, tile.k), registers=None)
    return replace(tile, bulk=tile.bulk and all(_bulk_can_copy(x) for x in inputs))
