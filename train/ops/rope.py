"""Rotary position embedding (arXiv:2104.09864) in its rotate-half form, with the per-head norms that stand before it.

Shapes: T rows, Hq and Hkv heads, D head size, R rotated pairs (2R <= D; the rest of a head passes unchanged).
"""

from __future__ import annotations

import torch
from torch import Tensor

from train.ops.norm import normalise


def qk_norm_rope(
    q: Tensor, k: Tensor, q_weight: Tensor | None, k_weight: Tensor | None, cos: Tensor, sin: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """(q, k): each head divided by its rms and multiplied by the weight (left out where the weight is None), then
    turned by the angles. q: [T, Hq, D]; k: [T, Hkv, D]; weights: [D]; cos, sin: float32 [T, R]. Computed in float32."""
    return _norm_rope(q, q_weight, cos, sin, eps), _norm_rope(k, k_weight, cos, sin, eps)


def vision_rope(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """(q, k) turned by the angles. q, k: [T, H, D]; cos, sin: float32 [T, D/2]. Computed in float32."""
    return _norm_rope(q, None, cos, sin, 0.0), _norm_rope(k, None, cos, sin, 0.0)


def _norm_rope(x: Tensor, weight: Tensor | None, cos: Tensor, sin: Tensor, eps: float) -> Tensor:
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    if weight is not None:
        wide = normalise(wide, eps) * weight
    pairs = cos.shape[-1]
    first, second, rest = wide.split([pairs, pairs, x.shape[-1] - 2 * pairs], dim=-1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), dim=-1).to(x.dtype)
