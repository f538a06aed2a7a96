"""Experts of several ranks against all experts in one place."""

from __future__ import annotations

import gc
import time
import weakref
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.utils.checkpoint import checkpoint

from schemas.errors import ConfigError
from schemas.strict import check_config
from tests import dist as processes
from tests.train.models import families
from tests.train.parallel.steps import FP32, meta_model
from train.config_trainer import AcceleratorConfig
from train.mesh import Mesh
from train.models.moe import Experts
from train.models.spec import fsdp_blocks
from train.ops import moe, moe_grouped_mm
from train.ops.expert_backward import ExpertBackward
from train.ops.lora_types import ExpertLora
from train.ops.registry import Device, OpSlot, eager_ops
from train.parallel import expert_gather
from train.parallel.apply import apply_parallel
from train.parallel.expert import Copies, ExpertParallel, _collect, _spread
from train.parallel.expert_apply import _can_be_asked, apply_expert_parallel, gathers, shard_experts
from train.parallel.expert_gather import GatheredExperts

EXPERTS, HIDDEN, INNER, CHOICES, RANK = 8, 16, 12, 3, 2
BACKENDS = {"eager": moe.eager, "grouped_mm": moe_grouped_mm.grouped_mm}


class _Asked(torch.autograd.Function):
    """The plain experts, which do in the backward pass what they are asked for."""

    @staticmethod
    def forward(ctx: Any, asked: ExpertBackward, ids: Tensor, *tensors: Tensor) -> Tensor:
        ctx.asked, ctx.ids = asked, ids
        ctx.save_for_backward(*tensors)
        return terms(ids, tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        tensors = [tensor.detach().requires_grad_() for tensor in ctx.saved_tensors]
        with torch.enable_grad():
            found = list(torch.autograd.grad(terms(ctx.ids, tensors), tensors, gradients, allow_unused=True))
        ctx.asked.dx_made(found[0])
        for number, so_far in enumerate(ctx.asked.so_far(), 2):
            if so_far is not None:
                so_far += found[number]
                found[number] = None
        return None, None, *found


def terms(ids: Tensor, tensors: Any) -> Tensor:
    x, weights, gate_up, down, *factors = tensors
    return moe.eager(x, ids, weights, gate_up, down, ExpertLora(*factors, scale=0.7) if factors else None)


def obedient(
    x: Tensor, ids: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor, lora: Any = None, *, asked: ExpertBackward
) -> Tensor:
    names = ("gate_a", "gate_b", "up_a", "up_b", "down_a", "down_b")
    factors = () if lora is None else tuple(getattr(lora, name) for name in names)
    out: Tensor = _Asked.apply(asked, ids, x, weights, gate_up, down, *factors)
    return out


MOST_ROWS = 21  # of a rank, where rows are gathered
# rows of each of four ranks; two ranks take two each; only: experts that are chosen among
CASES: dict[str, tuple[tuple[int, ...], range]] = {
    "even": ((9, 9, 9, 9), range(EXPERTS)),
    "more experts than rows": ((1, 1, 1, 0), range(EXPERTS)),
    "rows for the first rank alone": ((5, 0, 7, 3), range(3)),
    "rows for the last rank alone": ((5, 2, 0, 3), range(5, EXPERTS)),
    "no rows": ((0, 0, 0, 0), range(EXPERTS)),
}


def layer() -> dict[str, Tensor]:
    """Weights and adapters: of each expert for the down product, shared a and own b for the others."""
    generator = torch.Generator().manual_seed(5)
    shapes = {
        "gate_up": (EXPERTS, 2 * INNER, HIDDEN),
        "down": (EXPERTS, HIDDEN, INNER),
        "gate_a": (1, RANK, HIDDEN),
        "gate_b": (EXPERTS, INNER, RANK),
        "up_a": (1, RANK, HIDDEN),
        "up_b": (1, INNER, RANK),
        "down_a": (EXPERTS, RANK, INNER),
        "down_b": (EXPERTS, HIDDEN, RANK),
    }
    return {name: torch.randn(shape, generator=generator) * 0.3 for name, shape in shapes.items()}


def rows_of(case: str, rank: int, ranks: int) -> dict[str, Tensor]:
    """x, ids, weights and a gradient of the output, of one rank of 1, 2 or 4."""
    counts, chosen = CASES[case]
    generator = torch.Generator().manual_seed(6)
    total = sum(counts)
    x, gradient = (torch.randn(total, HIDDEN, generator=generator) for _ in range(2))
    ids = torch.rand(total, len(chosen), generator=generator).argsort(1)[:, :CHOICES]
    weights = torch.rand(total, CHOICES, generator=generator)
    share = 4 // ranks
    first, last = sum(counts[: rank * share]), sum(counts[: (rank + 1) * share])
    whole = {"x": x, "ids": ids + chosen.start, "weights": weights, "gradient": gradient}
    return {name: value[first:last] for name, value in whole.items()}


def run(compute: Any, rows: dict[str, Tensor], weights: dict[str, Tensor], adapted: bool) -> dict[str, Tensor]:
    """The output and every gradient; `weights` are leaves, some of them DTensors."""
    x, shares = rows["x"].clone().requires_grad_(), rows["weights"].clone().requires_grad_()
    lora = ExpertLora(**{n: w for n, w in weights.items() if n not in ("gate_up", "down")}, scale=0.7)
    out = compute(x, rows["ids"], shares, weights["gate_up"], weights["down"], lora if adapted else None)
    out.backward(rows["gradient"])
    found = {"out": out.detach(), "x": x.grad, "weights": shares.grad}
    found |= {name: weight.grad for name, weight in weights.items() if adapted or name in ("gate_up", "down")}
    return {name: torch.zeros(()) if value is None else value for name, value in found.items()}


def leaves(group: Any = None) -> dict[str, Tensor]:
    """group: whose ranks hold parts of the experts; adapters stay whole but for one."""
    found = {}
    for name, value in layer().items():
        if group is not None and name in ("gate_up", "down", "down_a"):
            own = value.chunk(group.size())[group.get_local_rank()].clone()
            found[name] = DTensor.from_local(own, group, [Shard(0)], run_check=False).requires_grad_()
        else:
            found[name] = value.clone().requires_grad_()
    return found


def _ranks() -> dict[tuple[str, str, bool], dict[str, Tensor]]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("ep",))
    group = mesh.get_group()
    found = {}
    for backend, compute in BACKENDS.items():
        routed, gathered = ExpertParallel(compute, group), GatheredExperts(compute, group, MOST_ROWS)
        for case, adapted, parallel in product(CASES, (False, True), (routed, gathered)):
            rows = rows_of(case, dist.get_rank(), dist.get_world_size())
            got = run(parallel, rows, leaves(mesh), adapted)
            for name in got.keys() - {"out", "x", "weights"}:
                if isinstance(got[name], DTensor):
                    got[name] = got[name].full_tensor()
                else:
                    dist.all_reduce(got[name])
            found[f"{backend} {type(parallel).__name__}", case, adapted] = got
    told = GatheredExperts(obedient, group, MOST_ROWS, asked=True)
    for case, adapted in product(CASES, (False, True)):
        rows = rows_of(case, dist.get_rank(), dist.get_world_size())
        plain = found["eager GatheredExperts", case, adapted]
        got = run(told, rows, leaves(mesh), adapted)
        found["asked", case, adapted] = plain | {name: got[name] for name in ("out", "x", "weights")}
    return found


