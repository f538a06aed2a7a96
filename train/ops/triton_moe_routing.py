"""Which row of the sorted buffers belongs to which token, made on the device and without a host sync.

A slot is one (token, choice) pair, `slot = token * k + j`; rows are the slots sorted by expert, stably, each expert's
first row at a multiple of `align` and the rows between two experts padding. Slots whose expert id lies outside [0, E)
have no row. The row kernels run over a map of tiles that has a static upper bound of entries, each tile within one
expert; how many of them are used stays on the device. So the launch does not depend on the counts, skew costs nothing,
and all of it can be captured in a CUDA graph. It takes 0.06 to 0.07 ms at 65,536 to 262,144 slots on an H200.
"""

# kernels take pointers, which have no type here
# mypy: disallow-untyped-defs=False, check-untyped-defs=False

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

TENSORS = (
    "row_of_slot", "slot_of_row", "starts", "ends", "tile_expert", "tile_row", "tile_count", "expert_order",
)  # fmt: skip  # of a `Routing`


@dataclass(frozen=True, eq=False)
class Routing:
    """row_of_slot int32 [T * k]: -1 where skipped; slot_of_row int32 [rows], only set where a slot has the row;
    starts, ends int32 [E]: first row and row after the last of each expert; tile_expert, tile_row int32 [tiles], -1
    and 0 where unused; tile_count int32 [1]: tiles in use; expert_order int32 [E]: the busiest first; rows: upper bound
    of the rows with padding; k; block: rows of a tile; align.
    """

    row_of_slot: Tensor
    slot_of_row: Tensor
    starts: Tensor
    ends: Tensor
    tile_expert: Tensor
    tile_row: Tensor
    tile_count: Tensor
    expert_order: Tensor
    rows: int
    k: int
    block: int
    align: int

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """Of which, with k, block and align, `of` makes the same routing."""
        return tuple(getattr(self, name) for name in TENSORS)

    @classmethod
    def of(cls, tensors: Sequence[Tensor | None], k: int, block: int, align: int) -> Routing:
        """Of the tensors of another one."""
        made: dict[str, Any] = dict(zip(TENSORS, tensors, strict=True))
        return cls(**made, rows=made["slot_of_row"].numel(), k=k, block=block, align=align)

    @property
    def num_tiles(self) -> int:
        return self.tile_expert.numel()

    @property
    def num_experts(self) -> int:
        return self.expert_order.numel()


@triton.jit(do_not_specialize=["num_tiles"])
def _tiles_kernel(
    edges, starts, ends, tile_expert, tile_row, tile_count, expert_order, num_tiles, num_experts,
    TILE: tl.constexpr, ALIGN: tl.constexpr, E: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """edges int32 [E + 1]: where each expert begins among the sorted slots."""
    expert = tl.arange(0, E)
    inside = expert < num_experts
    edge = tl.load(edges + expert, mask=inside, other=0)
    count = tl.load(edges + expert + 1, mask=inside, other=0) - edge
    padded = (count + ALIGN - 1) // ALIGN * ALIGN
    first = tl.cumsum(padded, 0) - padded
    tiles = (count + TILE - 1) // TILE
    last = tl.cumsum(tiles, 0)
    t = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    passed = (last[None, :] <= t[:, None]) & inside[None, :]
    mine = tl.sum(passed.to(tl.int32), 1)  # experts whose tiles end before t
    here = expert[None, :] == mine[:, None]
    start = tl.sum(tl.where(here, (last - tiles)[None, :], 0), 1)
    row = tl.sum(tl.where(here, first[None, :], 0), 1) + (t - start) * TILE
    used = mine < num_experts
    tl.store(tile_expert + t, tl.where(used, mine, -1), mask=t < num_tiles)
    tl.store(tile_row + t, tl.where(used, row, 0), mask=t < num_tiles)
    if tl.program_id(0) == 0:
        tl.store(tile_count, tl.sum(tiles, 0))
        tl.store(starts + expert, first, mask=inside)
        tl.store(ends + expert, first + count, mask=inside)
        other = tl.load(edges + expert + 1, mask=inside, other=0) - tl.load(edges + expert, mask=inside, other=1)
        earlier = (other[:, None] == count[None, :]) & (expert[:, None] < expert[None, :])
        ahead = (other[:, None] > count[None, :]) | earlier
        rank = tl.sum((ahead & inside[:, None]).to(tl.int32), 0)
        tl.store(expert_order + rank, expert, mask=inside)


@triton.jit(do_not_specialize=["num_slots"])
def _rows_kernel(order, keys, edges, starts, row_of_slot, slot_of_row, num_slots, num_experts, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < num_slots
    slot = tl.load(order + at, mask=inside, other=0).to(tl.int32)
    expert = tl.load(keys + at, mask=inside, other=0).to(tl.int32)
    used = inside & (expert < num_experts)
    row = at - tl.load(edges + expert, mask=used, other=0) + tl.load(starts + expert, mask=used, other=0)
    tl.store(row_of_slot + slot, tl.where(used, row, -1), mask=inside)
    tl.store(slot_of_row + row, slot, mask=used)


def build_routing(expert_ids: Tensor, num_experts: int, block: int, align: int) -> Routing:
    """expert_ids int64 [T, k]; ids outside [0, num_experts) are skipped. align divides block."""
    slots, k = expert_ids.numel(), expert_ids.shape[1]
    busy = min(num_experts, slots)  # at most so many experts have rows, each with one ragged tile and some padding
    rows = max(1, slots + busy * (align - 1))
    tiles = max(1, slots // block + busy)
    flat = expert_ids.reshape(-1)
    skipped = (flat < 0) | (flat >= num_experts)
    narrow = torch.int16 if num_experts < 2**15 - 1 else torch.int32  # fewer bits, fewer passes of the radix sort
    keys, order = torch.sort(flat.masked_fill(skipped, num_experts).to(narrow), stable=True)
    edges = torch.searchsorted(keys, torch.arange(num_experts + 1, device=flat.device, dtype=narrow), out_int32=True)
    sizes = {"starts": num_experts, "ends": num_experts, "tile_expert": tiles, "tile_row": tiles, "tile_count": 1}
    made = {name: flat.new_empty(n, dtype=torch.int32) for name, n in (sizes | {"expert_order": num_experts}).items()}
    e = max(16, triton.next_power_of_2(num_experts))
    span = min(64, max(16, 16384 // e))
    _tiles_kernel[(triton.cdiv(tiles, span),)](
        edges, **made, num_tiles=tiles, num_experts=num_experts, TILE=block, ALIGN=align, E=e, BLOCK=span
    )
    row_of_slot = flat.new_empty(slots, dtype=torch.int32)
    slot_of_row = flat.new_empty(rows, dtype=torch.int32)
    if slots:
        _rows_kernel[(triton.cdiv(slots, 1024),)](
            order, keys, edges, made["starts"], row_of_slot, slot_of_row, slots, num_experts, BLOCK=1024
        )
    return Routing(row_of_slot, slot_of_row, **made, rows=rows, k=k, block=block, align=align)
