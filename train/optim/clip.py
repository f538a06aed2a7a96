"""The norm of all gradients over all ranks, and scaling them down to a limit."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from train.optim.kernels import kernel

LARGE = 2**22  # elements of a gradient that is worth a kernel of its own
Sharding = tuple[DeviceMesh, tuple[int, ...]]  # mesh and the dimensions of it that shard


@torch.no_grad()
def clip_gradients(parameters: Iterable[Tensor], max_norm: float, device: torch.device) -> Tensor:
    """The global norm before clipping, float32 [] on the device; gradients are scaled in place to max_norm, 0 = never.
    Nothing waits for the device. Each gradient counts once, however it is sharded or replicated."""
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    norm = gradient_norm(gradients, device)
    if max_norm:
        factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        for (where, _), local in _by_place(gradients).items():
            _scale(local, factor.to(where))
    return norm


def _scale(tensors: list[Tensor], factor: Tensor) -> None:
    """In place, rounded once. Where the factor is of another dtype torch's lists round it, too, on a GPU, and are slow;
    of large tensors that is the kernel, of small ones the launch, which takes longer from Triton."""
    if not tensors[0].is_cuda or tensors[0].dtype == factor.dtype:
        torch._foreach_mul_(tensors, factor)
        return
    by = factor.view(1)  # one without dimensions would be taken in the tensor's dtype
    for tensor in tensors:
        if tensor.numel() >= LARGE and tensor.is_contiguous():
            kernel("triton_scale:scale")(tensor, factor)
        elif tensor.ndim:
            torch.mul(tensor, by, out=tensor)
        else:
            torch.mul(tensor.view(1), by, out=tensor.view(1))


@torch.no_grad()
def gradient_norm(gradients: Sequence[Tensor], device: torch.device) -> Tensor:
    """2-norm over all gradients, float32 [] on the device. Gradients that are sharded over the same dimensions of a
    mesh share one sum over its ranks."""
    grouped: dict[Sharding | None, list[Tensor]] = {}
    for gradient in gradients:
        grouped.setdefault(_sharding(gradient), []).append(_local(gradient))
    total = torch.zeros((), dtype=torch.float64, device=device)  # the square of a norm of 2e19 is no float32
    for sharding, local in grouped.items():
        squares = _sum_of_squares(local, device)
        if sharding is not None:
            mesh, dims = sharding
            for dim in dims:
                dist.all_reduce(squares, group=mesh.get_group(dim))
        total += squares
    return total.sqrt().float()


def _sum_of_squares(tensors: list[Tensor], device: torch.device) -> Tensor:
    """float64 [] on the device. On a CPU whole tensors are summed in it: torch's sums there run one after the other, so
    that in float32 the norm of ten million elements is off by 3e-4, differently for each way of dividing them among
    ranks."""
    parts = []
    for (place, _), group in _by_place(tensors).items():
        wide = torch.float64 if place.type == "cpu" else torch.float32
        squares = torch.stack(torch._foreach_norm(group, 2, wide)).double().square().sum()
        parts.append(squares.to(device, non_blocking=True))
    return torch.stack(parts).sum() if parts else torch.zeros((), dtype=torch.float64, device=device)


def _by_place(gradients: Sequence[Tensor]) -> dict[tuple[torch.device, torch.dtype], list[Tensor]]:
    """Local parts by device and dtype, as torch's grouped kernels want them."""
    found: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for gradient in gradients:
        local = _local(gradient)
        found.setdefault((local.device, local.dtype), []).append(local)
    return found


def _local(gradient: Tensor) -> Tensor:
    return gradient.to_local() if isinstance(gradient, DTensor) else gradient


def _sharding(gradient: Tensor) -> Sharding | None:
    """None for a whole gradient; dimensions of one rank shard nothing."""
    if not isinstance(gradient, DTensor):
        return None
    mesh = gradient.device_mesh
    if any(placement.is_partial() for placement in gradient.placements):
        raise ValueError("a gradient that is not summed yet has no norm")
    dims = tuple(i for i, placement in enumerate(gradient.placements) if placement.is_shard() and mesh.size(i) > 1)
    return (mesh, dims) if dims else None
