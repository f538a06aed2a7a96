"""RMSNorm, rotary embeddings, SwiGLU and router statistics in Triton against the eager ops in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.train.ops.triton_cases import DEVICE, DTYPES, assert_same, gpu, kernels_can_run
from train.ops import (
    norm,
    rope,
    router,
    swiglu,
    triton_norm,
    triton_rope,
    triton_router,
    triton_swiglu,
    triton_vision_rope,
)

setup_module = kernels_can_run

EPS = 1e-6


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(3, 7, 40), (300, 33), (1, 128), gpu((32768, 2048)), gpu((3001, 1999))])
def test_rms_norm(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x, residual, weight = draw(*shape), draw(*shape, seed=1), draw(shape[-1], seed=2)
    for outputs in (slice(None), slice(0, 1)):  # the second: the sum is not used, so its gradient is None
        assert_same(
            lambda x, w, outputs=outputs: triton_norm.rms_norm(x, w, EPS)[outputs],
            lambda x, w, outputs=outputs: norm.rms_norm(x, w, EPS)[outputs],
            [x, weight],
            dtype,
        )
    assert_same(
        lambda x, w, r: triton_norm.rms_norm(x, w, EPS, r),
        lambda x, w, r: norm.rms_norm(x, w, EPS, r),
        [x, weight, residual],
        dtype,
    )


def test_rms_norm_of_no_rows() -> None:
    x, weight = torch.empty(0, 16, device=DEVICE, requires_grad=True), draw(16).to(DEVICE).requires_grad_()
    y, _ = triton_norm.rms_norm(x, weight, EPS)
    y.sum().backward()
    assert x.grad is not None and weight.grad is not None
    assert x.grad.shape == (0, 16) and not weight.grad.any()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("tokens", "heads", "kv_heads", "dim", "pairs"),
    [(9, 6, 2, 16, 8), (5, 3, 3, 20, 6), (1, 4, 1, 12, 5), gpu(8192, 32, 4, 128, 64)],
)
@pytest.mark.parametrize("normed", ["qk", "q", ""])
def test_qk_norm_rope(
    tokens: int, heads: int, kv_heads: int, dim: int, pairs: int, normed: str, dtype: torch.dtype
) -> None:
    cos, sin = (draw(tokens, pairs, seed=seed).to(DEVICE) for seed in (3, 4))
    inputs = [draw(tokens, heads, dim), draw(tokens, kv_heads, dim, seed=1)]
    inputs += [draw(dim, seed=5 + i) for i in range(len(normed))]

    def weights(given: tuple[Tensor, ...]) -> tuple[Tensor | None, Tensor | None]:
        return (*given, None, None)[:2]  # type: ignore[return-value]

    assert_same(
        lambda q, k, *w: triton_rope.qk_norm_rope(q, k, *weights(w), cos, sin, EPS),
        lambda q, k, *w: rope.qk_norm_rope(q, k, *weights(w), cos.double(), sin.double(), EPS),
        inputs,
        dtype,
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("tokens", "heads", "dim"), [(9, 3, 12), (2, 1, 8), (23, 5, 22), (0, 2, 8), gpu(4097, 16, 72)])
def test_vision_rope_of_views_of_one_projection(tokens: int, heads: int, dim: int, dtype: torch.dtype) -> None:
    cos, sin = (draw(tokens, dim // 2, seed=seed).to(DEVICE) for seed in (3, 4))
    assert_same(
        lambda x: triton_vision_rope.vision_rope(x[:, 0], x[:, 1], cos, sin),
        lambda x: rope.vision_rope(x[:, 0], x[:, 1], cos.double(), sin.double()),
        [draw(tokens, 3, heads, dim)],
        dtype,
    )


def test_vision_rope_refuses_what_it_cannot_turn() -> None:
    q, angles = draw(4, 2, 8).to(DEVICE), draw(4, 4).to(DEVICE)
    with pytest.raises(ValueError, match=r"must be \[T, H, D\] twice"):
        triton_vision_rope.vision_rope(q, q[:, :1], angles, angles)
    with pytest.raises(ValueError, match=r"must be \[T, H, D\] twice"):
        triton_vision_rope.vision_rope(q, q, angles[:, :3], angles[:, :3])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(5, 7, 34), (1, 64), gpu((20000, 768))])
def test_swiglu(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    assert_same(triton_swiglu.swiglu, swiglu.swiglu, [draw(*shape), draw(*shape, seed=1)], dtype)
    assert_same(
        lambda x: triton_swiglu.swiglu(*x.chunk(2, -1)),
        lambda x: swiglu.swiglu(*x.chunk(2, -1)),
        [draw(*shape, seed=2)],
        dtype,
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "experts", "valid"), [(50, 12, 41), (3, 5, 3), (4, 8, 0), gpu(9000, 128, 8111)])
def test_router_statistics(rows: int, experts: int, valid: int, dtype: torch.dtype) -> None:
    ids = torch.randint(0, experts, (rows, 3), generator=torch.Generator().manual_seed(1)).to(DEVICE)
    assert_same(
        lambda x: triton_router.router_statistics(x, ids, valid)[1],
        lambda x: router.router_statistics(x, ids, valid)[1],
        [draw(rows, experts)],
        dtype,
    )
    logits = draw(rows, experts).to(DEVICE, dtype)
    counts, _ = triton_router.router_statistics(logits, ids, valid)
    assert torch.equal(counts, router.router_statistics(logits, ids, valid)[0])
