"""Experts in a block that is computed again and keeps what their activation is of."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from tests.train.ops.test_triton_moe import adapters, choose, draw, parameters
from tests.train.ops.triton_cases import DEVICE, DTYPES, ON_GPU, TOLERANCE, gpu, kernels_can_run, poison, relative_error
from train.ops import moe, triton_moe_first
from train.ops.expert_backward import ExpertBackward
from train.ops.lora_types import ExpertLora
from train.ops.recorded import Recording
from train.ops.recorded_room import Room
from train.ops.triton_moe import moe_experts
from train.ops.triton_moe_first import kept_rows
from train.ops.triton_moe_gemm import alignment
from train.ops.triton_moe_routing import build_routing

setup_module = kernels_can_run
Block = Callable[..., Tensor]


def block_of(ids: Tensor, share: float) -> Block:
    def block(x: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor, *factors: Tensor) -> Tensor:
        lora = ExpertLora(*factors, scale=0.5) if factors else None
        return x + moe_experts(x.sin(), ids, weights, gate_up, down, lora, ExpertBackward(share=share))

    return block


def results(block: Block, tensors: list[Tensor], recording: Recording | None) -> list[Tensor]:
    """The output and all gradients."""
    given = [t.detach().clone().requires_grad_() for t in tensors]
    if recording is None:
        out = block(*given)
    else:
        out = checkpoint(block, *given, use_reentrant=False, context_fn=recording.contexts)
    if ON_GPU:
        poison(0.5)
    out.backward(draw(*out.shape, seed=8).to(out.dtype))
    grads = [t.grad for t in given]
    assert all(grad is not None for grad in grads)
    return [out.detach(), *(grad for grad in grads if grad is not None)]


def noted(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Which products are made."""
    runs: list[str] = []
    for name in ("gate_up_products", "rest_of_gate_up"):
        original = getattr(triton_moe_first, name)

        def run(*args: Any, _name: str = name, _original: Any = original, **more: Any) -> Any:
            runs.append(_name)
            return _original(*args, **more)

        monkeypatch.setattr(triton_moe_first, name, run)
    return runs


def case(tokens: int, sizes: tuple[int, ...], skipped: float, skew: float, rank: int) -> tuple[Tensor, list[Tensor]]:
    experts, k, hidden, width = sizes
    ids, weights = choose(tokens, experts, k, skew, skipped)
    tensors = [draw(tokens, hidden, seed=7), weights, *parameters(experts, hidden, width)]
    return ids, tensors + (adapters((1, experts), rank, hidden, width) if rank else [])


SMALL, REAL = (5, 3, 24, 40), (64, 8, 2048, 768)


