"""The grid and the clock, against brute force and by property."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pack.media import timeline


def steady(count, rate, start=0.0):
    return start + np.arange(count) / rate


@pytest.mark.parametrize(
    ("end_s", "rate", "fps", "low", "high", "expected"),
    [
        (6.0, 30, 2.0, 1, 768, (2.0, 12)),
        (6.006, 29.97, 2.0, 1, 768, (2.0, 12)),  # 6.0 s has only 6 ms of picture left
        (6.02, 30, 2.0, 1, 768, (2.0, 13)),
        (0.0333, None, 2.0, 4, 768, (2.0, 1)),  # a still cannot be sampled faster
        (10.0, 1.0, 2.0, 4, 768, (1.0, 10)),  # never above the source's rate
        (100.0, 25, 2.0, 4, 10, (0.1, 10)),  # lowered to keep max_frames
        (1.0, 25, 2.0, 4, 768, (4.0, 4)),  # raised to reach min_frames
        (1.0, 3, 2.0, 4, 768, (3.0, 3)),  # raised, but not above the source
        (7200.0, 25, 2.0, 4, 768, (768 / 7200, 768)),
    ],
)
def test_grids(end_s, rate, fps, low, high, expected):
    grid = timeline.choose_grid(end_s, rate, fps, low, high)
    assert (pytest.approx(grid.fps), grid.num_frames) == expected


@given(
    end_s=st.floats(0.001, 20000),
    rate=st.one_of(st.none(), st.floats(0.05, 240)),
    fps=st.floats(0.05, 60),
    low=st.integers(1, 8),
    high=st.integers(8, 800),
)
def test_grid_laws(end_s, rate, fps, low, high):
    grid = timeline.choose_grid(end_s, rate, fps, low, high)
    assert 1 <= grid.num_frames <= high
    assert grid.num_frames == 1 or grid.times[-1] < end_s
    assert rate is None or grid.fps <= max(rate, fps) * 1.001
    if rate is not None and fps < rate * 0.99 and not grid.lowered and not grid.raised:
        brute = sum(1 for k in range(high + 1) if k / fps < end_s - timeline.GRID_TAIL_S)
        assert grid.num_frames == max(1, min(brute, high))


@given(st.lists(st.floats(0, 100), min_size=1, max_size=60), st.lists(st.floats(0, 120), min_size=1, max_size=30))
def test_picture_on_screen(pictures, grid):
    pictures = np.array(sorted(pictures))
    for time, index in zip(grid, timeline.on_screen(pictures, np.array(grid)), strict=True):
        begun = [i for i, t in enumerate(pictures) if t <= time + timeline.ON_SCREEN_TOLERANCE_S]
        assert index == (begun[-1] if begun else 0)


def test_millisecond_times_do_not_miss_a_picture():
    times = np.round(steady(90, 30), 3)
    assert timeline.on_screen(times, np.arange(6) / 3).tolist() == [0, 10, 20, 30, 40, 50]


def test_rates():
    assert timeline.source_rate(steady(50, 25)) == pytest.approx(25)
    assert timeline.source_rate(np.array([1.0])) is None
    assert not timeline.is_variable_rate(np.round(steady(300, 30000 / 1001), 3))
    assert timeline.is_variable_rate(np.r_[steady(60, 30), 2 + steady(20, 10)])


def test_gaps_of_pictures():
    times = np.r_[steady(30, 30), 1.7 + steady(30, 30)]
    assert timeline.picture_gaps(times) == [pytest.approx((1.0, 1.7))]
    assert timeline.picture_gaps(steady(5, 0.2)) == []  # a slide show has no holes


def test_epochs_follow_one_another_with_one_offset():
    once = [1.4 + i / 25 for i in range(50)]
    numbers = timeline.epoch_numbers(once + once)
    assert numbers.tolist() == [0] * 50 + [1] * 50
    assert timeline.epoch_offsets([[1.4, 1.38], [1.4, 1.38]], [[3.4, 3.41], [3.4, 3.41]], 2) == [0, pytest.approx(2.03)]


def test_reordered_decoding_times_are_no_epoch():
    assert timeline.epoch_numbers([0.0, 0.04, None, 0.03, 0.08, 0.1]).max() == 0


@given(st.integers(1, 60), st.integers(5, 60), st.floats(-1e5, 1e5).filter(lambda x: abs(x) > 5))
def test_damaged_times_are_found(run, where, shift):
    times = steady(200, 25, 10.0)
    damaged = times.copy()
    damaged[where : where + run] += shift
    expected = np.zeros(200, bool)
    expected[where : where + run] = True
    if run / 25 < timeline.STRAY_AHEAD_S - 0.1:
        assert timeline.stray_times(damaged).tolist() == expected.tolist()


@given(st.integers(2, 100), st.integers(2, 100), st.floats(-1, 1))
def test_joined_recordings_are_not_damage(first, second, start):
    assert not timeline.stray_times(np.r_[steady(first, 25), start + steady(second, 25)]).any()
