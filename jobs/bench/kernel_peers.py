"""What the kernels are measured against in the same run: plain torch here, other packages where they are installed."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

Experts = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
Loss = Callable[[Tensor, Tensor, Tensor], Tensor]


def find(module: str, name: str) -> Callable[..., Any] | None:
    """A function of another package, or None, said once, when it does not import."""
    try:
        found: Callable[..., Any] = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, RuntimeError, AssertionError) as error:
        print(f"not measured: {module}.{name}: {type(error).__name__}: {error}")
        return None
    return found


def grouped_experts(x: Tensor, ids: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """The layer by `torch._grouped_mm` and index operations; made to be compiled."""
    tokens, k = ids.shape
    flat = ids.reshape(-1)
    order = flat.argsort(stable=True)
    counts = torch.zeros(gate_up.shape[0], dtype=torch.int32, device=x.device)
    ends = counts.scatter_add_(0, flat, torch.ones_like(flat, dtype=torch.int32)).cumsum(0, dtype=torch.int32)
    gate, up = torch._grouped_mm(x[order // k], gate_up.transpose(1, 2), offs=ends).chunk(2, dim=-1)
    out = torch._grouped_mm(F.silu(gate) * up, down.transpose(1, 2), offs=ends)
    out = out[order.argsort()].view(tokens, k, -1)
    return (out.float() * weights[..., None]).sum(1).to(x.dtype)


def loop_experts(x: Tensor, ids: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """One expert after another; also the reference in float32."""
    out = torch.zeros_like(x, dtype=torch.float32)
    for expert in range(gate_up.shape[0]):
        rows, slots = (ids == expert).nonzero(as_tuple=True)
        gate, up = F.linear(x[rows], gate_up[expert]).chunk(2, dim=-1)
        y = F.linear(F.silu(gate) * up, down[expert])
        out = out.index_add(0, rows, y.float() * weights[rows, slots, None])
    return out.to(x.dtype)


def experts() -> dict[str, Experts]:
    """Name -> experts layer."""
    found: dict[str, Experts] = {"compiled grouped_mm": torch.compile(grouped_experts, dynamic=False)}
    fused = find("veomni.ops.kernels.moe.group_gemm", "group_gemm_fused_moe_forward")
    if fused is not None:

        def veomni(x: Tensor, ids: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
            out: Tensor = fused(gate_up.shape[0], weights.to(x.dtype), ids, x, None, None, down, gate_up)
            return out

        found["veomni triton"] = veomni
    return found


def losses() -> dict[str, Loss]:
    """Name -> sum of the losses over the tokens, divided by their number, of (hidden, weight, labels)."""
    found: dict[str, Loss] = {}
    liger = find("liger_kernel.transformers.functional", "liger_fused_linear_cross_entropy")
    if liger is not None:
        found["liger"] = lambda hidden, weight, labels: liger(hidden, weight, labels)
    chunk = find("veomni.ops.kernels.cross_entropy.chunk_loss", "chunk_loss_function")
    if chunk is not None:
        found["veomni chunk_loss"] = lambda hidden, weight, labels: chunk(hidden[None], weight, labels[None])[0]
    return found
