"""The router's statistics over all ranks, so that the auxiliary loss is that of the whole micro-step."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup


class _SumOverRanks(torch.autograd.Function):
    """Forward: the sum. Backward: the gradient as it is, because every rank computes the same loss from the sum and
    contributes the gradient through its own part; gradients of parameters are summed over ranks afterwards."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup | None) -> Tensor:
        total = x.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0], None


class RouterReduction:
    """For `FoundationModel.reduce_router`: sums over the ranks of a group (None = all) in one collective."""

    def __init__(self, group: ProcessGroup | None = None) -> None:
        self.group = group

    def __call__(self, counts: Tensor, prob_sums: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(counts [layers, E], prob_sums [layers, E], tokens []), float32 each."""
        parts = [counts.flatten(), prob_sums.flatten(), tokens.reshape(1)]
        total: Tensor = _SumOverRanks.apply(torch.cat(parts), self.group)
        summed_counts, summed_probs, summed_tokens = total.split([part.numel() for part in parts])
        return summed_counts.detach().view_as(counts), summed_probs.view_as(prob_sums), summed_tokens.detach()[0]
