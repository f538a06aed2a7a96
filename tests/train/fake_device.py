"""A device that takes as long as it is told, and a host that runs ahead of it; seconds are made up."""

from __future__ import annotations

from torch import Tensor


class HangError(Exception):
    """The host waits for a device that never ends."""


class FakeDevice:
    """A clock of `train.step_times`, and a maker of copies. stuck: it does nothing more."""

    def __init__(self) -> None:
        self.time = self.done_at = 100.0  # of the host; when all is done that the device was given
        self.stuck = False

    def host(self, seconds: float) -> None:
        """The host is busy, or asleep."""
        self.time += seconds

    def give(self, seconds: float) -> None:
        """Work for the device."""
        self.done_at = self.mark() + seconds

    def wait(self, mark: float) -> None:
        """The host waits until the device comes to a mark."""
        if not self.reached(mark):
            if self.stuck:
                raise HangError
            self.time = mark

    def now(self) -> float:
        return self.time

    def mark(self) -> float:
        return max(self.time, self.done_at)

    def reached(self, mark: float) -> bool:
        return mark <= self.time

    def between(self, first: float, second: float) -> float:
        self.wait(second)
        return second - first

    def copy(self, tensor: Tensor) -> FakeCopy:
        return FakeCopy(self, tensor)


class FakeCopy:
    """Of a tensor as it is when the copy is begun; there when the device comes to it."""

    at_once = False

    def __init__(self, device: FakeDevice, tensor: Tensor) -> None:
        self.device, self.there = device, device.mark()
        self.values: list[float] = tensor.tolist()

    def ready(self) -> bool:
        return self.device.reached(self.there)

    def get(self) -> list[float]:
        self.device.wait(self.there)
        return self.values
