"""Results that blocks keep within a budget."""

from __future__ import annotations

import gc
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from tests.train.ops.computed import Computed
from tests.train.ops.test_recorded import BOTH
from train.ops.recorded import Recording, Room, linear


def test_what_does_not_fit_is_computed_again() -> None:
    x = torch.randn(4, 8, requires_grad=True)
    weights = [torch.randn(8, 8, requires_grad=True) for _ in range(3)]
    room = Room(2 * x.nbytes)

    def block(rows: Tensor) -> Tensor:
        for weight in weights:
            rows = linear(rows, weight).tanh()
        return rows

    def gradients(context_fn: Any) -> list[Tensor]:
        out = checkpoint(block, x, use_reentrant=False, context_fn=context_fn)
        left.append(room.left)
        with Computed() as computed:
            found = torch.autograd.grad(out.sum(), [x, *weights])
        products.append(computed.counts["aten::mm"])
        return list(found)

    left: list[float] = []
    products: list[int] = []
    within = gradients(lambda: Recording(BOTH, room).contexts())
    assert left == [0] and room.left == 2 * x.nbytes  # all is given back
    whole = gradients(lambda: Recording(BOTH).contexts())
    assert products[0] == products[1] + 1  # the third
    assert all(torch.equal(a, b) for a, b in zip(within, whole, strict=True))
    forgotten = checkpoint(block, x, use_reentrant=False, context_fn=lambda: Recording(BOTH, room).contexts())
    assert room.left == 0
    del forgotten
    gc.collect()
    assert room.left == 2 * x.nbytes


def test_blocks_that_come_first_are_served_first_from_the_second_pass_on() -> None:
    room = Room(10)

    def tower_and_text(tower: int, text: int) -> list[bool]:
        """Of one pass."""
        found = [room.take(tower, first=False), room.take(text)]
        for taken, nbytes in zip(found, (tower, text), strict=True):
            room.give_back(nbytes if taken else 0)
        return found

    assert tower_and_text(3, 6) == [False, True]  # what the text model needs is not known yet
    assert tower_and_text(3, 6) == [True, True]
    assert tower_and_text(5, 6) == [False, True]
    assert tower_and_text(3, 12) == [True, False]  # more than before
    assert room.left == 10
