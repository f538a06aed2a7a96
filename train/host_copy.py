"""Values on their way from the device to the host, which goes on meanwhile."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor


class HostValues(Protocol):
    """What was copied. at_once: there is nothing to wait for, which is so on all ranks or on none; `ready` may be true
    on one rank and not yet on another."""

    at_once: bool

    def ready(self) -> bool:
        """Whether they are there; never waits."""

    def get(self) -> list[float]:
        """Waits until they are there, and for nothing that the device was given later."""


class HostCopy:
    """Of a tensor [n], which may be changed or freed as soon as the copy is begun. `tolist` of the tensor itself would
    wait for all that was queued on the device since."""

    def __init__(self, tensor: Tensor) -> None:
        tensor = tensor.detach()
        self.at_once = not tensor.is_cuda
        self._there: torch.cuda.Event | None = None
        if self.at_once:
            self._values = tensor.clone()
            return
        self._values = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        self._values.copy_(tensor, non_blocking=True)
        self._there = torch.cuda.Event(blocking=True)  # a waiting thread leaves its core to the loader
        self._there.record(torch.cuda.current_stream(tensor.device))

    def ready(self) -> bool:
        return self._there is None or self._there.query()

    def get(self) -> list[float]:
        if self._there is not None and not self._there.query():
            self._there.synchronize()
        values: list[float] = self._values.tolist()
        return values
