"""The fused head and loss against the eager one in float64: losses, both gradients, several chunks, ignored rows."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.train.ops.triton_cases import DEVICE, DTYPES, ON_GPU, TOLERANCE, gpu, kernels_can_run, poison, relative_error
from train.ops import triton_linear_cross_entropy as fused
from train.ops.linear_cross_entropy import IGNORED, eager

setup_module = kernels_can_run


def row_scales(rows: int) -> Tensor:
    """Of either sign, some 0."""
    scales = torch.randn(rows, generator=torch.Generator().manual_seed(5)) / 7
    scales[4::5] = 0.0
    return scales


# of all rows, or of each
SCALES = {"one": lambda rows: torch.tensor(1 / 7), "rows": row_scales}


def inputs(rows: int, hidden: int, vocabulary: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator(DEVICE).manual_seed(rows)
    x = torch.randn(rows, hidden, generator=generator, device=DEVICE).to(dtype)
    weight = (torch.randn(vocabulary, hidden, generator=generator, device=DEVICE) * hidden**-0.5).to(dtype)
    labels = torch.randint(0, vocabulary, (rows,), generator=generator, device=DEVICE)
    labels[1::3] = IGNORED
    return x.requires_grad_(), weight.requires_grad_(), labels


@pytest.fixture(params=[1, 10**9], ids=["chunks", "whole"])
def chunks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused, "CHUNK_BYTES", request.param)
    monkeypatch.setattr(fused, "ROWS", 8)


@pytest.mark.usefixtures("chunks")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("smoothing", "z_loss"), [(0.0, 0.0), (0.1, 1e-2)])
@pytest.mark.parametrize(("rows", "hidden", "vocabulary"), [(21, 16, 50), (1, 8, 32), (9, 24, 97)])
def test_small(rows: int, hidden: int, vocabulary: int, smoothing: float, z_loss: float, dtype: torch.dtype) -> None:
    for scale in SCALES.values():
        check(rows, hidden, vocabulary, smoothing, z_loss, dtype, torch.float64, scale(rows))


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "hidden", "smoothing"), [gpu(9001, 512, 0.0), gpu(700, 2048, 0.1)])
def test_real_vocabulary(rows: int, hidden: int, smoothing: float, dtype: torch.dtype, scale: str) -> None:
    check(rows, hidden, 151936, smoothing, 1e-4, dtype, torch.float32, SCALES[scale](rows))


def check(
    rows: int,
    hidden: int,
    vocabulary: int,
    smoothing: float,
    z_loss: float,
    dtype: torch.dtype,
    wide: torch.dtype,
    scale: Tensor,
) -> None:
    x, weight, labels = inputs(rows, hidden, vocabulary, dtype)
    exact = [t.detach().to(wide).requires_grad_() for t in (x, weight)]
    options = {"label_smoothing": smoothing, "z_loss": z_loss}
    if ON_GPU:
        poison(1)
    found = fused.linear_cross_entropy(x, weight, labels, scale=scale.to(DEVICE), **options)
    expected = eager(*exact, labels, scale=scale.to(DEVICE, wide), **options)
    (found.loss * 3).backward()  # not 1, so that the incoming gradient counts
    (expected.loss * 3).backward()
    size = (expected.token_loss * scale.to(DEVICE)).abs().sum()  # terms of either sign may all but cancel
    pairs = [(found.token_loss, expected.token_loss)]
    pairs += [(a.grad, b.grad) for a, b in zip((x, weight), exact, strict=True)]
    errors = [relative_error(a, b) for a, b in pairs]
    errors.append(float((found.loss - expected.loss).detach().abs() / size.clamp_min(1e-30)))
    assert max(errors) <= TOLERANCE[dtype], errors
    assert found.loss.dtype == found.token_loss.dtype == torch.float32
    assert not found.token_loss.requires_grad and not found.token_loss[labels == IGNORED].any()


@pytest.mark.usefixtures("chunks")
def test_no_row_has_a_label() -> None:
    x, weight, labels = inputs(9, 8, 20, torch.float32)
    found = fused.linear_cross_entropy(x, weight, torch.full_like(labels, IGNORED), scale=torch.ones((), device=DEVICE))
    found.loss.backward()
    for t in (found.loss, found.token_loss, x.grad, weight.grad):
        assert t is not None and not t.any()


@pytest.mark.parametrize("scale", SCALES)
def test_no_rows(scale: str) -> None:
    """A slice of a sequence without a label has none."""
    x, weight, labels = inputs(0, 8, 20, torch.float32)
    found = fused.linear_cross_entropy(x, weight, labels, scale=SCALES[scale](0).to(DEVICE))
    found.loss.backward()
    assert found.loss == 0 and found.token_loss.shape == (0,)
    assert x.grad is not None and x.grad.shape == x.shape
    assert weight.grad is not None and not weight.grad.any()


def test_only_what_is_asked_for_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The weight's gradient alone takes a third of the time and most of the memory."""
    x, weight, labels = inputs(9, 8, 20, torch.float32)
    scale = torch.ones((), device=DEVICE)
    monkeypatch.setattr(fused, "_accumulate", None)  # fails when it is called
    with torch.no_grad():
        alone = fused.linear_cross_entropy(x, weight, labels, scale=scale)
    frozen = fused.linear_cross_entropy(x, weight.detach(), labels, scale=scale)
    frozen.loss.backward()
    assert torch.equal(alone.loss, frozen.loss) and not alone.loss.requires_grad
    assert x.grad is not None and weight.grad is None


def test_a_label_outside_the_vocabulary_is_no_silent_number() -> None:
    x, weight, labels = inputs(9, 8, 20, torch.float32)
    labels[0] = 20
    found = fused.linear_cross_entropy(x, weight, labels, scale=torch.ones((), device=DEVICE))
    assert found.loss.isnan() and found.token_loss.isnan().tolist() == [True] + [False] * 8


def test_a_second_backward_pass_is_refused() -> None:
    x, weight, labels = inputs(9, 8, 20, torch.float32)
    loss = fused.linear_cross_entropy(x, weight, labels, scale=torch.ones((), device=DEVICE)).loss
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_chunks_are_equal_and_within_the_limit() -> None:
    row = 151936 * 2
    assert fused.chunk_rows(32768, row) == 4096
    assert fused.chunk_rows(8193, row) == 2816  # three of 2731 rows, rounded up to a multiple of 128
    assert fused.chunk_rows(100, row) == 128
    assert fused.chunk_rows(100, 10**12) == 128
