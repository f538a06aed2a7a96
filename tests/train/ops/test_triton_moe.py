"""The fused experts against the eager ones in float64: outputs, gradients, ragged routing, adapters, CUDA graphs."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from schemas.errors import UnsupportedError
from tests.train.ops.triton_cases import DEVICE, DTYPES, ON_GPU, TOLERANCE, gpu, kernels_can_run, poison, relative_error
from train.ops import moe, triton_moe, triton_moe_first
from train.ops.expert_backward import ExpertBackward
from train.ops.lora_types import ExpertLora
from train.ops.triton_moe import moe_experts
from train.ops.triton_moe_routing import build_routing

setup_module = kernels_can_run


def draw(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator(DEVICE).manual_seed(seed), device=DEVICE)


def choose(tokens: int, experts: int, k: int, skew: float = 0.0, skipped: float = 0.0) -> tuple[Tensor, Tensor]:
    """(ids [T, k] without repeats in a row, weights [T, k]); skew makes some experts busy and leaves others empty."""
    logits = draw(tokens, experts, seed=1) + skew * draw(experts, seed=2)
    weights, ids = logits.softmax(-1).topk(k, -1)
    left_out = torch.rand(ids.shape, generator=torch.Generator(DEVICE).manual_seed(3), device=DEVICE) < skipped
    return torch.where(left_out, -1, ids), weights


def parameters(experts: int, hidden: int, width: int) -> list[Tensor]:
    return [draw(experts, 2 * width, hidden, seed=4) * hidden**-0.5, draw(experts, hidden, width, seed=5) * width**-0.5]


def adapters(sharing: tuple[int, int], rank: int, hidden: int, width: int) -> list[Tensor]:
    """gate_a, gate_b, up_a, up_b, down_a, down_b; the first dimension of all a and of all b as given."""
    one, other = sharing
    sizes = [(one, rank, hidden), (other, width, rank)] * 2 + [(one, rank, width), (other, hidden, rank)]
    return [draw(*size, seed=6 + i) * size[-1] ** -0.5 for i, size in enumerate(sizes)]


def check(
    ids: Tensor, weights: Tensor, tensors: list[Tensor], dtype: torch.dtype, wide: torch.dtype = torch.float64
) -> None:
    """tensors: x, gate_up, down and, with adapters, their six factors."""
    x, *rest = tensors
    ours = [weights.clone(), *(t.to(dtype, copy=True) for t in (x, *rest))]
    exact = [t.to(wide) for t in ours]
    for t in (*ours, *exact):
        t.requires_grad_()

    def run(op, given: list[Tensor]) -> Tensor:  # type: ignore[no-untyped-def]
        lora = ExpertLora(*given[4:], scale=0.5) if len(given) > 4 else None
        return op(given[1], ids, given[0], given[2], given[3], lora)

    dout = draw(*x.shape, seed=8).to(dtype)
    if ON_GPU:
        poison(1)
    out, expected = run(moe_experts, ours), run(moe.eager, exact)
    if ON_GPU:
        poison(1)
    out.backward(dout)
    expected.backward(dout.to(wide))
    errors = [relative_error(out, expected)]
    errors += [relative_error(a.grad, b.grad) for a, b in zip(ours, exact, strict=True)]
    assert max(errors) <= TOLERANCE[dtype], errors


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("tokens", "experts", "k", "hidden", "width", "skew", "skipped"),
    [
        (21, 4, 2, 40, 24, 0.0, 0.0),
        (1, 5, 3, 32, 16, 0.0, 0.0),
        (23, 6, 1, 24, 40, 3.0, 0.0),
        (11, 6, 2, 24, 24, 1.0, 0.4),
        gpu(2048, 128, 8, 2048, 768, 0.0, 0.0),
        gpu(1500, 64, 4, 1000, 328, 2.0, 0.3),
        gpu(20001, 16, 2, 512, 264, 4.0, 0.0),
    ],
)
def test_outputs_and_gradients(
    tokens: int, experts: int, k: int, hidden: int, width: int, skew: float, skipped: float, dtype: torch.dtype
) -> None:
    ids, weights = choose(tokens, experts, k, skew, skipped)
    wide = torch.float32 if tokens > 100 and dtype == torch.bfloat16 else torch.float64
    check(ids, weights, [draw(tokens, hidden, seed=7), *parameters(experts, hidden, width)], dtype, wide)


@pytest.mark.parametrize(
    ("tokens", "experts", "k", "hidden", "width", "rank", "sharing", "dtype"),
    [
        (21, 4, 2, 40, 24, 4, (4, 4), torch.bfloat16),
        (9, 3, 2, 24, 16, 20, (1, 1), torch.float32),
        (13, 3, 1, 16, 24, 5, (1, 3), torch.float32),
        gpu(3000, 16, 4, 1024, 512, 16, (16, 16), torch.bfloat16),
        gpu(3000, 16, 4, 1024, 512, 16, (1, 1), torch.bfloat16),
    ],
)
def test_adapters(
    tokens: int, experts: int, k: int, hidden: int, width: int, rank: int, sharing: tuple[int, int], dtype: torch.dtype
) -> None:
    ids, weights = choose(tokens, experts, k, skipped=0.2)
    tensors = [draw(tokens, hidden, seed=7), *parameters(experts, hidden, width)]
    check(ids, weights, [*tensors, *adapters(sharing, rank, hidden, width)], dtype)


def test_without_gradients_the_output_is_the_same() -> None:
    """Nothing is kept then."""
    ids, weights = choose(9, 3, 2)
    tensors = [draw(9, 16, seed=7), weights, *parameters(3, 16, 8)]
    x, weights, gate_up, down = (t.requires_grad_() for t in tensors)
    with torch.no_grad():
        alone = moe_experts(x, ids, weights, gate_up, down)
    assert torch.equal(alone, moe_experts(x, ids, weights, gate_up, down)) and not alone.requires_grad


def test_frozen_experts_get_no_gradient() -> None:
    ids, weights = choose(9, 3, 2)
    x = draw(9, 16, seed=7).requires_grad_()
    gate_up, down = parameters(3, 16, 8)
    factors = [t.requires_grad_() for t in adapters((3, 3), 4, 16, 8)]
    moe_experts(x, ids, weights, gate_up, down, ExpertLora(*factors, scale=1.0)).sum().backward()
    assert x.grad is not None and all(t.grad is not None for t in factors)
    assert gate_up.grad is None and down.grad is None


@pytest.mark.parametrize("tokens", [0, 5])
def test_nothing_to_do(tokens: int) -> None:
    """No tokens, or every row empty, as in a dispatch buffer that nobody sent to."""
    ids = torch.full((tokens, 1), -1, device=DEVICE)
    tensors = [draw(tokens, 16, seed=7), torch.ones(tokens, 1, device=DEVICE), *parameters(3, 16, 8)]
    x, weights, gate_up, down = (t.requires_grad_() for t in tensors)
    out = moe_experts(x, ids, weights, gate_up, down)
    out.sum().backward()
    for t in (out, *(t.grad for t in tensors)):
        assert t is not None and t.isfinite().all() and not t.any()


@pytest.mark.parametrize("rank", [None, 4])
def test_the_down_product_is_not_computed_again(monkeypatch: pytest.MonkeyPatch, rank: int | None) -> None:
    """Under gradient checkpointing the second run stops once the pre-activations are there; the numbers are the same
    bit for bit."""
    ids, weights = choose(33, 5, 3, skew=1.0, skipped=0.2)
    tensors = [draw(33, 24, seed=7), weights, *parameters(5, 24, 40)]
    tensors += adapters((1, 5), rank, 24, 40) if rank else []
    runs: list[str] = []

    def noted(module: Any, name: str) -> None:
        original = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *args, **kwargs: runs.append(name) or original(*args, **kwargs))

    for name in ("row_products", "gather_sum", "down_backward"):
        noted(triton_moe, name)
    for name in ("row_products", "gate_up_products"):
        noted(triton_moe_first, name)

    def block(x: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor, *factors: Tensor) -> Tensor:
        lora = ExpertLora(*factors, scale=0.5) if factors else None
        return x + moe_experts(x.sin(), ids, weights, gate_up, down, lora)

    def results(again: bool) -> tuple[list[Tensor | None], list[str]]:
        given = [t.detach().clone().requires_grad_() for t in tensors]
        runs.clear()
        out = checkpoint(block, *given, use_reentrant=False) if again else block(*given)
        out.backward(draw(33, 24, seed=8))
        return [out.detach(), *(t.grad for t in given)], list(runs)

    (wanted, once), (found, twice) = results(again=False), results(again=True)
    assert all(a is not None and b is not None and torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
    second = ["row_products", "gate_up_products"] if rank else ["gate_up_products"]  # first A x, then the products
    first = [*second, *(["row_products"] if rank else []), "row_products", "gather_sum"]
    assert once[: len(first)] == first
    assert twice == first + second + once[len(first) :]


@pytest.mark.parametrize("rank", [None, 4])
def test_the_rows_gradient_is_announced_before_the_experts_own(
    monkeypatch: pytest.MonkeyPatch, rank: int | None
) -> None:
    told: list[Any] = []
    for name in ("weight_gradient", "add_weight_gradient"):
        real = getattr(triton_moe, name)
        monkeypatch.setattr(triton_moe, name, lambda *a, _real=real, **k: (told.append("experts"), _real(*a, **k))[1])
    ids, weights = choose(9, 4, 2)
    x, (gate_up, down) = draw(9, 32, seed=3).requires_grad_(), parameters(4, 32, 16)
    lora = None if rank is None else ExpertLora(*adapters((1, 4), rank, 32, 16), scale=0.5)
    asked = ExpertBackward(told.append)
    moe_experts(x, ids, weights, gate_up.requires_grad_(), down.requires_grad_(), lora, asked).sum().backward()
    announced = [n for n, value in enumerate(told) if isinstance(value, Tensor)]
    assert len(announced) == 1 and torch.equal(told[announced[0]], x.grad)
    assert told[announced[0] + 1 :] == ["experts"] * (1 if rank is None else len(told) - announced[0] - 1) != []


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("only", [range(5), range(1), range(2)], ids=["both", "gate_up", "down"])
def test_gradients_are_added_to_those_so_far(dtype: torch.dtype, only: range) -> None:
    """In place, and rounded once each; experts without rows keep theirs."""
    hidden, width, names = 40, 24, ("gate_up", "down")
    asked_of = {0: only == range(5) or only == range(1), 1: only == range(5) or only == range(2)}
    weights = [value.to(dtype).requires_grad_() for value in parameters(5, hidden, width)]
    so_far = [draw(*weight.shape, seed=20 + n).to(dtype) for n, weight in enumerate(weights)]
    given = [value if asked_of[n] else None for n, value in enumerate(so_far)]
    before = [value.clone() for value in so_far]
    ids, shares = choose(13, 5, 2)
    ids[ids == 3] = -1
    x, dout = draw(13, hidden, seed=3).to(dtype), draw(13, hidden, seed=9).to(dtype)
    asked = ExpertBackward(so_far=lambda: (given[0], given[1]))
    moe_experts(x, ids, shares, *weights, None, asked).backward(dout)
    exact = [weight.detach().double().requires_grad_() for weight in weights]
    moe.eager(x.double(), ids, shares.double(), *exact).backward(dout.double())
    for n, name in enumerate(names):
        if not asked_of[n]:
            assert torch.equal(so_far[n], before[n]) and weights[n].grad is not None, name
            continue
        assert weights[n].grad is None, name
        assert relative_error(so_far[n], before[n].double() + exact[n].grad) < TOLERANCE[dtype], name
        assert torch.equal(so_far[n][3], before[n][3]), name


def test_between_the_halves_nothing_is_held(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the first one leaves to the second is gone with it: also where gradient checkpointing stops between them."""
    ids, weights = choose(9, 3, 2)
    x, gate_up, down = (t.requires_grad_() for t in (draw(9, 16, seed=7), *parameters(3, 16, 8)))
    left: list[weakref.ref[Tensor]] = []
    original = triton_moe_first.gate_up_products

    def noted(*args: Any, **kwargs: Any) -> Any:
        z, h = original(*args, **kwargs)
        left.append(weakref.ref(h))
        return z, h

    monkeypatch.setattr(triton_moe_first, "gate_up_products", noted)
    gc.disable()
    try:
        out = moe_experts(x, ids, weights, gate_up, down)
        assert len(left) == 1 and left[0]() is None
        del out
        out = checkpoint(moe_experts, x, ids, weights, gate_up, down, use_reentrant=False)
        out.sum().backward()
        assert len(left) == 3 and not any(h() is not None for h in left)
    finally:
        gc.enable()


