"""Muon on one process: against float64, against torch's, blocks and stacks against their matrices alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from schemas.strict import check_config
from tests.train.optim.muon_reference import JORDAN, Reference, orthogonalised, share_off
from train.config_optimizer import OptimizerConfig
from train.optim.build import ModelOptimizer, make_optimizer
from train.optim.groups import parameter_groups
from train.optim.muon_layout import Matrices
from train.optim.muon_plan import PORTION, begun_before, cost, make_portions
from train.optim.newton_schulz import NewtonSchulz

FIVE = (JORDAN,) * 5
SHAPES = [(2, 24, 40), (2, 40, 24), (2, 32, 32), (1, 1, 7), (3, 7, 1)]


def gradients(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(4)) / 50


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(
    ("dtype", "limit"), [(torch.float32, 1e-5), (torch.float16, 1e-2), (torch.bfloat16, 5e-2)], ids=str
)
def test_steps_are_those_of_the_singular_values(shape: tuple[int, ...], dtype: torch.dtype, limit: float) -> None:
    given = gradients(*shape)
    for triples in (FIVE, ((2.0, -1.5, 0.5),) * 3, (JORDAN,), ((4.0, -6.0, 3.0), JORDAN)):
        found = NewtonSchulz(triples, 1e-7, dtype)(given)
        assert found.dtype == dtype
        assert share_off(found, orthogonalised(given, triples)) < limit, triples
    assert not NewtonSchulz(FIVE, 1e-7, dtype)(torch.zeros(shape)).any()


def test_float16_is_nearer_than_bfloat16() -> None:
    """Both forms, with singular values over four orders of magnitude."""
    for shape in ((48, 96), (96, 48), (64, 64)):
        u, _, vh = torch.linalg.svd(gradients(*shape), full_matrices=False)
        given = (u * torch.logspace(0, -4, min(shape))) @ vh
        want = orthogonalised(given)
        half, brain = (
            share_off(NewtonSchulz(FIVE, 1e-7, t)(given[None])[0], want) for t in (torch.half, torch.bfloat16)
        )
        assert half < brain / 2


def made(model: nn.Module, **keys: Any) -> ModelOptimizer:
    config = check_config({"type": "muon"} | keys, OptimizerConfig)
    found = make_optimizer(model, parameter_groups(model, config), config)
    assert isinstance(found, ModelOptimizer)
    return found


class Layer(nn.Module):
    """Three heads of 4, one matrix each of other shapes, a stack."""

    def __init__(self) -> None:
        super().__init__()
        self.heads, self.head_dim = 3, 4
        self.q_proj = nn.Linear(20, 12, bias=False)
        self.o_proj = nn.Linear(12, 20)
        self.experts = nn.Parameter(torch.randn(5, 6, 10))


def stepped(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 3) -> dict[str, Tensor]:
    for number in range(steps):
        for index, parameter in enumerate(model.parameters()):
            generator = torch.Generator().manual_seed(10 * number + index)
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        optimizer.step()
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def layer() -> Layer:
    torch.manual_seed(0)
    return Layer()


def test_torch_has_the_same_changes_of_matrices() -> None:
    """Within what bfloat16 rounds, which torch always computes in: the two are as far from float64."""
    keys = {"lr": 0.1, "muon_weight_decay": 0.05}
    for how in ("original", "match_rms_adamw"):
        ours, theirs = nn.Linear(48, 32, bias=False), nn.Linear(48, 32, bias=False)
        theirs.load_state_dict(ours.state_dict())
        first = ours.weight.detach().clone()
        reference = Reference(first, 0.1, 0.05, how=how)
        rival = torch.optim.Muon(theirs.parameters(), lr=0.1, weight_decay=0.05, adjust_lr_fn=how)
        optimizer = made(ours, muon_lr=0.1, muon_adjust_lr_fn=how, muon_ns_dtype="bf16", **keys)
        got, torchs = stepped(ours, optimizer)["weight"], stepped(theirs, rival)["weight"]
        for number in range(3):
            reference.step(torch.randn(32, 48, generator=torch.Generator().manual_seed(10 * number)))
        want = reference.parameter - first
        off = [share_off(value - first, want) for value in (got, torchs)]
        assert off[0] < 1.2 * off[1] < 0.05
        assert share_off(got - first, (torchs - first).double()) < 0.05


def test_a_stack_is_a_loop_over_its_matrices() -> None:
    model = layer()
    found = stepped(model, made(model, lr=0.1, muon_ns_dtype="fp32"))["experts"]
    start = layer().experts.detach()
    for expert in range(5):
        reference = Reference(start[expert], 0.1)
        for number in range(3):
            generator = torch.Generator().manual_seed(10 * number)
            reference.step(torch.randn(5, 6, 10, generator=generator)[expert])
        assert share_off(found[expert] - start[expert], reference.parameter - start[expert].double()) < 1e-5


@pytest.mark.parametrize(("size", "blocks"), [(1, 3), (3, 1)])
@pytest.mark.parametrize("how", ["original", "match_rms_adamw"])
def test_split_is_the_blocks_alone(size: int, blocks: int, how: str) -> None:
    keys = {"lr": 0.1, "muon_lr": 0.1, "muon_ns_dtype": "fp32", "muon_adjust_lr_fn": how}
    model = layer()
    found = stepped(model, made(model, muon_head_group_size=size, muon_head_split_modules=["q_proj"], **keys))
    start = layer()
    alone = nn.ParameterList(part.clone() for part in start.q_proj.weight.detach().chunk(blocks))
    optimizer = made(alone, **keys)
    for number in range(3):
        generator = torch.Generator().manual_seed(10 * number + 1)
        whole = torch.randn(12, 20, generator=generator)
        for part, gradient in zip(alone, whole.chunk(blocks), strict=True):
            part.grad = gradient.clone()
        optimizer.step()
    assert torch.allclose(found["q_proj.weight"], torch.cat(list(alone)).detach(), atol=1e-6)
    model = layer()
    without = stepped(model, made(model, **keys))
    assert torch.equal(without["o_proj.weight"], found["o_proj.weight"])
    assert torch.allclose(without["q_proj.weight"], found["q_proj.weight"], atol=1e-6) == (blocks == 1)


def test_portions_are_bounded_and_owners_have_alike_to_do() -> None:
    class Group:
        def rank(self) -> int:
            return 0

    options: dict[str, Any] = {}
    ranks, edge = 4, 4096
    group: Any = Group()
    held = (edge // ranks,) * ranks
    shared = [Matrices(f"w{n}", torch.empty(0), options, 1, edge, edge, 1, held, group) for n in range(45)]
    shared += [Matrices(f"e{n}", torch.empty(0), options, 50, edge, 512, 1, held, group) for n in range(3)]
    whole = [Matrices(f"x{n}", torch.empty(0), options, 128, 1536, 2048, 1, (1536,)) for n in range(2)]
    portions = make_portions([*shared, *whole])
    loads, seen = [0.0] * ranks, 0
    for portion in portions:
        each = [0] * ranks
        for entry in portion.entries:
            size = entry.count * entry.matrices.rows * entry.matrices.columns
            each[entry.owner] += size
            seen += size
            if portion.shared:
                loads[entry.owner] += entry.count * cost(entry.matrices)
        assert max(each) <= PORTION
        assert [entry.owner for entry in portion.entries] == sorted(entry.owner for entry in portion.entries)
    assert seen == sum(m.count * m.rows * m.columns for m in [*shared, *whole])
    assert max(loads) - min(loads) <= cost(shared[0])
    kinds = "".join("s" if portion.shared else "w" for portion in portions)
    assert kinds[0] == "s"
    assert "sw" in kinds[2:]


@pytest.mark.parametrize("count", [1, 2, 3, 7])
def test_exchanges_have_one_order_whatever_stays(count: int) -> None:
    """Ranks that hold other numbers of whole matrices would else take one exchange for another."""

    class Group:
        def rank(self) -> int:
            return 0

    def order(staying: int) -> tuple[str, ...]:
        group: Any = Group()
        empty, edge, options = torch.empty(0), 1 << 14, dict[str, Any]()
        quarters = (edge // 4,) * 4
        shared = [Matrices(f"w{n}", empty, options, 1, edge, edge, 1, quarters, group) for n in range(4 * count)]
        whole = [Matrices(f"x{n}", empty, options, 1, edge, edge, 1, (edge,)) for n in range(staying)]
        portions = make_portions([*shared, *whole])
        travelling = [portion for portion in portions if portion.shared]
        assert len(portions) == len(travelling) + staying and len(travelling) == count
        events = []
        for number, begins in enumerate(begun_before(portions)):
            events += [f"out {travelling.index(portions[n])}" for n in begins if portions[n].shared]
            events += [f"back {travelling.index(portions[number])}"] if portions[number].shared else []
        assert sorted(n for begins in begun_before(portions) for n in begins) == list(range(len(portions)))
        return tuple(events)

    found = {order(staying) for staying in (0, 1, 2, 3, 5, 11)}
    assert len(found) == 1
    assert found.pop()[:3] == (("out 0", "back 0") if count == 1 else ("out 0", "out 1", "back 0"))
