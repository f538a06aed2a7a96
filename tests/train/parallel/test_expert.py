"""Experts of several ranks against all experts in one place."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from schemas.errors import ConfigError
from schemas.strict import check_config
from tests import dist as processes
from tests.train.models import families
from tests.train.parallel.expert_cases import (
    BACKENDS,
    CASES,
    EXPERTS,
    MOST_ROWS,
    leaves,
    obedient,
    one_share,
    rows_of,
    run,
)
from tests.train.parallel.steps import FP32, meta_model
from train.config_trainer import AcceleratorConfig
from train.mesh import Mesh
from train.models.moe import Experts
from train.models.spec import fsdp_blocks
from train.ops import moe
from train.ops.registry import eager_ops
from train.parallel.apply import apply_parallel
from train.parallel.expert import Copies, ExpertParallel, _collect, _spread
from train.parallel.expert_apply import apply_expert_parallel, shard_experts
from train.parallel.expert_gather import GatheredExperts


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
