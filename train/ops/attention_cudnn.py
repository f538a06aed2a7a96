"""The fastest of three on Hopper: cuDNN's fused attention for long causal documents, Triton kernels for those without a
causal mask, as in the towers, torch's flash attention for the rest.

cuDNN plans anew for every shape, about 150 ms for forward and backward pass, and each call costs the host some 0.3 ms.
So only documents that keep the GPU busy for longer go there, and they are padded to few different lengths.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import groupby

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from train.ops.attention import check_rows, without
from train.ops.attention_fused import cudnn_operators
from train.ops.attention_varlen import torch_varlen
from train.ops.recorded import recorded_attention, recording_of
from train.ops.segments import Segments
from train.ops.triton_attention import fits, full_attention

LONG = 2048  # rows of a document
STEPS = 16  # lengths between a power of two and the next one
WIDEST_HEAD = 128

Packed = Callable[[Tensor, Tensor, Tensor, Segments], Tensor]
Batched = Callable[[Tensor, Tensor, Tensor], Tensor]


def cudnn(
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
    """[T, Hq, Dv]; bfloat16 or float16. `torch_varlen` takes short causal documents, and everything with a window or
    with heads that the others do not take."""
    if softcap is not None:
        raise without("cudnn", "softcap of attention scores", "flex_attention or flash_attention_*")
    check_rows(q, k, v, segments)
    if not causal and window is None and fits(q, k, v, scale):
        return full_attention(q, k, v, segments, scale)

    def short(queries: Tensor, keys: Tensor, values: Tensor, documents: Segments) -> Tensor:
        return torch_varlen(queries, keys, values, documents, causal=causal, scale=scale, window=window)

    def long(queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        if recording_of("attention") is not None:
            return recorded_attention(cudnn_operators(True, scale), queries, keys, values)
        grouped = queries.shape[1] != keys.shape[1]
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return F.scaled_dot_product_attention(
                queries, keys, values, is_causal=True, scale=scale, enable_gqa=grouped
            )

    sizes = (q.shape[-1], v.shape[-1])
    taken = all(size % 8 == 0 and size <= WIDEST_HEAD for size in sizes)
    if not causal or window is not None or not taken or segments.max_seqlen < LONG:
        return short(q, k, v, segments)
    return by_length(q, k, v, segments, long, short)


def by_length(q: Tensor, k: Tensor, v: Tensor, segments: Segments, long: Batched, short: Packed) -> Tensor:
    """[T, Hq, Dv], causal. long: q, k, v of n documents of one length L, [n, H, L, D] -> [n, Hq, L, Dv]; equal
    neighbours go in one call, single ones with rows added at the end, which no row before them sees. short: all other
    documents in one call, packed."""
    parts = _parts(segments)
    rows = [sum(lengths) for _, lengths in parts]
    pieces = list(zip(q.split(rows), k.split(rows), v.split(rows), strict=True))
    others = [piece for (is_long, _), piece in zip(parts, pieces, strict=True) if not is_long]
    made = iter(())
    if others:
        together = [x[0] if len(others) == 1 else torch.cat(x) for x in zip(*others, strict=True)]
        packed = short(together[0], together[1], together[2], _short_segments(segments, parts))
        made = iter(packed.split([sum(lengths) for is_long, lengths in parts if not is_long]))
    outputs = [
        _long_documents(piece, len(lengths), long) if is_long else next(made)
        for (is_long, lengths), piece in zip(parts, pieces, strict=True)
    ]
    return torch.cat(outputs)


def padded_length(length: int) -> int:
    """The next of few lengths: 16 between a power of two and the next, so that at most 1/16 is added."""
    step = max(1 << (length.bit_length() - 1), STEPS) // STEPS
    return -(-length // step) * step


def _long_documents(piece: tuple[Tensor, Tensor, Tensor], number: int, attend: Batched) -> Tensor:
    length = piece[0].shape[0] // number
    added = padded_length(length) - length if number == 1 else 0
    queries, keys, values = (F.pad(x, (0, 0, 0, 0, 0, added)) if added else x for x in piece)
    batched = [x.unflatten(0, (number, -1)).transpose(1, 2) for x in (queries, keys, values)]
    out = attend(batched[0], batched[1], batched[2])
    return out[:, :, :length].transpose(1, 2).flatten(0, 1)


def _parts(segments: Segments) -> list[tuple[bool, tuple[int, ...]]]:
    """(long, lengths): neighbours that are short, or long and of one length."""
    groups = groupby(segments.lengths, key=lambda length: length if length >= LONG else 0)
    return [(bool(key), tuple(lengths)) for key, lengths in groups]


def _short_segments(segments: Segments, parts: list[tuple[bool, tuple[int, ...]]]) -> Segments:
    """Made once per batch."""
    if "short" not in segments.cache:
        lengths = [length for is_long, group in parts if not is_long for length in group]
        segments.cache["short"] = Segments.from_lengths(lengths, segments.cu_seqlens.device)
    found: Segments = segments.cache["short"]
    return found
