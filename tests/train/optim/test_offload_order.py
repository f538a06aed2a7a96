"""That events order all copies and computations of the same memory, checked without a GPU: streams whose clocks say
what is known to be over (vector clocks; Fidge 1988)."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any

import pytest
import torch
from torch import Tensor

from train.optim.offload import OffloadedAverages

STEPS, PORTIONS = 3, 7
Clock = dict[str, int]
Range = tuple[int, int]


@dataclass(frozen=True)
class Event:
    clock: Clock


@dataclass
class Access:
    """tick: of the stream's own clock; known: ticks of all streams that are over before."""

    stream: str
    tick: int
    known: Clock
    reads: list[Range]
    writes: list[Range]

    def before(self, other: Access) -> bool:
        return other.known.get(self.stream, 0) >= self.tick

    def meets(self, other: Access) -> bool:
        pairs = [(a, b) for a in self.writes for b in other.reads + other.writes]
        pairs += [(a, b) for a in self.reads for b in other.writes]
        return any(max(low, start) < min(high, stop) for (low, high), (start, stop) in pairs)


@dataclass
class Stream:
    """Of CUDA, as far as it is used."""

    name: str
    clock: Clock = field(default_factory=dict)

    def record_event(self) -> Event:
        return Event(dict(self.clock))

    def wait_event(self, event: Event) -> None:
        for name, tick in event.clock.items():
            self.clock[name] = max(tick, self.clock.get(name, 0))

    def wait_stream(self, other: Stream) -> None:
        self.wait_event(other.record_event())

    def access(self, reads: list[Tensor], writes: list[Tensor]) -> Access:
        known = dict(self.clock)
        self.clock[self.name] = known.get(self.name, 0) + 1
        return Access(self.name, self.clock[self.name], known, [*map(place, reads)], [*map(place, writes)])


def place(tensor: Tensor) -> Range:
    return tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes


@dataclass
class Machine:
    """What was done, and on which stream work begins now."""

    compute: Stream = field(default_factory=lambda: Stream("compute"))
    done: list[Access] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.current = self.compute

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        self.current, last = stream, self.current
        yield
        self.current = last

    def conflicts(self) -> list[tuple[Access, Access]]:
        return [(a, b) for a, b in combinations(self.done, 2) if a.meets(b) and not (a.before(b) or b.before(a))]


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    made, copy = Machine(), torch.Tensor.copy_

    def copied(to: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
        assert non_blocking
        made.done.append(made.current.access([source], [to]))
        return copy(to, source)

    monkeypatch.setattr(torch.Tensor, "copy_", copied)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: made.current)
    monkeypatch.setattr(torch.cuda, "stream", made.stream)
    return made


def steps(machine: Machine) -> OffloadedAverages:
    """Portions of several sizes; between steps the memory of the buffers is somebody else's."""
    homes = [[torch.zeros(200 * number + 64), torch.zeros(5)] for number in range(PORTIONS)]
    averages = OffloadedAverages(torch.device("cpu"), 0)
    copies: Any = averages
    copies._inward.stream, copies._outward.stream = Stream("inward"), Stream("outward")
    for step in range(STEPS):
        held = []
        with averages.visits(homes) as visit:
            for _ in homes:
                with visit() as found:
                    assert all((tensor == step).all() for tensor in found)
                    for tensor in found:
                        tensor += 1
                    machine.done.append(machine.compute.access([], list(found)))
                    held += [*found]
        machine.done.append(machine.compute.access([], held))
    return averages


def test_what_touches_the_same_memory_is_ordered(machine: Machine) -> None:
    averages: Any = steps(machine)
    assert {access.stream for access in machine.done} == {"compute", "inward", "outward"}
    assert not machine.conflicts()
    # the host, once it has waited for the stream of what is written back
    host = Access("host", 0, averages._outward.stream.clock, [], [])
    assert all(access.before(host) for access in machine.done if access.stream == "outward")


def test_buffers_last_until_what_left_them_is_back(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that is given back sooner is taken by whoever computes next, while it is still being read."""
    made, empty = list[weakref.ref[Tensor]](), torch.empty

    def watched(*sizes: Any, **more: Any) -> Tensor:
        found = empty(*sizes, **more)
        made.append(weakref.ref(found))
        return found

    averages: Any = OffloadedAverages(torch.device("cpu"), 0)
    averages._inward.stream, averages._outward.stream = Stream("inward"), Stream("outward")
    homes = [[torch.zeros(64)] for _ in range(PORTIONS)]
    monkeypatch.setattr(torch, "empty", watched)
    with averages.visits(homes) as visit:
        for _ in homes:
            with visit():
                pass
        assert made and all(buffer() is not None for buffer in made)


def test_both_directions_run_beside_each_other(machine: Machine) -> None:
    """A portion is fetched without a wait for that before it to be computed or to be back."""
    steps(machine)
    inward = [access for access in machine.done if access.stream == "inward"]
    each = len(inward) // STEPS // PORTIONS
    for number in range(PORTIONS):
        fetched = inward[(PORTIONS + number) * each]  # in the second step
        for distance, ordered in ((1, False), (2, False), (3, True)):
            if number >= distance:
                before = PORTIONS + number - distance
                back = [access for access in machine.done if access.stream == "outward"][before * each]
                assert back.before(fetched) == ordered


MISSING: dict[str, Callable[[Any], None]] = {
    "an event that fetches wait for": lambda patch: patch(Stream, "wait_event", _only("compute", Stream.wait_event)),
    "an event that computation waits for": lambda patch: patch(
        Stream, "wait_event", _only("inward outward", Stream.wait_event)
    ),
    "the end of a step": lambda patch: patch("train.optim.offload._Step.end", lambda self: None),
}


def _only(names: str, real: Callable[[Stream, Event], None]) -> Callable[[Stream, Event], None]:
    return lambda stream, event: real(stream, event) if stream.name in names.split() else None


@pytest.mark.parametrize("missing", MISSING)
def test_missing_order_is_found(machine: Machine, missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    MISSING[missing](monkeypatch.setattr)
    steps(machine)
    assert machine.conflicts()
