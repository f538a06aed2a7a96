"""The fused kernels of the optimizers, found where they run: on GPUs."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib import import_module
from typing import Any


@cache
def kernel(target: str) -> Callable[..., Any]:
    """target: "module:function" below train.ops. Triton is not imported before."""
    module, _, name = target.partition(":")
    found: Callable[..., Any] = getattr(import_module(f"train.ops.{module}"), name)
    return found
