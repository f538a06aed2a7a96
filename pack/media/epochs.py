"""Epochs: stretches of a file with one clock. A recording that was joined to another begins a new one.

The times of a stream that jump back, or far ahead, begin an epoch when the other stream does not contradict: it jumps
there too, or it has no packets there. Where it just goes on, the jump is damage, and what overlaps is cut when it is
placed. Times that a header accounts for are no jump ahead: a picture may be held for an hour.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from pack.media.timeline import EPOCH_BACK_S, Times, epoch_numbers, epoch_offsets, follows

if TYPE_CHECKING:
    from pack.media.probe import PacketTable, StreamInfo

SKEW_S = 2.0  # streams change their clock at most this far apart in the file
LENGTH_SLACK_S = 1.0  # times may be this much behind the end that a header states


@dataclass
class Clock:
    """Decoding times of one stream's packets in file order (NaN: none, or not shown), where in the file they are, and
    the numbers of the packets at which the times jump. step_s: usual time from packet to packet."""

    times: Times
    position: NDArray[np.int64]
    jumps: list[int]
    step_s: float


def follow_epochs(infos: list[StreamInfo], lasts_s: float | None) -> tuple[list[float], float]:
    """Numbers the epochs of the streams, puts the times of each behind those of the one before, and returns (offset of
    each epoch in s, time of the first frame of any stream).

    lasts_s: container time at which the header says that all ends, None where it does not say.
    """
    for info in infos:
        info.packets.drop_outliers()
    zero = min((i.first_s for i in infos if i.first_s is not None), default=0.0)
    infos = [i for i in infos if len(i.packets)]
    joins = common_jumps([_clock(i.packets, lasts_s) for i in infos])
    for number, info in enumerate(infos):
        firsts = np.array([join[number] for join in joins], np.int64)
        info.packets.epoch = np.searchsorted(firsts, np.arange(len(info.packets)), side="right").astype(np.int64)
    num_epochs = len(joins) + 1
    starts: list[list[float]] = [[] for _ in range(num_epochs)]
    ends: list[list[float]] = [[] for _ in range(num_epochs)]
    for info in infos:
        pts, duration = info.packets.shown(), np.asarray(info.packets.duration)
        for epoch in range(num_epochs if num_epochs > 1 else 0):
            here = (info.packets.epoch == epoch) & ~np.isnan(pts)
            if here.any():
                starts[epoch].append(float(pts[here].min()))
                ends[epoch].append(float((pts + duration)[here].max()))
    offsets = epoch_offsets(starts, ends, num_epochs)
    for info in infos if num_epochs > 1 else []:
        info.packets.pts = list(np.asarray(info.packets.pts) + np.asarray(offsets)[info.packets.epoch])
    return offsets, zero


def common_jumps(clocks: list[Clock]) -> list[tuple[int, ...]]:
    """The number of the first packet in every stream, for each new epoch in file order."""
    joins: list[tuple[int, ...]] = []
    for number, clock in enumerate(clocks):
        for jump in clock.jumps:
            if not any(join[number] == jump for join in joins):
                join = _join_at(clocks, number, jump)
                joins += [] if join is None else [join]
    return sorted(joins)


def _join_at(clocks: list[Clock], number: int, jump: int) -> tuple[int, ...] | None:
    """The first packets behind a jump of stream `number`, None when another stream shows that it is damage."""
    clock, firsts = clocks[number], []
    for other_number, other in enumerate(clocks):
        first = int(np.searchsorted(other.position, clock.position[jump]))
        same = _nearest_jump(other, clock.position[jump])
        if other_number == number:
            firsts.append(jump)
        elif (
            same is not None
            and abs(same - first) * other.step_s <= SKEW_S
            and _nearest_jump(clock, other.position[same]) == jump
        ):
            firsts.append(same)
        elif _goes_on(other, first, clock):
            return None
        else:
            firsts.append(first)
    return tuple(firsts)


def _nearest_jump(clock: Clock, position: int) -> int | None:
    """The jump of a stream nearest to a position in the file, counted in its packets; None without any."""
    here = int(np.searchsorted(clock.position, position))
    return min(clock.jumps, key=lambda jump: abs(jump - here), default=None)


def _goes_on(clock: Clock, first: int, jumped: Clock) -> bool:
    """Whether the times of a stream go on at its packet `first` while those of `jumped` jump: the packets around follow
    each other, and are near each other in the file as well."""
    before = np.flatnonzero(~np.isnan(clock.times[:first]))
    after = first + np.flatnonzero(~np.isnan(clock.times[first:]))
    if not len(before) or not len(after):
        return False
    last, following = int(before[-1]), int(after[0])
    between = np.searchsorted(jumped.position, clock.position[[last, following]])
    near = (int(between[1]) - int(between[0])) * jumped.step_s <= SKEW_S
    return near and follows(float(clock.times[last]), float(clock.times[following]))


def _clock(packets: PacketTable, lasts_s: float | None) -> Clock:
    times = np.where(packets.discard, np.nan, np.asarray(packets.dts))
    steps = np.diff(times[~np.isnan(times)])
    times = np.where(packets.counted(), np.nan, times)  # libavformat dates them at the rate that the stream began with
    numbers = epoch_numbers([None if np.isnan(t) else float(t) for t in times])
    jumps = (np.flatnonzero(np.diff(numbers)) + 1).tolist()
    real = [
        jump for before, jump, after in zip([0, *jumps], jumps, [*jumps[1:], len(times)], strict=False)
        if not _is_steady(packets.shown(), times, (before, jump, after), lasts_s)
    ]  # fmt: skip
    step_s = float(np.median(steps)) if len(steps) else 0.0
    return Clock(times, np.maximum.accumulate(np.asarray(packets.position, np.int64)), real, step_s)


def _is_steady(shown: Times, times: Times, around: tuple[int, int, int], lasts_s: float | None) -> bool:
    """Whether a jump of decoding times is none of the clock. around: numbers of the jump before, this and the next."""
    before, after = shown[around[0] : around[1]], shown[around[1] : around[2]]
    before, after = before[~np.isnan(before)], after[~np.isnan(after)]
    if times[around[1]] < np.nanmax(times[around[0] : around[1]]):
        # At an edit the decoding times step back by as much as pictures are reordered; what is shown goes on.
        return len(before) > 0 and len(after) > 0 and bool(after.min() > before.max() - EPOCH_BACK_S)
    return lasts_s is not None and len(after) > 0 and bool(after.max() < lasts_s + LENGTH_SLACK_S)
