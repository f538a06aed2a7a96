"""The element-wise references fused by torch.compile, compiled at their first call on a GPU."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import cache
from types import FunctionType
from typing import Any

import torch
from torch import Tensor

from train.ops import layer_norm as layer
from train.ops import norm, rope, router
from train.ops import swiglu as gates


def compiled(function: Callable[..., Any], key: Hashable = None) -> Callable[..., Any]:
    """The compiled form of a function, made once per key. The key holds what should be compiled in, such as the size of
    a row; what differs between calls of one key, the number of rows, becomes a symbol at the second call.

    A function can be compiled eight times before torch gives up on it and runs it uncompiled; each key has its own.
    """
    return _compiled(function, key, torch.is_grad_enabled())


@cache
def _compiled(function: FunctionType, key: Hashable, with_gradient: bool) -> Callable[..., Any]:
    # torch counts compilations by code object, and remembers by its name which sizes vary
    name = f"{function.__name__}_{abs(hash((key, with_gradient))):x}"
    code = function.__code__.replace(co_name=name)
    copy = FunctionType(code, function.__globals__, name, function.__defaults__, function.__closure__)
    copy.__kwdefaults__ = function.__kwdefaults__
    made: Callable[..., Any] = torch.compile(copy)
    return made


def rms_norm(x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """As `train.ops.norm.rms_norm`."""
    y, total = compiled(norm.rms_norm, (x.shape[1:], x.dtype, residual is None))(x, weight, eps, residual)
    return y, x if residual is None else total


def layer_norm(
    x: Tensor, weight: Tensor, bias: Tensor, eps: float, residual: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """As `train.ops.layer_norm.layer_norm`."""
    key = (x.shape[1:], x.dtype, residual is None)
    y, total = compiled(layer.layer_norm, key)(x, weight, bias, eps, residual)
    return y, x if residual is None else total


def qk_norm_rope(
    q: Tensor, k: Tensor, q_weight: Tensor | None, k_weight: Tensor | None, cos: Tensor, sin: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """As `train.ops.rope.qk_norm_rope`."""
    key = (q.shape[1:], k.shape[1:], q.dtype, q_weight is None, k_weight is None)
    queries, keys = compiled(rope.qk_norm_rope, key)(q, k, q_weight, k_weight, cos, sin, eps)
    return queries, keys


def vision_rope(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """As `train.ops.rope.vision_rope`."""
    queries, keys = compiled(rope.vision_rope, (q.shape[1:], q.dtype))(q, k, cos, sin)
    return queries, keys


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """As `train.ops.swiglu.swiglu`."""
    out: Tensor = compiled(gates.swiglu, (gate.shape[1:], gate.dtype))(gate, up)
    return out


def topk_softmax(logits: Tensor, k: int, normalize: bool) -> tuple[Tensor, Tensor]:
    """As `train.ops.router.topk_softmax`."""
    key = (logits.shape[1], k, normalize, logits.dtype)
    weights, ids = compiled(router.topk_softmax, key)(logits, k, normalize)
    return weights, ids


def router_statistics(logits: Tensor, expert_ids: Tensor, num_valid: int) -> tuple[Tensor, Tensor]:
    """As `train.ops.router.router_statistics`."""
    # sliced out here: a number that differs in every batch would be compiled in again and again
    key = (logits.shape[1], expert_ids.shape[1], logits.dtype)
    counts, sums = compiled(router.all_rows, key)(logits[:num_valid], expert_ids[:num_valid])
    return counts, sums
