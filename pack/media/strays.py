"""Damaged times on the first and the last packets of a stream, where one side has no neighbours to compare with.

`timeline.stray_times` finds damage between sound packets on both sides. At an end more evidence is needed: a late
start, a hole in the sound and a picture that is held for long are real. What is taken for damage, seen from the start
of a stream (the end is its mirror image), is a run of packets which a jump parts from all the others: one picture, or
up to MAX_RUN times of sound, as one block of Matroska has that many frames. (Frames that share a PES packet have one
time.) A longer run is a clock that was set anew.

* The run is later than what follows. Nobody plays sound before sound that comes first, nor holds a picture back behind
  MAX_REORDER others. A recording that joins another one looks the same, but then the clock of the other stream jumps
  there as well. (One packet alone is no recording.)
* The run is earlier than what follows, by FAR_S, and so far away from everything in the other stream too. Less may be a
  hole or a title picture, and stays. At the end STRAY_AHEAD_S is enough when the run lies so far behind the duration
  in the header as well: a header counts to its last packet.

A stream without another to compare with is left to `timeline.epoch_numbers`, but for single packets in impossible
order.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from pack.media.timeline import (
    EPOCH_BACK_S,
    MAX_REORDER,
    MIN_REORDER_S,
    STRAY_AHEAD_S,
    Times,
    follows,
    stray_times,
)

if TYPE_CHECKING:
    from pack.media.probe import PacketTable, StreamInfo

FAR_S = 600.0
MAX_RUN = 8
NEAR = 256  # packets that are looked at


def mend_ends(infos: list[StreamInfo], declared_end_s: float | None) -> None:
    """Mends the times of damaged packets at the ends of these streams: those at the start are put right before what
    follows, those at the end lose their time. declared_end_s: container time at which the header says that all ends."""
    for info in infos:
        numbers, others = _known(info.packets, False), _ordered([o for o in infos if o is not info])
        bound_s = float(others.min()) if len(others) else None
        run = stray_run(_edge(info, numbers, 1), others, bound_s, FAR_S)
        if run:
            _put_before(info, int(numbers[run]))
    for info in infos:
        numbers, others = _known(info.packets, True), _ordered([o for o in infos if o is not info])
        ends = [float(others.max())] if len(others) else []
        ends += [] if declared_end_s is None else [declared_end_s]
        bound_s = -max(ends) if ends else None
        far_s = FAR_S if declared_end_s is None else STRAY_AHEAD_S
        run = stray_run(_edge(info, numbers, -1), -others[::-1], bound_s, far_s)
        for number in range(int(numbers[run - 1]), len(info.packets)) if run else ():
            info.packets.pts[number] = info.packets.dts[number] = float("nan")
            info.packets.strays.add(number)


def stray_run(times: Times, others: Times, bound_s: float | None, far_s: float) -> int:
    """How many packets at the start of a stream have a damaged time.

    times: of the stream in file order; others: of the other stream; bound_s: nothing but this stream has anything
    before it; far_s: how much earlier than bound_s, and than what follows, damaged packets are at least. Turn the order
    and the signs round for the end of a stream.
    """
    run = next((r for r in range(1, min(MAX_RUN, len(times) // 2) + 1) if not follows(times[r - 1], times[r])), 0)
    if run == 0 or (run + 1 < len(times) and not follows(times[run], times[run + 1])):
        return 0
    before, after = float(times[run - 1]), float(times[run])
    if before > after:
        jumps = np.flatnonzero(np.diff(others) < -EPOCH_BACK_S)
        reach_s = before - float(times[0]) + STRAY_AHEAD_S
        joined = len(jumps) > 0 and float(others[jumps[0]] - others[0]) <= reach_s
        joined |= bool((np.abs(others[jumps] - before) <= STRAY_AHEAD_S).any())  # at the same time of the old clock
        return run if run == 1 or (len(others) and not joined) else 0
    return run if bound_s is not None and min(after, bound_s) - before > far_s else 0


def _ordered(infos: list[StreamInfo]) -> Times:
    """Times of the first of these streams in file order, without what is damaged in its middle."""
    for info in infos:
        times = np.asarray(info.packets.dts)
        times = times[~np.isnan(times) & ~stray_times(times)]
        if len(times):
            return times
    return np.zeros(0)


def _known(table: PacketTable, last: bool) -> np.ndarray:
    """Numbers of the packets near one end of a stream, from there inwards, that have a time of their own which is not
    damaged in the middle."""
    near = slice(-NEAR, None) if last else slice(None, NEAR)
    pts = np.where(table.counted(), np.nan, table.pts)[near]
    dts = np.asarray(table.dts)[near]
    known = np.flatnonzero(~np.isnan(pts) & ~stray_times(np.where(np.isnan(pts) | np.isnan(dts), pts, dts)))
    return (known + len(table) - len(pts))[::-1] if last else known


def _edge(info: StreamInfo, numbers: np.ndarray, sign: int) -> Times:
    """sign x the times of these packets. Of pictures only the first counts, against the nearest time of those that it
    can be reordered with."""
    times = sign * np.asarray(info.packets.pts)[numbers]
    near = times[1 : MAX_REORDER + 2]
    if info.head is None or len(near) < 2:
        return times if info.head is None else times[:1]
    allowed_s = 0.0 if len(near) > MAX_REORDER else MIN_REORDER_S
    return np.array([times[0], np.clip(times[0], near.min(), near.max() + allowed_s)])


def _put_before(info: StreamInfo, count: int) -> None:
    """Puts the first packets right before packet `count`; the stream's first frame moves with its packet."""
    table, pictures = info.packets, info.head is not None
    pts, durations = np.asarray(table.pts), np.asarray(table.duration)[:count]
    near = pts[count : count + MAX_REORDER + 1]
    near = np.sort(near[~np.isnan(near)]) if pictures else near
    usual_s = float(np.median(np.diff(near))) if len(near) > 1 else 0.0
    new = near[0] - np.cumsum(np.where(durations > 0, durations, usual_s)[::-1])[::-1]
    if info.first_s is not None:
        at = int(np.abs(pts[:count] - info.first_s).argmin())
        if abs(pts[at] - info.first_s) < EPOCH_BACK_S:
            info.first_s += float(new[at] - pts[at])
    for number, time in enumerate(new.tolist()):
        table.pts[number] = time
        table.dts[number] = float("nan") if pictures else time
        table.strays.add(number)
