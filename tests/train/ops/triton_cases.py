"""What the tests of the Triton kernels share: the interpreter where there is no GPU, and comparing with a reference."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

ON_GPU = torch.cuda.is_available()
if not ON_GPU:  # read when triton is first imported, which transformers may have done already
    os.environ.setdefault("TRITON_INTERPRET", "1")

import triton  # noqa: E402

DEVICE = torch.device("cuda" if ON_GPU else "cpu")
# The interpreter cuts float32 to bfloat16 instead of rounding it, which doubles the error and gives it a sign.
TOLERANCE = {torch.float32: 5e-6, torch.bfloat16: 5e-3 if ON_GPU else 2e-2}
DTYPES = (torch.float32, torch.bfloat16)


def kernels_can_run() -> None:
    """For `setup_module`."""
    if not ON_GPU and not triton.knobs.runtime.interpret:
        pytest.fail("set TRITON_INTERPRET=1 before triton is imported; tests/conftest.py does it", pytrace=False)


def gpu(*values: object) -> pytest.ParameterSet:
    """A case of real size, which only a GPU does in reasonable time."""
    return pytest.param(*values, marks=[pytest.mark.gpu, pytest.mark.skipif(not ON_GPU, reason="needs a CUDA device")])


def relative_error(found: Tensor, expected: Tensor) -> float:
    """Norm of the difference over the norm of what is expected; infinite when anything is not finite."""
    assert found.shape == expected.shape, (found.shape, expected.shape)
    found, expected = found.detach().double(), expected.detach().double()
    if not found.isfinite().all():
        return float("inf")
    return float((found - expected).norm() / expected.norm().clamp_min(1e-30))


def poison(gigabytes: float) -> None:
    """Fills the allocator's free memory with NaN, so that reading what was never written shows."""
    pieces = [torch.full((int(gigabytes * 2**26),), float("nan"), device="cuda") for _ in range(4)]
    del pieces


def assert_same(
    ours: Callable[..., Tensor | tuple[Tensor, ...]],
    reference: Callable[..., Tensor | tuple[Tensor, ...]],
    inputs: Sequence[Tensor],
    dtype: torch.dtype,
    wide: torch.dtype = torch.float64,
) -> None:
    """Outputs and the gradients of all inputs are those of the reference, which computes in `wide`.

    Inputs are cast to dtype; the reference gets the same rounded values.
    """
    narrow = [x.detach().clone().to(DEVICE, dtype).requires_grad_() for x in inputs]
    exact = [x.detach().to(wide).requires_grad_() for x in narrow]
    found, expected = (as_tuple(f(*given)) for f, given in ((ours, narrow), (reference, exact)))
    generator = torch.Generator(DEVICE).manual_seed(9)
    weights = [
        torch.randn(y.shape, generator=generator, device=DEVICE, dtype=torch.float32).to(dtype) for y in expected
    ]
    torch.autograd.backward(found, [w.to(y.dtype) for w, y in zip(weights, found, strict=True)])
    torch.autograd.backward(expected, [w.to(y.dtype) for w, y in zip(weights, expected, strict=True)])
    errors = [relative_error(y, e) for y, e in zip(found, expected, strict=True)]
    errors += [relative_error(x.grad, e.grad) for x, e in zip(narrow, exact, strict=True)]
    assert max(errors) <= TOLERANCE[dtype], errors


def as_tuple(value: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return value if isinstance(value, tuple) else (value,)
