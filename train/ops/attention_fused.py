"""The fused attention operators behind `scaled_dot_product_attention`, in halves that a block can keep results of.

Shapes: q [n, Hq, L, D], k [n, Hkv, L, D], v [n, Hkv, L, Dv]; no dropout, no mask but the causal one.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

from train.ops.recorded import AttentionOperators, Results

aten = torch.ops.aten
_PADDED_TO = 8  # torch pads heads of other sizes for flash attention on a GPU
Gradients = tuple[Tensor, Tensor, Tensor]


def fused_operators(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float | None, grouped: bool
) -> AttentionOperators | None:
    """Those that torch would choose for these tensors; None where it composes attention of plain operations."""
    number = torch._fused_sdp_choice(q, k, v, None, 0.0, causal, scale=scale, enable_gqa=grouped)
    chosen = SDPBackend(number)
    if chosen == SDPBackend.FLASH_ATTENTION and q.device.type == "cpu":
        return _flash_cpu(causal, scale)
    if not q.is_cuda or q.shape[-1] % _PADDED_TO or v.shape[-1] % _PADDED_TO:
        return None
    made: dict[SDPBackend, Callable[[bool, float | None], AttentionOperators]] = {
        SDPBackend.FLASH_ATTENTION: _flash,
        SDPBackend.EFFICIENT_ATTENTION: _efficient,
        SDPBackend.CUDNN_ATTENTION: cudnn_operators,
    }
    return made[chosen](causal, scale) if chosen in made else None


def cudnn_operators(causal: bool, scale: float | None) -> AttentionOperators:
    """cuDNN's; bfloat16 or float16, heads of multiples of 8."""

    def forward(q: Tensor, k: Tensor, v: Tensor) -> Results:
        found = aten._scaled_dot_product_cudnn_attention.default(q, k, v, None, True, 0.0, causal, False, scale=scale)
        out, logsumexp, _, _, _, _, seed, offset, _ = found
        return out, logsumexp, seed, offset

    def backward(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, *rest: Tensor) -> Gradients:
        bias = bounds_q = bounds_k = None
        gradients: Gradients = aten._scaled_dot_product_cudnn_attention_backward.default(
            dout, q, k, v, out, *rest, bias, bounds_q, bounds_k, q.shape[-2], k.shape[-2], 0.0, causal, scale=scale
        )
        return gradients

    return AttentionOperators(forward, backward)


def _flash(causal: bool, scale: float | None) -> AttentionOperators:
    def forward(q: Tensor, k: Tensor, v: Tensor) -> Results:
        found = aten._scaled_dot_product_flash_attention.default(q, k, v, 0.0, causal, False, scale=scale)
        out, logsumexp, _, _, _, _, seed, offset, _ = found
        return out, logsumexp, seed, offset

    def backward(
        dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, logsumexp: Tensor, seed: Tensor, offset: Tensor
    ) -> Gradients:
        sizes = (None, None, q.shape[-2], k.shape[-2])
        gradients: Gradients = aten._scaled_dot_product_flash_attention_backward.default(
            dout, q, k, v, out, logsumexp, *sizes, 0.0, causal, seed, offset, scale=scale
        )
        return gradients

    return AttentionOperators(forward, backward)


def _efficient(causal: bool, scale: float | None) -> AttentionOperators:
    def forward(q: Tensor, k: Tensor, v: Tensor) -> Results:
        found: Results = aten._scaled_dot_product_efficient_attention.default(
            q, k, v, None, True, 0.0, causal, scale=scale
        )
        return found

    def backward(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, *results: Tensor) -> Gradients:
        dq, dk, dv, _ = aten._scaled_dot_product_efficient_attention_backward.default(
            dout, q, k, v, None, *results, 0.0, [True, True, True, False], causal, scale=scale
        )
        return dq, dk, dv

    return AttentionOperators(forward, backward)


def _flash_cpu(causal: bool, scale: float | None) -> AttentionOperators:
    def forward(q: Tensor, k: Tensor, v: Tensor) -> Results:
        found: Results = aten._scaled_dot_product_flash_attention_for_cpu.default(q, k, v, 0.0, causal, scale=scale)
        return found

    def backward(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, *results: Tensor) -> Gradients:
        gradients: Gradients = aten._scaled_dot_product_flash_attention_for_cpu_backward.default(
            dout, q, k, v, *results, 0.0, causal, scale=scale
        )
        return gradients

    return AttentionOperators(forward, backward)
