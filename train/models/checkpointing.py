"""Gradient checkpointing (Chen et al. 2016): a block keeps its inputs only and runs again in the backward pass."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, noop_context_fn

ContextPair = tuple[AbstractContextManager[Any], AbstractContextManager[Any]]


@dataclass(frozen=True)
class CheckpointPolicy:
    """context_fn: makes the contexts of a block's first run and of its second, which decide what is kept after all,
    e.g. `partial(create_selective_checkpoint_contexts, policy_fn)` of torch; the default keeps nothing."""

    context_fn: Callable[[], ContextPair] = noop_context_fn

    def __call__(self, block: Callable[..., Any], *inputs: Any) -> Any:
        if not torch.is_grad_enabled():
            return block(*inputs)
        return checkpoint(block, *inputs, use_reentrant=False, context_fn=self.context_fn)


def run_plainly(block: Callable[..., Any], *inputs: Any) -> Any:
    """How a block runs without checkpointing."""
    return block(*inputs)


class BlockStack(nn.Module):
    """A module that runs its blocks through `run_block`, which `set_checkpointing` replaces."""

    def __init__(self) -> None:
        super().__init__()
        self.run_block: Callable[..., Any] = run_plainly


def set_checkpointing(model: nn.Module, policy: CheckpointPolicy | None) -> None:
    """Turns gradient checkpointing on for every block of the text model and of the towers, or off with None."""
    for module in model.modules():
        if isinstance(module, BlockStack):
            module.run_block = run_plainly if policy is None else policy
