"""LayerNorm with the residual sum: torch's in float64 against the formula, Triton's against torch's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import pytest
import torch
import triton
from torch import Tensor, nn

from tests.train.models import families
from tests.train.ops.triton_cases import DEVICE, DTYPES, as_tuple, assert_same, gpu, kernels_can_run, relative_error
from train.models.audio import AudioBlock
from train.models.rope import RopeSpec, vision_table
from train.models.vision import VisionBlock
from train.ops import layer_norm, triton_layer_norm
from train.ops.registry import Ops, OpSlot, eager_ops
from train.ops.segments import Segments

setup_module = kernels_can_run

EPS = 1e-6
WIDTHS = [8, 20, 21, 30, 64, 96, 1152]  # 21 and 30: columns behind the end of the row's tail, or of its only part
Run = Callable[..., Tensor | tuple[Tensor, ...]]


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


def inputs(rows: int, width: int) -> list[Tensor]:
    """x, weight, bias, residual."""
    return [draw(rows, width), draw(width, seed=1), draw(width, seed=2), draw(rows, width, seed=3)]


def both(pick: slice | int, residual: bool = True) -> tuple[Run, Run]:
    """Ours and the reference, of whose two outputs some are used."""

    def run(norm: Callable[..., tuple[Tensor, Tensor]]) -> Run:
        if residual:
            return lambda x, w, b, r: norm(x, w, b, EPS, r)[pick]
        return lambda x, w, b: norm(x, w, b, EPS)[pick]

    return run(triton_layer_norm.layer_norm), run(layer_norm.layer_norm)


def gradients(norm: Callable[..., tuple[Tensor, Tensor]], leaves: list[Tensor]) -> list[Tensor]:
    """The outputs and the gradients of x, weight, bias, residual."""
    found = norm(*leaves[:3], EPS, leaves[3])
    given = [torch.linspace(-1, 2, y.numel(), device=y.device).view_as(y).to(y.dtype) for y in found]
    return [*found, *torch.autograd.grad(found, leaves, given)]


@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize(("shape", "dtype"), [((5, 12), torch.float64), ((2, 3, 7), torch.float64), ((0, 4), None)])
def test_the_reference_is_the_formula(shape: tuple[int, ...], dtype: torch.dtype | None, residual: bool) -> None:
    x, weight, bias, r = (
        t.to(dtype or torch.float32) for t in (draw(*shape), *inputs(1, shape[-1])[1:3], draw(*shape))
    )
    y, total = layer_norm.layer_norm(x, weight, bias, EPS, r if residual else None)
    assert torch.equal(total, x + r) if residual else total is x
    deviation = total - total.sum(-1, keepdim=True) / shape[-1]
    expected = deviation / ((deviation**2).sum(-1, keepdim=True) / shape[-1] + EPS) ** 0.5 * weight + bias
    torch.testing.assert_close(y, expected, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [0, 1, 5, 33])
@pytest.mark.parametrize("width", WIDTHS)
def test_triton(width: int, rows: int, dtype: torch.dtype) -> None:
    given = inputs(rows, width)
    assert_same(*both(slice(None)), given, dtype)
    assert_same(*both(slice(None), residual=False), given[:3], dtype)
    assert_same(*both(0), given, dtype)  # the sum has no gradient of its own
    assert_same(*both(0, residual=False), given[:3], dtype)


@pytest.mark.parametrize(
    ("rows", "width"),
    [gpu(56160, 1152), gpu(14040, 4608), gpu(30001, 1280), gpu(7501, 5120), gpu(4000, 8192), gpu(3001, 1999)],
)
@pytest.mark.parametrize("dtype", [*DTYPES, torch.float16])
def test_real_sizes(rows: int, width: int, dtype: torch.dtype) -> None:
    narrow = [t.to(DEVICE, dtype).requires_grad_() for t in inputs(rows, width)]
    exact = [t.detach().double().requires_grad_() for t in narrow]
    pairs = zip(gradients(triton_layer_norm.layer_norm, narrow), gradients(layer_norm.layer_norm, exact), strict=True)
    errors = [relative_error(a, b) for a, b in pairs]
    assert max(errors) < (1e-5 if dtype == torch.float32 else 5e-3), errors


def test_rows_take_one_node_of_autograd() -> None:
    """No views around it; each costs the host as much as a kernel's launch."""
    leaves = [t.to(DEVICE).requires_grad_() for t in inputs(5, 20)]
    y, total = triton_layer_norm.layer_norm(*leaves[:3], EPS, leaves[3])
    assert y.grad_fn is not None and y.grad_fn is total.grad_fn
    behind = [node for node, _ in y.grad_fn.next_functions if node is not None]
    assert len(behind) == 4 and all(node.name().endswith("AccumulateGrad") for node in behind)


