"""The experts' grouped matrix products: picks tiles, makes descriptors, launches `triton_moe_kernels`.

Shapes: M rows in expert order, H hidden size, I width of an expert, E experts, R LoRA rank (a power of two >= 16).
Factors of a first dimension of 1 are shared by all experts.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from train.ops.triton_moe_kernels import down_backward_kernel, gate_up_kernel, rows_kernel, weight_gradient_kernel
from train.ops.triton_moe_routing import Routing
from train.ops.triton_tiles import Tile, num_sms, pick_tile

# The edge m is one for all row kernels: they share the map of tiles.
GATE_UP = {  # n columns of the gate and as many of up
    "hopper": Tile(128, 128, 64, 8, 4),
    "default": Tile(128, 64, 32, 8, 3),
    "float32": Tile(128, 64, 32, 8, 2),
    "interpreter": Tile(16, 16, 32, 4, 1),
}
ROWS = {
    "hopper": Tile(128, 256, 64, 8, 3, persistent=1),
    "default": Tile(128, 128, 32, 8, 3),
    "float32": Tile(128, 128, 32, 8, 2),
    "interpreter": Tile(16, 32, 32, 4, 1, persistent=2),
}
DOWN_BACKWARD = {
    "hopper": Tile(128, 256, 64, 8, 3, persistent=1),
    "default": Tile(128, 128, 32, 8, 3),
    "float32": Tile(128, 64, 32, 8, 2),
    "interpreter": Tile(16, 32, 32, 4, 1, persistent=1),
}
WEIGHT_GRADIENT = {  # m, n: edges of the gradient's tile; k: rows of a step
    "hopper": Tile(128, 256, 64, 8, 3),
    "default": Tile(128, 128, 32, 8, 3),
    "float32": Tile(128, 64, 32, 8, 2),
    "interpreter": Tile(32, 32, 16, 4, 1),
}
FEW_ROWS = 1536  # mean rows of an expert below which two smaller programs share a multiprocessor and hide their ends
WEIGHT_GRADIENT_OF_FEW = WEIGHT_GRADIENT | {"hopper": Tile(128, 128, 64, 4, 3)}


def alignment(x: Tensor) -> tuple[int, int]:
    """(rows of a tile, multiple at which experts begin) for x's chip and dtype, for `build_routing`."""
    return pick_tile(GATE_UP, x).m, pick_tile(WEIGHT_GRADIENT, x).k


