"""How long steps took, and what of the time between them was waiting for data and what was a pause.

The host runs ahead of a GPU, so that its own clock does not say when the work of a step was done. What counts is when
the device came to a mark, and a wait or a pause of the host that the device filled with work is none.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass
from typing import Any, Protocol

import torch


class Clock(Protocol):
    """Of the host, and of the device at marks. A mark is reached when all is done that the device was given before."""

    def now(self) -> float:
        """Seconds of the host."""

    def mark(self) -> Any:
        """Set behind what the device was given so far."""

    def reached(self, mark: Any) -> bool:
        """Whether the device has come to a mark; never waits."""

    def between(self, first: Any, second: Any) -> float:
        """Seconds from one mark to a later one, which it waits for."""


class HostClock:
    """Of work that is done when a call of it returns."""

    def now(self) -> float:
        return time.monotonic()

    def mark(self) -> float:
        return time.monotonic()

    def reached(self, mark: float) -> bool:
        return True

    def between(self, first: float, second: float) -> float:
        return second - first


class DeviceClock:
    """Of a GPU, on whose current stream marks are set."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def now(self) -> float:
        return time.monotonic()

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True, blocking=True)
        event.record(torch.cuda.current_stream(self.device))
        return event

    def reached(self, mark: torch.cuda.Event) -> bool:
        return mark.query()

    def between(self, first: torch.cuda.Event, second: torch.cuda.Event) -> float:
        if not second.query():
            second.synchronize()
        return first.elapsed_time(second) / 1e3


def clock_of(device: torch.device) -> Clock:
    """The clock of what runs on a device."""
    return DeviceClock(device) if device.type == "cuda" else HostClock()


@dataclass(frozen=True)
class Idle:
    """Time of the device between steps. wait_s: for data; pause_s: for all else, such as saving."""

    wait_s: float = 0.0
    pause_s: float = 0.0

    def __add__(self, other: Idle) -> Idle:
        return Idle(self.wait_s + other.wait_s, self.pause_s + other.pause_s)


@dataclass(frozen=True)
class Span:
    """Between the marks that end two intervals."""

    clock: Clock
    first: Any
    last: Any

    def seconds(self) -> float:
        """Waits for the device to come to its end."""
        return self.clock.between(self.first, self.last)


@dataclass(frozen=True)
class _Gap:
    """From the end of a step to the beginning of the next: marks, seconds of the host, and what of these was waiting
    for data, which comes last."""

    ended: Any
    began: Any
    host_s: float
    wait_s: float

    def idle(self, clock: Clock) -> Idle:
        """The device's time, of which waiting counts first. What the host did before was hidden by work that the device
        still had, as far as its time is the shorter. Should it be the longer one, the rest belongs to the steps."""
        device_s = clock.between(self.ended, self.began)
        wait_s = min(self.wait_s, device_s)
        return Idle(wait_s, max(min(self.host_s - self.wait_s, device_s - wait_s), 0.0))


class StepTimes:
    """Of one rank, in intervals of steps: `begin_step`, `waited` and `end_step` of each, then `idle` and `cut`."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.start()

    def start(self) -> None:
        """Training begins now; what was before belongs to no interval. What comes before the first step, such as an
        evaluation that is made up for, is no part of it."""
        self._first = self.clock.mark()
        self._left: tuple[Any, float] | None = (self._first, self.clock.now())  # behind a step: mark, host's time
        self._entered: tuple[Any, Any, float] | None = None  # the gap before the step that is being taken
        self._gaps: deque[_Gap] = deque()
        self._idle = Idle()

    def begin_step(self) -> None:
        """The data of a step are there."""
        self._entered = None
        if self._left is not None:
            (ended, left), self._left = self._left, None
            self._entered = ended, self.clock.mark(), self.clock.now() - left

    def waited(self, seconds: float) -> None:
        """How long the host waited for the data of the step that is being taken. It is counted whole where no mark says
        what the device did meanwhile."""
        if self._entered is None:
            self._idle += Idle(wait_s=seconds)
            return
        self._gaps.append(_Gap(*self._entered, seconds))
        self._entered = None

    def end_step(self) -> None:
        """The step and what belongs to it are with the device."""
        while self._gaps and self.clock.reached(self._gaps[0].began):  # that marks of long intervals do not pile up
            self._idle += self._gaps.popleft().idle(self.clock)
        self._left = self.clock.mark(), self.clock.now()

    def idle(self) -> Idle:
        """Of the steps since the last call. Waits for the device to begin the last of them."""
        for gap in self._gaps:
            self._idle += gap.idle(self.clock)
        self._gaps.clear()
        found, self._idle = self._idle, Idle()
        return found

    def cut(self) -> Span:
        """Ends an interval here; what is known of it later."""
        first, self._first = self._first, self.clock.mark()
        return Span(self.clock, first, self._first)
