"""Newton-Schulz: whole matrices, many at a time, brought near to the nearest orthogonal ones (Jordan et al. 2024).

Each step takes X to a X + b (X X^T) X + c (X X^T)^2 X, which moves the singular values towards 1 and leaves the
singular vectors alone. Shapes: B matrices [M, K]; m = the smaller of M and K, the edge of their Gram matrices.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from train.config_optimizer import MuonConfig
from train.optim.kernels import kernel

RESTART = 2  # step before which the Gram form computes the Gram matrix anew: its rounding errors grow with each step
GRAM_ASPECT = 0.6  # of the smaller side over the larger one
DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}


@dataclass(frozen=True)
class NewtonSchulz:
    """triples: a, b, c of each step; eps: least norm that a matrix is divided by; dtype: that is computed in."""

    triples: tuple[tuple[float, float, float], ...]
    eps: float
    dtype: torch.dtype

    @classmethod
    def of(cls, config: MuonConfig) -> NewtonSchulz:
        return cls(config.ns_triples, config.muon_eps, DTYPES[config.muon_ns_dtype])

    @property
    def exchanged(self) -> torch.dtype:
        """Of matrices before they are divided by their norm: float16 has no room for small gradients."""
        return torch.bfloat16 if self.dtype == torch.float16 else self.dtype

    def __call__(self, matrices: Tensor) -> Tensor:
        """[B, M, K] in `dtype`; those of zeros stay zeros."""
        norms = torch.linalg.vector_norm(matrices, dim=(-2, -1), keepdim=True, dtype=_sum_dtype(matrices.dtype))
        x = torch.empty(matrices.shape, dtype=self.dtype, device=matrices.device)
        divide = kernel("triton_muon:divide") if matrices.is_cuda else torch.div
        divide(matrices.contiguous(), norms.clamp_(min=self.eps), out=x)  # in one pass, whatever the dtypes
        return self._by_gram(x) if self._gram_is_less(x) else self._standard(x)

    def _gram_is_less(self, x: Tensor) -> bool:
        """Products of m x m matrices take the place of those with all of X; in float16 only, whose errors are small
        enough for it. On an H200 it pays below an aspect of about 0.6: [768, 2048] takes 0.84 of the time of the other
        form in bfloat16, [1536, 2048] 1.05."""
        small, large = sorted(x.shape[-2:])
        return self.dtype == torch.float16 and small <= GRAM_ASPECT * large and len(self.triples) > 1

    def _standard(self, x: Tensor) -> Tensor:
        for a, b, c in self.triples:
            gram = gram_matrices(x)
            factor = symmetric_product(gram, gram, c, gram, b)
            if self.dtype == torch.float16:  # has the digits for a on the diagonal, which saves a copy of X
                factor.diagonal(dim1=-2, dim2=-1).add_(a)
                x = _mixed(x, factor, 0.0)
            else:
                x = _mixed(x, factor, a)
        return x

    def _by_gram(self, x: Tensor) -> Tensor:
        """The same polynomial: Q X with the product Q of the steps' factors, all polynomials of the Gram matrix R of X,
        so that the steps multiply m x m matrices alone (the Gram form, of Dao-AILab)."""
        q = r = None
        last = len(self.triples) - 1
        for step, (a, b, c) in enumerate(self.triples):
            if q is not None and step == RESTART:
                x, q, r = _mixed(x, q, 0.0), None, None
            r = gram_matrices(x) if r is None else r
            z = symmetric_product(r, r, c, r, b)
            if step < last and step + 1 != RESTART:
                rz = symmetric_product(r, z, 1.0, r, a)
                r = symmetric_product(rz, z, 1.0, rz, a)
            if q is None:
                q = z
                q.diagonal(dim1=-2, dim2=-1).add_(a)  # z is not needed after r
            else:
                q = symmetric_product(q, z, 1.0, q, a)
        assert q is not None
        return _mixed(x, q, 0.0)


def gram_matrices(x: Tensor) -> Tensor:
    """[B, m, m] of x [B, M, K]: x x^T, or x^T x when M > K."""
    if x.shape[-2] > x.shape[-1]:
        return kernel("triton_symmetric:gram_columns")(x) if _has_kernel(x) else torch.bmm(x.mT, x)
    return kernel("triton_symmetric:symmetric")(x, x) if _has_kernel(x) else torch.bmm(x, x.mT)


def symmetric_product(x: Tensor, y: Tensor, alpha: float, added: Tensor, beta: float) -> Tensor:
    """beta added + alpha x y, of symmetric matrices [B, m, m] that commute, so that the result is symmetric, too."""
    if _has_kernel(x):
        return kernel("triton_symmetric:symmetric")(x, y, alpha, added, beta)
    return torch.baddbmm(added, x, y, beta=beta, alpha=alpha)


def _mixed(x: Tensor, factor: Tensor, a: float) -> Tensor:
    """a x + factor x, on the smaller side of x [B, M, K]."""
    left, right = (x, factor) if x.shape[-2] > x.shape[-1] else (factor, x)
    return torch.baddbmm(x, left, right, beta=a) if a else torch.bmm(left, right)


def _has_kernel(x: Tensor) -> bool:
    """Whether half of each symmetric product can be left out: on GPUs, for rows that start at multiples of 16 bytes."""
    return x.is_cuda and x.dtype in (torch.float16, torch.bfloat16) and not x.shape[-1] % 8 and not x.shape[-2] % 8


def _sum_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)
