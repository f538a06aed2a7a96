"""Results that blocks keep within a budget."""

from __future__ import annotations

import gc
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from tests.train.ops.computed import Computed
from tests.train.ops.test_recorded import BOTH
from train.ops.recorded import Recording, linear
from train.ops.recorded_room import Room


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
        found = [room.take(tower, 2), room.take(text)]
        for taken, nbytes in zip(found, (tower, text), strict=True):
            room.give_back(nbytes if taken else 0)
        return found

    assert tower_and_text(3, 6) == [False, True]  # what the text model needs is not known yet
    assert tower_and_text(3, 6) == [True, True]
    assert tower_and_text(5, 6) == [False, True]
    assert tower_and_text(3, 12) == [True, False]  # more than before
    assert room.left == 10


def test_what_comes_first_in_a_block_is_not_taken_from_by_what_comes_next() -> None:
    """Four blocks ask for 3 of attention and then 2 of an MLP, a tower before them for 1: attention of the last block
    comes before the MLP of the first one."""
    for limit, mlps, tower in ((20, 4, False), (21, 4, True), (17, 2, False), (12, 0, False), (11, 1, False)):
        room = Room(limit)
        for number in range(3):
            found = [(2, 1, room.take(1, 2))]
            for _ in range(4):
                found += [(0, 3, room.take(3, 0)), (1, 2, room.take(2, 1))]
            for _, nbytes, taken in reversed(found):
                room.give_back(nbytes if taken else 0)
            served = [sum(taken for order, _, taken in found if order == which) for which in range(3)]
            assert room.left == limit
            expected = [min(limit // 3, 4), mlps, tower] if number else [min(limit // 3, 4), 0, 0]
            assert served == expected, (limit, number)
