"""Attention without a causal mask on packed, short documents, as in the vision and sound towers; the backend `triton`.

torch's flash attention pads a head of 72 to 96 and takes the documents' ragged ends in whole blocks. These kernels cut
the head in two parts and the ends in small steps, see `triton_attention_kernels`. Which tiles there are is worked out
on the host, once per batch, long documents first.

Shapes: T rows, H heads (queries and keys alike), D head size of all three, up to 128. Only the last dimension has to
be dense; gradients and results are contiguous. lse: float32 [H, T], the logarithm (base e) of the sums of exp(scores).
"""

from __future__ import annotations

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from schemas.errors import UnsupportedError
from train.ops.attention import check_rows, check_window, without
from train.ops.attention_varlen import torch_varlen
from train.ops.recorded import AttentionOperators, recorded_attention
from train.ops.segments import Segments
from train.ops.triton_attention_gradients import key_gradients_kernel, query_gradient_kernel
from train.ops.triton_attention_kernels import LOG2E, forward_kernel
from train.ops.triton_attention_tiles import (
    FORWARD,
    KEY_GRADIENTS,
    QUERY_GRADIENT,
    AttentionTile,
    parts,
    pick_attention_tile,
    tile_map,
)

WIDEST_HEAD = 128
FARTHEST_ROWS = 2**22  # elements between two rows; offsets within a tile have 32 bits


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    segments: Segments,
    *,
    causal: bool,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
) -> Tensor:
    """[T, Hq, Dv]. What these kernels do not do, a causal mask above all, `torch_varlen` does."""
    if softcap is not None:
        raise without("triton", "softcap of attention scores", "flex_attention or flash_attention_*")
    check_rows(q, k, v, segments)
    check_window(window, causal)
    if causal or not fits(q, k, v, scale):
        return torch_varlen(q, k, v, segments, causal=causal, scale=scale, window=window)
    return full_attention(q, k, v, segments, scale)


def fits(q: Tensor, k: Tensor, v: Tensor, scale: float | None = None) -> bool:
    """Whether `full_attention` takes them: heads of one number and size, a positive scale."""
    return q.shape == k.shape == v.shape and q.shape[2] <= WIDEST_HEAD and (scale is None or scale > 0)


def full_attention(q: Tensor, k: Tensor, v: Tensor, segments: Segments, scale: float | None = None) -> Tensor:
    """[T, H, D] of q, k, v [T, H, D]: every row attends to all rows of its document. UnsupportedError for others."""
    check_rows(q, k, v, segments)
    if not fits(q, k, v, scale):
        shapes = ", ".join(str(tuple(x.shape)) for x in (q, k, v))
        raise UnsupportedError(
            f"attention with q, k, v of {shapes} and scale {scale}: the Triton kernels take heads of one number and "
            f"size up to {WIDEST_HEAD} and a positive scale; torch_varlen and flex_attention take others"
        )
    return recorded_attention(operators(segments, scale), q, k, v)