def gate_up_products(
    x: Tensor, gate_up: Tensor, routing: Routing, gather: bool, z_rows: int, low: Tensor | None = None,
    gate_b: Tensor | None = None, up_b: Tensor | None = None,
) -> tuple[Tensor | None, Tensor]:  # fmt: skip
    """(the first z_rows of z [M, 2I] if any, h [M, I]): z = [gate | up] + low @ [gate_b | up_b], h = silu(gate) * up.

    x: tokens [T, H] when gather, which the kernel does, else rows [M, H]; gate_up: [E, 2I, H]; low: [M, 2R];
    gate_b, up_b: [E or 1, I, R].
    """
    z = x.new_empty(z_rows, gate_up.shape[1]) if z_rows else None
    h = x.new_empty(routing.rows, gate_up.shape[1] // 2)
    _gate_up(z, h, x, gate_up, routing, gather, low, gate_b, up_b)
    return z, h


def rest_of_gate_up(
    z: Tensor, first: int, x: Tensor, gate_up: Tensor, routing: Routing, low: Tensor | None = None,
    gate_b: Tensor | None = None, up_b: Tensor | None = None,
) -> None:  # fmt: skip
    """Stores z [M, 2I] of tokens x [T, H] from row `first` on; see `gate_up_products`."""
    _gate_up(z, None, x, gate_up, routing, True, low, gate_b, up_b, first)


def _gate_up(
    z: Tensor | None, h: Tensor | None, x: Tensor, gate_up: Tensor, routing: Routing, gather: bool,
    low: Tensor | None, gate_b: Tensor | None, up_b: Tensor | None, first: int = 0,
) -> None:  # fmt: skip
    """h: None = rows of z from `first` on are all that is wanted."""
    experts, double, hidden = gate_up.shape
    width = double // 2
    tile = pick_tile(GATE_UP, x)
    weights = TensorDescriptor(gate_up, [2 * experts, width, hidden], [width * hidden, hidden, 1], [2, tile.n, tile.k])
    gate_up_kernel[_programs(routing.num_tiles * triton.cdiv(width, tile.n), tile, x)](
        x if gather else _rows_of(x, tile.m, tile.k), weights, low, gate_b, up_b, z, h,
        routing.slot_of_row, routing.ends, routing.tile_expert, routing.tile_row, routing.tile_count,
        first, 0 if z is None else len(z), K_CHOICES=routing.k, H=hidden, I=width, GATHER=gather,
        RANK=0 if gate_b is None else gate_b.shape[2], SHARED=gate_b is not None and gate_b.shape[0] == 1,
        STORE_Z=z is not None, REST=h is None, BM=tile.m, BN=tile.n, BK=tile.k,
        ALIGN=routing.align, FLATTEN=tile.persistent > 0, num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip


def row_products(
    a: Tensor, b: Tensor, routing: Routing, transposed: bool, low: Tensor | None = None, low_b: Tensor | None = None
) -> Tensor:
    """[M, N] = a [M, K] @ b[e] [K, N], or @ b[e].T of [N, K] when transposed; plus low [M, R] @ low_b[e], alike."""
    tile = pick_tile(ROWS, a)
    inner = a.shape[1]
    n = b.shape[1] if transposed else b.shape[2]
    edge = min(tile.n, max(16, triton.next_power_of_2(n)))
    c = a.new_empty(routing.rows, n)
    block = [1, edge, tile.k] if transposed else [1, tile.k, edge]
    rows_kernel[_programs(routing.num_tiles * triton.cdiv(n, edge), tile, a)](
        _rows_of(a, tile.m, tile.k), TensorDescriptor.from_tensor(b, block), low, low_b, c,
        routing.ends, routing.tile_expert, routing.tile_row, routing.tile_count,
        N=n, K=inner, RANK=0 if low is None else low.shape[1], TRANSPOSED=transposed, SHARED=b.shape[0] == 1,
        SHARED_LOW=low_b is not None and low_b.shape[0] == 1, BM=tile.m, BN=edge, BK=tile.k,
        ALIGN=routing.align, FLATTEN=tile.persistent > 0, num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return c


def down_backward(
    dy: Tensor, down: Tensor, z: Tensor, weights: Tensor, routing: Routing, low: Tensor | None = None,
    down_a: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(scaled [M, I] = weight * h, partial float32 [parts, M]: sums to the routing weights' gradient).

    dy: rows [M, H]; down: [E, H, I]; z: [M, 2I] is overwritten by its gradient; weights: float32 [T, k]; low: [M, R],
    down_a: [E or 1, R, I].
    """
    _, hidden, width = down.shape
    tile = pick_tile(DOWN_BACKWARD, dy)
    blocks = triton.cdiv(width, tile.n)
    scaled = dy.new_empty(routing.rows, width)
    partial = torch.empty(blocks, routing.rows, dtype=torch.float32, device=dy.device)
    down_backward_kernel[_programs(routing.num_tiles * blocks, tile, dy)](
        _rows_of(dy, tile.m, tile.k), TensorDescriptor.from_tensor(down, [1, tile.k, tile.n]), low, down_a, z, scaled,
        weights, partial, routing.slot_of_row, routing.ends, routing.tile_expert, routing.tile_row, routing.tile_count,
        routing.rows, H=hidden, I=width, RANK=0 if low is None else low.shape[1],
        SHARED=down_a is not None and down_a.shape[0] == 1, BM=tile.m, BN=tile.n, BK=tile.k, ALIGN=routing.align,
        FLATTEN=tile.persistent > 0, num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return scaled, partial


def weight_gradient(a: Tensor, b: Tensor, routing: Routing, shared: bool = False) -> Tensor:
    """[E, P, Q] = sum over each expert's rows of a [M, P] outer b [M, Q]; [1, P, Q], over all experts, when shared."""
    shape = (routing.num_experts, a.shape[1], b.shape[1])
    gradient = a.new_empty(shape, dtype=torch.float32 if shared else a.dtype)
    _weight_gradient(gradient, a, b, routing, add=False)
    return gradient.sum(0, keepdim=True).to(a.dtype) if shared else gradient


def add_weight_gradient(so_far: Tensor | None, a: Tensor, b: Tensor, routing: Routing) -> Tensor | None:
    """Adds `weight_gradient` to so_far [E, P, Q], each sum rounded once; without so_far it is returned."""
    if so_far is None:
        return weight_gradient(a, b, routing)
    expected = (routing.num_experts, a.shape[1], b.shape[1])
    assert so_far.shape == expected and so_far.dtype == a.dtype and so_far.is_contiguous(), "the gradient so far"
    _weight_gradient(so_far, a, b, routing, add=True)
    return None


def _weight_gradient(gradient: Tensor, a: Tensor, b: Tensor, routing: Routing, *, add: bool) -> None:
    few = routing.row_of_slot.numel() < FEW_ROWS * routing.num_experts
    tile = pick_tile(WEIGHT_GRADIENT_OF_FEW if few else WEIGHT_GRADIENT, a)
    p, q = a.shape[1], b.shape[1]
    edge_p, edge_q = (min(edge, max(16, triton.next_power_of_2(size))) for edge, size in ((tile.m, p), (tile.n, q)))
    weight_gradient_kernel[(routing.num_experts * triton.cdiv(p, edge_p) * triton.cdiv(q, edge_q),)](
        _rows_of(a, tile.k, edge_p), _rows_of(b, tile.k, edge_q), gradient, routing.starts, routing.ends,
        routing.expert_order, P=p, Q=q, BP=edge_p, BQ=edge_q, BK=tile.k, ADD=add, num_warps=tile.warps,
        num_stages=tile.stages,
    )  # fmt: skip


def _programs(tiles: int, tile: Tile, tensor: Tensor) -> tuple[int]:
    return (min(tiles, num_sms(tensor.device) * tile.persistent) if tile.persistent else tiles,)


def _rows_of(rows: Tensor, block: int, step: int) -> TensorDescriptor:
    return TensorDescriptor.from_tensor(rows, [block, step])
