"""Expert parallelism without routing: every rank of a group gets the rows of all of them, computes what its own experts
add to each, and the sums go back to the rows' owners.

With P ranks and k experts a row, a row has choices on nearly every rank as long as P is below k, so routing rows one by
one would send as much; here all shapes are known on the host, which never waits for the device, and the experts see
their rows where they arrive. Memory: buffers of P times a rank's rows, twice what the choices fill for P = 2.

Shapes: P ranks of a group; E experts; S rows of a rank, H hidden size, k experts of a row; R rows that each rank sends.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup, Work
from torch.distributed.tensor import DTensor

from train.ops.expert_backward import ExpertBackward, nothing_yet
from train.ops.lora_types import ExpertLora
from train.parallel.exchange import PartialSums, begin_gather
from train.parallel.expert_local import NO_EXPERT, local_lora
from train.parallel.loading import local_part


class _Call:
    """What the nodes of one call leave to each other, past autograd. chosen: the context of `_GatherChoices`; dx: the
    sums of the rows' gradient, on their way. No work on its way to an output of theirs: that holds the output, and with
    it the node, which would never be freed."""

    def __init__(self) -> None:
        self.chosen: Any = None
        self.dx: PartialSums | None = None


class Underway:
    """Rows of all ranks on their way. every: [P * R, H], to be read after `arrival`; count: S of this rank. Neither a
    tuple nor a dataclass: FSDP looks into these, and would make a view of what is still being written."""

    def __init__(self, every: Tensor, count: int, arrival: Work, call: _Call) -> None:
        self.every, self.count, self.arrival, self.call = every, count, arrival, call


class GatheredExperts:
    """A moe_experts op of one rank's experts as one of all experts, with the same signature; gate_up and down are
    DTensors that are sharded over the group. rows: R, what the rows of any rank are filled up to; asked: whether the op
    takes an `ExpertBackward`. The rows' gradient then travels while the experts' own are computed, and where `adds_up`
    is set these are added to what earlier micro-batches left in `grad`. That is for parameters whose gradients nobody
    but autograd collects; any backward pass then changes `grad`.
    """

    def __init__(self, compute: Callable[..., Tensor], group: ProcessGroup, rows: int, *, asked: bool = False) -> None:
        self.compute, self.group, self.rows, self.asked = compute, group, rows, asked
        self.adds_up = False
        self.size, self.rank = group.size(), group.rank()

    def start(self, x: Tensor) -> Underway:
        """Sends rows [S, H] to all ranks, while this one goes on. ValueError: more than were agreed on."""
        if len(x) > self.rows:
            raise ValueError(
                f"{len(x)} rows of a rank, where experts over {self.size} ranks were set up for at most {self.rows}; "
                "write train.accelerator.expert_dispatch: all_to_all, or shorter sequences"
            )
        call, begun = _Call(), list[Work]()
        every: Tensor = _GatherRows.apply(self._filled(x), self.group, call, begun)
        return Underway(every, len(x), begun[0], call)

    def __call__(
        self,
        x: Tensor | Underway,
        expert_ids: Tensor,
        weights: Tensor,
        gate_up: Tensor,
        down: Tensor,
        lora: ExpertLora | None = None,
    ) -> Tensor:
        """[S, H] of rows, or of what `start` made of them; see `train.ops.moe`."""
        sent = self.start(x) if isinstance(x, Tensor) else x
        call = sent.call
        more = {"asked": self._wanted(call, gate_up, down)} if self.asked else {}
        gate_up, down = (
            _OwnPart.apply(weight) if isinstance(weight, DTensor) else weight for weight in (gate_up, down)
        )
        choices = self._filled(weights), self._filled(expert_ids, NO_EXPERT)
        every_weight, every_id = _GatherChoices.apply(*choices, self.group, call)
        ids = self._own(every_id, len(gate_up))
        sent.arrival.wait()  # the device, for the device
        own_lora = local_lora(lora, self.rank, len(gate_up))
        made = self.compute(sent.every, ids, every_weight, gate_up, down, own_lora, **more)
        found: Tensor = _SumParts.apply(made, self.group, call)
        # a copy: FSDP around experts warns of views
        return found[: sent.count].clone() if sent.count < self.rows else found

    def _wanted(self, call: _Call, gate_up: Tensor, down: Tensor) -> ExpertBackward:
        so_far = partial(_so_far, gate_up, down) if self.adds_up else nothing_yet
        return ExpertBackward(_sends(call, self.group), so_far, 1 / self.size)

    def _filled(self, x: Tensor, value: int = 0) -> Tensor:
        """Up to as many rows as every rank sends."""
        missing = self.rows - len(x)
        return F.pad(x, (0, 0, 0, missing), value=value) if missing else x

    def _own(self, ids: Tensor, experts: int) -> Tensor:
        """Numbers of the experts among this rank's own, `NO_EXPERT` for others."""
        own = ids - self.rank * experts
        return own.masked_fill_((own < 0) | (own >= experts), NO_EXPERT)