@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_equal_one_process(ranks: int) -> None:
    found = processes.run(ranks, _ranks)
    for (backend, case, adapted), first in found[0].items():
        expected = run(moe.eager, rows_of(case, 0, 1), leaves(), adapted)
        for name, want in expected.items():
            parts = [rank[backend, case, adapted][name] for rank in found]
            got = torch.cat(parts) if name in ("out", "x", "weights") else first[name]
            assert torch.allclose(got, want.expand_as(got), rtol=1e-5, atol=1e-6), (backend, case, adapted, name)


def _waits() -> tuple[int, int]:
    """How often one forward pass asks a tensor for its values on the host: routed, and gathered."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("ep",))
    rows, weights = rows_of("even", dist.get_rank(), dist.get_world_size()), leaves(mesh)
    asked = 0

    class Count(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            nonlocal asked
            names = {"tolist", "item", "cpu", "nonzero", "__bool__", "__int__", "numpy", "bincount"}
            asked += getattr(function, "__name__", "") in names
            return function(*args, **(kwargs or {}))

    found = []
    for parallel in (ExpertParallel(one_share, mesh.get_group()), GatheredExperts(one_share, mesh.get_group(), 40)):
        asked = 0
        with Count():
            parallel(rows["x"], rows["ids"], rows["weights"], weights["gate_up"], weights["down"])
        found.append(asked)
    return found[0], found[1]


def _order() -> list[str]:
    """What happens in the backward pass of a block that is computed again."""
    group = init_device_mesh("cpu", (2,), mesh_dim_names=("ep",)).get_group()
    happened: list[str] = []
    begin, exchange = expert_gather.begin_gather, expert_gather.PartialSums

    def gather(x: Tensor, *more: Any) -> Any:
        happened.append("rows leave" if x.shape[1] == HIDDEN else "choices leave")
        return begin(x, *more)

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
        x = rows["x"].requires_grad_()
        out = checkpoint(lambda x: experts(x, rows["ids"], rows["weights"], *own), x, use_reentrant=False)
        happened.clear()
        out.backward(rows["gradient"])
    return happened


def test_gradients_travel_while_a_block_is_computed_again() -> None:
    again = ["rows leave", "choices leave", "experts"]
    assert processes.run(2, _order) == [["rows leave", *again, "sums leave"]] * 2


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
    """Of the experts' gradients after three micro-batches: whether they are those that autograd adds up, and whether
    the first one's memory has them."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("ep",))
    rows = rows_of("even", dist.get_rank(), 2)
    found = {}
    for adds_up in (False, True):
        experts = GatheredExperts(obedient, mesh.get_group(), MOST_ROWS, asked=True)
        experts.adds_up = adds_up
        weights, places = leaves(mesh), []
        for number in range(3):
            x = (rows["x"] * (number + 1)).requires_grad_()
            out = experts(x, rows["ids"], rows["weights"], weights["gate_up"], weights["down"])
            out.backward(rows["gradient"])
            places.append([weights[name].grad.to_local().data_ptr() for name in ("gate_up", "down")])
        found[adds_up] = weights["gate_up"].grad, weights["down"].grad, x.grad, places
    ours, plain = found[True], found[False]
    parts = [torch.allclose(a.to_local(), b.to_local(), rtol=1e-5) for a, b in zip(ours[:2], plain[:2], strict=True)]
    same_place = all(place == ours[3][0] for place in ours[3])
    return [(*parts, torch.equal(ours[2], plain[2]), same_place, isinstance(ours[0], DTensor))]