def test_a_second_backward_pass_is_refused() -> None:
    """The first one overwrote the pre-activations."""
    ids, weights = choose(5, 3, 2)
    x = draw(5, 16, seed=7).requires_grad_()
    out = moe_experts(x, ids, weights, *parameters(3, 16, 8)).sum()
    out.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.backward()


def test_weights_at_any_place_of_a_buffer() -> None:
    """Descriptors begin at multiples of 16 bytes; a view of a flat buffer may not."""
    ids, weights = choose(9, 3, 2)
    x, (gate_up, down) = draw(9, 16, seed=7), parameters(3, 16, 8)
    flat = [torch.cat((t.new_zeros(1), t.reshape(-1))).requires_grad_() for t in (gate_up, down)]
    views = [whole[1:].view(t.shape) for whole, t in zip(flat, (gate_up, down), strict=True)]
    out = moe_experts(x, ids, weights, *views)
    assert torch.equal(out, moe_experts(x, ids, weights, gate_up, down))
    out.sum().backward()
    assert all(whole.grad is not None and whole.grad[1:].any() and not whole.grad[0] for whole in flat)


def test_sizes_that_descriptors_cannot_take_are_refused() -> None:
    ids, weights = choose(5, 3, 2)
    with pytest.raises(UnsupportedError, match=r"multiples of 4 .*not hidden size 16 and expert width 10"):
        moe_experts(draw(5, 16, seed=7), ids, weights, *parameters(3, 16, 10))


