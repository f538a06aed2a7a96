"""What of blocks' inputs stays on the GPU counts for as long as it is there, however a pass ends."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, noop_context_fn

from tests.train.models.families import make_ours
from tests.train.models.media import case_of, everything_mix, omni_assets
from train.models.checkpointing import CheckpointPolicy, keep_projections, set_checkpointing
from train.parallel.offload import ActivationOffload

ROWS, WIDTH, BLOCKS = 5, 7, 6
INPUT = ROWS * WIDTH * 4  # bytes
STAY = 3  # inputs that have room

run = partial(checkpoint, use_reentrant=False)


class Block(nn.Module):
    """fails: at the next run."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.fails = False

    def forward(self, hidden: Tensor, scale: float) -> tuple[Tensor, None]:
        if self.fails:
            raise RuntimeError("no memory")
        return hidden + scale * torch.tanh(self.inner(hidden)), None


@pytest.fixture
def blocks() -> list[Block]:
    torch.manual_seed(0)
    return [Block() for _ in range(BLOCKS)]


@pytest.fixture(autouse=True)
def no_collector() -> Iterator[None]:
    """What is freed is freed at once, not when cycles are looked for."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def forward(offload: ActivationOffload | None, blocks: list[Block], seed: int = 1) -> Tensor:
    hidden = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(seed)).requires_grad_() * 1.0
    hidden = hidden.to(blocks[0].inner.weight.device)
    for number, block in enumerate(blocks):
        scale = 1.0 / (1 + number)
        hidden, _ = run(block, hidden, scale) if offload is None else offload(run, block, hidden, scale)
    return hidden.square().mean()


def gradients(loss: Tensor, blocks: list[Block], **keys: Any) -> list[Tensor]:
    return list(torch.autograd.grad(loss, [p for block in blocks for p in block.parameters()], **keys))


def carried(offload: ActivationOffload, blocks: list[Block]) -> int:
    """Inputs that go to the CPU in a forward pass, seen by who asks for it."""
    leave, count = offload._leave, 0

    def counting(hidden: Tensor) -> Any:
        nonlocal count
        count += 1
        return leave(hidden)

    offload._leave = counting  # type: ignore[method-assign]
    loss = forward(offload, blocks)
    offload._leave = leave  # type: ignore[method-assign]
    wanted = gradients(forward(None, blocks), blocks)
    for got, want in zip(gradients(loss, blocks), wanted, strict=True):
        assert torch.equal(got, want)
    return count


def as_at_first(offload: ActivationOffload, blocks: list[Block]) -> bool:
    """Nothing counts as held, and the next pass has the room that the first one had."""
    return offload.held == 0 and carried(offload, blocks) == BLOCKS - STAY and offload.held == 0


def make_offload() -> ActivationOffload:
    return ActivationOffload(STAY * INPUT + INPUT // 2)


def test_a_whole_pass(blocks: list[Block]) -> None:
    offload = make_offload()
    loss = forward(offload, blocks)
    assert offload.held == STAY * INPUT
    loss.backward()
    assert offload.held == 0 and loss.grad_fn is not None  # the loss is there, the inputs are not
    assert as_at_first(offload, blocks)


def test_a_pass_without_backward(blocks: list[Block]) -> None:
    offload = make_offload()
    for _ in range(3):
        loss = forward(offload, blocks)
        assert offload.held == STAY * INPUT
        del loss
        assert offload.held == 0
    assert as_at_first(offload, blocks)


@pytest.mark.parametrize("at", range(BLOCKS))
def test_a_forward_pass_that_fails(blocks: list[Block], at: int) -> None:
    offload = make_offload()
    blocks[at].fails = True
    with pytest.raises(RuntimeError, match="no memory"):
        forward(offload, blocks)
    blocks[at].fails = False
    assert as_at_first(offload, blocks)


@pytest.mark.parametrize("at", range(BLOCKS))
def test_a_backward_pass_that_fails(blocks: list[Block], at: int) -> None:
    """Of blocks that stay and of those that do not."""
    offload = make_offload()
    loss = forward(offload, blocks)
    blocks[at].fails = True
    with pytest.raises(RuntimeError, match="no memory"):
        gradients(loss, blocks)
    blocks[at].fails = False
    assert offload.held <= STAY * INPUT
    del loss
    assert as_at_first(offload, blocks)


def test_a_second_backward_pass(blocks: list[Block]) -> None:
    offload = make_offload()
    loss = forward(offload, blocks)
    wanted = gradients(forward(None, blocks), blocks)
    for again in (True, True, False):
        found = gradients(loss, blocks, retain_graph=again)
        assert all(torch.equal(got, want) for got, want in zip(found, wanted, strict=True))
        assert offload.held == (STAY * INPUT if again else 0)
    assert as_at_first(offload, blocks)


def test_a_result_that_no_loss_uses(blocks: list[Block]) -> None:
    offload = make_offload()
    hidden = torch.randn(ROWS, WIDTH, requires_grad=True)
    beside, _ = offload(run, blocks[0], hidden, 1.0)
    loss = forward(offload, blocks)
    assert offload.held == STAY * INPUT
    loss.backward()
    assert offload.held == INPUT  # its graph is there
    del beside
    assert as_at_first(offload, blocks)


def test_two_graphs_at_once(blocks: list[Block]) -> None:
    """The second finds the room taken, until the first is gone."""
    offload = make_offload()
    first, second = forward(offload, blocks), forward(offload, blocks, seed=2)
    assert offload.held == STAY * INPUT
    first.backward()
    assert offload.held == 0
    second.backward()
    assert as_at_first(offload, blocks)


def test_copies_of_a_graph_that_is_gone_are_gone(blocks: list[Block]) -> None:
    """The last inputs that leave are still where they were; without their graph nobody needs them."""
    offload = ActivationOffload()
    loss = forward(offload, blocks)
    records = [record for record in gc.get_objects() if type(record).__name__ == "_Input"]
    assert len(records) == BLOCKS
    del records, loss
    assert not [record for record in gc.get_objects() if type(record).__name__ == "_Input"]


@pytest.mark.gpu
def test_on_a_gpu(blocks: list[Block]) -> None:
    """Where copies are on their way when a graph goes."""
    blocks = [block.cuda() for block in blocks]
    offload = make_offload()
    for at in range(BLOCKS):
        for _ in range(3):
            forward(offload, blocks)
        loss = forward(offload, blocks)
        blocks[at].fails = True
        with pytest.raises(RuntimeError, match="no memory"):
            gradients(loss, blocks)
        blocks[at].fails = False
        del loss
        gradients(forward(offload, blocks), blocks)  # torch's thread lets go of a pass that failed in the next one
        assert as_at_first(offload, blocks)
    loss = forward(offload, blocks)
    wanted = gradients(forward(None, blocks), blocks)
    for again in (True, False):
        found = gradients(loss, blocks, retain_graph=again)
        assert all(torch.equal(got, want) for got, want in zip(found, wanted, strict=True))
    assert as_at_first(offload, blocks)


@pytest.mark.parametrize("keep", ["inputs", "projections"])
def test_in_a_model(keep: str) -> None:
    """With towers, deepstack features and results that blocks keep. Of a graph with branches torch lets go only in the
    next backward pass when one failed; until then its inputs are there, and counted."""
    model, inputs = make_ours("omni"), case_of(omni_assets(), [everything_mix()]).inputs
    offload = ActivationOffload(30_000)
    set_checkpointing(model, CheckpointPolicy(noop_context_fn if keep == "inputs" else keep_projections, carry=offload))
    for how in ("whole", "forward", "fails", "whole", "twice" if keep == "inputs" else "whole"):
        loss = model(inputs).loss
        assert loss is not None and 0 < offload.held <= 30_000
        if how == "twice":
            loss.backward(retain_graph=True)
        if how == "fails":
            handle = model.model.layers[0].register_forward_pre_hook(_raise)
            with pytest.raises(RuntimeError, match="no memory"):
                loss.backward()
            handle.remove()
        elif how != "forward":
            loss.backward()
        del loss
        assert offload.held == 0 or how == "fails"
    assert offload.held == 0


def _raise(*_: Any) -> None:
    raise RuntimeError("no memory")
