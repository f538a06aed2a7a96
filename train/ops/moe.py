"""The experts of a mixture-of-experts layer, one expert after another: what every backend must equal.

Shapes: T rows, H hidden size, k chosen experts per row, E experts, I width of an expert, r LoRA rank.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from train.ops.lora_types import ExpertLora


def eager(
    x: Tensor, expert_ids: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor, lora: ExpertLora | None = None
) -> Tensor:
    """[T, H] = sum over j of weights[t, j] * down[e] @ (silu(gate) * up), summed in float32.

    x: [T, H]; expert_ids: int64 [T, k], those outside [0, E) contribute nothing; weights: float32 [T, k];
    gate_up: [E, 2I, H], the gate's rows first; down: [E, H, I].
    """
    compute = torch.promote_types(x.dtype, torch.float32)
    out = torch.zeros_like(x, dtype=compute)
    for expert in range(gate_up.shape[0]):
        rows, slots = (expert_ids == expert).nonzero(as_tuple=True)
        inputs = x[rows]
        gate, up = F.linear(inputs, gate_up[expert]).chunk(2, dim=-1)
        if lora is not None:
            gate = gate + _update(inputs, lora.gate_a, lora.gate_b, expert) * lora.scale
            up = up + _update(inputs, lora.up_a, lora.up_b, expert) * lora.scale
        hidden = F.silu(gate) * up
        outputs = F.linear(hidden, down[expert])
        if lora is not None:
            outputs = outputs + _update(hidden, lora.down_a, lora.down_b, expert) * lora.scale
        out = out.index_add(0, rows, outputs.to(compute) * weights[rows, slots, None].to(compute))
    return out.to(x.dtype)


def _update(x: Tensor, a: Tensor, b: Tensor, expert: int) -> Tensor:
    """x [n, in] -> b @ a @ x [n, out] of one expert; a pair with one entry belongs to all."""
    a, b = a[expert % a.shape[0]].to(x.dtype), b[expert % b.shape[0]].to(x.dtype)
    return F.linear(F.linear(x, a), b)
