"""The gate of a feed-forward layer (SwiGLU, arXiv:2002.05202)."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up; all [..., I]."""
    return F.silu(gate) * up
