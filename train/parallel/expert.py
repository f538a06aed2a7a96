"""Expert parallelism (GShard, arXiv:2006.16668): each rank of a group holds some experts of every layer; rows travel to
the ranks that have experts which they chose, once to each, and their results come back.

Shapes: P ranks of a group; E experts; S rows of a rank, H hidden size, k experts of a row; M rows that a rank sends, R
rows that it receives, C choices of its experts by these.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup

from train.ops.lora_types import ExpertLora
from train.parallel.exchange import all_to_all, exchange_rows
from train.parallel.expert_local import NO_EXPERT, local_lora
from train.parallel.loading import local_part


class Copies(NamedTuple):
    """Rows that are copied to several places and summed again. rows: int64 [N], the row that each copy is of; place:
    int64 [S, m], where the copies of each row are, N where there is none."""

    rows: Tensor
    place: Tensor


class Dispatch(NamedTuple):
    """Where the rows of one layer go. sent: the M copies, ordered by rank; ids: int64 [M, k], numbers of the experts on
    the rank that a copy goes to, -1 for those elsewhere; send, recv: rows to and from each rank; choices: C."""

    sent: Copies
    ids: Tensor
    send: list[int]
    recv: list[int]
    choices: int


class ExpertParallel:
    """A moe_experts op of one rank's experts as one of all experts, with the same signature; gate_up and down are
    DTensors that are sharded over the group. Expert ids lie in [0, E). Five all-to-alls, of counts, ids, weights, rows
    and results, and one wait for the device, which tells the host how many rows travel."""

    def __init__(self, compute: Callable[..., Tensor], group: ProcessGroup) -> None:
        self.compute, self.group = compute, group
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
        """[S, H]; see `train.ops.moe`."""
        plan = self.plan(expert_ids, gate_up.shape[0])
        gate_up, down = local_part(gate_up), local_part(down)
        ids = all_to_all(plan.ids, plan.send, plan.recv, self.group)  # [R, k]
        shares = exchange_rows(_spread(weights, plan.sent), plan.send, plan.recv, self.group)
        rows = exchange_rows(_spread(x, plan.sent), plan.send, plan.recv, self.group)
        experts = gate_up, down, local_lora(lora, self.rank, len(gate_up))
        made = self._compute(rows, ids, shares, plan.choices, experts)
        return _collect(exchange_rows(made, plan.recv, plan.send, self.group), plan.sent)

    @torch.no_grad()
    def plan(self, expert_ids: Tensor, experts: int) -> Dispatch:
        """Of int64 [S, k] ids."""
        own, ranks = experts // self.size, torch.arange(self.size, device=expert_ids.device)
        there = expert_ids.div(own, rounding_mode="floor") == ranks[:, None, None]  # [P, S, k]
        goes = there.any(-1)
        leaving = torch.stack([goes.sum(1), there.sum((1, 2))], 1)  # rows and choices, [P, 2]
        arriving = all_to_all(leaving, None, None, self.group)
        counts = torch.cat([leaving[:, 0], arriving[:, 0], arriving[:, 1].sum()[None]]).tolist()  # waits for the device
        send, recv, choices = counts[: self.size], counts[self.size : -1], counts[-1]
        flat, place = _compact(goes.flatten(), sum(send))
        rank, row = flat.div(len(expert_ids), rounding_mode="floor"), flat.remainder(len(expert_ids))
        ids = torch.where(there[rank, row], expert_ids[row] - own * rank[:, None], NO_EXPERT)
        return Dispatch(Copies(row, place.view(self.size, -1).T), ids, send, recv, choices)

    def _compute(
        self, rows: Tensor, ids: Tensor, shares: Tensor, choices: int, experts: tuple[Tensor, Tensor, ExpertLora | None]
    ) -> Tensor:
        """[R, H] of received rows [R, H], ids and weights [R, k]; each choice is a row of its own, none is empty."""
        flat, place = _compact((ids != NO_EXPERT).flatten(), choices)
        each = Copies(flat.div(ids.shape[1], rounding_mode="floor"), place.view_as(ids))
        chosen = _spread(rows, each)
        chosen_ids = ids.flatten()[flat][:, None]
        chosen_shares = _spread(shares.reshape(-1, 1), Copies(flat, place[:, None]))
        if not choices:  # the experts still take part in the backward pass
            padding = (0, 0, 0, 1)
            chosen, chosen_shares = F.pad(chosen, padding), F.pad(chosen_shares, padding)
            chosen_ids = F.pad(chosen_ids, padding, value=NO_EXPERT)
        return _collect(self.compute(chosen, chosen_ids, chosen_shares, *experts)[:choices], each)


class _Spread(torch.autograd.Function):
    """Copies of rows; the gradient of a row is the sum over its copies."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: Tensor, place: Tensor) -> Tensor:
        ctx.save_for_backward(place)
        return x[rows]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (place,) = ctx.saved_tensors
        return _sum_copies(gradients[0], place), None, None


class _Collect(torch.autograd.Function):
    """The sum over the copies of each row: the transpose of `_Spread`."""

    @staticmethod
    def forward(ctx: Any, made: Tensor, rows: Tensor, place: Tensor) -> Tensor:
        ctx.save_for_backward(rows)
        return _sum_copies(made, place)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (rows,) = ctx.saved_tensors
        return gradients[0][rows], None, None


def _spread(x: Tensor, copies: Copies) -> Tensor:
    """[N, H] of x [S, H]."""
    found: Tensor = _Spread.apply(x, *copies)
    return found


def _collect(made: Tensor, copies: Copies) -> Tensor:
    """[S, H] of made [N, H]."""
    found: Tensor = _Collect.apply(made, *copies)
    return found


def _sum_copies(x: Tensor, place: Tensor) -> Tensor:
    """[S, H] of x [N, H], summed in float32 at least, always in the same order."""
    if not len(x):
        return x.new_zeros(len(place), x.shape[1])
    copies = x[place.clamp(max=len(x) - 1)].masked_fill_((place == len(x))[..., None], 0)
    return copies.sum(1, dtype=torch.promote_types(x.dtype, torch.float32)).to(x.dtype)


def _compact(chosen: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """(int64 [count], the indexes where chosen, bool [N], is true; int64 [N], the place of each among them, count where
    it is false), without waiting for the device."""
    place = torch.where(chosen, chosen.cumsum(0) - 1, count)
    numbers = torch.arange(len(chosen), device=chosen.device)
    return numbers.new_empty(count + 1).scatter_(0, place, numbers)[:count], place
