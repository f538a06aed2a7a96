"""Random weights of a model that is trained from a config alone, distributed as transformers initialises each kind."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, Protocol, runtime_checkable

import torch
import xxhash
from torch import Tensor, nn

from train.models.layer_norm import LayerNorm
from train.models.moe import Experts, Router
from train.models.text import RMSNorm
from train.models.vision import PatchProjection

NORMAL = (nn.Linear, nn.Embedding, nn.Conv2d, PatchProjection, Experts, Router)
NORMS = (nn.LayerNorm, LayerNorm, RMSNorm)


@dataclass(frozen=True)
class Initializer:
    """How one parameter starts. kind: normal of mean 0 and this std, uniform within +-bound, or a constant; zero_row:
    row that is 0."""

    name: str
    shape: tuple[int, ...]
    kind: Literal["normal", "uniform", "zeros", "ones"]
    std: float = 0.0
    zero_row: int | None = None
    bound: float = 0.0

    def make(self, seed: int) -> Tensor:
        """float32 on the CPU. The values depend on the seed and the parameter's name alone, so that every rank may make
        its slices in any order."""
        if self.kind in ("zeros", "ones"):
            return torch.full(self.shape, float(self.kind == "ones"))
        generator = torch.Generator().manual_seed(xxhash.xxh3_64_intdigest(f"{seed}:{self.name}".encode()) >> 1)
        if self.kind == "uniform":
            return torch.empty(self.shape).uniform_(-self.bound, self.bound, generator=generator)
        values = torch.empty(self.shape).normal_(0.0, self.std, generator=generator)
        if self.zero_row is not None:
            values[self.zero_row] = 0
        return values


@runtime_checkable
class HasInitializer(Protocol):
    """A module that says itself how its one parameter starts."""

    def initializer(self, name: str) -> Initializer:
        """name: of the parameter in the model."""
        ...


def initializers(model: nn.Module) -> dict[str, Initializer]:
    """Of every parameter, by name. The standard deviation is the `initializer_range` of the nearest module around a
    parameter that has one: text model, towers and the whole follow their own configs."""
    ranges = {name: module.initializer_range for name, module in model.named_modules() if _has_range(module)}
    found = {}
    for path, module in model.named_modules():
        for local, parameter in module.named_parameters(recurse=False):
            name = f"{path}.{local}" if path else local
            if isinstance(module, HasInitializer):
                found[name] = module.initializer(name)
                continue
            kind = _kind(module, local, name)
            std = _nearest(ranges, path) if kind == "normal" else 0.0
            zero_row = module.padding_idx if isinstance(module, nn.Embedding) else None
            found[name] = Initializer(name, tuple(parameter.shape), kind, std, zero_row)
    return found


@torch.no_grad()
def initialize(model: nn.Module, seed: int) -> None:
    """Fills every parameter of a model that has left the meta device, without sharding."""
    parameters = dict(model.named_parameters())
    for name, initializer in initializers(model).items():
        parameters[name].copy_(initializer.make(seed))


def _has_range(module: nn.Module) -> bool:
    return isinstance(getattr(module, "initializer_range", None), float)


def _nearest(ranges: dict[str, float], path: str) -> float:
    while path not in ranges:
        if not path:
            return math.nan
        path = path.rpartition(".")[0]
    return ranges[path]


def _kind(module: nn.Module, local: str, name: str) -> Literal["normal", "zeros", "ones"]:
    if isinstance(module, NORMS):
        return "zeros" if local == "bias" else "ones"
    if isinstance(module, NORMAL):
        return "zeros" if local == "bias" else "normal"
    raise TypeError(f"no rule for the initial values of {name} ({type(module).__name__})")
