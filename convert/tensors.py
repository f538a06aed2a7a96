"""What a checkpoint looks like to the converter, whatever its files are: named tensors that can be read box by box.

A box is one `(start, stop)` per dimension. A reader reads the bytes of the box only, never the whole tensor, so that
any target tensor can be made alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, runtime_checkable

import torch

from schemas.errors import ConfigError
from schemas.wording import known_names

Box = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class TensorInfo:
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize

    def __str__(self) -> str:
        return f"{dtype_name(self.dtype)} {list(self.shape)}"


class TensorReader(Protocol):
    """A source of weights. `read` may be called from several threads at once."""

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """The weights of the source, by name; what is no weight is not here but in `skipped`."""

    @property
    def skipped(self) -> Mapping[str, str]:
        """What the source holds besides weights: name -> the reason why it is not read."""

    @property
    def fingerprint(self) -> str:
        """Changes when the source does: over file names, sizes and the index or metadata; weights are not hashed."""

    @property
    def bytes_read(self) -> int:
        """Bytes taken from the files so far."""

    def changed(self) -> Iterable[Path]:
        """The files that were written to or replaced since the reader was made."""

    def read(self, name: str, box: Box | None = None) -> torch.Tensor:
        """A contiguous CPU tensor of the box (default: all) in the source's dtype, owned by the caller.
        KeyError for a name that is not in `tensors`; OmniloomError for damaged files."""

    def location(self, name: str) -> tuple[str, int]:
        """(file name, offset in bytes) where the tensor begins: reads in this order are sequential."""


def full_box(shape: tuple[int, ...]) -> Box:
    return tuple((0, size) for size in shape)


def box_shape(box: Box) -> tuple[int, ...]:
    return tuple(stop - start for start, stop in box)


def check_box(name: str, box: Box, shape: tuple[int, ...]) -> None:
    """ValueError unless the box has the tensor's rank and lies inside it."""
    inside = len(box) == len(shape) and all(
        0 <= start <= stop <= size for (start, stop), size in zip(box, shape, strict=True)
    )
    if not inside:
        raise ValueError(f"{name}: box {box} does not lie within the shape {list(shape)}")


def intersect(a: Box, b: Box) -> Box | None:
    """The common box of two, None when they share nothing."""
    common = tuple((max(a0, b0), min(a1, b1)) for (a0, a1), (b0, b1) in zip(a, b, strict=True))
    return None if any(start >= stop for start, stop in common) else common


def dtype_name(dtype: torch.dtype) -> str:
    """`float32`, `bfloat16`, as config.json writes it."""
    return str(dtype).removeprefix("torch.")


def dtype_of(name: str) -> torch.dtype:
    """The dtype of a name as config.json or a user writes it: `bfloat16`, `bf16`, `torch.bfloat16`.
    ConfigError for others."""
    text = name.removeprefix("torch.").lower()
    text = {"bf16": "bfloat16", "fp16": "float16", "half": "float16", "fp32": "float32", "float": "float32"}.get(
        text, text
    )
    known = ("bfloat16", "float16", "float32", "float64")
    if text not in known:
        raise ConfigError(f"{name!r} is no dtype of weights{known_names(text, known)}")
    dtype: torch.dtype = getattr(torch, text)
    return dtype


@runtime_checkable
class ChecksRecords(Protocol):
    """A reader that compares the checksums of what it reads, unless that is turned off."""

    check_records: bool
