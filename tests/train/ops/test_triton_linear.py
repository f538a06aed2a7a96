"""Linear layers of the towers: column sums, GELU each way and both behind a product, against torch in float64."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import product
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from tests.train.models import families
from tests.train.ops.computed import Computed
from tests.train.ops.triton_cases import (
    DEVICE,
    DTYPES,
    ON_GPU,
    TOLERANCE,
    as_tuple,
    assert_same,
    gpu,
    kernels_can_run,
    relative_error,
)
from train.lora.layers import LoraLinear, PairSettings, Starts
from train.models.audio import AudioBlock
from train.models.checkpointing import keep_projections
from train.models.linear import Gelu, TowerLinear, activated
from train.models.rope import RopeSpec, vision_table
from train.models.vision import OmniMerger, PatchProjection, VisionBlock, VLMerger
from train.ops import linear, triton_linear
from train.ops.registry import Ops, OpSlot, eager_ops
from train.ops.segments import Segments
from train.ops.triton_column_sum import SUM, column_sum
from train.ops.triton_gelu import gelu_backward, gelu_forward

setup_module = kernels_can_run

HALF = [*DTYPES, torch.float16]
KINDS = ["none", "tanh"]
ERROR = TOLERANCE | {torch.float16: 1e-3}
# of the real sizes on a GPU
REAL = [gpu(56160, 4304), gpu(56160, 3456), gpu(56160, 1152), gpu(14040, 4608), gpu(1560, 5120), gpu(30001, 1999)]
REAL_KERNELS = cast("list[tuple[int, int]]", REAL)


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


def fused_ops() -> Ops:
    changed = {name: cast(OpSlot, getattr(triton_linear, name)) for name in ("linear", "linear_gelu")}
    return replace(eager_ops(DEVICE), **changed)


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize(
    ("rows", "width"), [(1, 1), (1, 17), (3, 8), (16, 9), (17, 16), (33, 31), (100, 24), (301, 5), *REAL_KERNELS]
)
def test_column_sum(rows: int, width: int, dtype: torch.dtype) -> None:
    x = draw(rows, width).to(DEVICE, dtype) + 1
    found = column_sum(x)
    assert found.dtype == dtype and found.shape == (width,)
    assert relative_error(found, x.double().sum(0)) < (1e-6 if dtype == torch.float32 else ERROR[dtype])
    assert torch.equal(column_sum(x), found)


def test_column_sum_of_whole_numbers_is_exact() -> None:
    """Every row and column counts once, wherever tiles end."""
    for rows, width in product((1, 3, 4, 5, 16, 31, 64, 129), (1, 7, 8, 9, 23)):
        x = (torch.arange(rows * width).view(rows, width) % 97 - 20).float().to(DEVICE)
        assert torch.equal(column_sum(x), x.sum(0)), (rows, width)


@pytest.mark.parametrize("kind", ["columns", "rows", "transposed", "expanded", "part"])
def test_column_sum_of_a_view(kind: str) -> None:
    base = draw(40, 30).to(DEVICE)
    x = {
        "columns": base[:, 3:20], "rows": base[::3], "transposed": base.t(), "expanded": base[0].expand(37, 30),
        "part": base[:, ::2],
    }[kind]  # fmt: skip
    assert relative_error(column_sum(x), x.double().sum(0)) < 1e-6


def test_no_rows_are_zeros() -> None:
    assert not column_sum(torch.empty(0, 5, device=DEVICE)).any()
    assert column_sum(torch.empty(4, 0, device=DEVICE)).shape == (0,)
    for sums in (True, False):
        x = torch.empty(0, 5, device=DEVICE)
        dx, found = gelu_backward(x, x, "tanh", sums=sums)
        assert dx.shape == (0, 5) and (found is None) is not sums
        assert found is None or not found.any()


def test_programs_of_a_sum() -> None:
    tile = replace(SUM, rows=32, columns=128, programs=8, least=4)
    assert tile.grid(1, 1, DEVICE) == (1, 1)
    assert tile.grid(128, 1152, DEVICE) == (9, 1)  # too few for a second program
    blocks, programs = tile.grid(56160, 4304, DEVICE)
    assert blocks == 34 and 1 <= programs <= 56160 // 128


@pytest.mark.parametrize("approximate", KINDS)
@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize(("rows", "width"), [(1, 1), (5, 8), (33, 31), (70, 24), *REAL_KERNELS])
def test_gelu(rows: int, width: int, dtype: torch.dtype, approximate: str) -> None:
    x, dout = (draw(rows, width, seed=seed).to(DEVICE, dtype) * 2 for seed in (0, 1))
    exact = x.double().requires_grad_()
    wanted = F.gelu(exact, approximate=approximate)
    (change,) = torch.autograd.grad(wanted, exact, dout.double())
    limit = 2e-6 if dtype == torch.float32 else ERROR[dtype]
    assert relative_error(gelu_forward(x, approximate), wanted) < limit
    found, sums = gelu_backward(x, dout, approximate, sums=True)
    assert sums is not None
    assert relative_error(found, change) < limit
    # the sum of numbers of both signs: as its own error, and as torch's, which adds rounded ones
    assert float((sums.double() - change.sum(0)).norm()) < limit * float(change.norm())
    again, nothing = gelu_backward(x, dout, approximate, sums=False)
    assert nothing is None and torch.equal(again, found)


@pytest.mark.parametrize("approximate", KINDS)
def test_gelu_is_torch_s_everywhere(approximate: str) -> None:
    """Value by value, from where it is nothing to where it is x; no exponential runs over."""
    ends = torch.tensor([-6e4, -1e3, -50.0, 50.0, 1e3, 6e4, 0.0, -0.0, 1e-30, -1e-6])
    x = torch.cat([torch.linspace(-12, 12, 4001), ends])[None].to(DEVICE)
    exact = x.double().requires_grad_()
    wanted = F.gelu(exact, approximate=approximate)
    (change,) = torch.autograd.grad(wanted, exact, torch.ones_like(wanted))
    found, _ = gelu_backward(x, torch.ones_like(x), approximate, sums=False)
    torch.testing.assert_close(gelu_forward(x, approximate).double(), wanted.detach(), atol=2e-6, rtol=2e-6)
    torch.testing.assert_close(found.double(), change, atol=3e-6, rtol=3e-6)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(0, 6), (1, 6), (37, 6), (2, 9, 16)], ids=str)
def test_layers_against_float64(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    tensors = [draw(*shape), draw(21, shape[-1], seed=1) / shape[-1] ** 0.5, draw(21, seed=2)]
    if dtype == torch.float32 or ON_GPU:  # a CPU's products in bfloat16 are not those of the reference
        assert_same(triton_linear.linear, linear.linear, tensors, dtype)
    for approximate in KINDS:

        def ours(*given: Tensor, approximate: str = approximate) -> Tensor:
            return triton_linear.linear_gelu(*given, approximate)

        def theirs(*given: Tensor, approximate: str = approximate) -> Tensor:
            return linear.linear_gelu(*given, approximate)

        assert_same(ours, theirs, tensors, dtype)


@pytest.mark.parametrize(("rows", "width"), [(37, 21), gpu(56160, 4304)])
@pytest.mark.parametrize("approximate", KINDS)
def test_no_worse_than_torch_in_bfloat16(rows: int, width: int, approximate: str) -> None:
    """Each result is at most as far from float64 as torch's, and a tenth; the interpreter cuts bits off, twice that."""
    inner = 1152 if ON_GPU and rows > 1000 else 12
    tensors = [draw(rows, inner), draw(width, inner, seed=1) / inner**0.5, draw(width, seed=2)]
    leaves = [t.to(DEVICE, torch.bfloat16) for t in tensors]
    dout = draw(rows, width, seed=3).to(DEVICE, torch.bfloat16)

    def results(layer: Callable[..., Tensor], dtype: torch.dtype) -> list[Tensor]:
        given = [t.to(dtype).requires_grad_() for t in leaves]
        out = layer(*given, approximate)
        return [out, *torch.autograd.grad(out, given, dout.to(dtype))]

    exact = results(linear.linear_gelu, torch.float64)
    ours, torchs = (results(m.linear_gelu, torch.bfloat16) for m in (triton_linear, linear))
    for name, a, b, e in zip(("out", "dx", "dweight", "dbias"), ours, torchs, exact, strict=True):
        assert relative_error(a, e) < 1.1 * (1 if ON_GPU else 2) * relative_error(b, e), name


