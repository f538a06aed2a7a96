"""What two versions of a tensor have in common, in one pass over blocks of rows; also what one alone tells."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch
import xxhash

from convert.safetensors_io import raw_bytes
from convert.tensors import Box, TensorInfo, TensorReader, full_box

BLOCK = 1 << 20  # bytes read at once; about six times that is in use, by every thread
# elements compared at once: in float32 they stay in a core's cache, which is ten times as fast as passes over a block
CACHED = 1 << 17


@dataclass
class Comparison:
    """Of one output tensor. The fields from `cosine` on are None without a counterpart in the base.

    nonfinite: number of NaN and Inf. relative: norm of the tensor over norm of the base's. max_difference: absolute.
    groups: cosine per group of rows (heads), where groups were asked for.
    """

    name: str
    info: TensorInfo
    digest: str = ""
    nonfinite: int = 0
    zero: bool = True
    cosine: float | None = None
    relative: float | None = None
    max_difference: float | None = None
    unchanged: bool | None = None
    base_zero: bool | None = None
    groups: list[float] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        entry: dict[str, Any] = {"name": self.name, "shape": list(self.info.shape), "dtype": str(self.info.dtype)[6:]}
        if self.nonfinite:
            entry["nonfinite"] = self.nonfinite
        if self.zero:
            entry["all_zero"] = True
        if self.cosine is not None:
            entry |= {"cosine": _number(self.cosine), "relative_norm": _number(self.relative)}
            entry |= {"max_difference": _number(self.max_difference), "unchanged": self.unchanged}
        if self.groups:
            entry["cosine_per_group"] = [_number(value) for value in self.groups]
        return entry


def _number(value: float | None) -> float | None:
    """Seven digits, as a float32 has; None for what JSON cannot hold."""
    return None if value is None or not math.isfinite(value) else float(f"{value:.7g}")


@dataclass(frozen=True)
class Counterpart:
    """The base's tensor of the same meaning. transposed: its last two dimensions are swapped."""

    reader: TensorReader
    name: str
    transposed: bool = False

    def read(self, box: Box) -> torch.Tensor:
        if not self.transposed:
            return self.reader.read(self.name, box)
        swapped = (*box[:-2], box[-1], box[-2])
        return self.reader.read(self.name, swapped).transpose(-1, -2)


def compare(reader: TensorReader, name: str, base: Counterpart | None, groups: int = 0) -> Comparison:
    """Reads the tensor, and its counterpart, once. groups: into how many equal ranges of rows to divide it."""
    info = reader.tensors[name]
    result = Comparison(name, info)
    digest = xxhash.xxh3_64()
    sums = _Sums()
    per_group: list[_Sums] = []
    for box in _blocks(info, groups):
        block = reader.read(name, box)
        digest.update(raw_bytes(block))
        other = base.read(box) if base else None
        if groups:
            per_group.append(_Sums())
            per_group[-1].add(block, other)
            sums.merge(per_group[-1])
        else:
            sums.add(block, other)
    result.digest = digest.hexdigest()
    result.nonfinite, result.zero = sums.nonfinite, sums.xx == 0 and not sums.nonfinite
    if base is not None:
        result.cosine, result.groups = sums.cosine(), [group.cosine() for group in per_group]
        result.relative = math.sqrt(sums.xx / sums.yy) if sums.yy else (1.0 if not sums.xx else math.inf)
        result.max_difference, result.unchanged = sums.difference, sums.equal
        result.base_zero = sums.yy == 0
    return result


def _blocks(info: TensorInfo, groups: int) -> list[Box]:
    """Boxes of about BLOCK bytes, or one per group, that follow one another in the tensor's bytes."""
    box = full_box(info.shape)
    if not info.shape or not info.numel:
        return [box]
    rows = info.shape[0]
    step = rows // groups if groups else max(1, BLOCK // (info.nbytes // rows))
    return [((start, min(rows, start + step)), *box[1:]) for start in range(0, rows, step)]


@dataclass
class _Sums:
    """xx, yy, xy: sums of products in float64 over blocks that are summed in float32."""

    xx: float = 0.0
    yy: float = 0.0
    xy: float = 0.0
    difference: float = 0.0
    nonfinite: int = 0
    equal: bool = True

    def add(self, x: torch.Tensor, y: torch.Tensor | None) -> None:
        """Takes in a block and its counterpart of the same shape."""
        x = x.reshape(-1)
        y = None if y is None else y.reshape(-1)
        if y is not None and y.dtype == x.dtype and _same_bytes(x, y):
            y = None
            self._alone(x, twice=True)
        elif y is None:
            self._alone(x, twice=False)
        else:
            self.equal = False
            self._both(x, y)

    def _alone(self, x: torch.Tensor, twice: bool) -> None:
        a = torch.empty(min(CACHED, x.numel()))
        for part in x.split(CACHED):
            here = a[: part.numel()].copy_(part)
            xx = self._square(here)
            self.xx += xx
            if twice:
                self.yy += xx
                self.xy += xx

    def _both(self, x: torch.Tensor, y: torch.Tensor) -> None:
        size = min(CACHED, x.numel())
        a, b = torch.empty(size), torch.empty(size)
        for part, other in zip(x.split(CACHED), y.split(CACHED), strict=True):
            here, there = a[: part.numel()].copy_(part), b[: part.numel()].copy_(other)
            self.xx += self._square(here)
            yy, xy = float(torch.dot(there, there)), float(torch.dot(here, there))
            if not (math.isfinite(yy) and math.isfinite(xy)):  # numbers beyond 1e19, or not finite themselves
                wide, other_wide = _finite(here), _finite(there)
                yy, xy = float(other_wide.square().sum()), float((wide * other_wide).sum())
            self.yy += yy
            self.xy += xy
            low, high = torch.aminmax(here.sub_(there)) if here.numel() else (0.0, 0.0)
            self.difference = max(self.difference, -float(low), float(high))

    def _square(self, a: torch.Tensor) -> float:
        """Sum of squares; NaN and Inf are counted and left out."""
        xx = float(torch.dot(a, a))
        if math.isfinite(xx):
            return xx
        self.nonfinite += int((~torch.isfinite(a)).sum())
        return float(_finite(a).square().sum())

    def merge(self, other: _Sums) -> None:
        self.xx += other.xx
        self.yy += other.yy
        self.xy += other.xy
        self.difference = max(self.difference, other.difference)
        self.nonfinite += other.nonfinite
        self.equal = self.equal and other.equal

    def cosine(self) -> float:
        """1 for two zero tensors, 0 when one of them is zero."""
        if not self.xx or not self.yy:
            return 1.0 if self.xx == self.yy else 0.0
        return self.xy / math.sqrt(self.xx) / math.sqrt(self.yy)


def _same_bytes(x: torch.Tensor, y: torch.Tensor) -> bool:
    """torch.equal of bf16 takes twenty times as long as that of whole numbers."""
    if x.nbytes % 8 or not x.is_contiguous() or not y.is_contiguous():
        return torch.equal(x, y)
    return torch.equal(x.view(torch.int64), y.view(torch.int64))


def _finite(a: torch.Tensor) -> torch.Tensor:
    return torch.nan_to_num(a.double(), nan=0.0, posinf=0.0, neginf=0.0)
