"""Low-rank updates of fused experts."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class ExpertLora:
    """`W + scale * b @ a` for the three projections of every expert (LoRA, arXiv:2106.09685).

    a: [E, r, in], b: [E, out, r]; a first dimension of 1 is shared by all experts. gate and up read the hidden size H
    and give the expert's width I; down reads I and gives H.
    The matrices may be wider than the experts (float32 beside bfloat16); they are rounded to the dtype of the rows
    where they are used.
    """

    gate_a: Tensor
    gate_b: Tensor
    up_a: Tensor
    up_b: Tensor
    down_a: Tensor
    down_b: Tensor
    scale: float
