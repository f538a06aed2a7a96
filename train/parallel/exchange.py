"""All-to-all of rows between the ranks of a group, with its gradient."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup, Work

Counts = Sequence[int] | None


class _AllToAll(torch.autograd.Function):
    """Forward: rows go to other ranks. Backward: their gradients come back the same way."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, send: Counts, recv: Counts, group: ProcessGroup) -> Tensor:
        ctx.send, ctx.recv, ctx.group = send, recv, group
        return all_to_all(x, send, recv, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        return all_to_all(gradients[0], ctx.recv, ctx.send, ctx.group), None, None, None


def all_to_all(x: Tensor, send: Counts, recv: Counts, group: ProcessGroup) -> Tensor:
    """`exchange_rows` without a gradient, of tensors of any dtype."""
    rows = len(x) if recv is None else sum(recv)
    out = x.new_empty((rows, *x.shape[1:]))
    dist.all_to_all_single(out, x.contiguous(), _listed(recv), _listed(send), group=group)
    return out


class PartialSums:
    """Of what every rank of a group makes for the rows of all, made [P * R, ...] in the order of the ranks, the sum for
    this rank's own rows, on its way; a collective call. made must not change until `result`."""

    def __init__(self, made: Tensor, group: ProcessGroup) -> None:
        self.rank, ranks = group.rank(), group.size()
        self.parts = made.contiguous().unflatten(0, (ranks, -1))
        # its own part stays where it is
        before, after = self.parts[: self.rank], self.parts[self.rank + 1 :]
        sent = torch.cat([before, after]) if len(before) and len(after) else (before if len(before) else after)
        rows = self.parts.shape[1]
        counts = [rows * (rank != self.rank) for rank in range(ranks)]
        self.others = torch.empty_like(sent)
        received, sent = self.others.flatten(0, 1), sent.flatten(0, 1)
        work = dist.all_to_all_single(received, sent, counts, counts, group=group, async_op=True)
        self.work = _of_member(work)

    def result(self) -> Tensor:
        """[R, ...], each sum in float32 and in the order of the ranks. The device waits, not the host."""
        self.work.wait()
        own, others = self.parts[self.rank], self.others
        if len(others) == 1:
            return own + others[0]
        return torch.cat([others[: self.rank], own[None], others[self.rank :]]).sum(0)


def exchange_rows(x: Tensor, send: Counts, recv: Counts, group: ProcessGroup) -> Tensor:
    """[sum(recv), ...] of x [sum(send), ...]: send[r] rows of x, in order, go to rank r of the group, and recv[r] come
    from it, in the order of the ranks. None for both: equal shares.

    A collective call, in the backward pass too: x must require a gradient on every rank of the group or on none.
    """
    received: Tensor = _AllToAll.apply(x, send, recv, group)
    return received


def begin_gather(x: Tensor, group: ProcessGroup) -> tuple[Tensor, Work]:
    """([P * R, ...] of every rank's x [R, ...], in their order; what its arrival can be awaited by); a collective call.
    x must not change until then."""
    every = x.new_empty((group.size() * len(x), *x.shape[1:]))
    # where torch has the first name, the second one warns
    gather = dist.all_gather_single if hasattr(dist, "all_gather_single") else dist.all_gather_into_tensor
    arrival: Work | None = gather(every, x.contiguous(), group=group, async_op=True)
    return every, _of_member(arrival)


def _of_member(work: Work | None) -> Work:
    assert work is not None, "this rank is in the group"
    return work


def _listed(counts: Counts) -> list[int] | None:
    return None if counts is None else list(counts)
