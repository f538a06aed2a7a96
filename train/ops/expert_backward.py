"""What the caller of experts can ask of them for the backward pass."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

ROOM = 1.125  # of rows that blocks keep room for, over those that experts get where all get alike


def nothing_yet() -> tuple[None, None]:
    """Gradients are to be returned."""
    return None, None


@dataclass(frozen=True)
class ExpertBackward:
    """dx_made: is called with the gradient of the rows before those of the experts, which take longer, are computed.
    so_far: gives, in the backward pass, the gradients of gate_up and down that new ones are added to in place, dense
    and of the weights' shape and dtype; those are then not returned. It saves a pass over them, and each sum is rounded
    once. share: of all choices, what these experts get where all experts get alike; of others it is known on the
    device alone how many there are, and what a block keeps for them between its two runs has room for as many.
    """

    dx_made: Callable[[Tensor], None] | None = None
    so_far: Callable[[], tuple[Tensor | None, Tensor | None]] = nothing_yet
    share: float = 1.0