def test_a_gradient_that_is_a_view() -> None:
    """Of a sum, of a transposed and of a part: strides of 0, columns apart, rows apart."""
    tensors = [draw(33, 6), draw(20, 6, seed=1), draw(20, seed=2)]
    uses: list[Callable[[Tensor], Tensor]] = [
        lambda y: y.sum(),
        lambda y: (y.t().contiguous() * draw(20, 33, seed=4).to(y)).sum(),
        lambda y: (y * draw(40, 33, seed=5).to(y)[:20].t()).sum(),
        lambda y: F.pad(y, (3, 4)).square().sum(),
    ]
    for use in uses:
        found, expected = ([t.clone().to(DEVICE).requires_grad_() for t in tensors] for _ in range(2))
        results = [
            torch.autograd.grad(use(layer(*leaves, "tanh")), leaves)
            for layer, leaves in ((triton_linear.linear_gelu, found), (linear.linear_gelu, expected))
        ]
        for a, b in zip(*results, strict=True):
            torch.testing.assert_close(a, b, atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("layer", ["linear", "linear_gelu"])
def test_only_what_is_asked_for(layer: str) -> None:
    """Whichever gradients are asked for, those come, and they are the ones of all."""
    tensors, rest = [draw(9, 6), draw(5, 6, seed=1), draw(5, seed=2)], [] if layer == "linear" else ["tanh"]
    results = {}
    for needs in product([True, False], repeat=3):
        given = [t.clone().to(DEVICE).requires_grad_(need) for t, need in zip(tensors, needs, strict=True)]
        out = getattr(triton_linear, layer)(*given, *rest)
        assert out.requires_grad is any(needs)
        if any(needs):
            out.backward(draw(9, 5, seed=3).to(DEVICE))
        results[needs] = [t.grad for t in given]
    everything = results[True, True, True]
    for needs, found in results.items():
        for need, a, b in zip(needs, found, everything, strict=True):
            assert torch.equal(a, b) if need and a is not None and b is not None else not need and a is None


def test_no_more_is_kept_than_torch_keeps() -> None:
    """Bytes between the passes, of a tower's MLP, without the parameters."""
    x = draw(64, 32).to(DEVICE).requires_grad_()
    shapes = (((96, 32), (96,)), ((32, 96), (32,)))
    first, second = ([draw(*shape, seed=1).to(DEVICE).requires_grad_() for shape in layer] for layer in shapes)
    parameters = {t.untyped_storage().data_ptr() for t in (*first, *second)}
    kept = {}
    for module in (triton_linear, linear):
        seen: dict[int, int] = {}

        def keep(t: Tensor, seen: dict[int, int] = seen) -> Tensor:
            seen[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
            return t

        with saved_tensors_hooks(keep, lambda t: t):
            out = module.linear(module.linear_gelu(x, *first, "tanh"), *second)
        kept[module] = sum(size for place, size in seen.items() if place not in parameters)
        out.sum().backward()
    assert kept[triton_linear] == kept[linear] == 4 * 64 * (32 + 2 * 96)


def test_fewer_nodes() -> None:
    def nodes(out: Tensor) -> int:
        found, left = set(), [out.grad_fn]
        while left:
            if (node := left.pop()) is not None and node not in found:
                found.add(node)
                left += [following for following, _ in node.next_functions]
        return len(found)

    leaves = [t.to(DEVICE).requires_grad_() for t in (draw(4, 6), draw(5, 6), draw(5))]
    ours, torchs = (nodes(m.linear_gelu(*leaves, "tanh")) for m in (triton_linear, linear))
    assert ours == 1 + 3  # and one for each leaf
    assert torchs > ours


def test_second_derivatives_of_a_layer_with_the_kernel() -> None:
    """The sum has a derivative of its own, else that of the bias would be lost without a word."""
    x, weight, bias = (t.to(DEVICE).requires_grad_() for t in (draw(5, 3), draw(2, 3, seed=1), draw(2, seed=2)))
    results = []
    for layer in (triton_linear.linear, linear.linear):
        out = layer(x, weight, bias).sin()
        (dbias,) = torch.autograd.grad(out.sum(), bias, create_graph=True)
        results.append(torch.autograd.grad(dbias.square().sum(), (x, weight, bias)))
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)


def test_a_block_that_is_computed_again_keeps_the_projection() -> None:
    tensors = [t.to(DEVICE) for t in (draw(9, 6), draw(6, 6, seed=1), draw(6, seed=2))]

    def block(*given: Tensor) -> Tensor:
        return triton_linear.linear(triton_linear.linear(*given, kept=True).sin(), *given[1:]).sin()

    results, products = [], []
    for context in ({"context_fn": keep_projections}, None, {}):
        given = [t.clone().requires_grad_() for t in tensors]
        with Computed() as computed:
            out = block(*given) if context is None else checkpoint(block, *given, use_reentrant=False, **context)
            out.square().sum().backward()
        results.append([t.grad for t in given])
        products.append(computed.counts["aten::addmm"])
    assert products == [3, 2, 4]  # kept: one of two again
    for found in (results[0], results[2]):
        assert all(torch.equal(cast(Tensor, a), cast(Tensor, b)) for a, b in zip(found, results[1], strict=True))


def test_blocks_and_mergers_with_the_kernels() -> None:
    """Values and all gradients are those with torch's layers, under the same names."""
    config = families.omni()
    vision, audio = config.vision_config, config.audio_config
    segments = Segments.from_lengths([4, 4], DEVICE)
    place = torch.arange(8, device=DEVICE)
    table = vision_table(place, place % 3, RopeSpec.of_vision(vision))
    patch = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2

    def results(make: Callable[[Ops], nn.Module], ops: Ops, width: int, *rest: Any) -> dict[str, Tensor]:
        block = make(ops)
        for number, parameter in enumerate(block.parameters()):
            parameter.data.copy_(draw(*parameter.shape, seed=number) / 4)
        x = draw(8, width).to(DEVICE).requires_grad_()
        y = as_tuple(block.to(DEVICE)(x, *rest))[0]
        names = ["x", *(name for name, _ in block.named_parameters())]
        return {
            "y": y,
            **dict(zip(names, torch.autograd.grad(y.square().sum(), [x, *block.parameters()]), strict=True)),
        }

    cases: list[tuple[Callable[[Ops], nn.Module], int, tuple[Any, ...]]] = [
        (lambda ops: VisionBlock(vision, ops), vision.hidden_size, (table, segments)),
        (lambda ops: AudioBlock(audio, ops), audio.d_model, (segments,)),
        (lambda ops: OmniMerger(vision, ops, late_norm=True), vision.hidden_size, ()),
        (lambda ops: VLMerger(vision, ops, late_norm=False), vision.hidden_size, ()),
        (lambda ops: PatchProjection(vision, ops), patch, ()),
    ]
    for make, width, rest in cases:
        found, expected = (results(make, ops, width, *rest) for ops in (fused_ops(), eager_ops(DEVICE)))
        assert list(found) == list(expected)
        # the gradient of k's bias is nothing but rounding
        largest = max(float(t.detach().abs().max()) for t in expected.values())
        for name, a in found.items():
            torch.testing.assert_close(a, expected[name], atol=2e-6 * largest, rtol=1e-4, msg=name)


def test_an_adapter_comes_before_the_activation() -> None:
    ops = fused_ops()
    layer = TowerLinear(6, 5, ops).to(DEVICE)
    x = draw(4, 6).to(DEVICE).requires_grad_()
    assert isinstance(layer, nn.Linear) and set(layer.state_dict()) == {"weight", "bias"}
    adapted = LoraLinear(layer, PairSettings(2, 0.5), Starts.of(False), torch.float32).to(DEVICE)
    for parameter in adapted.parameters():
        parameter.data.copy_(draw(*parameter.shape))
    a, b = adapted.lora_A.weight, adapted.lora_B.weight
    wanted = F.gelu(F.linear(x, layer.weight + adapted.settings.scale * b @ a, layer.bias), approximate="tanh")
    torch.testing.assert_close(activated(adapted, x, Gelu("tanh")), wanted, atol=1e-5, rtol=1e-5)


def test_modules_are_heard_without_gradients() -> None:
    merger = OmniMerger(families.omni().vision_config, fused_ops(), late_norm=True).to(DEVICE)
    heard: list[str] = []
    for name, module in merger.named_modules():
        if name.startswith("mlp."):
            module.register_forward_hook(lambda *_, name=name: heard.append(name))
    x = draw(8, merger.joined // 4).to(DEVICE)
    with torch.no_grad():
        merger(x)
    assert heard == ["mlp.0", "mlp.1", "mlp.2"]


def test_another_activation_comes_after_the_layer() -> None:
    layer, x = TowerLinear(6, 5, fused_ops()).to(DEVICE), draw(4, 6).to(DEVICE)
    assert torch.equal(activated(layer, x, F.silu), F.silu(layer(x)))
    with pytest.raises(ValueError, match="approximate 'erf': none or tanh"):
        triton_linear.linear_gelu(x, layer.weight, layer.bias, "erf")