@pytest.mark.parametrize("rank", [0, 4])
@pytest.mark.parametrize(
    ("tokens", "sizes", "share", "skipped"),
    [
        (33, SMALL, 1.0, 0.0),  # all
        (45, SMALL, 0.5, 0.6),  # more room than rows
        (45, SMALL, 0.25, 0.0),  # rows without room
        gpu(4096, REAL, 1.0, 0.0),
        gpu(16384, REAL, 0.5, 0.5),
        gpu(16384, REAL, 0.25, 0.3),
    ],
)
def test_what_is_kept_gives_the_same_bits(
    tokens: int, sizes: tuple[int, ...], share: float, skipped: float, rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids, tensors = case(tokens, sizes, skipped, 0.5, rank)
    dtype = torch.bfloat16 if tokens > 100 else torch.float32
    tensors = [t if n == 1 else t.to(dtype) for n, t in enumerate(tensors)]
    routing = build_routing(ids, sizes[0], *alignment(tensors[0]))
    there, rows = kept_rows(routing, share), int(routing.ends.max())
    assert (there == routing.rows) == (share == 1) and (rows > there) == (share == 0.25)
    block = block_of(ids, share)
    wanted = results(block, tensors, None)
    runs = noted(monkeypatch)
    found = results(block, tensors, Recording({"mlp"}))
    assert runs == ["gate_up_products", *(["rest_of_gate_up"] if share < 1 else [])]
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


def test_without_room_it_is_computed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    ids, tensors = case(33, SMALL, 0.2, 0.0, 0)
    block, runs = block_of(ids, 0.5), noted(monkeypatch)
    wanted = results(block, tensors, None)
    runs.clear()
    room = Room(1000)
    found = results(block, tensors, Recording({"mlp"}, room))
    assert runs == ["gate_up_products"] * 2 and room.left == 1000
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


def test_other_choices_in_the_second_run_do_not_mix_rows() -> None:
    """Where a router draws near two experts, what was kept is still of the experts it was computed with."""
    ids, tensors = case(33, SMALL, 0.0, 0.0, 0)
    wanted = results(block_of(ids, 1.0), tensors, None)
    calls: list[int] = []

    def block(x: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
        calls.append(1)
        other = ids.roll(1, 0) if len(calls) == 2 else ids
        return x + moe_experts(x.sin(), other, weights, gate_up, down)

    found = results(block, tensors, Recording({"mlp"}))
    assert len(calls) == 2 and all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


def test_a_second_run_to_the_very_end_makes_what_it_needs() -> None:
    ids, tensors = case(33, SMALL, 0.2, 0.0, 4)
    block = block_of(ids, 0.5)
    wanted = results(block, tensors, None)
    with set_checkpoint_early_stop(False):
        found = results(block, tensors, Recording({"mlp"}))
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


def test_what_is_kept_takes_the_memory_of_its_rows() -> None:
    ids, tensors = case(64, SMALL, 0.5, 0.0, 0)
    room = Room(10**9)
    out = checkpoint(
        block_of(ids, 0.5), *(t.requires_grad_() for t in tensors), use_reentrant=False,
        context_fn=Recording({"mlp"}, room).contexts,
    )  # fmt: skip
    assert room.left == 10**9  # in the first pass others come first
    out.sum().backward()
    room = Room(10**9)
    room.take(1)
    room.give_back(1)
    out = checkpoint(block_of(ids, 0.5), *tensors, use_reentrant=False, context_fn=Recording({"mlp"}, room).contexts)
    routing = build_routing(ids, 5, *alignment(tensors[0]))
    rows = kept_rows(routing, 0.5)
    assert 10**9 - room.left == rows * 80 * 4 + sum(t.nbytes for t in routing.tensors)
    assert rows < 0.8 * routing.rows
    out.sum().backward()
    assert room.left == 10**9


def test_nothing_is_kept_where_nothing_is_trained() -> None:
    ids, tensors = case(33, SMALL, 0.0, 0.0, 0)
    room = Room(10**9)
    room.take(1)
    room.give_back(1)
    block = block_of(ids, 1.0)
    with Recording({"mlp"}, room).contexts()[0]:
        found = block(*tensors)
    assert room.left == 10**9 and torch.equal(found, block(*tensors))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("counts", [(4, 1, 1, 1), (1, 4, 1, 4), (1, 1, 4, 4), (4, 4, 1, 1)])
def test_adapters_of_each_expert_beside_shared_ones(counts: tuple[int, ...], dtype: torch.dtype) -> None:
    """counts: of the factors a and b of gate, a and b of up."""
    ids, weights = choose(19, 4, 2)
    sizes = [(4, 24), (16, 4), (4, 24), (16, 4)]
    factors = [
        draw(n, *size, seed=6 + i) * size[-1] ** -0.5 for i, (n, size) in enumerate(zip(counts, sizes, strict=True))
    ]
    factors += [draw(1, 4, 16, seed=11) * 0.25, draw(4, 24, 4, seed=12) * 0.5]
    tensors = [draw(19, 24, seed=7), *parameters(4, 24, 16), *factors]
    ours = [t.to(DEVICE, dtype, copy=True).requires_grad_() for t in tensors]
    exact = [t.detach().double().requires_grad_() for t in ours]
    for op, given in ((moe_experts, ours), (moe.eager, exact)):
        shares = weights if op is moe_experts else weights.double()
        out = op(given[0], ids, shares, given[1], given[2], ExpertLora(*given[3:], scale=0.5))
        out.backward(draw(19, 24, seed=8).to(out.dtype))
    errors = [relative_error(a.grad, b.grad) for a, b in zip(ours, exact, strict=True)]  # type: ignore[arg-type]
    assert max(errors) <= TOLERANCE[dtype], errors