@pytest.mark.parametrize(
    ("experts", "block", "align"), [(3, 8, 4), (20, 16, 16), gpu(128, 128, 64), gpu(1000, 128, 64)]
)
def test_routing(experts: int, block: int, align: int) -> None:
    """Against the same by Python loops; ids too small and too large are skipped."""
    ids = torch.randint(-2, experts + 2, (41, 2), generator=torch.Generator().manual_seed(0))
    routing = build_routing(ids.to(DEVICE), experts, block, align)
    start, starts, ends, tiles, row_of_slot = 0, [], [], [], [-1] * ids.numel()
    for expert in range(experts):
        slots = (ids.reshape(-1) == expert).nonzero().flatten().tolist()
        starts.append(start)
        ends.append(start + len(slots))
        tiles += [(expert, row) for row in range(start, ends[-1], block)]
        for i, slot in enumerate(slots):
            row_of_slot[slot] = start + i
        start += -(-len(slots) // align) * align
    assert routing.starts.tolist() == starts and routing.ends.tolist() == ends and start <= routing.rows
    assert routing.row_of_slot.tolist() == row_of_slot
    assert all(routing.slot_of_row[row] == slot for slot, row in enumerate(row_of_slot) if row >= 0)
    used = int(routing.tile_count)
    assert used == len(tiles) <= routing.num_tiles
    found = list(zip(routing.tile_expert.tolist(), routing.tile_row.tolist(), strict=True))
    assert found == tiles + [(-1, 0)] * (routing.num_tiles - used)
    counts = [end - first for first, end in zip(starts, ends, strict=True)]
    assert routing.expert_order.tolist() == sorted(range(experts), key=lambda e: (-counts[e], e))


@pytest.mark.gpu
@pytest.mark.skipif(not ON_GPU, reason="needs a CUDA device")
def test_cuda_graph_with_other_routing() -> None:
    """A graph captured with one routing is right for another, and both passes give the same bits each time."""
    ids, weights = choose(512, 16, 4)
    tensors = [draw(512, 256, seed=7).bfloat16(), weights, *(t.bfloat16() for t in parameters(16, 256, 128))]
    static = [t.requires_grad_() for t in tensors]
    dout = draw(512, 256, seed=8).bfloat16()

    def step() -> tuple[Tensor, ...]:
        out = moe_experts(static[0], ids, *static[1:])
        return out, *torch.autograd.grad(out, static, dout)

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        step()
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph, stream=stream):
            captured = step()
    ids.copy_(choose(512, 16, 4, skew=3.0, skipped=0.3)[0])
    graph.replay()
    first = [t.clone() for t in captured]
    for found in (step(), captured):
        graph.replay()
        assert all(torch.equal(a, b) for a, b in zip(found, first, strict=True))
