"""Inputs of blocks that are computed again, in CPU memory between forward and backward pass.

While a block computes, its input is copied to pinned memory on a stream of its own; the copy on the GPU goes two blocks
later. In the backward pass the input of the block before is fetched while a block computes. Only a tensor without
memory, of the same shape, takes part in checkpointing in its place.

A block's input is S x H elements: 64 MB at 16,384 rows of 2,048 in bfloat16, 1.3 ms of PCIe each way at 50 GB/s, while
a layer computes for 8 ms or more.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

WINDOW = 2  # inputs that are on the GPU while they are copied


class ActivationOffload:
    """For `CheckpointPolicy.carry`. gpu_bytes: of inputs that stay on the GPU, the first of each forward pass."""

    def __init__(self, gpu_bytes: int = 0) -> None:
        self.gpu_bytes = gpu_bytes
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._window: deque[weakref.ref[_Input]] = deque()  # a graph that is gone needs no input
        self._last: weakref.ref[_Input] | None = None
        self._staying: weakref.WeakSet[_Stays] = weakref.WeakSet()

    @property
    def held(self) -> int:
        """Bytes of inputs that stay on the GPU, of all graphs that are there now."""
        return sum(stays.nbytes for stays in self._staying)

    def __call__(self, run: Callable[..., Any], block: Callable[..., Any], hidden: Tensor, *others: Any) -> Any:
        """run(block, hidden, *others), hidden being elsewhere between its two runs."""
        if not hidden.requires_grad:
            return run(block, hidden, *others)
        if self.held + hidden.nbytes <= self.gpu_bytes:
            stays = _Stays(block, hidden.nbytes)
            self._staying.add(stays)
            return run(stays, hidden, *others)
        record = self._leave(hidden)

        def again(ticket: Tensor, *rest: Any) -> Any:
            return block(_Arrive.apply(ticket, record), *rest)

        result = run(again, _Leave.apply(hidden), *others)
        first = result[0] if isinstance(result, tuple) else result
        if first.requires_grad:
            first.register_hook(lambda _: record.fetch(ahead=True))  # before the block begins its backward pass
        return result

    def _leave(self, hidden: Tensor) -> _Input:
        record = _Input(hidden.detach(), self._stream(hidden.device), self._last)
        self._last = weakref.ref(record)
        self._window.append(self._last)
        while len(self._window) > WINDOW:
            oldest = self._window.popleft()()
            if oldest is not None:
                oldest.drop()
        return record

    def _stream(self, device: torch.device) -> torch.cuda.Stream | None:
        if device.type != "cuda":
            return None
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)
        return self._streams[device]


class _Stays:
    """A block whose input stays. Checkpointing holds it exactly as long as that input: until the graph lets go of both,
    in a backward pass or when it is gone itself, however often and however far backward passes went."""

    def __init__(self, block: Callable[..., Any], nbytes: int) -> None:
        self.block, self.nbytes = block, nbytes

    def __call__(self, *inputs: Any) -> Any:
        return self.block(*inputs)


class _Input:
    """One block's input, on the GPU or in CPU memory. before: that of the block which ran before it."""

    def __init__(self, hidden: Tensor, stream: torch.cuda.Stream | None, before: weakref.ref[_Input] | None) -> None:
        self.stream, self.before = stream, before
        self.here: Tensor | None = hidden
        self.device = hidden.device
        self.copied = self.ready = None
        self.ran = False  # the block, for the first time
        if stream is None:
            self.there = hidden.clone()
            return
        self.there = torch.empty(hidden.shape, dtype=hidden.dtype, pin_memory=True)
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):
            self.there.copy_(hidden, non_blocking=True)
            self.copied = stream.record_event()

    def drop(self) -> None:
        """Frees the memory on the GPU: what takes its place comes after the copy."""
        if self.copied is not None:
            torch.cuda.current_stream(self.device).wait_event(self.copied)
        self.here = self.ready = None

    def fetch(self, *, ahead: bool) -> None:
        """Begins to bring it back. ahead: also that of the block before, which is next in the backward pass."""
        if self.here is None:
            self.here = torch.empty(self.there.shape, dtype=self.there.dtype, device=self.device)
            if self.stream is None:
                self.here.copy_(self.there)
            else:
                self.stream.wait_stream(torch.cuda.current_stream(self.device))  # whose memory it takes
                with torch.cuda.stream(self.stream):
                    self.here.copy_(self.there, non_blocking=True)
                    self.ready = self.stream.record_event()
                self.here.record_stream(self.stream)
        before = None if self.before is None else self.before()
        if ahead and before is not None:
            before.fetch(ahead=False)

    def tensor(self) -> Tensor:
        """On the device, once what runs there has come so far. In a second run the taker alone holds it: the graph has
        this record until the backward pass of all blocks is over."""
        self.fetch(ahead=False)
        if self.ready is not None:
            torch.cuda.current_stream(self.device).wait_event(self.ready)
        found = self.here
        assert found is not None
        if self.ran:
            self.drop()
        self.ran = True
        return found


class _Leave(torch.autograd.Function):
    """Something of the shape of x that has no memory; the gradient passes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.new_zeros(()).expand(x.shape)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0]


class _Arrive(torch.autograd.Function):
    """The tensor itself in its place; the gradient passes."""

    @staticmethod
    def forward(ctx: Any, ticket: Tensor, record: _Input) -> Tensor:
        return record.tensor().view_as(ticket)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0], None
