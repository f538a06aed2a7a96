"""The loss on labelled rows alone is that on all rows: value, loss of each row, gradients."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from train.ops.label_rows import on_rows
from train.ops.linear_cross_entropy import IGNORED
from train.ops.registry import OPS


def run(name: str, labels: Tensor, scale: Tensor, *, chosen: bool) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(len(labels), 12, generator=generator).requires_grad_()
    weight = torch.randn(37, 12, generator=generator).requires_grad_()
    rows = (labels != IGNORED).nonzero()[:, 0] if chosen else None
    found = on_rows(OPS["linear_cross_entropy"].backends[name].load(), rows)(hidden, weight, labels, scale=scale)
    found.loss.backward()
    assert hidden.grad is not None and weight.grad is not None
    return [found.loss.detach(), found.token_loss, hidden.grad, weight.grad]


@pytest.mark.parametrize("name", ["eager", "chunk_loss"])
@pytest.mark.parametrize("labelled", [0, 1, 7, 20])
@pytest.mark.parametrize("per_row", [False, True])
def test_rows_without_a_label_change_nothing(name: str, labelled: int, per_row: bool) -> None:
    generator = torch.Generator().manual_seed(labelled)
    labels = torch.full((20,), IGNORED)
    labels[torch.randperm(20, generator=generator)[:labelled]] = torch.randint(37, (labelled,), generator=generator)
    scale = torch.rand(20, generator=generator) if per_row else torch.tensor(0.3)
    for got, want in zip(run(name, labels, scale, chosen=True), run(name, labels, scale, chosen=False), strict=True):
        assert got.shape == want.shape
        assert torch.allclose(got, want, rtol=1e-6, atol=1e-7)
