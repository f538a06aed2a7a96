"""The weights of a model in training under the hub's names, one tensor at a time, for an engine that serves it.

    for name, tensor in export_tensors(model, dtype=torch.bfloat16):
        engine.load(name, tensor)

At most one parameter (of experts: those of one layer and kind) is gathered at a time, in the dtype that is sent.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from convert.live import hub_tensors
from convert.patterns import some
from convert.pieces import Assembly, Piece, usage
from convert.tensors import TensorInfo
from schemas.errors import ConfigError
from train.models.foundation import FoundationModel
from train.models.freeze import matching
from train.models.hub_model import HubModel


@dataclass(frozen=True)
class HubExport:
    """What is sent. sources: parameter -> (name in the files, how it is made of the parameter), in the order of the
    model; skipped: parameters that are not sent."""

    sources: Mapping[str, Sequence[tuple[str, Assembly | None]]]
    skipped: Sequence[str]

    @property
    def names(self) -> list[str]:
        """Of all tensors, in the order in which they come."""
        return [name for made in self.sources.values() for name, _ in made]


def plan_export(
    model: FoundationModel | HubModel, *, to: str | None = None, experts: str | None = None, skip: Sequence[str] = ()
) -> HubExport:
    """Without gathering anything; see `export_tensors`."""
    infos = {name: TensorInfo(tuple(p.shape), p.dtype) for name, p in model.named_parameters()}
    skipped = _skipped(model, skip)
    sources: dict[str, list[tuple[str, Assembly | None]]] = {name: [] for name in infos}
    if isinstance(model, HubModel):  # its names are those of its files
        if to is not None or experts is not None:
            raise ConfigError("a model of transformers is exported under its own names; leave `to` and `experts` out")
        sources = {name: [(name, None)] for name in infos}
    else:
        for target, made in hub_tensors(model.config.to_dict(), infos, to, experts).made.items():
            (source,) = usage(made.pieces)  # no rule of a training model mixes parameters
            sources[source].append((target, made))
    return HubExport({name: made for name, made in sources.items() if name not in skipped}, sorted(skipped))


def export_tensors(
    model: FoundationModel | HubModel,
    *,
    to: str | None = None,
    experts: str | None = None,
    dtype: torch.dtype | None = None,
    skip: Sequence[str] = (),
    ranks: Literal["all", "first"] = "all",
) -> Iterator[tuple[str, Tensor]]:
    """(name in the hub's files, tensor), each tensor the receiver's own, on the device that trains.

    to, experts: see `convert.live.hub_tensors`; None: a thinker as `thinker.*` of a Qwen3-Omni, others as what they
    are, experts as the hub publishes them. dtype: of what is sent, None = of the parameters. skip: paths of parameters
    or modules (`*` for any run of characters) that the receiver has already: they must be frozen.
    ranks: who gets the tensors; "first": only rank 0, iterators of other ranks give nothing. On every rank the iterator
    must be run to its end, with the same arguments, between steps: all take part in gathering.

    Raises at the call, before anything is gathered: ConfigError for a pattern that matches nothing or something that is
    trained, and what `hub_tensors` raises for parameters that have no name in the files.
    """
    plan = plan_export(model, to=to, experts=experts, skip=skip)
    mine = ranks == "all" or not dist.is_initialized() or dist.get_rank() == 0
    return _tensors(model, plan, dtype, mine=mine)


@torch.no_grad()
def _tensors(
    model: nn.Module, plan: HubExport, dtype: torch.dtype | None, *, mine: bool
) -> Iterator[tuple[str, Tensor]]:
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()  # after an evaluation the root still has its gathered copy, in the dtype of computation
    parameters = dict(model.named_parameters())
    for source, made in plan.sources.items():
        value = gathered(parameters[source], dtype)
        if not mine:
            continue
        for name, assembly in made:
            yield name, value if assembly is None else _taken(assembly, value, alone=len(made) == 1)
        del value


def gathered(parameter: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """A whole copy, cast before it is gathered; on the device of the mesh, where a sharded one may be offloaded."""
    if not isinstance(parameter, DTensor):
        return parameter.detach().to(dtype or parameter.dtype, copy=True)
    mesh, local = parameter.device_mesh, parameter.to_local().detach()
    device = local.device if local.device.type == mesh.device_type else torch.device(mesh.device_type)
    copied = local.to(device, dtype or local.dtype, copy=True)
    shape, stride = parameter.shape, parameter.stride()
    sharded = DTensor.from_local(copied, mesh, parameter.placements, run_check=False, shape=shape, stride=stride)
    return sharded.full_tensor()


def _taken(made: Assembly, value: Tensor, *, alone: bool) -> Tensor:
    """The tensor of the files, contiguous. alone: the only one of its parameter; else it has memory of its own, as a
    view would keep the whole parameter."""
    if len(made.pieces) == 1:
        found = _piece(made.pieces[0], value)
        return found.contiguous() if alone else found.clone(memory_format=torch.contiguous_format)
    target = value.new_empty(made.shape)
    for piece in made.pieces:
        target[tuple(slice(*bounds) for bounds in piece.at)] = _piece(piece, value)
    return target


def _piece(piece: Piece, value: Tensor) -> Tensor:
    """A view with the dimensions of the target."""
    part = value[tuple(slice(*bounds) for bounds in piece.box)]
    used = [axis for axis in piece.axes if axis is not None]
    unused = [axis for axis in range(part.dim()) if axis not in used]
    return part.permute(*used, *unused).reshape([stop - start for start, stop in piece.at])


def _skipped(model: nn.Module, patterns: Sequence[str]) -> set[str]:
    """Parameters that patterns declare to be left out."""
    named = dict(model.named_parameters())
    skipped: set[str] = set()
    for pattern in patterns:
        found = matching(pattern, list(named), "skip")
        if trained := [name for name in found if named[name].requires_grad]:
            raise ConfigError(f"skip: {pattern!r} would leave out what is trained: {some(trained)}")
        skipped |= found
    return skipped
