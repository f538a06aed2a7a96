"""Flash attention that torch brings along, on packed documents."""

from __future__ import annotations

import inspect
from collections.abc import Collection
from functools import cache
from typing import Any

import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import varlen

from train.ops.attention import check_rows, check_window, without
from train.ops.segments import Segments

_HEAD_MULTIPLE = 8  # of the kernel's head sizes


def torch_varlen(
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
    """[T, Hq, Dv] by `torch.nn.attention.varlen.varlen_attn`; bfloat16 or float16 on a GPU."""
    if softcap is not None:
        raise without("torch_varlen", "softcap of attention scores", "flex_attention or flash_attention_*")
    check_rows(q, k, v, segments)
    grouped = q.shape[1] != k.shape[1]
    scale = q.shape[-1] ** -0.5 if scale is None and q.shape[-1] % _HEAD_MULTIPLE else scale
    options = varlen_options(_parameters(), causal=causal, scale=scale, window=window, grouped=grouped)
    bounds, longest = segments.cu_seqlens, segments.max_seqlen
    attend: Any = varlen.varlen_attn
    out: Tensor = attend(_padded(q), _padded(k), _padded(v), bounds, bounds, longest, longest, **options)
    return out[..., : v.shape[-1]]


def _padded(heads: Tensor) -> Tensor:
    """Zeros up to the size of a head that the kernel takes; they add nothing to scores and results."""
    missing = -heads.shape[-1] % _HEAD_MULTIPLE
    return F.pad(heads, (0, missing)) if missing else heads


def varlen_options(
    parameters: Collection[str], *, causal: bool, scale: float | None, window: int | None, grouped: bool
) -> dict[str, Any]:
    """The keyword arguments in the words of the installed torch. parameters: names that varlen_attn takes: torch 2.10
    has is_causal, 2.11 a window (left, right) with -1 = no end, later ones must be told of grouped heads."""
    check_window(window, causal)
    options: dict[str, Any] = {"scale": scale} if scale is not None else {}
    if "window_size" in parameters:
        options["window_size"] = (-1 if window is None else window - 1, 0 if causal else -1)
    elif window is not None:
        raise without("torch_varlen", "sliding window before torch 2.11", "flex_attention or flash_attention_*")
    else:
        options["is_causal"] = causal
    if "enable_gqa" in parameters and grouped:
        options["enable_gqa"] = True
    return options


@cache
def _parameters() -> frozenset[str]:
    return frozenset(inspect.signature(varlen.varlen_attn).parameters)
