"""The head and its loss in chunks of rows, so that the logits are never whole. Gradients are made together with the
loss, since recomputing the logits would cost a third matrix product; nothing waits for the device."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from train.ops.compiled import compiled
from train.ops.linear_cross_entropy import IGNORED, CrossEntropy

# float32 logits of one chunk; on a GPU so many that a chunk's products keep it busy: 2560 rows of Qwen3's vocabulary
CHUNK_BYTES = {"cuda": 3 * 2**29, "cpu": 2**26}


def chunk_loss(
    hidden: Tensor, weight: Tensor, labels: Tensor, *, scale: Tensor, label_smoothing: float = 0.0, z_loss: float = 0.0
) -> CrossEntropy:
    """As `train.ops.linear_cross_entropy.eager`. The weight's gradient is summed over chunks in float32."""
    chunk = rows_per_chunk(weight.shape[0], CHUNK_BYTES.get(hidden.device.type, 2**26))
    wanted = torch.is_grad_enabled()
    loss, token_loss = _ChunkLoss.apply(
        hidden,
        weight,
        labels,
        scale,
        label_smoothing,
        z_loss,
        chunk,
        (wanted and hidden.requires_grad, wanted and weight.requires_grad),
    )
    return CrossEntropy(loss, token_loss)


def rows_per_chunk(vocabulary: int, chunk_bytes: int) -> int:
    """Rows whose float32 logits fit, whole tiles of 128 where there is room for one."""
    rows = max(1, chunk_bytes // (4 * vocabulary))
    return rows if rows < 128 else rows - rows % 128


class _ChunkLoss(Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        labels: Tensor,
        scale: Tensor,
        label_smoothing: float,
        z_loss: float,
        chunk: int,
        wanted: tuple[bool, bool],
    ) -> tuple[Tensor, Tensor]:
        to_hidden, to_weight = wanted
        wide = torch.promote_types(hidden.dtype, torch.float32)
        token_loss = torch.empty(hidden.shape[0], dtype=torch.float32, device=hidden.device)
        hidden_grad = torch.empty_like(hidden) if to_hidden else None
        weight_grad = torch.zeros(weight.shape, dtype=wide, device=weight.device) if to_weight else None
        loss = torch.zeros((), dtype=wide, device=hidden.device)
        key = (weight.shape[0], hidden.dtype, label_smoothing, z_loss, scale.ndim)
        step = compiled(rows_and_gradient, key) if hidden.is_cuda else rows_and_gradient
        for start in range(0, hidden.shape[0], chunk):
            part = slice(start, start + chunk)
            logits = _wide_product(hidden[part], weight.t())
            by = scale[part] if scale.ndim else scale
            rows, gradient = step(logits, labels[part], by, label_smoothing, z_loss, hidden.dtype)
            token_loss[part] = rows
            loss += (rows * by).sum() if scale.ndim else rows.sum() * scale
            if hidden_grad is not None:
                torch.mm(gradient, weight, out=hidden_grad[part])
            if weight_grad is not None:
                _add_product(weight_grad, gradient.t(), hidden[part])
        ctx.save_for_backward(hidden_grad, weight_grad if weight_grad is None else weight_grad.to(weight.dtype))
        ctx.mark_non_differentiable(token_loss)
        return loss, token_loss

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        hidden_grad, weight_grad = ctx.saved_tensors
        to_hidden = None if hidden_grad is None else hidden_grad * grad.to(hidden_grad.dtype)
        to_weight = None if weight_grad is None else weight_grad * grad.to(weight_grad.dtype)
        return to_hidden, to_weight, None, None, None, None, None, None


def rows_and_gradient(
    logits: Tensor, labels: Tensor, scale: Tensor, label_smoothing: float, z_loss: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """(loss of each row [n], gradient of the sum of scale * loss [n, V] in dtype). logits: [n, V] in float32,
    overwritten; scale: [] or [n]."""
    labelled = labels != IGNORED
    target = torch.where(labelled, labels, 0)[:, None]
    total = logits.logsumexp(dim=-1, keepdim=True)
    rows = total - (1 - label_smoothing) * logits.gather(1, target)
    if label_smoothing:
        rows = rows - label_smoothing * logits.mean(dim=-1, keepdim=True)
    factor = torch.where(labelled, scale, 0.0)[:, None]
    slope = factor
    if z_loss:
        rows = rows + z_loss * total.square()
        slope = factor * (1 + 2 * z_loss * total)
    gradient = logits.sub_(total).exp_().mul_(slope)
    if label_smoothing:
        gradient.sub_(factor * (label_smoothing / logits.shape[1]))
    gradient.scatter_add_(1, target, (label_smoothing - 1) * factor.to(gradient.dtype))
    return torch.where(labelled, rows[:, 0], 0.0), gradient.to(dtype)


def _wide_product(a: Tensor, b: Tensor) -> Tensor:
    """a @ b in float32 (float64 stays); on a GPU without rounding to the inputs' dtype in between."""
    if a.is_cuda and a.dtype in (torch.bfloat16, torch.float16):
        return torch.mm(a, b, out_dtype=torch.float32)
    return torch.mm(a, b).to(torch.promote_types(a.dtype, torch.float32))


def _add_product(out: Tensor, a: Tensor, b: Tensor) -> None:
    """out += a @ b; out is float32 whatever a and b are."""
    if out.dtype == a.dtype:
        out.addmm_(a, b)
    elif not a.is_cuda:
        out.add_(torch.mm(a.to(out.dtype), b.to(out.dtype)))
    elif _sums_wide(a.dtype):
        torch.addmm(out, a, b, out_dtype=out.dtype, out=out)
    else:
        out.add_(torch.mm(a, b, out_dtype=out.dtype))


@cache
def _sums_wide(dtype: torch.dtype) -> bool:
    """True when this torch adds products of 16-bit matrices onto a float32 one; earlier ones refuse."""
    one = torch.ones(8, 8, dtype=dtype, device="cuda")
    out = torch.zeros(8, 8, device="cuda")
    try:
        torch.addmm(out, one, one, out_dtype=torch.float32, out=out)
    except RuntimeError:
        return False
    return True
