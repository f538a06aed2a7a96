"""The language-model head together with its loss, whole logits never in memory; the backend `fused_triton`.

Rows are taken in chunks whose logits fill about `CHUNK_BYTES`: a chunk of 4096 rows keeps the matrix products at full
rate, where chunks of a few hundred rows do not. One kernel turns a chunk's logits into their gradient in place and
gives the loss of each row. The weight's gradient is summed in float32 over the chunks. The gradients are made in the
forward pass, as in Liger-Kernel (arXiv:2410.10989); the backward pass multiplies them by the incoming scalar, which
stays on the device. There is no host sync.

One H200, V = 151,936, H = 2048, bfloat16, forward and backward: 24.3 ms at T = 8192 and 95 to 98 ms at 32768, 80 and
79 to 81 % of 790 TFLOP/s, in 2.35 and 2.45 GiB with both gradients. Liger-Kernel 0.8.5 took 2.3 and 1.13 times as
long, VeOmni 0.1.12's chunk_loss 1.7 times. The products take 22 of the 24 ms; the kernel 1.0 ms for each 4096 rows.
Chunks of half the size take 2.5 % longer and 0.6 GiB less; larger blocks of columns in the kernel up to 80 % longer.

Shapes: T rows, H hidden size, V vocabulary.
"""

# kernels take pointers, which have no type here
# mypy: disallow-untyped-defs=False, check-untyped-defs=False

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from train.ops.linear_cross_entropy import IGNORED, CrossEntropy
from train.ops.triton_tiles import INTERPRETED

CHUNK_BYTES = 1_250_000_000  # 4096 rows of 151,936 bfloat16 logits
ROWS = 128  # chunks are multiples of it, but the last


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    scale: Tensor,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
) -> CrossEntropy:
    """loss = sum of scale * the labelled rows' losses, as `linear_cross_entropy.eager`.

    hidden: [T, H]; weight: [V, H] of the same dtype; labels: int64 [T], already shifted, -100 = none, any other number
    outside [0, V) makes the loss NaN; scale: float32 on the device, a scalar or contiguous [T], without gradient.
    """
    enabled = torch.is_grad_enabled()  # within the function gradients are always off
    wanted = (enabled and hidden.requires_grad, enabled and weight.requires_grad)
    loss, token_loss = _LinearCrossEntropy.apply(
        hidden.contiguous(), weight, labels.contiguous(), scale.contiguous(), label_smoothing, z_loss, wanted
    )
    return CrossEntropy(loss, token_loss)


