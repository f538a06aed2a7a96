"""Ulysses sequence parallelism (arXiv:2309.14509): each rank holds a slice of the rows; for attention alone the slices
are traded for a share of the heads of all rows.

Shapes: P ranks of a group, S rows of a slice, T = P * S rows, Hq query and Hkv key/value heads, D and Dv head sizes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from schemas.errors import ConfigError, UnsupportedError
from train.models.hub_model import HubModel
from train.models.text import Attention
from train.ops.segments import Segments
from train.parallel.exchange import exchange_rows

# kinds of rotary embedding whose frequencies depend on the longest position that is seen, which a slice does not know
LENGTH_DEPENDENT = {"dynamic", "longrope"}


class UlyssesAttention:
    """An attention op of whole sequences as one of slices: the signature and the options are the same, segments are
    those of the full sequence. Two all-to-alls: q, k and v together, and the output."""

    def __init__(self, attention: Callable[..., Tensor], group: ProcessGroup) -> None:
        self.attention, self.group, self.size = attention, group, group.size()

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        segments: Segments,
        *,
        causal: bool,
        scale: float | None = None,
        **options: Any,
    ) -> Tensor:
        """[S, Hq, Dv] of q [S, Hq, D], k [S, Hkv, D], v [S, Hkv, Dv]. ConfigError: heads that cannot be dealt out."""
        k, v = (self._shared(x, q.shape[1]) for x in (k, v))
        queries, keys, values = self._heads_of_all_rows(q, k, v)
        out = self.attention(queries, keys, values, segments, causal=causal, scale=scale, **options)
        return self._rows_of_all_heads(out)

    def _shared(self, x: Tensor, heads: int) -> Tensor:
        """Keys or values with a head for each rank at least: each goes to all ranks whose queries read it."""
        kv_heads = x.shape[1]
        if heads % self.size:
            raise ConfigError(f"train.accelerator.ulysses_size {self.size} does not divide {heads} attention heads")
        if kv_heads % self.size == 0:
            return x
        if self.size % kv_heads:
            raise ConfigError(
                f"train.accelerator.ulysses_size {self.size} neither divides {kv_heads} key/value heads nor is a "
                "multiple of them"
            )
        return x.repeat_interleave(self.size // kv_heads, dim=1)

    def _heads_of_all_rows(self, *parts: Tensor) -> list[Tensor]:
        """[T, H / P, D] of each [S, H, D]."""
        ranks, rows = self.size, parts[0].shape[0]
        shares = [x.reshape(rows, ranks, -1).transpose(0, 1) for x in parts]  # [P, S, H / P * D]
        mine = exchange_rows(torch.cat(shares, dim=-1), None, None, self.group).flatten(0, 1)
        split = mine.split([share.shape[-1] for share in shares], dim=-1)
        return [x.unflatten(-1, (part.shape[1] // ranks, -1)) for x, part in zip(split, parts, strict=True)]

    def _rows_of_all_heads(self, out: Tensor) -> Tensor:
        """[S, Hq, Dv] of [T, Hq / P, Dv]."""
        slices = out.reshape(self.size, -1, *out.shape[1:])
        return exchange_rows(slices, None, None, self.group).transpose(0, 1).flatten(1, 2)


def apply_ulysses(model: nn.Module, group: ProcessGroup) -> None:
    """Replaces the attention of the text model; towers attend within their own pieces. UnsupportedError: a model of
    transformers whose positions need the whole sequence."""
    if isinstance(model, HubModel):
        if cut := sorted(_rope_kinds(getattr(model.config, "rope_parameters", None)) & LENGTH_DEPENDENT):
            raise UnsupportedError(
                f"{model.config.model_type}: rope_type {cut[0]} depends on the length of the whole sequence, which "
                "sequence parallelism cuts; set train.accelerator.ulysses_size to 1"
            )
        model.attention = UlyssesAttention(model.attention, group)
        return
    for module in model.modules():
        if isinstance(module, Attention):
            module.attention = UlyssesAttention(module.attention, group)


def _rope_kinds(parameters: Any) -> set[str]:
    """Of all layers: some models have parameters for each type of layer."""
    if not isinstance(parameters, dict):
        return set()
    kinds = {kind for inner in parameters.values() for kind in _rope_kinds(inner)}
    return kinds | {str(parameters.get("rope_type", "default"))}
