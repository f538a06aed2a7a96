"""Attention over packed documents: what every backend must equal, and torch's fused attention document by document.

Shapes: T rows, Hq query heads, Hkv key heads (Hq a multiple of Hkv: query head i reads key head i // (Hq / Hkv)),
D head size, Dv value head size. Two options serve models of the hub: window: a row sees itself and the window - 1 rows
before it; softcap: scores s become softcap * tanh(s / softcap).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from schemas.errors import UnsupportedError
from train.ops.attention_fused import fused_operators
from train.ops.recorded import recorded_attention, recording_of
from train.ops.segments import Segments

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


def eager(
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
    """[T, Hq, Dv] by a dense [Hq, T, T] matrix with its softmax in float32; for short sequences."""
    check_rows(q, k, v, segments)
    compute = torch.promote_types(q.dtype, torch.float32)
    groups = q.shape[1] // k.shape[1]
    queries = q.to(compute) * (q.shape[-1] ** -0.5 if scale is None else scale)
    keys, values = (x.to(compute).repeat_interleave(groups, dim=1) for x in (k, v))
    allowed = segments.ids[:, None] == segments.ids[None, :]
    if causal or window is not None:
        allowed = allowed & band(q.shape[0], check_window(window, causal), q.device)
    scores = torch.einsum("thd,shd->hts", queries, keys)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~allowed, float("-inf"))
    return torch.einsum("hts,shd->thd", scores.softmax(dim=-1), values).to(q.dtype)


def sdpa(
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
    """[T, Hq, Dv] by `scaled_dot_product_attention` of each document; longer ones than the window with a whole mask."""
    if softcap is not None:
        raise without("sdpa", "softcap of attention scores", "eager, flex_attention or flash_attention_*")
    check_window(window, causal)
    groups = q.shape[1] // k.shape[1]
    # the kernel for float32 on a GPU does not know grouped heads, and torch would fall back to a whole matrix
    grouped = groups > 1 and q.is_cuda and q.dtype in (torch.bfloat16, torch.float16)
    if groups > 1 and not grouped:
        k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)

    def attend(queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        run = partial(F.scaled_dot_product_attention, queries, keys, values, scale=scale, enable_gqa=grouped)
        length = queries.shape[-2]
        if window is not None and length > window:
            return run(attn_mask=band(length, window, queries.device))
        if recording_of("attention") is not None:
            operators = fused_operators(queries, keys, values, causal=causal, scale=scale, grouped=grouped)
            if operators is not None:
                return recorded_attention(operators, queries, keys, values)
        return run(is_causal=causal)

    return by_document(q, k, v, segments, attend)


def by_document(q: Tensor, k: Tensor, v: Tensor, segments: Segments, attend: Attend) -> Tensor:
    """[T, Hq, Dv]. attend: q, k, v of n documents of one length L, [n, H, L, D] -> [n, Hq, L, Dv]; neighbours of one
    length go in one call."""
    check_rows(q, k, v, segments)
    runs = segments.runs
    rows = [number * length for number, length in runs]
    outputs = []
    for (number, _), *parts in zip(runs, q.split(rows), k.split(rows), v.split(rows), strict=True):
        queries, keys, values = (part.unflatten(0, (number, -1)).transpose(1, 2) for part in parts)
        outputs.append(attend(queries, keys, values).transpose(1, 2).flatten(0, 1))
    return torch.cat(outputs) if outputs else v.repeat_interleave(q.shape[1] // v.shape[1], dim=1)


def band(length: int, window: int | None, device: torch.device) -> Tensor:
    """bool [length, length]: which rows (second) each row (first) sees, itself and those before it in the window."""
    seen = torch.ones(length, length, dtype=torch.bool, device=device).tril()
    return seen if window is None else seen.triu(1 - window)


def check_rows(q: Tensor, k: Tensor, v: Tensor, segments: Segments) -> None:
    """ValueError when rows, heads and segments do not fit together."""
    if not q.shape[0] == k.shape[0] == v.shape[0] == segments.total:
        raise ValueError(
            f"q, k, v have {q.shape[0]}, {k.shape[0]}, {v.shape[0]} rows and the segments {segments.total}"
        )
    if k.shape[1] != v.shape[1] or q.shape[1] % k.shape[1]:
        raise ValueError(f"{q.shape[1]} query heads cannot share {k.shape[1]} key and {v.shape[1]} value heads")


def check_window(window: int | None, causal: bool) -> int | None:
    """The window. UnsupportedError without a causal mask, ValueError below 1."""
    if window is not None and not causal:
        raise UnsupportedError(f"a sliding window of {window} without a causal mask is not supported")
    if window is not None and window < 1:
        raise ValueError(f"a window has at least one row, not {window}")
    return window


def without(name: str, feature: str, others: str) -> UnsupportedError:
    """The error of a backend that lacks something a model asks for."""
    return UnsupportedError(
        f"attn_implementation {name} has no {feature}, which this model needs; set "
        f"model.ops_implementation.attn_implementation to {others}"
    )
