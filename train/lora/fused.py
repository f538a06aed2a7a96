"""Pairs of experts <-> the one pair that PEFT has for a fused parameter.

gate_up_proj holds the gate's rows and then those of up: their two pairs are one of the sum of their ranks, A stacked, B
block-diagonal. In PEFT's file A is [R * E, in] with the experts one after the other, B [out, R * E] with the expert as
its fastest column index.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from train.lora.layers import PairSettings
from train.lora.targets import FUSED

Factors = tuple[Tensor, Tensor]  # A [n, r, in], B [n, out, r]


def fused_settings(parameter: str, settings: Mapping[str, PairSettings]) -> PairSettings | None:
    """Of the one pair of a fused parameter: the sum of the ranks, and the alpha under which it has the scale of the
    first; None when nothing of it is adapted. settings: by projection."""
    found = [settings[name] for name in FUSED[parameter] if name in settings]
    if not found:
        return None
    rank, first = sum(pair.rank for pair in found), found[0]
    if len(found) == 1:
        return first
    grown = rank / first.rank
    return PairSettings(rank, first.alpha * (math.sqrt(grown) if first.rslora else grown), first.rslora)


def fuse(parameter: str, pairs: Mapping[str, Factors], settings: Mapping[str, PairSettings], inner: int) -> Factors:
    """(A [n, R, in], B [n, out, R]) of all projections of a fused parameter. inner: width of an expert."""
    names = [name for name in FUSED[parameter] if name in pairs]
    first = settings[names[0]].scale
    a = torch.cat([pairs[name][0] for name in names], 1)
    experts, rank, _ = a.shape
    parts = FUSED[parameter]
    rows = inner if len(parts) > 1 else pairs[names[0]][1].shape[1]
    b = a.new_zeros(experts, rows * len(parts), rank)
    column = 0
    for number, name in enumerate(parts):
        if name not in pairs:
            continue
        factor, scale = pairs[name][1], settings[name].scale
        width = factor.shape[2]
        b[:, number * rows : (number + 1) * rows, column : column + width] = (
            factor if scale == first else factor * (scale / first)
        )
        column += width
    return a, b


def divide(parameter: str, fused: Factors, settings: Mapping[str, PairSettings]) -> dict[str, Factors]:
    """The inverse of `fuse`; settings: by projection, of those that are there."""
    a, b = fused
    parts = FUSED[parameter]
    names = [name for name in parts if name in settings]
    first, rows, column = settings[names[0]].scale, b.shape[1] // len(parts), 0
    found = {}
    for number, name in enumerate(parts):
        if name not in settings:
            continue
        width, scale = settings[name].rank, settings[name].scale
        factor = b[:, number * rows : (number + 1) * rows, column : column + width]
        found[name] = (a[:, column : column + width], factor if scale == first else factor * (first / scale))
        column += width
    return found


def copied(parameter: str, fused: Factors) -> dict[str, Factors]:
    """A pair that PEFT trained on a fused parameter, as pairs of its projections: each with all of A."""
    a, b = fused
    parts = FUSED[parameter]
    return {name: (a, half) for name, half in zip(parts, b.chunk(len(parts), 1), strict=True)}


def to_file(fused: Factors, experts: int) -> Factors:
    """(A [R * E, in], B [out, R * E]); a shared pair is repeated for every expert."""
    a, b = (factor.expand(experts, -1, -1) for factor in fused)
    return a.reshape(-1, a.shape[2]).contiguous(), b.permute(1, 2, 0).reshape(b.shape[1], -1).contiguous()


def of_file(a: Tensor, b: Tensor, experts: int, kind: str) -> Factors:
    """The inverse of `to_file`. kind: as `convert.adapter` names it."""
    if kind == "shared":
        return a[None], b[None]
    rows, columns = a.view(experts, -1, a.shape[1]), b.view(b.shape[0], -1, experts).permute(2, 0, 1)
    if kind == "experts transposed":  # as PEFT had them before it knew that the output dimension comes first
        return columns.mT, rows.mT
    return rows, columns
