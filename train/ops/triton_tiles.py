"""What the Triton kernels share: tile sizes for each chip, and a matrix product that is right under the interpreter.

Nothing is tuned at run time. The tables hold what was fastest on the chip for the shapes of Qwen3-Omni-30B-A3B; other
chips take the row `default`. Under Triton's interpreter (`TRITON_INTERPRET=1`, tensors on the CPU) tiles are tiny, so
that small test shapes have several tiles and ragged ones.
"""

# kernels take pointers, which have no type here
# mypy: disallow-untyped-defs=False, check-untyped-defs=False

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TypeVar

import torch
import triton
import triton.language as tl
from torch import Tensor

INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))


@dataclass(frozen=True)
class Tile:
    """m, n, k: edges of the output tile and step of the inner dimension; warps and pipeline stages of a program;
    persistent: programs for each multiprocessor that take tile after tile, or 0: a program for each tile.
    """

    m: int
    n: int
    k: int
    warps: int
    stages: int
    persistent: int = 0


AnyTile = TypeVar("AnyTile", bound=Tile)


@triton.jit
def dot(a, b, acc):
    """acc + a @ b in float32. The interpreter multiplies the raw bits of bfloat16, so operands are widened there."""
    if INTERPRETED:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), acc)
    else:
        return tl.dot(a, b, acc, input_precision="ieee")


@lru_cache
def chip(device: torch.device) -> str:
    """`interpreter`, `hopper` (H100 and H200), or `default`."""
    if INTERPRETED.value:
        return "interpreter"
    return "hopper" if torch.cuda.get_device_capability(device)[0] == 9 else "default"


@lru_cache
def num_sms(device: torch.device) -> int:
    """Multiprocessors of the device; 2 under the interpreter."""
    return 2 if INTERPRETED.value else torch.cuda.get_device_properties(device).multi_processor_count


def as_rows(x: Tensor) -> Tensor:
    """[N, C] of x [..., C]; x itself where it is that, for a view would be a node of autograd."""
    return x if x.dim() == 2 else x.reshape(-1, x.shape[-1])


def pick_tile(table: dict[str, AnyTile], tensor: Tensor) -> AnyTile:
    """The row of the table for the tensor's chip; `float32` for tensors of that type, which take twice the room."""
    name = chip(tensor.device)
    if name != "interpreter" and tensor.dtype == torch.float32:
        name = "float32"
    return table[name]
