"""cuDNN's fused attention, document by document: fast for few long documents."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from train.ops.attention import by_document, without
from train.ops.segments import Segments


def cudnn(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    segments: Segments,
    *,
    causal: bool,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
) -> Tensor:
    """[T, Hq, Dv]; bfloat16 or float16. Documents of one row, which cuDNN does not take, go through torch's plain
    kernel."""
    if window is not None or softcap is not None:
        raise without("cudnn", "sliding window and no softcap", "flex_attention or flash_attention_*")
    grouped = q.shape[1] != k.shape[1]

    def attend(queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        kernel = SDPBackend.MATH if queries.shape[-2] == 1 else SDPBackend.CUDNN_ATTENTION
        with sdpa_kernel(kernel):
            return F.scaled_dot_product_attention(
                queries, keys, values, is_causal=causal, scale=scale, enable_gqa=grouped
            )

    return by_document(q, k, v, segments, attend)
