"""Divides the experts of a model among ranks: which rank holds which, how rows reach them, who sums their gradients."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard

from schemas.errors import ConfigError
from train.config_trainer import FsdpConfig
from train.mesh import Degrees, Mesh
from train.models.moe import Experts
from train.ops.registry import OpSlot
from train.parallel.expert import ExpertParallel
from train.parallel.expert_gather import GatheredExperts
from train.parallel.fsdp import offload_policy, precision_policy, sum_gradients


def apply_expert_parallel(model: nn.Module, mesh: DeviceMesh, dispatch: str = "auto", rows: int | None = None) -> None:
    """Leaves each rank its share of the experts of every layer, and takes rows to them. mesh: the `ep` dimension of the
    experts' mesh; dispatch: `train.accelerator.expert_dispatch`; rows: the most that any rank has in a forward pass,
    None = unknown. ConfigError: experts that cannot be divided evenly; all_gather without rows."""
    group = mesh.get_group()
    for path, module in model.named_modules():
        if isinstance(module, Experts):
            for name, parameter in list(module.named_parameters(recurse=False)):
                setattr(module, name, _divided(parameter, mesh, f"{path}.{name}"))
            if gathers(dispatch, mesh.size(), module.top_k, rows):
                assert rows is not None
                gathered = GatheredExperts(module.compute, group, rows, asked=_can_be_asked(module.compute))
                module.compute, module.start = gathered, gathered.start
            else:
                module.compute = ExpertParallel(module.compute, group)


def gathers(dispatch: str, ranks: int, top_k: int, rows: int | None) -> bool:
    """Whether rows are gathered on all ranks rather than routed. `auto`: where nearly every row has a choice on every
    rank, and the most rows of a rank are known. ConfigError: all_gather where they are not."""
    if dispatch == "all_gather" and rows is None:
        raise ConfigError("train.accelerator.expert_dispatch: all_gather needs to know the most rows of a rank")
    return dispatch == "all_gather" or (dispatch == "auto" and rows is not None and 2 * ranks <= top_k)


def _can_be_asked(compute: object) -> bool:
    """Of an op for experts."""
    backend = compute.backend if isinstance(compute, OpSlot) else None
    return backend is not None and backend.asked


def needs_no_fsdp(degrees: Degrees, config: FsdpConfig, master: torch.dtype) -> bool:
    """Whether one rank holds an expert whole, in the dtype that it computes in and adds up gradients in. master: of the
    experts' parameters."""
    precision = config.mixed_precision
    # FSDP would add up the micro-batches of a step in that dtype
    wider = not config.sync_every_micro_batch and precision.enable and precision.reduce_dtype != precision.param_dtype
    alone = degrees.ep_fsdp == degrees.dp_replicate == 1 and not config.offload
    return alone and not wider and master == getattr(torch, precision.compute_dtype)


def shard_experts(model: nn.Module, mesh: Mesh, config: FsdpConfig) -> set[nn.Parameter]:
    """FSDP of divided experts over the ranks that hold the same ones, along the second dimension; an expert's gradient
    is the sum over the rows of its whole group already. The experts that need none of it, since one rank holds them in
    the dtype that it computes in, are returned: for FSDP to leave alone. ConfigError: a dimension that cannot be
    divided evenly."""
    assert mesh.experts is not None, "experts are divided over a mesh"
    ranks, replicas = mesh.degrees.ep_fsdp, mesh.degrees.dp_replicate
    shards = mesh.experts["ep_replicate", "ep_fsdp"] if replicas > 1 else mesh.experts["ep_fsdp"]
    left: set[nn.Parameter] = set()
    for path, module in model.named_modules():
        if not isinstance(module, Experts):
            continue
        own = dict(module.named_parameters(recurse=False))
        if all(needs_no_fsdp(mesh.degrees, config, parameter.dtype) for parameter in own.values()):
            left.update(own.values())
            if isinstance(module.compute, GatheredExperts):
                module.compute.adds_up = True
            continue
        for name, parameter in own.items():
            if parameter.shape[1] % ranks:
                raise ConfigError(
                    f"train.accelerator: {ranks} ranks hold the same experts, which does not divide dimension 1 "
                    f"of {path}.{name} {tuple(parameter.shape)}; raise ep_size"
                )
        wrapped = fully_shard(
            module,
            mesh=shards,
            reshard_after_forward=config.reshard_after_forward,
            shard_placement_fn=lambda _: Shard(1),
            mp_policy=precision_policy(config.mixed_precision),
            offload_policy=offload_policy(config, mesh.device),
        )
        sum_gradients(wrapped, shards.size())
    return left


def _divided(parameter: nn.Parameter, mesh: DeviceMesh, name: str) -> nn.Parameter:
    """This rank's part of [E, ...] as a DTensor of all."""
    experts, ranks = parameter.shape[0], mesh.size()
    if experts % ranks:
        raise ConfigError(f"train.accelerator.ep_size {ranks} does not divide the {experts} experts of {name}")
    local = parameter.detach().chunk(ranks)[mesh.get_local_rank()].clone()
    divided = DTensor.from_local(local, mesh, [Shard(0)], run_check=False)
    return nn.Parameter(divided, requires_grad=parameter.requires_grad)
