"""The operations written out in float64, row by row, and the comparison with a backend: values and every gradient."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 4e-3}


def compare(
    backend: Callable[..., Any],
    reference: Callable[..., Any],
    inputs: Mapping[str, Tensor],
    *,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    keep: Sequence[str] = (),
    tolerance: float | None = None,
    gradients: bool = True,
    reference_device: str = "cpu",
) -> None:
    """Both functions of the same inputs, those rounded to dtype first; `keep` names inputs that stay float32. The
    error is relative to the largest value of each result. reference_device: where the reference runs, in float64."""
    rounded = {
        name: x.to(torch.float32 if name in keep else dtype) if x.is_floating_point() else x
        for name, x in inputs.items()
    }
    ours = {name: _leaf(x.to(device), gradients) for name, x in rounded.items()}
    exact = {name: x.to(reference_device) for name, x in rounded.items()}
    theirs = {name: _leaf(x.double() if x.is_floating_point() else x, gradients) for name, x in exact.items()}
    found, wanted = _tuple(backend(**ours)), _tuple(reference(**theirs))
    limit = TOLERANCE[dtype] if tolerance is None else tolerance
    assert len(found) == len(wanted)
    generator = torch.Generator().manual_seed(7)
    pairs = []
    for i, (a, b) in enumerate(zip(found, wanted, strict=True)):
        assert a.shape == b.shape, f"output {i}"
        _close(a, b, limit, f"output {i}")
        if b.requires_grad:
            pairs.append((a, b, torch.randn(b.shape, generator=generator, dtype=torch.float64)))
    if not gradients:
        return
    torch.autograd.backward([b for _, b, _ in pairs], [g.to(reference_device) for _, _, g in pairs])
    torch.autograd.backward([a for a, _, _ in pairs], [g.to(a.dtype).to(device) for a, _, g in pairs])
    largest = max((_size(x.grad) for x in theirs.values() if x.grad is not None), default=0.0)
    for name, x in theirs.items():
        if x.requires_grad:
            wanted_grad = torch.zeros_like(x) if x.grad is None else x.grad
            found_grad = torch.zeros_like(ours[name]) if ours[name].grad is None else ours[name].grad
            assert found_grad is not None and found_grad.dtype == ours[name].dtype
            _close(found_grad, wanted_grad, limit, f"gradient of {name}", floor=1e-2 * largest)


def _leaf(x: Tensor, gradients: bool) -> Tensor:
    return x.detach().clone().requires_grad_(gradients and x.is_floating_point())


def _tuple(result: Any) -> tuple[Tensor, ...]:
    return (result,) if isinstance(result, Tensor) else tuple(result)


def _size(x: Tensor) -> float:
    return float(x.detach().abs().max()) if x.numel() else 0.0


def _close(found: Tensor, wanted: Tensor, limit: float, what: str, floor: float = 1e-6) -> None:
    """floor: what counts as the largest value of a result that is all but zero."""
    assert bool(torch.isfinite(found).all()), f"{what} is not finite"
    size = max(_size(wanted), floor, 1e-6)
    worst = _size(found.detach().cpu().double() - wanted.detach().cpu())
    assert worst <= limit * size, f"{what} is off by {worst / size:.2e} of its largest value, allowed {limit:.0e}"


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: Sequence[int],
    causal: bool,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
) -> Tensor:
    groups = q.shape[1] // k.shape[1]
    documents, start = [], 0
    for length in lengths:
        rows = slice(start, start + length)
        keys, values = (x[rows][:, [head // groups for head in range(q.shape[1])]] for x in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q[rows], keys) * (scale or 1 / math.sqrt(q.shape[-1]))
        if softcap is not None:
            scores = torch.tanh(scores / softcap) * softcap
        if causal:
            scores = scores + torch.full_like(scores[0], -math.inf).triu(1)
        if window is not None:
            scores = scores + torch.full_like(scores[0], -math.inf).tril(-window)
        documents.append(torch.einsum("hqk,khd->qhd", torch.softmax(scores, -1), values))
        start += length
    return torch.cat(documents) if documents else v.repeat_interleave(groups, 1)


def moe_experts(
    x: Tensor,
    expert_ids: Tensor,
    weights: Tensor,
    gate_up: Tensor,
    down: Tensor,
    lora: Mapping[str, Tensor] | None = None,
    scale: float = 1.0,
) -> Tensor:
    experts, width = down.shape[0], down.shape[2]
    if lora is not None:
        full = {
            name: torch.einsum("eor,eri->eoi", *(lora[f"{name}_{s}"].expand(experts, -1, -1) for s in "ba")) * scale
            for name in ("gate", "up", "down")
        }
        gate_up, down = gate_up + torch.cat((full["gate"], full["up"]), 1), down + full["down"]
    out = []
    for t in range(x.shape[0]):
        row = torch.zeros_like(x[t])
        for j in range(expert_ids.shape[1]):
            e = int(expert_ids[t, j])
            if 0 <= e < experts:
                gate, up = (gate_up[e] @ x[t]).split(width)
                row = row + weights[t, j] * (down[e] @ (gate * torch.sigmoid(gate) * up))
        out.append(row)
    return torch.stack(out) if out else x * 1


def cross_entropy(
    hidden: Tensor, weight: Tensor, labels: Tensor, scale: Tensor, smoothing: float, z_loss: float
) -> tuple[Tensor, Tensor]:
    rows = []
    for t, label in enumerate(labels.tolist()):
        if label == -100:
            rows.append(hidden[t].sum() * 0)
            continue
        logits = weight @ hidden[t]
        total = torch.log(torch.exp(logits - logits.max()).sum()) + logits.max()
        target = torch.full_like(logits, smoothing / len(logits))
        target[label] += 1 - smoothing
        rows.append((target * (total - logits)).sum() + z_loss * total**2)
    per_row = torch.stack(rows) if rows else hidden.new_zeros(0)
    return (per_row * scale.detach()).sum() + 0 * hidden.sum(), per_row.detach()


def rms_norm(x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None) -> tuple[Tensor, Tensor]:
    total = x if residual is None else x + residual
    return total / torch.sqrt((total**2).sum(-1, keepdim=True) / total.shape[-1] + eps) * weight, total


def layer_norm(
    x: Tensor, weight: Tensor, bias: Tensor, eps: float, residual: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    total = x if residual is None else x + residual
    deviation = total - total.sum(-1, keepdim=True) / total.shape[-1]
    variance = (deviation**2).sum(-1, keepdim=True) / total.shape[-1]
    return deviation / torch.sqrt(variance + eps) * weight + bias, total


def rope(x: Tensor, weight: Tensor | None, cos: Tensor, sin: Tensor, eps: float) -> Tensor:
    if weight is not None:
        x = rms_norm(x, weight, eps)[0]
    pairs = cos.shape[1]
    turned = torch.complex(x[..., :pairs], x[..., pairs : 2 * pairs]) * torch.complex(cos, sin)[:, None]
    return torch.cat((turned.real, turned.imag, x[..., 2 * pairs :]), -1)


def router_statistics(logits: Tensor, expert_ids: Tensor, num_valid: int) -> tuple[Tensor, Tensor]:
    counts = torch.zeros(logits.shape[1], dtype=torch.float64)
    sums = torch.zeros(logits.shape[1], dtype=torch.float64)
    for t in range(num_valid):
        for e in expert_ids[t].tolist():
            counts[e] += 1
        powers = torch.exp(logits[t])
        sums = sums + powers / powers.sum()
    return counts, sums
