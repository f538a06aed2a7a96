"""Modules with low-rank adapters. Parameters of the base keep their names; adapters stand beside them.

Shapes: r rank; E experts, H hidden size, I width of an expert; n = E for pairs of every expert, 1 for a shared one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from train.models.checkpointing import Projection
from train.models.initialize import Initializer
from train.ops.lora_linear import lora_linear
from train.ops.lora_types import ExpertLora

Start = Literal["uniform", "normal", "zeros"]
PROJECTIONS = ("gate_proj", "up_proj", "down_proj")  # of an expert
HEAD_MULTIPLE = 16  # to which the columns that LoRA adds to a head are filled up, so that rows stay aligned


@dataclass(frozen=True)
class PairSettings:
    """One pair: its product is multiplied by alpha / rank, or alpha / sqrt(rank) (rsLoRA, arXiv:2312.03732)."""

    rank: int
    alpha: float
    rslora: bool = False

    @property
    def scale(self) -> float:
        return self.alpha / (math.sqrt(self.rank) if self.rslora else self.rank)


@dataclass(frozen=True)
class Starts:
    """How the factors begin, see `init_lora_weights`."""

    a: Start
    b: Start

    @classmethod
    def of(cls, init: bool | str) -> Starts:
        if init == "gaussian":
            return cls("normal", "zeros")
        return cls("uniform", "zeros" if init else "uniform")


class Factor(nn.Module):
    """One factor of a pair, weight [..., out, in]. It is no layer: who has the pair multiplies by it."""

    def __init__(self, shape: tuple[int, ...], start: Start, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(shape, dtype=dtype))
        self.start = start

    def initializer(self, name: str) -> Initializer:
        """uniform: as a linear layer of that many inputs begins, which is Kaiming's rule with a = sqrt(5); normal: of
        standard deviation 1 / rank."""
        rows, inputs = self.weight.shape[-2:]
        return Initializer(name, tuple(self.weight.shape), self.start, std=1 / rows, bound=1 / math.sqrt(inputs))


class LoraLinear(nn.Linear):
    """A linear layer and its adapter: W x + bias + scale * B A dropout(x), with lora_A.weight [r, in] and lora_B.weight
    [out, r]."""

    def __init__(
        self, base: nn.Linear, settings: PairSettings, starts: Starts, dtype: torch.dtype, dropout: float = 0.0
    ) -> None:
        """Takes the parameters of the base over; on the device of torch's default."""
        nn.Module.__init__(self)
        self.in_features, self.out_features = base.in_features, base.out_features
        self.weight, self.bias = base.weight, base.bias
        # a block that is computed again can keep the result where it could keep the base's
        self.kind = base.kind if isinstance(base, Projection) else None
        self.settings, self.dropout = settings, dropout
        self.lora_A = Factor((settings.rank, self.in_features), starts.a, dtype)
        self.lora_B = Factor((self.out_features, settings.rank), starts.b, dtype)

    def forward(self, x: Tensor) -> Tensor:
        """[..., out] of [..., in]."""
        factors = self.lora_A.weight.to(x.dtype), self.lora_B.weight.to(x.dtype)
        dropped = self._dropped(x) if self.dropout else None
        weight, scale = self.weight, self.settings.scale
        return lora_linear(x, weight, self.bias, *factors, scale, dropped=dropped, kind=self.kind)

    def widened(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """(rows [S, in + r'], weight [out, in + r']) whose product is what `forward` gives, without its bias, for an op
        that makes the product itself. r' is the rank filled up with zeros."""
        extra = -self.settings.rank % HEAD_MULTIPLE
        low = F.linear(self._dropped(x), self.lora_A.weight.to(x.dtype)) * self.settings.scale
        columns = F.pad(self.lora_B.weight.to(self.weight.dtype), (0, extra))
        return torch.cat([x, F.pad(low, (0, extra))], -1), torch.cat([self.weight, columns], -1)

    def _dropped(self, x: Tensor) -> Tensor:
        return F.dropout(x, self.dropout, self.training) if self.dropout else x


class Pair(nn.Module):
    """lora_A.weight [n, r, in] and lora_B.weight [n, out, r] of one projection of experts."""

    def __init__(
        self, count: int, size_in: int, size_out: int, settings: PairSettings, starts: Starts, dtype: torch.dtype
    ) -> None:
        super().__init__()
        self.settings, self.size_in, self.size_out = settings, size_in, size_out
        self.lora_A = Factor((count, settings.rank, size_in), starts.a, dtype)
        self.lora_B = Factor((count, size_out, settings.rank), starts.b, dtype)

    def filled(self, rank: int) -> tuple[Tensor, Tensor]:
        """Both factors, with zeros up to a rank."""
        missing = rank - self.settings.rank
        a, b = self.lora_A.weight, self.lora_B.weight
        return (F.pad(a, (0, 0, 0, missing)), F.pad(b, (0, missing))) if missing else (a, b)


class ExpertAdapters(nn.Module):
    """The adapters of a layer's experts: gate_proj, up_proj and down_proj, those that are adapted. It stands beside the
    experts, not in them, so that it is sharded with the layer and never divided with the experts."""

    def __init__(
        self,
        sizes: tuple[int, int, int],
        settings: Mapping[str, PairSettings],
        starts: Starts,
        dtype: torch.dtype,
        *,
        shared: bool,
    ) -> None:
        """sizes: E, H, I; settings: by projection."""
        super().__init__()
        experts, hidden, inner = sizes
        self.shared, self.inner, self.hidden = shared, inner, hidden
        count = 1 if shared else experts
        for name in PROJECTIONS:
            if name in settings:
                size_in, size_out = (inner, hidden) if name == "down_proj" else (hidden, inner)
                self.add_module(name, Pair(count, size_in, size_out, settings[name], starts, dtype))

    @property
    def pairs(self) -> dict[str, Pair]:
        """By projection."""
        return {name: pair for name, pair in self.named_children() if isinstance(pair, Pair)}

    def factors(self) -> ExpertLora:
        """Of all three projections, of one rank and one scale: a pair of lower rank is filled up with zeros, as is one
        that is not there; another scale goes into its B."""
        pairs = self.pairs
        rank = max(pair.settings.rank for pair in pairs.values())
        scale = next(iter(pairs.values())).settings.scale
        like = next(iter(pairs.values())).lora_A.weight
        found: list[Tensor] = []
        for name in PROJECTIONS:
            pair = pairs.get(name)
            if pair is None:
                size_in, size_out = (self.inner, self.hidden) if name == "down_proj" else (self.hidden, self.inner)
                found += [like.new_zeros(len(like), rank, size_in), like.new_zeros(len(like), size_out, rank)]
                continue
            a, b = pair.filled(rank)
            found += [a, b if pair.settings.scale == scale else b * (pair.settings.scale / scale)]
        gate_a, gate_b, up_a, up_b, down_a, down_b = found
        return ExpertLora(gate_a, gate_b, up_a, up_b, down_a, down_b, scale)