def _sends(call: _Call, group: ProcessGroup) -> Callable[[Tensor], None]:
    def send(dx: Tensor) -> None:
        call.dx = PartialSums(dx, group)

    return send


def _so_far(*weights: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """This rank's parts of their gradients."""
    gate_up, down = (None if weight.grad is None else local_part(weight.grad) for weight in weights)
    return gate_up, down


def _own_part(weight: Tensor) -> Tensor:
    own: Tensor = _OwnPart.apply(weight) if isinstance(weight, DTensor) else weight
    return own


class _OwnPart(torch.autograd.Function):
    """What this rank has of a DTensor. Its gradient may be none, where it was added to the DTensor's own."""

    @staticmethod
    def forward(ctx: Any, weight: DTensor) -> Tensor:
        ctx.mesh, ctx.placements = weight.device_mesh, weight.placements
        ctx.set_materialize_grads(False)
        own = weight.to_local()
        return own.view_as(own)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> DTensor | None:
        own = gradients[0]
        return None if own is None else DTensor.from_local(own, ctx.mesh, ctx.placements, run_check=False)


class _GatherRows(torch.autograd.Function):
    """Rows of all ranks, in their order; the gradient is summed over the ranks that made parts of it. begun: takes what
    the rows' arrival can be awaited by."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup, call: _Call, begun: list[Work]) -> Tensor:
        ctx.group, ctx.call = group, call
        every, arrival = begin_gather(x, group)
        begun.append(arrival)
        return every

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        # nothing but the experts reads these rows, so that what they announced is the gradient
        sums, ctx.call.dx = ctx.call.dx, None
        return (PartialSums(gradients[0], ctx.group) if sums is None else sums).result(), None, None, None


class _GatherChoices(torch.autograd.Function):
    """Weights float32 [P * R, k] and ids int64 [P * R, k] of all ranks, in one message: both are small."""

    @staticmethod
    def forward(ctx: Any, weights: Tensor, ids: Tensor, group: ProcessGroup, call: _Call) -> tuple[Tensor, Tensor]:
        ctx.group, ctx.dtype = group, weights.dtype
        ctx.save_for_backward(weights)  # for `_SumParts`
        call.chosen = ctx
        packed = torch.cat([weights.float().view(torch.int32), ids.to(torch.int32)], 1)
        every, arrival = begin_gather(packed, group)
        arrival.wait()
        every_weight, every_id = every.chunk(2, 1)
        ids = every_id.long()
        ctx.mark_non_differentiable(ids)
        return every_weight.contiguous().view(torch.float32), ids

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        return PartialSums(gradients[0], ctx.group).result().to(ctx.dtype), None, None, None


class _SumParts(torch.autograd.Function):
    """Of what every rank adds to the rows of all, [P * R, H], the sum for this rank's own [R, H]."""

    @staticmethod
    def forward(ctx: Any, made: Tensor, group: ProcessGroup, call: _Call) -> Tensor:
        ctx.group, ctx.call = group, call
        return PartialSums(made, group).result()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        every, arrival = begin_gather(gradients[0], ctx.group)
        # a block under gradient checkpointing runs again as soon as something that it saved is asked for: here, while
        # the gradients are under way, and not where the experts need them
        _ = ctx.call.chosen.saved_tensors
        arrival.wait()
        return every, None, None
