"""A linear layer with a low-rank update (LoRA, arXiv:2106.09685) as one node of autograd.

Shapes: N rows, r rank.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from train.ops.recorded import Kind, Recording, recording_of


def lora_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, a: Tensor, b: Tensor, scale: float,
    *, dropped: Tensor | None = None, kind: Kind | None = None,
) -> Tensor:  # fmt: skip
    """x @ weight.T + bias + scale * (dropped @ a.T) @ b.T, all of one dtype; the update is added to the rounded product
    of the base and the sum rounded once.

    x: [..., in]; weight: [out, in]; bias: [out]; a: [r, in]; b: [out, r]; dropped: what the update reads, None = x;
    kind: of result that a block which is computed again may keep (`train.ops.recorded`), None = none. It saves the
    product of the second run, all but a's.
    """
    recording = None if kind is None else recording_of(kind)
    if torch.is_autocast_enabled(x.device.type):  # as a linear layer of torch would
        dtype = torch.get_autocast_dtype(x.device.type)
        x, weight, a, b = (t.to(dtype) for t in (x, weight, a, b))
        bias, dropped = (None if t is None else t.to(dtype) for t in (bias, dropped))
    out: Tensor = _LoraLinear.apply(recording, kind, scale, x, dropped, weight, bias, a, b)
    return out


class _LoraLinear(Function):
    """Saves what the gradients that are asked for need."""

    @staticmethod
    def forward(
        ctx: Any, recording: Recording | None, kind: Kind, scale: float, x: Tensor, dropped: Tensor | None,
        weight: Tensor, bias: Tensor | None, a: Tensor, b: Tensor,
    ) -> Tensor | None:  # fmt: skip
        of_x, of_dropped, of_weight, _, of_a, of_b = ctx.needs_input_grad[3:]
        read = x if dropped is None else dropped
        low = F.linear(read, a)

        def compute() -> tuple[Tensor]:
            out = F.linear(x, weight, bias)
            out.view(-1, out.shape[-1]).addmm_(low.view(-1, low.shape[-1]), b.t(), alpha=scale)
            return (out,)

        of_read = of_x if dropped is None else of_dropped
        ctx.scale, ctx.apart = scale, dropped is not None
        ctx.save_for_backward(
            x if of_weight else None,
            read if of_a else None,
            low if of_b else None,
            weight if of_x else None,
            a if of_read else None,
            b if of_read or of_a else None,
        )
        return compute()[0] if recording is None else recording.results(kind, compute)[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        x, read, low, weight, a, b = ctx.saved_tensors
        rows = dout.reshape(-1, dout.shape[-1])
        dx = None if weight is None else rows @ weight
        dlow = None if b is None else (rows @ b).mul_(ctx.scale)
        dread = da = db = None
        if a is not None:
            assert dlow is not None, "the update's gradient comes with a's"
            if dx is None or ctx.apart:
                dread = dlow @ a
            else:
                dx.addmm_(dlow, a)
        if read is not None:
            assert dlow is not None, "the update's gradient comes with b"
            da = dlow.t() @ read.reshape(-1, read.shape[-1])
        if low is not None:
            db = (rows.t() @ low.view(-1, low.shape[-1])).mul_(ctx.scale)
        dweight = None if x is None else rows.t() @ x.reshape(-1, x.shape[-1])
        dbias = rows.sum(0) if ctx.needs_input_grad[6] else None
        shaped = [None if d is None else d.view(*dout.shape[:-1], d.shape[1]) for d in (dx, dread)]
        return None, None, None, *shaped, dweight, dbias, da, db
