"""The flash-attn packages: version 2 (arXiv:2307.08691), 3 for Hopper (arXiv:2407.08608) and 4 (its CuTe kernels)."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import cache
from typing import Any

from torch import Tensor

from train.ops.attention import check_rows, check_window
from train.ops.segments import Segments


def flash_attention_2(q: Tensor, k: Tensor, v: Tensor, segments: Segments, **options: Any) -> Tensor:
    """[T, Hq, Dv] by the package flash-attn; bfloat16 or float16. Options as `train.ops.attention.eager`."""
    return _attend("flash_attn", q, k, v, segments, **options)


def flash_attention_3(q: Tensor, k: Tensor, v: Tensor, segments: Segments, **options: Any) -> Tensor:
    """[T, Hq, Dv] by the package flash_attn_interface; bfloat16 or float16. Options as `train.ops.attention.eager`."""
    return _attend("flash_attn_interface", q, k, v, segments, **options)


def flash_attention_4(q: Tensor, k: Tensor, v: Tensor, segments: Segments, **options: Any) -> Tensor:
    """[T, Hq, Dv] by the package flash-attn-4; bfloat16 or float16. Options as `train.ops.attention.eager`."""
    return _attend("flash_attn.cute", q, k, v, segments, **options)


def _attend(
    package: str,
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
    check_rows(q, k, v, segments)
    options: dict[str, Any] = {"causal": causal, "softmax_scale": scale}
    if check_window(window, causal) is not None:
        options["window_size"] = (window - 1, 0)  # type: ignore[operator]
    if softcap is not None:
        options["softcap"] = softcap
    bounds, longest = segments.cu_seqlens, segments.max_seqlen
    out = _varlen(package)(
        q,
        k,
        v,
        cu_seqlens_q=bounds,
        cu_seqlens_k=bounds,
        max_seqlen_q=longest,
        max_seqlen_k=longest,
        **options,
    )
    first: Tensor = out[0] if isinstance(out, tuple) else out  # some versions return the logsumexp as well
    return first


@cache
def _varlen(package: str) -> Callable[..., Any]:
    function: Callable[..., Any] = importlib.import_module(package).flash_attn_varlen_func
    return function
