"""Flash attention that torch brings along, on packed documents."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import varlen

from schemas.errors import UnsupportedError
from train.ops.attention import check_rows, check_window, without
from train.ops.recorded import AttentionOperators, Results, recorded_attention, recording_of
from train.ops.segments import Segments

_HEAD_MULTIPLE = 8  # of the kernel's head sizes
# arguments of the operators behind it that are known here
_INPUTS = ("query", "key", "value")
_MADE = ("grad_out", "out", "lse", "rng_state")
_CONSTANTS = ("cu_seq_q", "cu_seq_k", "max_q", "max_k", "is_causal", "scale", "window_size", "enable_gqa")


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
    padded = (_padded(q), _padded(k), _padded(v))
    if recording_of("attention") is not None:
        out = recorded_attention(varlen_operators(segments, causal, options), *padded)
    else:
        bounds, longest = segments.cu_seqlens, segments.max_seqlen
        attend: Any = varlen.varlen_attn
        out = attend(*padded, bounds, bounds, longest, longest, **options)
    return out[..., : v.shape[-1]]


def varlen_operators(segments: Segments, causal: bool, options: Mapping[str, Any]) -> AttentionOperators:
    """The operators behind `varlen_attn`. options: from `varlen_options`, one head or several of a group."""
    run, run_backward = _operators()
    window = options.get("window_size")
    constants = {
        "cu_seq_q": segments.cu_seqlens,
        "cu_seq_k": segments.cu_seqlens,
        "max_q": segments.max_seqlen,
        "max_k": segments.max_seqlen,
        "is_causal": causal if window is None else window == (-1, 0),  # a window is a mask of its own
        "scale": options.get("scale"),
        "window_size": None if window is None else list(window),
        "enable_gqa": options.get("enable_gqa", False),
    }

    def forward(q: Tensor, k: Tensor, v: Tensor) -> Results:
        found: Results = run(query=q, key=k, value=v, **constants)
        return found

    def backward(
        dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, rng_state: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        made = {"grad_out": dout, "query": q, "key": k, "value": v, "out": out, "lse": lse, "rng_state": rng_state}
        dq, dk, dv = run_backward(**made, **constants)
        return dq, dk, dv

    return AttentionOperators(forward, backward)


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


def with_known_arguments(operator: Any, given: Collection[str]) -> Callable[..., Any]:
    """The operator, called by name with those of the given arguments that the installed torch's takes: releases differ.
    UnsupportedError: it wants one that is not given."""
    arguments = operator._schema.arguments
    names = frozenset(argument.name for argument in arguments)
    missing = [a.name for a in arguments if not a.has_default_value() and a.name not in given]
    if missing:
        raise UnsupportedError(
            f"torch {torch.__version__}: {operator} wants {', '.join(missing)}, which is unknown here, so that results "
            "of attn_implementation torch_varlen cannot be kept; set train.gradient_checkpointing.keep to inputs"
        )

    def call(**values: Any) -> Any:
        return operator(**{name: value for name, value in values.items() if name in names})

    return call


@cache
def _operators() -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Forward and backward."""
    ops = torch.ops.torch_attn
    run = with_known_arguments(ops._varlen_attn.default, (*_INPUTS, *_CONSTANTS))
    return run, with_known_arguments(ops._varlen_attn_backward.default, (*_INPUTS, *_MADE, *_CONSTANTS))


@cache
def _parameters() -> frozenset[str]:
    return frozenset(inspect.signature(varlen.varlen_attn).parameters)
