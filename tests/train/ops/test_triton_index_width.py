"""Tensors of more than 2^31 elements: offsets in 64 bits, also where each factor fits 32.

On the CPU such a tensor is never filled: its rows lie that far apart, and pages that nobody touches take no memory.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from tests.train.ops.triton_cases import DEVICE, ON_GPU, kernels_can_run, relative_error
from train.ops import norm, rope, swiglu, triton_moe, triton_norm, triton_rope, triton_swiglu, triton_vision_rope
from train.ops.triton_column_sum import column_sum
from train.ops.triton_gelu import gelu_backward, gelu_forward

setup_module = kernels_can_run

FAR = 2**31 + 64  # elements between two rows
BF16 = torch.bfloat16
real_size = [pytest.mark.gpu, pytest.mark.skipif(not ON_GPU, reason="needs a CUDA device")]


@pytest.fixture(autouse=True)
def memory_back() -> Iterator[None]:
    yield
    if ON_GPU:
        torch.cuda.empty_cache()


def far_apart(*inner: int, seed: int) -> Tensor:
    """[2, *inner] whose second row begins FAR elements behind the first."""
    size = torch.Size(inner).numel()
    line = torch.empty(FAR + size, dtype=BF16, device=DEVICE)
    strides = [FAR, *torch.empty(inner).stride()]
    made = line.as_strided((2, *inner), strides)
    made.copy_(torch.randn(2, *inner, generator=torch.Generator().manual_seed(seed)))
    return made


def test_rotary_embedding_of_rows_far_apart() -> None:
    q, k = far_apart(2, 16, seed=1), far_apart(1, 16, seed=2)
    cos, sin = (torch.rand(2, 8, generator=torch.Generator().manual_seed(s)).to(DEVICE) for s in (3, 4))
    found = triton_rope.qk_norm_rope(q, k, None, None, cos, sin, 1e-6)
    expected = rope.qk_norm_rope(q.double(), k.double(), None, None, cos.double(), sin.double(), 1e-6)
    assert max(relative_error(a, b) for a, b in zip(found, expected, strict=True)) < 1e-2


def test_vision_rope_of_rows_far_apart() -> None:
    q, k = far_apart(2, 16, seed=1), far_apart(2, 16, seed=2)
    cos, sin = (torch.rand(2, 8, generator=torch.Generator().manual_seed(s)).to(DEVICE) for s in (3, 4))
    found = triton_vision_rope.vision_rope(q, k, cos, sin)
    expected = rope.vision_rope(q.double(), k.double(), cos.double(), sin.double())
    assert max(relative_error(a, b) for a, b in zip(found, expected, strict=True)) < 1e-2


def test_swiglu_of_rows_far_apart() -> None:
    gate, up = far_apart(24, seed=1).requires_grad_(), far_apart(24, seed=2).requires_grad_()
    found = triton_swiglu.swiglu(gate, up)
    exact = [t.detach().double().requires_grad_() for t in (gate, up)]
    expected = swiglu.swiglu(exact[0], exact[1])
    assert relative_error(found, expected) < 1e-2
    gradients = torch.autograd.grad(found, (gate, up), torch.ones_like(found))
    wanted = torch.autograd.grad(expected, exact, torch.ones_like(expected))
    assert max(relative_error(a, b) for a, b in zip(gradients, wanted, strict=True)) < 1e-2


def test_sums_and_gelu_of_rows_far_apart() -> None:
    dout = far_apart(24, seed=1)
    assert relative_error(column_sum(dout), dout.double().sum(0)) < 1e-2
    x = torch.linspace(-2, 2, 48, device=DEVICE).view(2, 24).to(BF16)
    (found, sums), (wanted, exact) = (gelu_backward(x, given, "tanh", sums=True) for given in (dout, dout.clone()))
    assert torch.equal(found, wanted)
    assert sums is not None and exact is not None and torch.equal(sums, exact)


@pytest.mark.parametrize("rows", [pytest.param(2**31 // 4304 + 77, marks=real_size)])
def test_sums_and_gelu_of_many_rows(rows: int) -> None:
    x = torch.randn(rows, 4304, device=DEVICE, dtype=BF16)
    assert relative_error(column_sum(x), x.sum(0, dtype=torch.float32)) < 5e-3
    out = gelu_forward(x, "tanh")
    change, _ = gelu_backward(x, x, "tanh", sums=False)
    last = x[-200:].float().requires_grad_()
    expected = torch.nn.functional.gelu(last, approximate="tanh")
    expected.backward(last.detach())
    assert relative_error(out[-200:], expected) < 5e-3
    assert last.grad is not None and relative_error(change[-200:], last.grad) < 5e-3


@pytest.mark.parametrize("size", [pytest.param(2**31 + 4096 * 3, marks=real_size)])
def test_swiglu_of_a_long_dense_tensor(size: int) -> None:
    """It is taken as one row."""
    gate, up = (torch.randn(1, size, device=DEVICE, dtype=BF16).requires_grad_() for _ in range(2))
    found = triton_swiglu.swiglu(gate, up)
    found.backward(torch.ones_like(found))
    for part in (slice(0, 5000), slice(2**31 - 5000, None)):
        exact = [t.detach()[:, part].float().requires_grad_() for t in (gate, up)]
        expected = swiglu.swiglu(exact[0], exact[1])
        expected.backward(torch.ones_like(expected))
        assert relative_error(found[:, part], expected) < 5e-3
        assert gate.grad is not None and up.grad is not None
        assert relative_error(gate.grad[:, part], exact[0].grad) < 5e-3  # type: ignore[arg-type]
        assert relative_error(up.grad[:, part], exact[1].grad) < 5e-3  # type: ignore[arg-type]


@pytest.mark.parametrize("rows", [pytest.param(2**20 + 77, marks=real_size)])
def test_rms_norm_of_many_rows(rows: int) -> None:
    x, weight = torch.randn(rows, 2048, device=DEVICE, dtype=BF16), torch.randn(2048, device=DEVICE, dtype=BF16)
    x.requires_grad_()
    found, _ = triton_norm.rms_norm(x, weight, 1e-6)
    found.backward(torch.ones_like(found))
    last = x.detach()[-200:].float().requires_grad_()
    expected, _ = norm.rms_norm(last, weight.float(), 1e-6)
    expected.backward(torch.ones_like(expected))
    assert x.grad is not None and last.grad is not None
    assert max(relative_error(found[-200:], expected), relative_error(x.grad[-200:], last.grad)) < 5e-3


@pytest.mark.parametrize("tokens", [pytest.param(180_001, marks=real_size)])
def test_experts_of_many_rows(tokens: int) -> None:
    """Pre-activations of 1.44 million rows of 1,536; rows do not depend on each other, so the last tokens alone give
    the same."""
    generator = torch.Generator(DEVICE).manual_seed(0)

    def draw(*shape: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(*shape, generator=generator, device=DEVICE) * scale).to(BF16)

    weights, ids = torch.rand(tokens, 16, generator=generator, device=DEVICE).topk(8)
    gate_up, down = draw(16, 1536, 256, scale=1 / 16), draw(16, 256, 768, scale=768**-0.5)
    x, dout = draw(tokens, 256), draw(tokens, 256)
    results = []
    for part in (slice(None), slice(-500, None)):
        leaf, probability = x[part].clone().requires_grad_(), weights[part].clone().requires_grad_()
        out = triton_moe.moe_experts(leaf, ids[part], probability, gate_up, down)
        results.append([t[-500:] for t in (out, *torch.autograd.grad(out, (leaf, probability), dout[part]))])
    assert max(relative_error(a, b) for a, b in zip(*results, strict=True)) < 1e-6
