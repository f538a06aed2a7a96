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


def exchange_rows(x: Tensor, send: Counts, recv: Counts, group: ProcessGroup) -> Tensor:
    """[sum(recv), ...] of x [sum(send), ...]: send[r] rows of x, in order, go to rank r of the group, and recv[r] come
    from it, in the order of the ranks. None for both: equal shares.

    A collective call, in the backward pass too: x must require a gradient on every rank of the group or on none.
    """
    received: Tensor = _AllToAll.apply(x, send, recv, group)
    return received


def all_gather(out: Tensor, x: Tensor, group: ProcessGroup, *, wait: bool = True) -> Work | None:
    """out [P * n, ...] takes x [n, ...] of each of the P ranks, in their order; both contiguous. wait: False returns at
    once what the arrival can be awaited by; x must not change until then."""
    # where torch has the first name, the second one warns
    gather = dist.all_gather_single if hasattr(dist, "all_gather_single") else dist.all_gather_into_tensor
    work: Work | None = gather(out, x, group=group, async_op=not wait)
    return work


def _listed(counts: Counts) -> list[int] | None:
    return None if counts is None else list(counts)
