"""Expert parallelism without routing: every rank of a group gets the rows of all of them, computes what its own experts
add to each, and the sums go back to the rows' owners.

With P ranks and k experts a row, a row has choices on nearly every rank as long as P is below k, so routing rows one by
one would send as much; here all shapes are known on the host, which never waits for the device, and the experts see
their rows where they arrive. Memory: buffers of P times a rank's rows, twice what the choices fill for P = 2.

Shapes: P ranks of a group; E experts; S rows of a rank, H hidden size, k experts of a row; R rows that each rank sends.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup

from train.ops.lora_types import ExpertLora
from train.parallel.exchange import all_to_all
from train.parallel.expert_local import NO_EXPERT, local_lora, local_part


class GatheredExperts:
    """A moe_experts op of one rank's experts as one of all experts, with the same signature; gate_up and down are
    DTensors that are sharded over the group. rows: R, what the rows of any rank are filled up to."""

    def __init__(self, compute: Callable[..., Tensor], group: ProcessGroup, rows: int) -> None:
        self.compute, self.group, self.rows = compute, group, rows
        self.size, self.rank = group.size(), group.rank()

    def __call__(
        self,
        x: Tensor,
        expert_ids: Tensor,
        weights: Tensor,
        gate_up: Tensor,
        down: Tensor,
        lora: ExpertLora | None = None,
    ) -> Tensor:
        """[S, H]; see `train.ops.moe`. ValueError: more rows than were agreed on."""
        count = len(x)
        if count > self.rows:
            raise ValueError(
                f"{count} rows of a rank, where experts over {self.size} ranks were set up for at most {self.rows}; "
                "write train.accelerator.expert_dispatch: all_to_all, or shorter sequences"
            )
        gate_up, down = local_part(gate_up), local_part(down)
        missing = self.rows - count
        if missing:
            padding = (0, 0, 0, missing)
            x, weights = F.pad(x, padding), F.pad(weights, padding)
            expert_ids = F.pad(expert_ids, padding, value=NO_EXPERT)
        every_x, every_weight, every_id = _GatherRows.apply(x, weights, expert_ids, self.group)
        ids = self._own(every_id, len(gate_up))
        made = self.compute(every_x, ids, every_weight, gate_up, down, local_lora(lora, self.rank, len(gate_up)))
        found: Tensor = _SumParts.apply(made, self.group)
        return found[:count] if missing else found

    def _own(self, ids: Tensor, experts: int) -> Tensor:
        """Numbers of the experts among this rank's own, `NO_EXPERT` for others."""
        own = ids - self.rank * experts
        return own.masked_fill_((own < 0) | (own >= experts), NO_EXPERT)


class _GatherRows(torch.autograd.Function):
    """Rows, weights and ids of all ranks, in their order; gradients are summed over the ranks that made them."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weights: Tensor, ids: Tensor, group: ProcessGroup
    ) -> tuple[Tensor, Tensor, Tensor]:
        ctx.group = group
        every_id = gather_rows(ids, group)
        ctx.mark_non_differentiable(every_id)
        return gather_rows(x, group), gather_rows(weights, group), every_id

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None, None]:
        return sum_parts(gradients[0], ctx.group), sum_parts(gradients[1], ctx.group), None, None


class _SumParts(torch.autograd.Function):
    """Of what every rank adds to the rows of all, [P * R, H], the sum for this rank's own [R, H]."""

    @staticmethod
    def forward(ctx: Any, made: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return sum_parts(made, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gather_rows(gradients[0], ctx.group), None


def gather_rows(x: Tensor, group: ProcessGroup) -> Tensor:
    """[P * R, ...] of every rank's x [R, ...]; a collective call."""
    every = x.new_empty((group.size() * len(x), *x.shape[1:]))
    dist.all_gather_into_tensor(every, x.contiguous(), group=group)
    return every


def sum_parts(made: Tensor, group: ProcessGroup) -> Tensor:
    """[R, ...], the sum of all ranks' parts [P * R, ...] for this rank's rows, in float32 and in the order of the
    ranks; a collective call."""
    parts = all_to_all(made, None, None, group).unflatten(0, (group.size(), -1))
    return parts.sum(0)
