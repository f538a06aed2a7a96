"""The experts' first half: from rows to what their activation is of, which a block that is computed again can keep.

Shapes: T rows, H hidden size, k chosen experts per row, E experts, I width of an expert, M = T * k, R LoRA rank.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

from train.ops.expert_backward import ROOM
from train.ops.recorded import Recording, Results
from train.ops.triton_moe_gemm import alignment, gate_up_products, rest_of_gate_up, row_products
from train.ops.triton_moe_routing import Routing, build_routing
from train.ops.triton_moe_rows import spread


@dataclass(frozen=True, eq=False)
class GateUp:
    """x [T, H], expert_ids int64 [T, k], gate_up [E, 2I, H]; of adapters low_a [E or 1, 2R, H], gate_b and up_b [E or
    1, I, R]."""

    x: Tensor
    expert_ids: Tensor
    gate_up: Tensor
    low_a: Tensor | None = None
    gate_b: Tensor | None = None
    up_b: Tensor | None = None

    def route(self) -> Routing:
        return build_routing(self.expert_ids, self.gate_up.shape[0], *alignment(self.x))

    def products(self, routing: Routing, z_rows: int) -> tuple[Tensor | None, Tensor | None, Tensor]:
        """(low [M, 2R], the first z_rows of z [M, 2I], h [M, I])."""
        if self.low_a is None:
            return None, *gate_up_products(self.x, self.gate_up, routing, True, z_rows)
        rows = spread(self.x, routing)  # once, for both products
        low = row_products(rows, self.low_a, routing, transposed=True)
        return low, *gate_up_products(rows, self.gate_up, routing, False, z_rows, low, self.gate_b, self.up_b)

    def whole(self, routing: Routing, low: Tensor | None, found: Tensor) -> Tensor:
        """z of whose rows the first are there."""
        if len(found) == routing.rows:
            return found
        z = found.new_empty(routing.rows, found.shape[1])
        z[: len(found)] = found
        rest_of_gate_up(z, len(found), self.x, self.gate_up, routing, low, self.gate_b, self.up_b)
        return z


@dataclass(frozen=True, eq=False)
class FirstHalf:
    """z [M, 2I]: gate and up, None where no backward pass comes; h [M, I] = silu(gate) * up, None where it was not made
    because z was kept; low [M, 2R]."""

    routing: Routing
    low: Tensor | None
    z: Tensor | None
    h: Tensor | None


def first_half(given: GateUp, recording: Recording | None, share: float, *, keep: bool) -> FirstHalf:
    """recording: of the block that runs, if it keeps z; share: of the choices, about what these experts get; keep:
    whether z is wanted."""
    if recording is None or not keep:
        routing = given.route()
        low, z, h = given.products(routing, routing.rows if keep else 0)
        return FirstHalf(routing, low, z, h)
    made: list[FirstHalf] = []

    def compute() -> Results:
        routing = given.route()
        rows = routing.rows if recording.again else kept_rows(routing, share)
        low, z, h = given.products(routing, rows)
        assert z is not None
        # what is saved in the first run is dropped, and has to have the shape of what is in the second
        saved = z if recording.again else z.new_empty(()).expand(routing.rows, z.shape[1])
        made.append(FirstHalf(routing, low, saved, h))
        return z, low, *routing.tensors

    z, low, *routed = recording.results("mlp", compute)
    if made:
        return made[0]
    assert z is not None
    # the order of rows is kept with them, whatever the router chooses in the second run
    routing = Routing.of(routed, given.expert_ids.shape[1], *alignment(given.x))
    return FirstHalf(routing, low, given.whole(routing, low, z), None)


def kept_rows(routing: Routing, share: float) -> int:
    """How many there is memory for between the runs. The host does not know how many there are: of a share of all
    choices, a few more than where all experts get alike; what is beyond is computed again."""
    padding = routing.num_experts * (routing.align - 1)
    wanted = math.ceil(routing.row_of_slot.numel() * share * ROOM) + padding
    return routing.rows if share >= 1 else min(routing.rows, wanted)
