"""torch's flex attention (arXiv:2412.05496) with a mask of documents, compiled on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import flex_attention as flex
from torch.nn.attention.flex_attention import BlockMask

from train.ops.attention import check_rows, check_window
from train.ops.compiled import compiled
from train.ops.segments import Segments

BLOCK = 128


def flex_attention(
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
    """[T, Hq, Dv]; blocks of the matrix that no document touches are skipped."""
    check_rows(q, k, v, segments)
    if not segments.lengths:
        return v.repeat_interleave(q.shape[1] // v.shape[1], dim=1)
    key = (q.shape[1:], k.shape[1:], v.shape[2], q.dtype, causal, scale, window, softcap)
    attend: Callable[..., Tensor] = compiled(_attend, key) if q.is_cuda else _attend
    queries, keys, values = (x.transpose(0, 1)[None] for x in (q, k, v))
    out = attend(queries, keys, values, block_mask(segments, causal, window), scale, softcap)
    return out[0].transpose(0, 1)


def _attend(q: Tensor, k: Tensor, v: Tensor, mask: BlockMask, scale: float | None, softcap: float | None) -> Tensor:
    """[1, Hq, T, Dv] of q, k, v [1, H, T, D]."""

    def capped(score: Tensor, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return score if softcap is None else softcap * torch.tanh(score / softcap)

    rule = None if softcap is None else capped
    attend: Any = flex.flex_attention
    out: Tensor = attend(q, k, v, rule, mask, scale, enable_gqa=q.shape[1] != k.shape[1])
    return out


def block_mask(segments: Segments, causal: bool, window: int | None = None) -> BlockMask:
    """The mask of all documents, made once per batch from the lengths on the host."""
    key = ("block_mask", causal, check_window(window, causal))
    if key not in segments.cache:
        segments.cache[key] = _block_mask(segments, causal, window)
    mask: BlockMask = segments.cache[key]
    return mask


def _block_mask(segments: Segments, causal: bool, window: int | None) -> BlockMask:
    device = segments.cu_seqlens.device
    touched, whole = _blocks(segments.lengths, causal, window)
    counts, columns = (table.to(device) for table in _sparse(touched & ~whole))
    whole_counts, whole_columns = (table.to(device) for table in _sparse(whole))
    rule = _rule(segments.ids, causal, window)
    sizes = (segments.total, segments.total)
    return BlockMask.from_kv_blocks(counts, columns, whole_counts, whole_columns, BLOCK, rule, sizes)


def _rule(ids: Tensor, causal: bool, window: int | None) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
    def same(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return ids[query] == ids[key]

    def before(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (query >= key) & (ids[query] == ids[key])

    if window is None:
        return before if causal else same
    reach = window

    def near(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (query >= key) & (query - key < reach) & (ids[query] == ids[key])

    return near


def _blocks(lengths: tuple[int, ...], causal: bool, window: int | None) -> tuple[Tensor, Tensor]:
    """Two bool [n, n] on the host, over blocks of rows: those in which something is allowed, those in which all is."""
    starts = torch.tensor([0, *accumulate(lengths)])
    total = int(starts[-1])
    first = torch.arange(0, total, BLOCK)  # rows of each block, both ends included
    last = (first + BLOCK - 1).clamp(max=total - 1)
    low, high = (torch.searchsorted(starts, rows, right=True) - 1 for rows in (first, last))  # documents of each block
    touched = (low[:, None] <= high[None, :]) & (low[None, :] <= high[:, None])
    whole = (low == high)[:, None] & (low == high)[None, :] & (low[:, None] == low[None, :])
    if causal:
        touched &= last[:, None] >= first[None, :]
        whole &= first[:, None] >= last[None, :]
    if window is not None:
        touched &= first[:, None] - last[None, :] < window
        whole &= last[:, None] - first[None, :] < window
    full = last - first + 1 == BLOCK  # the kernel checks no bounds inside whole blocks
    return touched, whole & full[:, None] & full[None, :]


def _sparse(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """bool [n, n] -> int32 [1, 1, n] counts and [1, 1, n, n] column indices, those that count first."""
    order = blocks.to(torch.int8).argsort(dim=1, descending=True, stable=True)
    return blocks.sum(dim=1).int()[None, None], order.int()[None, None]
