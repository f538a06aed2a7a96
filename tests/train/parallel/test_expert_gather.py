"""Experts whose rows are gathered: what travels when, where gradients are added up, and what is held."""

from __future__ import annotations

import gc
import time
import weakref
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.utils.checkpoint import checkpoint

from schemas.errors import ConfigError
from tests import dist as processes
from tests.train.ops.triton_cases import ON_GPU, kernels_can_run
from tests.train.parallel.expert_cases import EXPERTS, HIDDEN, MOST_ROWS, layer, leaves, obedient, one_share, rows_of
from train.models.checkpointing import keep_mlp
from train.ops import moe, triton_moe
from train.ops.expert_backward import ExpertBackward
from train.ops.registry import Device, OpSlot
from train.parallel import expert_gather
from train.parallel.expert_apply import _can_be_asked, gathers
from train.parallel.expert_gather import GatheredExperts

setup_module = kernels_can_run


def _order() -> list[str]:
    """What happens in the backward pass of a block that is computed again."""
    group = init_device_mesh("cpu", (2,), mesh_dim_names=("ep",)).get_group()
    happened: list[str] = []
    begin, exchange = expert_gather.begin_gather, expert_gather.PartialSums

    class Arrival:
        def __init__(self, what: str, work: Any) -> None:
            self.what, self.work = what, work

        def wait(self) -> None:
            happened.append(f"{self.what} arrive")
            self.work.wait()

    def gather(x: Tensor, *more: Any) -> Any:
        what = "rows" if x.shape[1] == HIDDEN else "choices"
        happened.append(f"{what} leave")
        every, work = begin(x, *more)
        return every, Arrival(what, work)

    def sums(made: Tensor, *more: Any) -> Any:
        happened.append("sums leave" if made.shape[1] == HIDDEN else "gradients of choices leave")
        return exchange(made, *more)

    def compute(*tensors: Any, **more: Any) -> Tensor:
        happened.append("experts")
        return obedient(*tensors, **more)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(expert_gather, "begin_gather", gather)
        patch.setattr(expert_gather, "PartialSums", sums)
        rows, weights = rows_of("even", dist.get_rank(), 2), layer()
        share = EXPERTS // 2
        own = [weights[name][dist.get_rank() * share :][:share].requires_grad_() for name in ("gate_up", "down")]
        experts = GatheredExperts(compute, group, MOST_ROWS, asked=True)
        x, shares = rows["x"].requires_grad_(), rows["weights"].requires_grad_()
        out = checkpoint(lambda x: experts(x, rows["ids"], shares * 1.0, *own), x, use_reentrant=False)
        happened.clear()
        out.backward(rows["gradient"])
    return happened


def test_gradients_travel_while_a_block_is_computed_again() -> None:
    again = ["rows leave", "choices leave", "choices arrive", "rows arrive", "experts"]
    after = ["rows arrive", "sums leave", "gradients of choices leave"]
    assert processes.run(2, _order) == [["rows leave", *again, *after]] * 2


def _freed() -> tuple[bool, bool]:
    """Whether the rows of all ranks, and what the nodes of a call share, are gone with the output, without a search for
    cycles: half before a backward pass, half after it."""
    group = init_device_mesh("cpu", (2,), mesh_dim_names=("ep",)).get_group()
    rows, weights = rows_of("even", dist.get_rank(), 2), layer()
    share = EXPERTS // 2
    own = [weights[name][dist.get_rank() * share :][:share].requires_grad_() for name in ("gate_up", "down")]
    experts = GatheredExperts(obedient, group, MOST_ROWS, asked=True)
    found = []
    gc.collect()
    gc.disable()
    for backward in (False, True):
        sent = experts.start(rows["x"].requires_grad_())
        held = [weakref.ref(sent.every), weakref.ref(sent.call)]
        out = experts(sent, rows["ids"], rows["weights"], *own)
        if backward:
            out.backward(rows["gradient"])
        del sent, out
        until = time.monotonic() + 5  # the threads of gloo let go a little later
        while any(reference() is not None for reference in held) and time.monotonic() < until:
            time.sleep(0.01)
        found.append(not any(reference() is not None for reference in held))
    gc.enable()
    return found[0], found[1]