def test_only_the_sum_is_used() -> None:
    leaves = [t.to(DEVICE).requires_grad_() for t in inputs(5, 20)]
    _, total = triton_layer_norm.layer_norm(*leaves[:3], EPS, leaves[3])
    x, weight, bias, residual = torch.autograd.grad(total, leaves, 2 * torch.ones_like(total))
    assert (x == 2).all() and (residual == 2).all()
    assert not weight.any() and not bias.any()


def test_no_rows() -> None:
    leaves = [t.to(DEVICE).requires_grad_() for t in inputs(0, 16)]
    y, _ = triton_layer_norm.layer_norm(*leaves[:3], EPS, leaves[3])
    found = torch.autograd.grad(y.sum(), leaves)
    assert [t.shape for t in found] == [t.shape for t in leaves]
    assert not found[1].any() and not found[2].any()


@pytest.mark.parametrize("width", [20, 1152])
def test_a_mean_far_from_zero(width: int) -> None:
    """The mean of squares less the square of the mean would be off by 1e-3."""
    x, *rest = inputs(9, width)
    narrow = [t.to(DEVICE).requires_grad_() for t in (x + 100, *rest)]
    exact = [t.detach().double().requires_grad_() for t in narrow]
    pairs = zip(gradients(triton_layer_norm.layer_norm, narrow), gradients(layer_norm.layer_norm, exact), strict=True)
    assert max(relative_error(a, b) for a, b in pairs) < 3e-5


def test_a_row_of_one_value_is_the_bias() -> None:
    """Where columns behind the row's end are masked, their difference from the mean would be infinite times zero."""
    x, (weight, bias) = torch.full((3, 21), 2.0**119, device=DEVICE), (t.to(DEVICE) for t in inputs(1, 21)[1:3])
    x.requires_grad_()
    y, _ = triton_layer_norm.layer_norm(x, weight, bias, EPS)
    assert torch.equal(y, bias.expand_as(y))
    (change,) = torch.autograd.grad(y, x, torch.ones_like(y))
    assert change.isfinite().all()


def test_strided_inputs_and_gradients() -> None:
    x, residual = draw(4, 24, 6).to(DEVICE).transpose(1, 2), draw(4, 6, 48, seed=1).to(DEVICE)[..., ::2]
    weight, bias = (draw(48, seed=seed).to(DEVICE)[::2] for seed in (2, 3))
    found, expected = ([t.detach().requires_grad_() for t in (x, weight, bias, residual)] for _ in range(2))
    results = []
    for norm, leaves in ((triton_layer_norm.layer_norm, found), (layer_norm.layer_norm, expected)):
        y, total = norm(*leaves[:3], EPS, leaves[3])
        assert y.shape == total.shape == x.shape
        given = [torch.ones((), device=DEVICE).expand_as(y), draw(6, 4, 24).to(DEVICE).transpose(0, 1)]
        results.append([y, total, *torch.autograd.grad((y, total), leaves, given)])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)


