"""Muon on several GPUs: matrices sharded in rows, each orthogonalised by its owner, against one GPU that has them all.

Started by `torchrun -m jobs.bench.muon`; rank 0 reports.
"""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from jobs.bench.claims import Claim, at_least
from jobs.bench.kernel_timing import milliseconds
from jobs.bench.muon_step import ATTENTION, EXPERTS, Shape, Weights, optimizer

LEAST_SHARE = 0.8  # of the time that a rank's share would take without travelling


def claims(quick: bool) -> list[Claim] | None:
    """None on all ranks but the first."""
    rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl")
    try:
        mesh = init_device_mesh("cuda", (dist.get_world_size(),))
        found = [
            *_compare("attention of 8 layers, 2-D, rows", ATTENTION, mesh, 0, apart=True),
            *_compare("experts of a layer, whole ones", _part(EXPERTS, quick), mesh, 0),
            *_compare("experts of a layer, rows of each", _part(EXPERTS, quick), mesh, 1),
        ]
    finally:
        dist.destroy_process_group()
    return found if rank == 0 else None


def _part(shapes: dict[str, Shape], quick: bool) -> dict[str, Shape]:
    return {name: (count // (8 if quick else 1), m, k) for name, (count, m, k) in shapes.items()}


def _compare(name: str, shapes: dict[str, Shape], mesh: DeviceMesh, dim: int, *, apart: bool = False) -> list[Claim]:
    ranks = mesh.size()
    alone = _time(Weights(list(shapes.values()), torch.float32, apart=apart))
    model = _sharded(Weights(list(shapes.values()), torch.float32, apart=apart), mesh, dim)
    torch.cuda.empty_cache()
    together = _time(model)
    said = f"{ranks} GPUs, {together:.2f} ms against {alone:.2f} ms on one; {[list(s) for s in shapes.values()]}"
    speed = alone / together / ranks
    return [at_least(f"step of {name}: speed over {ranks} x one GPU", speed, LEAST_SHARE, "x", said)]


def _time(model: nn.Module) -> float:
    """The slowest rank's, milliseconds."""
    made = optimizer(model)
    made.step()
    dist.barrier()
    time = torch.tensor(milliseconds(made.step), device="cuda")
    dist.all_reduce(time, dist.ReduceOp.MAX)
    return float(time)


def _sharded(model: Weights, mesh: DeviceMesh, dim: int) -> Weights:
    placed = []
    for parameter in model.weights:
        assert parameter.grad is not None
        made = nn.Parameter(distribute_tensor(parameter.detach(), mesh, [Shard(dim)]))
        made.grad = distribute_tensor(parameter.grad, mesh, [Shard(dim)])
        placed.append(made)
    model.weights = nn.ParameterList(placed)
    return model