def chunk_rows(rows: int, row_bytes: int) -> int:
    """Rows of a chunk: equal chunks, as few as `CHUNK_BYTES` allows."""
    most = max(ROWS, CHUNK_BYTES // row_bytes // ROWS * ROWS)
    chunks = max(1, triton.cdiv(rows, most))
    return max(1, triton.cdiv(triton.cdiv(rows, chunks), ROWS)) * ROWS


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor, scale: Tensor, label_smoothing: float, z_loss: float,
        wanted: tuple[bool, bool],
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        rows, vocabulary = hidden.shape[0], weight.shape[0]
        need_hidden, need_weight = wanted
        size = chunk_rows(rows, vocabulary * hidden.element_size())
        token_loss = torch.zeros(rows, dtype=torch.float32, device=hidden.device)
        dhidden = torch.empty_like(hidden) if need_hidden else None
        whole = torch.float32 if size < rows else weight.dtype  # one chunk needs no sum of several
        dweight = torch.empty_like(weight, dtype=whole) if need_weight else None
        buffer = hidden.new_empty(min(size, rows), vocabulary)
        logits = buffer
        for start in range(0, rows, size):
            part = slice(start, min(start + size, rows))
            logits = buffer[: part.stop - start]
            torch.mm(hidden[part], weight.t(), out=logits)
            by = scale[part] if scale.ndim else scale
            _losses(logits, labels[part], by, token_loss[part], label_smoothing, z_loss, need_hidden or need_weight)
            if dhidden is not None:
                torch.mm(logits, weight, out=dhidden[part])
            if dweight is not None:
                _accumulate(dweight, logits, hidden[part], first=start == 0)
        del buffer, logits  # before the weight's gradient is rounded, which takes room of its own
        if dweight is not None:
            dweight = dweight.to(weight.dtype) if rows else dweight.zero_()
        ctx.save_for_backward(dhidden, dweight)
        ctx.mark_non_differentiable(token_loss)
        return (token_loss * scale).sum() if scale.ndim else token_loss.sum() * scale, token_loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dloss: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        gradients = ctx.saved_tensors
        for gradient in gradients:
            if gradient is not None:
                _multiply(gradient, dloss)
                torch.autograd.graph.increment_version(
                    gradient
                )  # a second backward pass would multiply twice: it fails
        return *gradients, None, None, None, None, None


@triton.jit
def _losses_kernel(
    logits, labels, scale, token_loss, stride, vocabulary, smoothing, z_loss, NONE: tl.constexpr,
    GRADIENT: tl.constexpr, BLOCK: tl.constexpr, ROW_SCALES: tl.constexpr,
):  # fmt: skip
    """One row of logits [V] -> its loss, and in place its gradient times scale, its own one with ROW_SCALES.

    loss = (1 - smoothing) * (lse - x[label]) + smoothing * (lse - mean(x)) + z_loss * lse^2;
    d loss / dx = softmax(x) * (1 + 2 * z_loss * lse) - (1 - smoothing) * onehot - smoothing / V.
    """
    row = tl.program_id(0).to(tl.int64)
    line = logits + row * stride
    label = tl.load(labels + row)
    lane = tl.arange(0, BLOCK)
    if label == NONE:
        if GRADIENT:
            for start in range(0, vocabulary, BLOCK):
                tl.store(
                    line + start + lane, tl.zeros((BLOCK,), logits.dtype.element_ty), mask=start + lane < vocabulary
                )
    else:
        known = (label >= 0) & (label < vocabulary)
        target = tl.load(line + label, mask=known, other=float("nan")).to(tl.float32)
        top = float("-inf")
        sums = tl.zeros((BLOCK,), tl.float32)
        plain = tl.zeros((BLOCK,), tl.float32)
        for start in range(0, vocabulary, BLOCK):
            inside = start + lane < vocabulary
            x = tl.load(line + start + lane, mask=inside, other=float("-inf")).to(tl.float32)
            new_top = tl.maximum(top, tl.max(x, 0))
            sums = sums * tl.exp(top - new_top) + tl.exp(x - new_top)
            plain += tl.where(inside, x, 0.0)
            top = new_top
        lse = top + tl.log(tl.sum(sums, 0))
        mean = tl.sum(plain, 0) / vocabulary
        loss = lse - (1.0 - smoothing) * target - smoothing * mean + z_loss * lse * lse
        tl.store(token_loss + row, loss)
        if GRADIENT:
            factor = tl.load(scale + row if ROW_SCALES else scale).to(tl.float32)
            spread = smoothing / vocabulary * factor
            peak = (1.0 + 2.0 * z_loss * lse) * factor
            last = (vocabulary - 1) // BLOCK * BLOCK
            for back in range(0, vocabulary, BLOCK):  # from the end, whose logits are still in the cache
                column = last - back + lane
                inside = column < vocabulary
                x = tl.load(line + column, mask=inside, other=float("-inf")).to(tl.float32)
                gradient = tl.exp(x - lse) * peak - spread
                gradient -= tl.where(column == label, (1.0 - smoothing) * factor, 0.0)
                tl.store(line + column, gradient.to(logits.dtype.element_ty), mask=inside)


@triton.jit
def _multiply_kernel(values, factor, size, BLOCK: tl.constexpr):
    by = tl.load(factor).to(tl.float32)
    if by != 1.0:  # known on the device only: no sync, and no pass over memory in the usual case
        at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        found = tl.load(values + at, mask=at < size, other=0.0)
        tl.store(values + at, (found.to(tl.float32) * by).to(values.dtype.element_ty), mask=at < size)


def _losses(
    logits: Tensor, labels: Tensor, scale: Tensor, token_loss: Tensor, smoothing: float, z_loss: float, gradient: bool
) -> None:
    rows, vocabulary = logits.shape
    block = 32 if INTERPRETED.value else min(4096, triton.next_power_of_2(vocabulary))
    _losses_kernel[(rows,)](
        logits, labels, scale, token_loss, logits.stride(0), vocabulary, smoothing, z_loss,
        NONE=IGNORED, GRADIENT=gradient, BLOCK=block, ROW_SCALES=scale.ndim == 1,
        num_warps=max(4, min(16, block // 512)),
    )  # fmt: skip


def _multiply(values: Tensor, factor: Tensor) -> None:
    """values *= factor, a scalar on the device, in place."""
    if values.numel():
        _multiply_kernel[(triton.cdiv(values.numel(), 4096),)](values, factor, values.numel(), BLOCK=4096, num_warps=8)


def _accumulate(total: Tensor, a: Tensor, b: Tensor, first: bool) -> None:
    """total [V, H] = a.T @ b, or += when not the first; a [rows, V], b [rows, H] may be narrower than total."""
    if total.dtype == a.dtype:
        total.addmm_(a.t(), b, beta=0 if first else 1)
    elif a.is_cuda:
        if first:
            torch.mm(a.t(), b, out_dtype=total.dtype, out=total)
        else:
            torch.addmm(total, a.t(), b, out_dtype=total.dtype, out=total)
    else:
        total.addmm_(a.t().to(total.dtype), b.to(total.dtype), beta=0 if first else 1)