def test_frozen_weights_get_no_gradient() -> None:
    x, weight, bias, residual = (t.to(DEVICE) for t in inputs(5, 96))
    wanted = gradients(layer_norm.layer_norm, [t.requires_grad_() for t in (x, weight, bias, residual)])
    y, total = triton_layer_norm.layer_norm(x, weight.detach(), bias.detach(), EPS, residual)
    given = [torch.linspace(-1, 2, t.numel(), device=DEVICE).view_as(t) for t in (y, total)]
    torch.autograd.backward((y, total), given)
    assert x.grad is not None and relative_error(x.grad, wanted[2]) < 5e-6
    assert weight.grad is None and bias.grad is None


@pytest.mark.parametrize(("rows", "width"), [(33, 96), gpu(56160, 1152)])
def test_same_bits_at_every_run(rows: int, width: int) -> None:
    leaves = [t.to(DEVICE, torch.bfloat16).requires_grad_() for t in inputs(rows, width)]
    first, second = (gradients(triton_layer_norm.layer_norm, leaves) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("programs", [1, 128, 300])
def test_sums_of_many_programs(programs: int) -> None:
    parts = draw(2, programs, 72).to(DEVICE)
    dweight, dbias = torch.empty(2, 72, device=DEVICE).unbind()
    triton_layer_norm._layer_norm_parts_kernel[(triton.cdiv(72, 32), 2)](
        parts, dweight, dbias, programs, 72, ROWS=128, COLUMNS=32
    )
    for found, expected in zip((dweight, dbias), parts.double().sum(1), strict=True):
        assert relative_error(found, expected) < 1e-6


@pytest.mark.parametrize(
    ("width", "parts"),
    [(1152, (1024, 128)), (1280, (1024, 256)), (4608, (4096, 512)), (5120, (4096, 1024)), (96, (64, 32)), (64, (64, 0)),
     (127, (128, 0)), (1, (1, 0)), (3, (2, 1)), (8192, (8192, 0))],
)  # fmt: skip
def test_parts_of_a_row(width: int, parts: tuple[int, int]) -> None:
    tile = triton_layer_norm.row_tile(width, 32)
    assert (tile.main, tile.tail) == parts


def test_every_width_fits_its_tile() -> None:
    for width in range(1, 8193):
        tile = triton_layer_norm.row_tile(width, 16)
        assert tile.main + tile.tail >= width > tile.main // 2
        assert all(n & (n - 1) == 0 for n in (tile.main, tile.tail, tile.warps))
        assert 1 <= tile.warps <= 16


def test_blocks_of_the_towers_with_the_kernels() -> None:
    """Values and all gradients of a block are those with torch's norms."""
    eager = eager_ops(DEVICE)
    fused = replace(eager, layer_norm=cast(OpSlot, triton_layer_norm.layer_norm))
    config = families.omni()
    vision, audio = config.vision_config, config.audio_config
    segments = Segments.from_lengths([4, 5], DEVICE)
    place = torch.arange(9, device=DEVICE)
    table = vision_table(place, place % 3, RopeSpec.of_vision(vision))

    def results(make: Callable[[Ops], nn.Module], ops: Ops, width: int, *rest: Any) -> list[Tensor]:
        block = make(ops)
        for number, parameter in enumerate(block.parameters()):
            parameter.data.copy_(draw(*parameter.shape, seed=number) / 4)
        x = draw(9, width).to(DEVICE).requires_grad_()
        y = as_tuple(block.to(DEVICE)(x, *rest))[0]
        return [y, *torch.autograd.grad(y.square().sum(), [x, *block.parameters()])]

    for make, width, rest in (
        (lambda ops: VisionBlock(vision, ops), vision.hidden_size, (table, segments)),
        (lambda ops: AudioBlock(audio, ops), audio.d_model, (segments,)),
    ):
        found, expected = (results(make, ops, width, *rest) for ops in (fused, eager))
        largest = max(
            float(t.detach().abs().max()) for t in expected
        )  # the gradient of k's bias is nothing but rounding
        for a, b in zip(found, expected, strict=True):
            torch.testing.assert_close(a, b, atol=2e-6 * largest, rtol=1e-4)
