"""The document boundaries of one packed sequence, on the device and on the host, so that no operation waits for the
device to learn them."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, groupby
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Segments:
    """Rows attend within their own segment only.

    cu_seqlens: int32 [n + 1] on the compute device, from 0 to T; lengths: n row counts on the host, none of them 0;
    max_seqlen: the longest (0 without segments); cache: what a backend derives once per batch.
    """

    cu_seqlens: Tensor
    lengths: tuple[int, ...]
    max_seqlen: int
    cache: dict[Hashable, Any] = field(default_factory=dict, repr=False)

    @classmethod
    def from_lengths(cls, lengths: Sequence[int], device: torch.device | str | None = None) -> Segments:
        """Segments of so many rows, one after another; empty ones are left out. ValueError for a negative length."""
        if any(length < 0 for length in lengths):
            raise ValueError(f"a segment cannot have {min(lengths)} rows")
        kept = tuple(int(length) for length in lengths if length)
        bounds = torch.tensor([0, *accumulate(kept)], dtype=torch.int32)
        if device is not None and torch.device(device).type == "cuda":
            bounds = bounds.pin_memory()  # a copy from pageable memory would wait for the device
        return cls(bounds.to(device, non_blocking=True), kept, max(kept, default=0))

    @property
    def total(self) -> int:
        """T, the rows of the packed sequence."""
        return sum(self.lengths)

    @property
    def runs(self) -> list[tuple[int, int]]:
        """[(number, length)]: neighbouring segments of one length, counted."""
        return [(len(list(group)), length) for length, group in groupby(self.lengths)]

    @property
    def ids(self) -> Tensor:
        """int32 [T] on the device: which segment a row belongs to. Made once per batch."""
        if "ids" not in self.cache:
            counts = self.cu_seqlens.diff()
            numbers = torch.arange(len(self.lengths), dtype=torch.int32, device=counts.device)
            self.cache["ids"] = torch.repeat_interleave(numbers, counts, output_size=self.total)
        ids: Tensor = self.cache["ids"]
        return ids
