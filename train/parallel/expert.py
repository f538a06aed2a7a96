"""Expert parallelism (GShard, arXiv:2006.16668): each rank of a group holds some experts of every layer; rows travel to
the experts that they chose and their results come back.

Shapes: P ranks of a group, E experts, n = E / P of one rank; S rows of a rank, H hidden size, k experts of a row,
N = S * k choices that a rank sends, R choices that it receives.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard

from schemas.errors import ConfigError
from train.config_trainer import FsdpConfig
from train.mesh import Mesh
from train.models.moe import Experts
from train.ops.lora_types import ExpertLora
from train.parallel.exchange import all_to_all, exchange_rows
from train.parallel.fsdp import offload_policy, precision_policy

NO_EXPERT = -1


class Dispatch(NamedTuple):
    """Where the choices of one layer go. rows: int64 [N], the row of each choice, sorted by expert; order: int64 [N],
    the choice itself, numbered row by row; place: int64 [S, k], where each choice went; send, recv: choices to and from
    each rank; experts: int64 [R], which of this rank's experts each received choice is for."""

    rows: Tensor
    order: Tensor
    place: Tensor
    send: list[int]
    recv: list[int]
    experts: Tensor


class ExpertParallel:
    """A moe_experts op of one rank's experts as one of all experts, with the same signature; gate_up and down are
    DTensors that are sharded over the group. Expert ids lie in [0, E). Four all-to-alls, of counts, rows, weights and
    results, and one wait for the device, which tells the host how many rows travel."""

    def __init__(self, compute: Callable[..., Tensor], group: ProcessGroup) -> None:
        self.compute, self.group = compute, group
        self.size, self.rank = group.size(), group.rank()

    def __call__(
        self,
        x: Tensor,
        expert_ids: Tensor,
        weights: Tensor,
        gate_up: Tensor,
        down: Tensor,
        lora: ExpertLora | None = None,
    ) -> Tensor:
        """[S, H]; see `train.ops.moe`."""
        plan = self.plan(expert_ids, gate_up.shape[0])
        gate_up, down = _local(gate_up), _local(down)
        sent: Tensor = _Spread.apply(x, plan.rows, plan.place)
        shares: Tensor = _Spread.apply(weights.reshape(-1, 1), plan.order, plan.place.reshape(-1, 1))
        rows = exchange_rows(sent, plan.send, plan.recv, self.group)
        shares = exchange_rows(shares, plan.send, plan.recv, self.group)
        ids = plan.experts[:, None]
        count = len(rows)
        if not count:  # the experts still take part in the backward pass
            rows, shares, ids = (F.pad(part, (0, 0, 0, 1), value=NO_EXPERT) for part in (rows, shares, ids))
        made = self.compute(rows, ids, shares, gate_up, down, self._local_lora(lora, len(gate_up)))[:count]
        returned = exchange_rows(made, plan.recv, plan.send, self.group)
        out: Tensor = _Collect.apply(returned, plan.rows, plan.place)
        return out

    @torch.no_grad()
    def plan(self, expert_ids: Tensor, experts: int) -> Dispatch:
        """Of int64 [S, k] ids."""
        device = expert_ids.device
        ids, order = expert_ids.reshape(-1).sort(stable=True)
        place = torch.empty_like(order).scatter(0, order, torch.arange(len(order), device=device))
        ends = torch.searchsorted(ids, torch.arange(experts, device=device), right=True)
        counts = ends.diff(prepend=ends.new_zeros(1))
        arriving = all_to_all(counts.view(self.size, -1), None, None, self.group)  # [P, n]
        sizes = torch.stack([counts.view(self.size, -1).sum(1), arriving.sum(1)])
        send, recv = sizes.tolist()  # waits for the device
        mine = torch.arange(arriving.shape[1], device=device).repeat(self.size)
        received = torch.repeat_interleave(mine, arriving.flatten(), output_size=sum(recv))
        return Dispatch(order // expert_ids.shape[1], order, place.view_as(expert_ids), send, recv, received)

    def _local_lora(self, lora: ExpertLora | None, experts: int) -> ExpertLora | None:
        """The adapters of this rank's experts; those that all share stay as they are."""
        if lora is None:
            return None
        first = self.rank * experts
        changes: dict[str, Any] = {}
        for name in (field.name for field in fields(lora) if field.name != "scale"):
            part: Tensor = getattr(lora, name)
            whole = not isinstance(part, DTensor) and len(part) > 1
            changes[name] = part[first : first + experts] if whole else _local(part)
        return replace(lora, **changes)


class _Spread(torch.autograd.Function):
    """x [S, H] -> [N, H], the row of each choice. The gradient of a row is the sum over its choices."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: Tensor, place: Tensor) -> Tensor:
        ctx.save_for_backward(place)
        return x[rows]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (place,) = ctx.saved_tensors
        return _sum_choices(gradients[0], place), None, None


class _Collect(torch.autograd.Function):
    """made [N, H] -> [S, H], the sum over the choices of each row: the transpose of `_Spread`."""

    @staticmethod
    def forward(ctx: Any, made: Tensor, rows: Tensor, place: Tensor) -> Tensor:
        ctx.save_for_backward(rows)
        return _sum_choices(made, place)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (rows,) = ctx.saved_tensors
        return gradients[0][rows], None, None


def _sum_choices(x: Tensor, place: Tensor) -> Tensor:
    """[S, H] of x [N, H], summed in float32 at least, always in the same order."""
    return x[place].sum(1, dtype=torch.promote_types(x.dtype, torch.float32)).to(x.dtype)


def apply_expert_parallel(model: nn.Module, mesh: DeviceMesh) -> None:
    """Leaves each rank its share of the experts of every layer, and sends rows to them. mesh: the `ep` dimension of the
    experts' mesh. ConfigError: experts that cannot be divided evenly."""
    for path, module in model.named_modules():
        if isinstance(module, Experts):
            for name, parameter in list(module.named_parameters(recurse=False)):
                setattr(module, name, _divided(parameter, mesh, f"{path}.{name}"))
            module.compute = ExpertParallel(module.compute, mesh.get_group())


def shard_experts(model: nn.Module, mesh: Mesh, config: FsdpConfig) -> None:
    """FSDP of divided experts over the ranks that hold the same ones, along the second dimension. An expert's gradient
    is the sum over the rows of its whole group already; it is divided by all ranks, as every other gradient is.
    ConfigError: a dimension that cannot be divided evenly."""
    assert mesh.experts is not None, "experts are divided over a mesh"
    ranks = mesh.degrees.ep_fsdp
    shards = mesh.experts["ep_replicate", "ep_fsdp"] if mesh.degrees.dp_replicate > 1 else mesh.experts["ep_fsdp"]
    for path, module in model.named_modules():
        if not isinstance(module, Experts):
            continue
        for name, parameter in module.named_parameters(recurse=False):
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
        wrapped.set_gradient_divide_factor(float(mesh.world_size))
        if ranks > 1:
            # else a reduction that multiplies, which gloo lacks; with one rank torch would divide twice
            wrapped.set_force_sum_reduction_for_comms(True)


def _divided(parameter: nn.Parameter, mesh: DeviceMesh, name: str) -> nn.Parameter:
    """This rank's part of [E, ...] as a DTensor of all."""
    experts, ranks = parameter.shape[0], mesh.size()
    if experts % ranks:
        raise ConfigError(f"train.accelerator.ep_size {ranks} does not divide the {experts} experts of {name}")
    local = parameter.detach().chunk(ranks)[mesh.get_local_rank()].clone()
    divided = DTensor.from_local(local, mesh, [Shard(0)], run_check=False)
    return nn.Parameter(divided, requires_grad=parameter.requires_grad)


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