def test_gradients_of_micro_batches_are_added_in_place() -> None:
    assert processes.run(2, _added) == [[(True,) * 5]] * 2


def test_nothing_is_held_beyond_the_graph() -> None:
    assert processes.run(2, _freed) == [(True, True)] * 2


def test_the_fused_experts_can_be_asked() -> None:
    hopper = Device("cuda", (9, 0), frozenset({"train", "triton"}))
    bound = {name: OpSlot("moe_experts").bind(name, hopper) for name in ("fused_triton", "grouped_mm", "eager")}
    assert [name for name, slot in bound.items() if _can_be_asked(slot)] == ["fused_triton"]
    assert not _can_be_asked(moe.eager)


def one_share(x: Tensor, ids: Tensor, shares: Tensor, *_: Any) -> Tensor:
    return x * shares[:, :1]


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


def _sent() -> list[tuple[list[int], int]]:
    """Rows and choices of a layer in which both choices of each row are experts of one rank."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("ep",))
    plan = ExpertParallel(moe.eager, mesh.get_group()).plan(torch.tensor([[0, 3], [5, 4], [1, 2]]), EXPERTS)
    return [(plan.send, plan.choices)]


def test_a_row_travels_once_to_each_rank() -> None:
    assert processes.run(2, _sent) == [[([2, 1], 8)], [([2, 1], 4)]]


def test_one_wait_for_the_device_per_layer_or_none() -> None:
    assert processes.run(2, _waits) == [(1, 0), (1, 0)]


def _placements() -> list[tuple[Any, ...]]:
    """Of the experts' parameters under every pair of degrees, and what cannot be divided."""
    found = []
    for keys in ({"ep_size": 4}, {"ep_size": 2}, {"ep_size": 2, "dp_replicate_size": 2}):
        config = check_config({"fsdp_config": FP32} | keys, AcceleratorConfig)
        mesh = Mesh.make(config, 4, dist.get_rank(), torch.device("cpu"))
        model = meta_model()
        for module in model.modules():
            if isinstance(module, Experts):
                module.down_proj.requires_grad_(False)
        apply_parallel(model, fsdp_blocks(model), mesh, config.fsdp_config)
        parameter: Any = model.get_parameter("model.layers.1.mlp.experts.gate_up_proj")
        frozen = model.get_parameter("model.layers.1.mlp.experts.down_proj")
        assert parameter.requires_grad and not frozen.requires_grad
        found.append((tuple(parameter.shape), str(parameter.placements), tuple(parameter.to_local().shape)))
    text = {**families.TEXT, **families.MOE, "moe_intermediate_size": 21, "rope_parameters": families.MROPE}
    odd = families.omni(text_config=text | {"hidden_size": 45, "head_dim": 16})
    with torch.device("meta"):
        wide = Experts(odd.text_config, eager_ops())
    mesh = Mesh.make(check_config({"ep_size": 2}, AcceleratorConfig), 4, dist.get_rank(), torch.device("cpu"))
    holder = torch.nn.ModuleDict({"experts": wide})
    with pytest.raises(ConfigError, match=r"2 ranks hold the same experts.*experts.down_proj \(8, 45, 21\); raise ep_"):
        apply_parallel(holder, [], mesh, check_config({"fsdp_config": FP32}, AcceleratorConfig).fsdp_config)
    with torch.device("meta"):
        three = torch.nn.ModuleDict({"experts": Experts(replace_experts(odd.text_config, 6), eager_ops())})
    with pytest.raises(ConfigError, match=r"ep_size 4 does not divide the 6 experts of experts\.gate_up_proj"):
        apply_expert_parallel(three, init_device_mesh("cpu", (4,), mesh_dim_names=("ep",)))
    return found


