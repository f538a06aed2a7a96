"""A router's choice of experts, and what its load-balancing loss needs of one layer (Switch Transformer,
arXiv:2101.03961, equations 4-6)."""

from __future__ import annotations

import torch
from torch import Tensor


def topk_softmax(logits: Tensor, k: int, normalize: bool) -> tuple[Tensor, Tensor]:
    """(weights float32 [T, k], expert ids int64 [T, k]) of logits [T, E]: softmax over all experts in float32, the k
    greatest in descending order, divided by their sum with normalize. The ids have no gradient. Which of two equal
    probabilities comes first is left to torch.topk here; the backend triton takes the lower expert."""
    weights, ids = torch.topk(torch.softmax(logits, -1, dtype=torch.float32), k, dim=-1)
    if normalize:
        weights = weights / weights.sum(-1, keepdim=True)
    return weights, ids


def router_statistics(logits: Tensor, expert_ids: Tensor, num_valid: int) -> tuple[Tensor, Tensor]:
    """(counts, prob_sums), float32 [E], of the first num_valid rows: how often each expert was chosen (no gradient),
    and the sum of the softmax probabilities. logits: [T, E]; expert_ids: int64 [T, k] in [0, E)."""
    return all_rows(logits[:num_valid], expert_ids[:num_valid])


def all_rows(logits: Tensor, expert_ids: Tensor) -> tuple[Tensor, Tensor]:
    """(counts, prob_sums) of all rows."""
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    chosen = expert_ids.reshape(-1)
    counts = torch.zeros(logits.shape[1], dtype=torch.float32, device=logits.device)
    counts.scatter_add_(0, chosen, torch.ones_like(chosen, dtype=torch.float32))
    return counts, wide.softmax(dim=-1).sum(dim=0)
