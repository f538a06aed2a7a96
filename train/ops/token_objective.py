"""Losses that are any function of the log-probability of each token, by way of a linear cross-entropy.

With l_t = -log p_t, the cross-entropy of row t, the chain rule gives

    d/dw sum_t f_t(log p_t) = sum_t -f_t'(log p_t) * d/dw l_t

so the log-probabilities are computed first, without gradient, and then the cross-entropy with -f_t' as the scale of row
t. Every backend of the cross-entropy serves, logits are never whole, and the head's product is computed once more.

Shapes: T rows, H hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from train.ops.linear_cross_entropy import IGNORED, CrossEntropy


class TokenTerms(NamedTuple):
    """loss: float32 [T], f_t of each row; slope: float32 [T], its derivative by the row's log-probability; both 0 where
    there is no label; sums: float32 [K], statistics that are sums over the rows."""

    loss: Tensor
    slope: Tensor
    sums: Tensor


# (log-probabilities float32 [T], bool [T]: which rows have a label) -> the terms
TokenObjective: TypeAlias = Callable[[Tensor, Tensor], TokenTerms]


class LabelledLoss(NamedTuple):
    """loss: float32 scalar with gradient, scale * sum of token_loss; token_loss: float32 [T], detached; sums: those of
    the objective, None of the cross-entropy."""

    loss: Tensor
    token_loss: Tensor
    sums: Tensor | None


def labelled_loss(
    cross_entropy: Callable[..., CrossEntropy],
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    scale: Tensor,
    objective: TokenObjective | None,
) -> LabelledLoss:
    """hidden: [T, H]; weight: [V, H]; labels: int64 [T], already shifted, -100 = none; scale: float32 scalar on the
    device; cross_entropy: the bound operation; objective: None = the cross-entropy itself. Nothing waits for the
    device."""
    if objective is None:
        return LabelledLoss(*cross_entropy(hidden, weight, labels, scale=scale), None)
    with torch.no_grad():
        logprobs = -cross_entropy(hidden, weight, labels, scale=scale).token_loss
        terms = objective(logprobs, labels != IGNORED)
        value = terms.loss.sum() * scale
    found = cross_entropy(hidden, weight, labels, scale=-terms.slope * scale).loss
    # the gradient of the one, the value of the other
    return LabelledLoss(found + (value - found.detach()), terms.loss, terms.sums)