def _added() -> list[tuple[bool, ...]]:
    """Of the experts' gradients after three micro-batches: whether they are those that autograd adds up, what the op
    was given to add to, and whether the first one's memory has them."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("ep",))
    rows = rows_of("even", dist.get_rank(), 2)
    found = {}
    for adds_up in (False, True):
        given: list[list[int | None]] = []

        def compute(*tensors: Any, asked: ExpertBackward, given: list[Any] = given) -> Tensor:
            def so_far() -> tuple[Tensor | None, Tensor | None]:
                parts = asked.so_far()
                given.append([None if part is None else part.data_ptr() for part in parts])
                return parts

            return obedient(*tensors, asked=replace(asked, so_far=so_far))

        experts = GatheredExperts(compute, mesh.get_group(), MOST_ROWS, asked=True)
        experts.adds_up = adds_up
        weights = leaves(mesh)
        for number in range(3):
            x = (rows["x"] * (number + 1)).requires_grad_()
            out = experts(x, rows["ids"], rows["weights"], weights["gate_up"], weights["down"])
            out.backward(rows["gradient"])
        gradients = [weights[name].grad for name in ("gate_up", "down")]
        found[adds_up] = gradients, x.grad, given, [gradient.to_local().data_ptr() for gradient in gradients]
    ours, plain = found[True], found[False]
    same = [torch.allclose(a.to_local(), b.to_local(), rtol=1e-5) for a, b in zip(ours[0], plain[0], strict=True)]
    nothing = [None, None]
    told = plain[2] == [nothing] * 3 and ours[2] == [nothing, ours[3], ours[3]]
    return [(*same, torch.equal(ours[1], plain[1]), told, all(isinstance(value, DTensor) for value in ours[0]))]


def test_gradients_of_micro_batches_are_added_in_place() -> None:
    assert processes.run(2, _added) == [[(True,) * 5]] * 2


def _fused(kept: bool) -> list[float]:
    """Of two micro-batches, relative errors of what the fused experts on two ranks make to the plain ones in one place:
    the output, the rows' and weights' gradients of the second, the sums of the experts' gradients. kept: in a block
    that is computed again and keeps what it can."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("ep",))
    rank, wide = dist.get_rank(), 16  # descriptors take multiples of 4
    whole = rows_of("even", 0, 1)
    experts = GatheredExperts(triton_moe.moe_experts, mesh.get_group(), MOST_ROWS, asked=True)
    experts.adds_up = True
    generator = torch.Generator().manual_seed(8)
    shapes = {"gate_up": (EXPERTS, 2 * wide, HIDDEN), "down": (EXPERTS, HIDDEN, wide)}
    plain = {n: (torch.randn(shape, generator=generator) * 0.3).requires_grad_() for n, shape in shapes.items()}
    parts = {n: w.detach().chunk(2)[rank].clone() for n, w in plain.items()}
    own = {n: DTensor.from_local(w, mesh, [Shard(0)], run_check=False).requires_grad_() for n, w in parts.items()}
    for number in (1, 2):
        mine = rows_of("even", rank, 2)
        x, shares = (mine["x"] * number).requires_grad_(), mine["weights"].clone().requires_grad_()
        given = x, mine["ids"], shares, own["gate_up"], own["down"]
        out = checkpoint(experts, *given, use_reentrant=False, context_fn=keep_mlp) if kept else experts(*given)
        out.backward(mine["gradient"])
        all_x, all_shares = (whole["x"] * number).requires_grad_(), whole["weights"].clone().requires_grad_()
        wanted = moe.eager(all_x, whole["ids"], all_shares, plain["gate_up"], plain["down"])
        wanted.backward(whole["gradient"])
    pairs = [(found, want.chunk(2)[rank]) for found, want in ((out, wanted), (x.grad, all_x.grad))]
    pairs.append((shares.grad, all_shares.grad.chunk(2)[rank]))
    pairs += [(own[name].grad.to_local(), plain[name].grad.chunk(2)[rank]) for name in own]
    return [float((found - want).norm() / want.norm()) for found, want in pairs]


@pytest.mark.skipif(ON_GPU, reason="its ranks have CPU tensors, which kernels take under the interpreter alone")
@pytest.mark.parametrize("kept", [False, True])
def test_fused_experts_of_two_ranks_equal_plain_ones_in_one_place(kept: bool) -> None:
    for errors in processes.run(2, _fused, kept):
        assert len(errors) == 5 and max(errors) < 1e-5, errors


def test_nothing_is_held_beyond_the_graph() -> None:
    assert processes.run(2, _freed) == [(True, True)] * 2


def _twice() -> str:
    group = init_device_mesh("cpu", (2,), mesh_dim_names=("ep",)).get_group()
    rows, weights = rows_of("even", dist.get_rank(), 2), layer()
    share = EXPERTS // 2
    own = [weights[name][dist.get_rank() * share :][:share].requires_grad_() for name in ("gate_up", "down")]
    x = rows["x"].requires_grad_()
    out = GatheredExperts(moe.eager, group, MOST_ROWS)(x, rows["ids"], rows["weights"], *own)
    (dx,) = torch.autograd.grad(out, x, rows["gradient"], create_graph=True)
    with pytest.raises(RuntimeError) as error:
        dx.square().sum().backward()
    return str(error.value)


def test_second_derivatives_are_refused() -> None:
    assert all("once_differentiable" in said for said in processes.run(2, _twice))


def test_the_fused_experts_can_be_asked() -> None:
    hopper = Device("cuda", (9, 0), frozenset({"train", "triton"}))
    bound = {name: OpSlot("moe_experts").bind(name, hopper) for name in ("fused_triton", "grouped_mm", "eager")}
    assert [name for name, slot in bound.items() if _can_be_asked(slot)] == ["fused_triton"]
    assert not _can_be_asked(moe.eager)


def _too_many_rows() -> str:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("ep",))
    weights = leaves(mesh)
    with pytest.raises(ValueError) as error:
        parallel = GatheredExperts(one_share, mesh.get_group(), 8)
        parallel(
            torch.zeros(9, HIDDEN), torch.zeros(9, 2).long(), torch.zeros(9, 2), weights["gate_up"], weights["down"]
        )
    return str(error.value)


def test_more_rows_than_were_agreed_on_are_refused() -> None:
    said = processes.run(2, _too_many_rows)
    assert all("9 rows of a rank, where experts over 2 ranks were set up for at most 8" in text for text in said)


def test_rows_are_gathered_where_nearly_all_go_everywhere() -> None:
    assert [gathers("auto", ranks, 8, 4096) for ranks in (2, 4, 5, 8)] == [True, True, False, False]
    assert not gathers("auto", 2, 8, None) and not gathers("all_to_all", 2, 8, 4096)
    assert gathers("all_gather", 8, 2, 4096)
    with pytest.raises(ConfigError, match="expert_dispatch: all_gather needs to know the most rows"):
        gathers("all_gather", 2, 8, None)