def operators(segments: Segments, scale: float | None) -> AttentionOperators:
    """`forward` and `backward`, so that blocks that are computed again can keep the results."""

    def run(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return forward(q, k, v, segments, scale)

    def gradients(
        dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        return backward(dout, q, k, v, out, lse, segments, scale)

    return AttentionOperators(run, gradients)


def forward(
    q: Tensor, k: Tensor, v: Tensor, segments: Segments, scale: float | None = None, tile: AttentionTile | None = None
) -> tuple[Tensor, Tensor]:
    """(out [T, H, D], lse [H, T]). tile: in place of the table's, for tuning."""
    q, k, v = (_dense(x) for x in (q, k, v))
    total, heads, size = q.shape
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    lse = torch.empty(heads, total, dtype=torch.float32, device=q.device)
    scale = size**-0.5 if scale is None else scale
    tile = pick_attention_tile(FORWARD, q, k, v) if tile is None else tile
    first, rest = parts(size)
    tiles = tile_map(segments, tile.m)
    if total:
        forward_kernel[(tiles.shape[0] * heads,)](
            q, k, v, *boxes(k, tile), *boxes(v, tile), out, lse, tiles, scale * LOG2E.value, total, q.stride(0),
            k.stride(0), v.stride(0), HEADS=heads, SIZE=size, HEAD_Q=q.stride(1), HEAD_K=k.stride(1),
            HEAD_V=v.stride(1), FIRST=first, REST=rest, M=tile.m, N=tile.n, END=tile.k, STAGES=tile.stages,
            num_warps=tile.warps, maxnreg=tile.registers,
        )  # fmt: skip
    return out, lse


def backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, segments: Segments,
    scale: float | None = None, tiles: tuple[AttentionTile, AttentionTile] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """(dq, dk, dv), each [T, H, D]; out and lse as `forward` gives them. tiles: of the queries' and of the keys'
    gradients, in place of the tables', for tuning."""
    q, k, v, dout = (_dense(x) for x in (q, k, v, dout))
    out = out.contiguous()
    scale = q.shape[2] ** -0.5 if scale is None else scale
    dq, dk, dv = (torch.empty(q.shape, dtype=q.dtype, device=q.device) for _ in range(3))
    if tiles is None:
        tiles = pick_attention_tile(QUERY_GRADIENT, q, k, v), pick_attention_tile(KEY_GRADIENTS, q, k, v, dout)
    stats = query_gradient(dout, q, k, v, out, lse, dq, segments, scale, tiles[0])
    key_gradients(dout, q, k, v, stats, dk, dv, segments, scale, tiles[1])
    return dq, dk, dv


def query_gradient(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, dq: Tensor, segments: Segments,
    scale: float, tile: AttentionTile,
) -> Tensor:  # fmt: skip
    """Writes dq; float32 [2, H, T] for `key_gradients`: lse in base 2, and delta = sum(dout * out) over D."""
    total, heads, size = q.shape
    stats = torch.empty(2, heads, total, dtype=torch.float32, device=q.device)
    first, rest = parts(size)
    tiles = tile_map(segments, tile.m)
    if total:
        query_gradient_kernel[(tiles.shape[0] * heads,)](
            q, k, v, out, dout, *boxes(k, tile), *boxes(v, tile), lse, stats, dq, tiles, scale * LOG2E.value, scale,
            total, q.stride(0), k.stride(0), v.stride(0), dout.stride(0), HEADS=heads, SIZE=size, HEAD_Q=q.stride(1),
            HEAD_K=k.stride(1), HEAD_V=v.stride(1), HEAD_DOUT=dout.stride(1), FIRST=first, REST=rest, M=tile.m,
            N=tile.n, END=tile.k, STAGES=tile.stages, num_warps=tile.warps, maxnreg=tile.registers,
        )  # fmt: skip
    return stats


def key_gradients(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, stats: Tensor, dk: Tensor, dv: Tensor, segments: Segments,
    scale: float, tile: AttentionTile,
) -> None:  # fmt: skip
    """Writes dk and dv; stats as `query_gradient` gives them."""
    total, heads, size = q.shape
    copied = tile.bulk and stats.numel() < 2**31  # coordinates of a descriptor have 32 bits
    stats_boxes = TensorDescriptor(stats, [stats.numel()], [1], [tile.n]) if copied else None
    first, rest = parts(size)
    tiles = tile_map(segments, tile.m)
    if total:
        key_gradients_kernel[(tiles.shape[0] * heads,)](
            q, k, v, dout, *boxes(q, tile), *boxes(dout, tile), stats, stats_boxes, dk, dv, tiles, scale * LOG2E.value,
            scale, total, q.stride(0), k.stride(0), v.stride(0), dout.stride(0), HEADS=heads, SIZE=size,
            HEAD_Q=q.stride(1), HEAD_K=k.stride(1), HEAD_V=v.stride(1), HEAD_DOUT=dout.stride(1), FIRST=first,
            REST=rest, M=tile.m, N=tile.n, END=tile.k, STAGES=tile.stages, num_warps=tile.warps,
            maxnreg=tile.registers,
        )  # fmt: skip


def boxes(x: Tensor, tile: AttentionTile) -> tuple[TensorDescriptor | None, TensorDescriptor | None]:
    """Of the first and of the rest columns of N rows, for the bulk copies of Hopper."""
    if not tile.bulk:
        return None, None
    total, heads, size = x.shape
    first, rest = parts(size)
    columns = (heads - 1) * x.stride(1) + size

    def box(width: int) -> TensorDescriptor:
        return TensorDescriptor(x, [total, columns], [x.stride(0), 1], [tile.n, width])

    return box(first), box(rest) if rest else None


def _dense(x: Tensor) -> Tensor:
    """A copy where the kernels cannot read x as it lies."""
    return x if x.stride(2) == 1 and abs(x.stride(0)) <= FARTHEST_ROWS else x.contiguous()
