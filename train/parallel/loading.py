"""Values for a model whose parameters are sharded: each rank reads or draws its own slices."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Placement, Shard

from schemas.errors import UnsupportedError
from train.lora.apply import adapter_names
from train.lora.plan import LoraPlan
from train.models.hub_model import HubModel
from train.models.initialize import initializers
from train.models.loading import Assign, ReadSlice, load, open_weights, row_boxes
from train.progress import progress

Box = tuple[tuple[int, int], ...]


def local_box(parameter: Tensor) -> Box:
    """(start, stop) per dimension of this rank's part of a parameter; all of one that is not sharded."""
    if not isinstance(parameter, DTensor):
        return tuple((0, size) for size in parameter.shape)
    mesh, coordinate = parameter.device_mesh, parameter.device_mesh.get_coordinate()
    assert coordinate is not None, "a rank outside the mesh of its parameter"
    return placed_box(parameter.shape, parameter.placements, mesh.shape, coordinate)


def placed_box(
    shape: Sequence[int], placements: Sequence[Placement], mesh_shape: Sequence[int], coordinate: Sequence[int]
) -> Box:
    """What the rank at a coordinate of a mesh holds. Mesh dimensions that shard the same dimension of the tensor divide
    it one after the other. UnsupportedError for a placement that is no slice."""
    bounds = [(0, size) for size in shape]
    for placement, ranks, rank in zip(placements, mesh_shape, coordinate, strict=True):
        if not placement.is_shard():
            continue
        if type(placement) is not Shard:
            raise UnsupportedError(f"a parameter placed as {placement} cannot be read in one slice")
        start, stop = bounds[placement.dim]
        chunk = -(-(stop - start) // ranks)  # as torch.chunk divides: all but the last ones are equal
        first = min(start + rank * chunk, stop)
        bounds[placement.dim] = (first, min(first + chunk, stop))
    return tuple(bounds)


def local_part(parameter: Tensor) -> Tensor:
    """What this rank holds, as a plain tensor that shares its memory."""
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def give_memory(model: nn.Module, device: torch.device) -> None:
    """Memory without values for a model on the meta device, sharded or not."""
    if any(parameter.is_meta for parameter in model.parameters()):
        model.to_empty(device=device)


@torch.no_grad()
def fill_random(model: nn.Module, seed: int) -> None:
    """Random values that depend on the seed and the names of the parameters alone, not on how they are sharded."""
    parameters = dict(model.named_parameters())
    for name, initializer in initializers(model).items():
        parameter = parameters[name]
        index = tuple(slice(*bounds) for bounds in local_box(parameter))
        local_part(parameter).copy_(initializer.make(seed)[index])


def fill_from_hub(model: nn.Module, folder: Path, *, show: bool) -> None:
    """The weights of a directory in the Hugging Face layout. show: progress on stderr, on one rank."""
    adapters = set(adapter_names(model))
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters() if name not in adapters}
    weights = open_weights(folder, shapes, native=not isinstance(model, HubModel))
    if not show:
        load(weights, assign_slices(model))
        return
    local = sum(local_part(parameter).numel() for parameter in model.parameters())
    share = local / max(1, sum(parameter.numel() for parameter in model.parameters()))
    with progress(f"loading {folder.name}", int(weights.nbytes * share), "bytes") as advance:
        load(weights, assign_slices(model, advance))


@torch.no_grad()
def fill_adapters(model: nn.Module, plan: LoraPlan, seed: int) -> None:
    """The adapters of a plan, by rule or from a file, and what else that file brings; the values do not depend on how
    they are sharded."""
    parameters = dict(model.named_parameters())

    def slices(name: str, whole: Tensor) -> tuple[Tensor, Tensor]:
        parameter = parameters[name]
        return local_part(parameter), whole[tuple(slice(*bounds) for bounds in local_box(parameter))]

    for name, value in plan.start(model, seed).items():
        here, there = slices(name, value.make())
        here.copy_(there)
    file = plan.file
    for name in file.copies if file is not None else ():
        assert file is not None
        here, there = slices(name, file.copy_of_base(name))
        if not torch.equal(here.cpu(), there.to(here.dtype)):
            raise UnsupportedError(f"{file.folder}: holds another {name} than the base; it was trained on another")


def assign_slices(model: nn.Module, advance: Callable[[int], None] | None = None) -> Assign:
    """Fills this rank's part of each parameter, some rows at a time, whatever its dtype and device. advance: is told
    the bytes that were read."""
    parameters = dict(model.named_parameters())

    @torch.no_grad()
    def assign(name: str, read: ReadSlice) -> None:
        parameter = parameters[name]
        part, box = local_part(parameter), local_box(parameter)
        if not part.numel():
            return
        for rows in row_boxes(tuple(part.shape), part.element_size()):
            there = tuple((start + low, start + high) for (start, _), (low, high) in zip(box, rows, strict=True))
            values = read(there)
            part[tuple(slice(*bounds) for bounds in rows)] = values
            if advance is not None:
                advance(values.nbytes)

    return assign
