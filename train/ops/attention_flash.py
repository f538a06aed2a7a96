"""The flash-attn packages: version 2 (arXiv:2307.08691), 3 for Hopper (arXiv:2407.08608) and 4 (its CuTe kernels)."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from schemas.errors import UnsupportedError
from train.ops.attention import check_rows, check_window
from train.ops.segments import Segments

FUNCTION = "flash_attn_varlen_func"
VERSION_2, VERSION_3, VERSION_4 = "flash_attn.flash_attn_interface", "flash_attn_interface", "flash_attn.cute"
# of every call; a window, softcap and deterministic only where they are asked for
KEYWORDS = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k", "causal", "softmax_scale")


def flash_attention_2(q: Tensor, k: Tensor, v: Tensor, segments: Segments, **options: Any) -> Tensor:
    """[T, Hq, Dv] by the package flash-attn; bfloat16 or float16. Options as `train.ops.attention.eager`."""
    return _attend(VERSION_2, q, k, v, segments, **options)


def flash_attention_3(q: Tensor, k: Tensor, v: Tensor, segments: Segments, **options: Any) -> Tensor:
    """[T, Hq, Dv] by the package flash_attn_interface; bfloat16 or float16. Options as `train.ops.attention.eager`."""
    return _attend(VERSION_3, q, k, v, segments, **options)


def flash_attention_4(q: Tensor, k: Tensor, v: Tensor, segments: Segments, **options: Any) -> Tensor:
    """[T, Hq, Dv] by the package flash-attn-4; bfloat16 or float16. Options as `train.ops.attention.eager`."""
    return _attend(VERSION_4, q, k, v, segments, **options)


def misfit(package: str, *, repeatable: bool, capability: tuple[int, int] | None) -> str | None:
    """Why the installed release cannot be called as it is here, or None. package: imported already; repeatable,
    capability: as of `train.ops.backend.Device`."""
    function = getattr(importlib.import_module(package), FUNCTION, None)
    if function is None:
        return f"the package {package} has no {FUNCTION}"
    try:  # what flash-attn 2.8 ships as flash_attn.cute has no backward pass for packed documents, nor max_seqlen_q
        inspect.signature(function).bind("q", "k", "v", **dict.fromkeys(KEYWORDS))
    except TypeError as error:
        return f"{FUNCTION} of the installed {package} is of another release than those that are supported: {error}"
    if repeatable and "deterministic" not in _parameters(function):
        return (
            f"{FUNCTION} of the installed {package} has no parameter deterministic, so that its gradients differ from "
            "run to run, and train.deterministic is true"
        )
    if repeatable and package == VERSION_4 and capability is not None and capability >= (12, 0):
        return "its gradients cannot be repeated from capability 12.0 on, and train.deterministic is true"
    return None


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
    function: Callable[..., Any] = getattr(importlib.import_module(package), FUNCTION)
    asked: dict[str, Any] = {}
    if check_window(window, causal) is not None:
        asked["window_size"] = (window - 1, 0)  # type: ignore[operator]
    if softcap is not None:
        asked["softcap"] = softcap
    # without it, blocks of threads add up the gradients of queries in the order in which they end
    repeatable = torch.are_deterministic_algorithms_enabled()
    if repeatable or "deterministic" in _parameters(function):
        asked["deterministic"] = repeatable
    if missing := sorted(asked.keys() - _parameters(function)):
        raise UnsupportedError(
            f"{FUNCTION} of the installed {package} has no parameter {', '.join(missing)}; install a later release, or "
            "set model.ops_implementation.attn_implementation to flex_attention"
        )
    bounds, longest = segments.cu_seqlens, segments.max_seqlen
    always = dict(zip(KEYWORDS, (bounds, bounds, longest, longest, causal, scale), strict=True))
    out = function(q, k, v, **always, **asked)
    first: Tensor = out[0] if isinstance(out, tuple) else out  # some versions return the logsumexp as well
    return first


@cache
def _parameters(function: Callable[..., Any]) -> frozenset[str]:
    return frozenset(inspect.signature(function).parameters)
