"""The optimizer's averages in pinned CPU memory, which visit the GPU portion by portion during a step.

A few buffers on the GPU are used in turn. A portion is copied into one on a stream of its own, is changed there, and is
copied back on another stream; a buffer takes the next portion once the last one is back in CPU memory. So both
directions of PCIe run while the portions in between are computed. Events order everything on the device; the host waits
for nothing. On a CPU the copies are made at once.

Muon of 15.8 B elements in bfloat16: 31.7 GB each way are 0.83 s at 38 GB/s, what it computes takes 0.8 s.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from train.parallel.loading import local_part

BUFFERS = 3  # one that is computed with, and one each on its way in and out
ALIGNED = 256  # bytes: where tensors start in a buffer, as in memory of their own
SLAB = 1 << 32  # bytes of CPU memory that are pinned at a time

Visit = Callable[[], AbstractContextManager[Sequence[Tensor]]]  # of the next portion


class HostMemory:
    """Zeros in CPU memory, cut from a few slabs: each allocation of pinned memory is rounded up to a power of two.
    expected: bytes of all tensors; once they are out, others are taken to replace them."""

    def __init__(self, expected: int, *, pinned: bool) -> None:
        self.expected, self.pinned = expected, pinned
        self._to_come = expected
        self._left = torch.empty(0, dtype=torch.uint8)

    def take(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Contiguous; shares its storage with others."""
        numel = torch.Size(shape).numel()
        size = aligned(numel * dtype.itemsize)
        if not self._to_come:
            self._to_come, self._left = self.expected, self._left[:0].clone()
        if self._left.numel() < size:
            most = 1 << max(self._to_come.bit_length() - 1, 0)
            found = torch.empty(max(size, min(SLAB, most)), dtype=torch.uint8, pin_memory=self.pinned)
        else:
            found = self._left
        self._to_come = max(self._to_come - size, 0)
        if found.numel() - size >= self._left.numel() or found is self._left:
            self._left = found[size:]
        return found[: numel * dtype.itemsize].view(dtype).view(tuple(shape)).zero_()


class OffloadedAverages:
    """CPU memory for averages, and their visits to the device of the parameters. expected: bytes of them all."""

    def __init__(self, device: torch.device, expected: int) -> None:
        self.device = device
        self._memory = HostMemory(expected, pinned=device.type == "cuda")
        self._inward, self._outward = _Copies(device), _Copies(device)

    @torch.no_grad()
    def like(self, parameter: Tensor, dtype: torch.dtype) -> Tensor:
        """Zeros placed as a parameter, this rank's part in pinned memory."""
        made = torch.empty_like(parameter, dtype=dtype, device="cpu", requires_grad=False)
        local = local_part(made)  # the tensor itself, as no gradient passes; its own memory was never touched
        found = self._memory.take(local.shape, dtype)
        local.set_(found.untyped_storage(), found.storage_offset(), found.shape, found.stride())
        return made

    @torch.no_grad()
    def taken(self, parameter: Tensor, average: Tensor, dtype: torch.dtype) -> Tensor:
        """An average of another dtype or place; the host waits for it."""
        self.wait()
        made = self.like(parameter, dtype)
        local_part(made).copy_(local_part(average))
        return made

    def holds(self, average: Tensor) -> bool:
        """Whether it is in memory that copies need not wait for."""
        local = local_part(average)
        return local.device.type == "cpu" and (self.device.type != "cuda" or not local.numel() or local.is_pinned())

    @contextmanager
    def visits(self, portions: Sequence[Sequence[Tensor]]) -> Iterator[Visit]:
        """For one step. portions: flat tensors in CPU memory. What it gives is entered once for each of them, in this
        order: the same tensors on the device, which are written back when it is left."""
        step = _Step(self.device, self._inward, self._outward, portions)
        try:
            yield step.visit
        finally:
            step.end()

    def wait(self) -> None:
        """Until all that was written back can be read by the host."""
        self._outward.wait()


class _Copies:
    """In one direction, one after the other, on a stream of their own; on a CPU at once."""

    def __init__(self, device: torch.device) -> None:
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def copy(
        self, to: Sequence[Tensor], source: Sequence[Tensor], after: torch.cuda.Event | None
    ) -> torch.cuda.Event | None:
        """The event at their end."""
        if self.stream is None:
            for there, here in zip(to, source, strict=True):
                there.copy_(here)
            return None
        assert after is not None
        self.stream.wait_event(after)
        with torch.cuda.stream(self.stream):
            for there, here in zip(to, source, strict=True):
                there.copy_(here, non_blocking=True)
            return self.stream.record_event()

    def wait(self) -> None:
        if self.stream is not None:
            self.stream.synchronize()


@dataclass
class _Buffer:
    """On the device. free: after which it may be filled."""

    memory: Tensor
    free: torch.cuda.Event | None

    def like(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        made, at = [], 0
        for tensor in tensors:
            made.append(self.memory[at : at + tensor.nbytes].view(tensor.dtype))
            at += aligned(tensor.nbytes)
        return made


@dataclass
class _Guest:
    """A portion on the device. arrived: after which it may be read."""

    homes: Sequence[Tensor]
    here: list[Tensor]
    buffer: _Buffer
    arrived: torch.cuda.Event | None


class _Step:
    """The visits of one step."""

    def __init__(
        self, device: torch.device, inward: _Copies, outward: _Copies, portions: Sequence[Sequence[Tensor]]
    ) -> None:
        self.device, self.inward, self.outward = device, inward, outward
        self.waiting = deque(portions)
        self.guests: deque[_Guest] = deque()
        size = max((sum(aligned(tensor.nbytes) for tensor in portion) for portion in portions), default=0)
        memory = [torch.empty(size, dtype=torch.uint8, device=device) for _ in range(min(BUFFERS, len(portions)))]
        if inward.stream is not None and outward.stream is not None:
            inward.stream.wait_stream(outward.stream)  # what the last step wrote back is read now
        begin = self._now()  # what had this memory before is done
        self.free = deque(_Buffer(part, begin) for part in memory)
        while self.free and self.waiting:
            self._fetch()

    @contextmanager
    def visit(self) -> Iterator[Sequence[Tensor]]:
        guest = self.guests.popleft()
        if guest.arrived is not None:
            torch.cuda.current_stream(self.device).wait_event(guest.arrived)
        yield guest.here
        guest.buffer.free = self.outward.copy(guest.homes, guest.here, self._now())
        self.free.append(guest.buffer)
        if self.waiting:
            self._fetch()

    def end(self) -> None:
        """Whoever takes the memory of the buffers next comes after the copies."""
        for copies in (self.inward, self.outward):
            if copies.stream is not None:
                torch.cuda.current_stream(self.device).wait_stream(copies.stream)

    def _fetch(self) -> None:
        homes, buffer = self.waiting.popleft(), self.free.popleft()
        here = buffer.like(homes)
        self.guests.append(_Guest(homes, here, buffer, self.inward.copy(here, homes, buffer.free)))

    def _now(self) -> torch.cuda.Event | None:
        return torch.cuda.current_stream(self.device).record_event() if self.inward.stream is not None else None


def aligned(nbytes: int) -> int:
    """Bytes that so many take up."""
    return -(-nbytes // ALIGNED) * ALIGNED
