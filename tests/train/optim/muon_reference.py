"""Muon on whole matrices in float64, by their singular values: what every implementation is compared with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

JORDAN = (3.4445, -4.775, 2.0315)


def orthogonalised(matrix: Tensor, triples: Sequence[tuple[float, float, float]] = (JORDAN,) * 5) -> Tensor:
    """float64 [..., M, K]: the polynomial of each step, applied to the singular values of the matrix over its norm."""
    u, s, vh = torch.linalg.svd(matrix.double(), full_matrices=False)
    s = s / torch.linalg.vector_norm(s, dim=-1, keepdim=True).clamp(min=1e-7)
    for a, b, c in triples:
        s = a * s + b * s**3 + c * s**5
    return u * s[..., None, :] @ vh


@dataclass
class Reference:
    """One parameter; gradients come one after the other."""

    parameter: Tensor
    lr: float
    decay: float = 0.0
    momentum: float = 0.95
    nesterov: bool = True
    how: str = "match_rms_adamw"
    blocks: int = 1
    buffer: Tensor | None = None

    def step(self, gradient: Tensor) -> Tensor:
        """The change of the parameter, float64."""
        g = gradient.double()
        buffer = torch.zeros_like(g) if self.buffer is None else self.buffer
        self.buffer = self.momentum * buffer + (1 - self.momentum) * g
        u = (1 - self.momentum) * g + self.momentum * self.buffer if self.nesterov else self.buffer
        *many, rows, columns = u.shape
        block = rows // self.blocks
        direction = orthogonalised(u.reshape(*many, self.blocks, block, columns)).reshape(u.shape)
        if self.how == "original":
            scale = max(1.0, block / columns) ** 0.5
        else:
            scale = 0.2 * max(block, columns) ** 0.5
        change = -self.lr * self.decay * self.parameter.double() - self.lr * scale * direction
        self.parameter = self.parameter.double() + change
        return change


def share_off(found: Tensor, expected: Tensor) -> float:
    """Norm of the difference over the norm of what is expected."""
    return float((found.double() - expected).norm() / expected.norm())