def replace_experts(config: Any, experts: int) -> Any:
    config.num_experts = experts
    return config


def test_experts_are_sharded_over_both_dimensions() -> None:
    found = processes.run(4, _placements)
    assert all(rank == found[0] for rank in found)
    assert found[0] == [
        ((8, 40, 48), "(Shard(dim=0),)", (2, 40, 48)),
        ((8, 40, 48), "(Shard(dim=1), Shard(dim=0))", (4, 20, 48)),
        ((8, 40, 48), "(Replicate(), Shard(dim=1), Shard(dim=0))", (4, 40, 48)),
    ]


def _left_alone() -> list[tuple[int, bool]]:
    """How many parameters of experts FSDP leaves alone, and whether their gradients are added up in place."""
    rounded = {"mixed_precision": {"reduce_dtype": "bfloat16"}}
    kinds: list[tuple[torch.dtype, dict[str, Any]]] = [
        (torch.float32, FP32),
        (torch.float32, FP32 | {"offload": True}),
        (torch.float32, {}),  # computes in bfloat16
        (torch.bfloat16, {}),
        (torch.bfloat16, {"sync_every_micro_batch": False}),  # FSDP adds up in float32
        (torch.bfloat16, rounded | {"sync_every_micro_batch": False}),
    ]
    found = []
    for dtype, keys in kinds:
        config = check_config({"fsdp_config": keys, "ep_size": dist.get_world_size()}, AcceleratorConfig)
        mesh = Mesh.make(config, dist.get_world_size(), dist.get_rank(), torch.device("cpu"))
        model = meta_model().to(dtype)
        assert mesh.experts is not None
        apply_expert_parallel(model, mesh.experts["ep"], "all_gather", 16)
        left = len(shard_experts(model, mesh, config.fsdp_config))
        in_place = {module.compute.adds_up for module in model.modules() if isinstance(module, Experts)}
        assert len(in_place) == 1
        found.append((left, in_place.pop()))
    return found


def test_experts_that_need_no_fsdp_are_left_alone() -> None:
    everything = sum(2 for module in meta_model().modules() if isinstance(module, Experts))
    wanted = [(everything, True), (0, False), (0, False), (everything, True), (0, False), (everything, True)]
    assert processes.run(2, _left_alone) == [wanted, wanted]


def test_copies_are_spread_and_summed() -> None:
    """The two row functions are one another's transpose; rows may have no copy."""
    place = torch.tensor([[0, 3], [5, 5], [1, 5], [2, 4]])
    rows = torch.tensor([0, 2, 3, 0, 3])
    x = torch.randn(4, 5, dtype=torch.float64, requires_grad=True)
    made = torch.randn(5, 5, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda t: _spread(t, Copies(rows, place)), x)
    assert torch.autograd.gradcheck(lambda t: _collect(t, Copies(rows, place)), made)
    both = _collect(_spread(x, Copies(rows, place)), Copies(rows, place))
    assert torch.equal(both, torch.tensor([2.0, 0.0, 1.0, 2.0])[:, None] * x)
    assert _collect(made[:0], Copies(rows[:0], place * 0)).tolist() == [[0.0] * 5] * 4
