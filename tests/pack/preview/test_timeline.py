import re

import pytest

from pack.preview import timeline
from pack.preview.texts import clock, size
from tests.pack.preview.samples import audio_meta, sine, video


def test_frames_ticks_and_sound_share_one_scale() -> None:
    packed, meta = video(5.28, audio_s=4.0, audio={"start_s": 1.0, "gaps_s": [(2.0, 2.5)]}, gaps_s=[(3.0, 3.4)])
    line = timeline.video_timeline("x", "video 1", packed, meta, 16, 10**9)
    # the last frame, at 5.0 s, gets the room of half a second
    assert line.span_s == 5.5
    assert [f.left for f in line.frames] == [100 * k / 2 / 5.5 for k in range(11)]
    assert {f.width for f in line.frames} == {100 * 0.5 / 5.5}
    assert line.end_left == pytest.approx(100 * 5.28 / 5.5)
    found = {(b.lane, b.kind): (b.left, b.width) for b in line.bands}
    assert found[("audio", "lead")] == pytest.approx((0, 100 / 5.5))
    assert found[("audio", "gap")] == pytest.approx((200 / 5.5, 50 / 5.5))
    assert found[("video", "gap")] == pytest.approx((300 / 5.5, 40 / 5.5))
    assert line.sound is not None
    last_x = max(float(x) for x in re.findall(r"[ML]([\d.]+),", line.sound.path))
    assert last_x == pytest.approx(1000 * 4.0 / 5.5, abs=0.1)
    assert dict((label, left) for left, label in line.ticks)["2 s"] == pytest.approx(200 / 5.5)


def test_a_sound_longer_than_the_picture_makes_the_axis() -> None:
    packed, meta = video(3.0, audio_s=6.0)
    line = timeline.video_timeline("x", "video 1", packed, meta, 16, 10**9)
    assert line.span_s == 6.0 and line.end_left == 50
    assert line.frames[-1].left == pytest.approx(100 * 2.5 / 6)


def test_many_frames_are_thinned_evenly_and_it_is_said() -> None:
    packed, meta = video(60.0)
    line = timeline.video_timeline("x", "video 1", packed, meta, 16, 10**9)
    assert len(line.frames) == 16 and line.frames_note == "16 of 120 frames are shown"
    assert [line.frames[0].index, line.frames[-1].index] == [0, 119]
    assert line.frames[3].time_s == meta.frame_times_s[line.frames[3].index]


def test_one_frame_fills_the_axis() -> None:
    packed, meta = video(0.04, fps=25.0)
    line = timeline.video_timeline("x", "video 1", packed, meta, 16, 10**9)
    assert [(f.left, f.width) for f in line.frames] == [(0, 100)]


def test_a_long_sound_is_shortened_with_a_note_and_a_band() -> None:
    data = sine(30.0)
    line = timeline.audio_timeline("x", "audio 1", data, audio_meta(30.0), len(data) // 3)
    assert line.sound is not None and line.sound.played_s == pytest.approx(10.0, abs=0.01)
    assert "first 10.0" in line.sound.note and "30.000 s" in line.sound.note
    (band,) = line.bands
    assert band.kind == "unplayed" and band.left == pytest.approx(100 / 3, abs=0.1)


@pytest.mark.parametrize("end", [0.04, 0.5, 5.28, 41.8, 599, 7200, 90000])
def test_ticks_are_round_few_and_inside(end: float) -> None:
    found = timeline.ticks(end)
    assert 1 <= len(found) <= 13
    assert found[0][0] == 0 and all(0 <= left <= 100 for left, _ in found)
    assert len({label for _, label in found}) == len(found)


def test_words_for_times_and_sizes() -> None:
    assert [clock(t) for t in (0, 2.5, 90, 3660)] == ["0 s", "2.5 s", "1:30", "1:01:00"]
    assert [size(n) for n in (0, 999, 1500, 8_210_000)] == ["0 B", "999 B", "1.5 kB", "8.21 MB"]
