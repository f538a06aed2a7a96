"""The language-model head together with its loss: what every backend must equal.

Shapes: T rows, H hidden size, V vocabulary.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

IGNORED = -100


class CrossEntropy(NamedTuple):
    """loss: float32 scalar with gradient, sum of scale * token_loss; token_loss: float32 [T], detached, unscaled, 0
    where there is no label."""

    loss: Tensor
    token_loss: Tensor


def eager(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    scale: Tensor,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
) -> CrossEntropy:
    """The loss by whole float32 logits [T, V].

    hidden: [T, H]; weight: [V, H]; labels: int64 [T], already shifted, -100 = none; scale: float32 on the device, a
    scalar or [T], without gradient; label_smoothing: share of the target that is spread evenly over the vocabulary, as
    in `torch.nn.functional.cross_entropy`; z_loss: factor of logsumexp squared (PaLM, arXiv:2204.02311, section 5).
    """
    compute = torch.promote_types(hidden.dtype, torch.float32)
    logits = F.linear(hidden, weight).to(compute)
    rows = F.cross_entropy(logits, labels, ignore_index=IGNORED, reduction="none", label_smoothing=label_smoothing)
    if z_loss:
        rows = rows + z_loss * torch.where(labels != IGNORED, logits.logsumexp(dim=-1).square(), 0.0)
    loss = (rows * scale).sum() if scale.ndim else rows.sum() * scale
    return CrossEntropy(loss, rows.detach().float())
