"""One clip, one clock: which picture is on screen when, and which frames to take. Pure functions on times in seconds.

The policy is written down in docs/packing.md. t = 0 is the first decoded picture or sound sample. Frame k of the grid
has time k / fps and shows the picture that is on screen then.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Times = NDArray[np.float64]

GRID_TAIL_S = 0.010  # a frame needs this much picture after its time
ON_SCREEN_TOLERANCE_S = 0.001  # containers round picture times to milliseconds
GAP_S = 0.1  # a hole of more than this inside a stream is flagged
STRAY_RUN = 64  # packets in a row whose time may be damaged: one damaged PES header dates many sound frames
STRAY_AHEAD_S = 2.0  # the packets around damaged ones are at most this far apart
MAX_REORDER = 40  # a picture is shown at most this many pictures after it is decoded: two times 16, or a pyramid of 32
MIN_REORDER_S = 1.0
EPOCH_BACK_S = 0.2  # decoding times that step back further than this start a new epoch
EPOCH_AHEAD_S = 600.0  # and so do steps ahead of more than this


@dataclass(frozen=True)
class Grid:
    """fps: effective rate in frames per second; num_frames: how many; raised, lowered: against the rate asked for."""

    fps: float
    num_frames: int
    raised: bool = False
    lowered: bool = False

    @property
    def times(self) -> Times:
        return np.arange(self.num_frames) / self.fps


def source_rate(times: Times) -> float | None:
    """1 / median gap between pictures, in 1/s; None for fewer than two pictures. times: sorted, distinct."""
    if len(times) < 2:
        return None
    gap = float(np.median(np.diff(times)))
    return 1.0 / gap if gap > 0 else None


def is_variable_rate(times: Times) -> bool:
    """True when more than 5 % of the gaps between pictures differ from the median by over 20 % (and over 2 ms, which is
    what containers with millisecond times add)."""
    if len(times) < 3:
        return False
    gaps = np.diff(times)
    median = np.median(gaps)
    return bool(np.mean(np.abs(gaps - median) > max(0.2 * median, 0.002)) > 0.05)


def count_on_grid(end_s: float, fps: float) -> int:
    """How many k have k / fps < end_s - GRID_TAIL_S; at least 1."""
    return max(1, math.ceil((end_s - GRID_TAIL_S) * fps - 1e-9))


def choose_grid(end_s: float, rate: float | None, fps: float, min_frames: int, max_frames: int) -> Grid:
    """The frame grid of a clip whose picture ends at end_s.

    rate: the source's own (`source_rate`). fps is lowered to the source's rate, lowered to keep max_frames, and raised,
    but never above the source's rate, to reach min_frames.
    """
    effective = min(fps, rate) if rate is not None else fps
    if rate is not None and math.isclose(rate, fps, rel_tol=1e-3):
        effective = fps  # 1.9999 is 2: timestamps are rounded
    if count_on_grid(end_s, effective) < min_frames and rate is not None and end_s > GRID_TAIL_S:
        effective = max(effective, min(rate, min_frames / end_s))
    if count_on_grid(end_s, effective) > max_frames:
        effective = max_frames / end_s
    num_frames = min(count_on_grid(end_s, effective), max_frames)
    return Grid(effective, num_frames, raised=effective > fps * 1.001, lowered=effective < fps * 0.999)


def fewer_frames(grid: Grid, end_s: float, num_frames: int, fps: float) -> Grid:
    """The grid of num_frames <= grid.num_frames frames over the same clip."""
    if num_frames == grid.num_frames:
        return grid
    effective = num_frames / end_s
    return Grid(effective, num_frames, raised=effective > fps * 1.001, lowered=effective < fps * 0.999)


def on_screen(picture_times: Times, grid_times: Times) -> NDArray[np.int64]:
    """For every grid time the index of the picture on screen: the last that starts at or before it, else the first.

    picture_times: sorted. A picture may start ON_SCREEN_TOLERANCE_S late.
    """
    index = np.searchsorted(picture_times, grid_times + ON_SCREEN_TOLERANCE_S, side="right") - 1
    return np.maximum(index, 0).astype(np.int64)


def picture_gaps(times: Times) -> list[tuple[float, float]]:
    """Spans without a picture: gaps GAP_S longer than the median gap, and over three times the gaps beside them (a
    slower stretch of a variable rate is no hole)."""
    if len(times) < 3:
        return []
    gaps = np.diff(times)
    median = float(np.median(gaps))
    beside = np.maximum(np.r_[gaps[1], gaps[:-1]], np.r_[gaps[1:], gaps[-2]])
    wide = np.flatnonzero((gaps - median > GAP_S) & (gaps > 3 * np.maximum(beside, 0.5 * median)))
    return [(float(times[i] + median), float(times[i + 1])) for i in wide]


def stray_times(times: Times) -> NDArray[np.bool_]:
    """Which times of a stream in file order are damaged: up to STRAY_RUN packets in a row whose times are outside those
    of the packets around them, which themselves follow each other. times: decoding times, NaN = none."""
    bad = np.zeros(len(times), bool)
    known = np.flatnonzero(~np.isnan(times))
    value = times[known]
    if not ((np.diff(value) < -EPOCH_BACK_S) | (np.diff(value) > STRAY_AHEAD_S)).any():
        return bad
    i = 1
    while i < len(known) - 1:
        before = value[i - 1]
        if follows(before, value[i]):
            i += 1
            continue
        for run in range(1, STRAY_RUN + 1):
            if i + run >= len(known):
                break
            # The run must also end with a jump: a second recording that counts up again passes the old time steadily.
            if follows(before, value[i + run]) and not follows(value[i + run - 1], value[i + run]):
                bad[known[i : i + run]] = True
                value[i : i + run] = before
                break
        i += 1
    return bad


def misplaced_times(shown: Times, decoded: Times) -> NDArray[np.bool_]:
    """Which presentation times of a stream in file order are damaged although the decoding times are not: they are
    further away than pictures are reordered.

    shown, decoded: presentation and decoding times, NaN = none. A pause lies between the two times of a picture that
    is shown behind it, so pauses among the decoding times nearby are allowed for. Behind the last decoding times
    nothing tells a pause from damage, up to EPOCH_AHEAD_S.
    """
    bad = np.zeros(len(decoded), bool)
    known = np.flatnonzero(~np.isnan(decoded))
    if len(known) < 2:
        return bad
    steps = np.diff(decoded[known])
    usual = float(np.median(steps))
    paused = np.r_[0.0, np.cumsum(np.maximum(steps - usual, 0.0))]
    number = np.arange(len(known))
    ahead = paused[np.minimum(number + MAX_REORDER, len(known) - 1)] - paused
    ahead[-MAX_REORDER:] += EPOCH_AHEAD_S
    behind = paused - paused[np.maximum(number - MAX_REORDER, 0)]
    late = shown[known] - decoded[known]
    reorder_s = max(MIN_REORDER_S, MAX_REORDER * usual)
    bad[known] = (late > reorder_s + ahead) | (late < -reorder_s - behind)
    return bad


def follows(before: float, after: float) -> bool:
    """Whether a packet may come next after another one; times in s."""
    return before - EPOCH_BACK_S <= after <= before + STRAY_AHEAD_S


def epoch_numbers(decode_times: Sequence[float | None]) -> NDArray[np.int64]:
    """For every packet of a stream, in file order, the number of its epoch: how often its decoding times have jumped.

    Packets without a decoding time (None) never start an epoch.
    """
    numbers = np.zeros(len(decode_times), dtype=np.int64)
    last: float | None = None
    epoch = 0
    for i, time in enumerate(decode_times):
        if time is not None:
            if last is not None and (time < last - EPOCH_BACK_S or time > last + EPOCH_AHEAD_S):
                epoch += 1
            last = time
        numbers[i] = epoch
    return numbers


def epoch_offsets(starts: Sequence[Sequence[float]], ends: Sequence[Sequence[float]], num_epochs: int) -> list[float]:
    """Seconds to add to the times of each epoch so that it follows the one before, one offset for all streams.

    starts[e], ends[e]: first and last presentation time of every stream that has packets in epoch e.
    """
    offsets = [0.0]
    for epoch in range(1, num_epochs):
        before, here = ends[epoch - 1], starts[epoch]
        follow = (max(before) + offsets[-1] - min(here)) if before and here else offsets[-1]
        offsets.append(follow)
    return offsets
