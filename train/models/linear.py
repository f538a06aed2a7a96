"""Linear layers of the vision and audio towers, and the activations behind them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from schemas.errors import UnsupportedError
from train.ops.registry import Ops


@dataclass(frozen=True)
class Gelu:
    """approximate: as of torch's."""

    approximate: Literal["none", "tanh"] = "none"

    def __call__(self, x: Tensor) -> Tensor:
        return F.gelu(x, approximate=self.approximate)


def activation(name: str, owner: str) -> Callable[[Tensor], Tensor]:
    """The activation of a tower's MLP by its name in the config; UnsupportedError for another."""
    if name == "gelu":
        return Gelu()
    if name == "gelu_pytorch_tanh":
        return Gelu("tanh")
    if name == "silu":
        return F.silu
    raise UnsupportedError(f"{owner}: activation {name!r}; the towers know gelu, gelu_pytorch_tanh and silu")


class TowerLinear(nn.Linear):
    """A linear layer with a bias."""

    def __init__(self, in_features: int, out_features: int, ops: Ops) -> None:
        super().__init__(in_features, out_features)
        self.compute: Callable[..., Tensor] = ops.linear
        self.with_gelu: Callable[..., Tensor] = ops.linear_gelu

    def forward(self, x: Tensor) -> Tensor:
        """[..., out] of [..., in]."""
        return self.compute(x, self.weight, self.bias)


def activated(layer: nn.Module, x: Tensor, act: Callable[[Tensor], Tensor]) -> Tensor:
    """act(layer(x)), by one operation where there is one. An adapter in the layer's place comes before the activation;
    and without gradients modules are called one by one, so that who listens to them hears each."""
    if isinstance(layer, TowerLinear) and isinstance(act, Gelu | nn.GELU) and torch.is_grad_enabled():
        return layer.with_gelu(x, layer.weight, layer.bias, act.approximate)
    made: Tensor = act(layer(x))
    return made
