"""Pauses in clips whose pictures are decoded in another order than shown: what is on screen is what the times say."""

import random

import numpy as np
import pytest

from pack.media.probe import PacketTable
from tests.media_factory import make_clip, time_shown
from tests.pack.media.loading import assert_as_a_player_shows, clip


def times_with_holds(end_s, fps, holds):
    """Picture times of a steady clip without the pictures inside (start, length) of each hold."""
    times = [round(600 * k / fps) / 600 for k in range(round(end_s * fps))]
    return [t for t in times if not any(a < t < a + length for a, length in holds)]


@pytest.mark.parametrize(
    ("name", "holds"),
    [
        ("a.mp4", [(2.0, 3.0)]),
        ("a.mkv", [(2.0, 3.0)]),
        ("a.ts", [(2.0, 3.0)]),
        ("a.flv", [(2.0, 3.0)]),
        ("a.mp4", [(3.0, 4.96)]),  # right before the last two pictures
        ("a.ts", [(3.0, 4.96)]),
        ("a.mkv", [(0.0, 4.0)]),
        ("a.mov", [(1.0, 1.2), (2.4, 1.3), (4.0, 3.5)]),
    ],
)
def test_no_picture_of_the_future_is_shown_in_a_pause(tmp_path, name, holds):
    times = times_with_holds(8.0, 30, holds)
    meta = assert_as_a_player_shows(make_clip(tmp_path / name, 8.0, times=times, options={"bf": "3"}))
    assert meta.decode_errors == 0


def test_slow_clips_with_many_b_pictures_keep_their_times(tmp_path):
    """Pictures of a pyramid that are shown 16 pictures after they are decoded."""
    options = {"x264-params": "bframes=16:b-adapt=0:b-pyramid=normal:scenecut=0"}
    path = make_clip(tmp_path / "a.mp4", 9.0, fps=8, options=options, audio_codec=None)
    meta = assert_as_a_player_shows(path, fps=8.0)
    assert "vfr" not in meta.flags


@pytest.mark.parametrize("seed", range(12))
def test_pauses_anywhere(tmp_path, seed):
    rng = random.Random(seed)
    fps, end_s = rng.choice([10, 24, 30, 60]), rng.uniform(4, 9)
    holds = [(rng.uniform(-0.1, end_s), rng.uniform(0.5, 8)) for _ in range(rng.randint(1, 3))]
    holds = [(a, min(length, end_s - a - 1.5 / fps) if rng.random() < 0.7 else length) for a, length in holds]
    times = times_with_holds(end_s, fps, holds)
    if len(times) < 2:
        times = [0.0, round(end_s)]
    bf = rng.randint(2, 8)
    options = {"g": rng.choice(["15", "30", "250"]), "x264-params": f"bframes={bf}:b-adapt={rng.randint(0, 1)}"}
    name = rng.choice(["a.mp4", "a.mkv", "a.ts", "a.mov", "a.flv"])
    path = make_clip(
        tmp_path / name, end_s, fps=fps, times=times, options=options, audio_codec=rng.choice(["aac", None])
    )
    assert_as_a_player_shows(path, fps=rng.choice([2.0, 5.0]), max_frames=60)


def table(pts, dts):
    packets = PacketTable(list(pts), list(dts))
    packets.discard, packets.position = [False] * len(packets), list(range(len(packets)))
    packets.drop_outliers()
    return packets.strays


@pytest.mark.parametrize("shift", [3.0, 11.0, 1e4, -3.0, -40.0])
@pytest.mark.parametrize("at", [60, 100, 150])
def test_a_damaged_presentation_time_is_still_found(shift, at):
    """The decoding times are whole, one presentation time is not: with pauses elsewhere, and without."""
    for hold in (0.0, 0.6):
        shown = np.arange(200) / 25 + hold * (np.arange(200) >= 30)
        dts, pts = np.r_[shown[0] - 0.08, shown[0] - 0.04, shown[:-2]], shown.copy()
        for k in range(1, 197, 3):  # P b b is decoded before the pictures that it follows
            pts[k : k + 3] = shown[[k + 2, k, k + 1]]
        assert table(pts, dts) == set()
        pts[at] += shift
        assert table(pts, dts) == {at}


@pytest.mark.parametrize("byte", [0, 1, 2])
def test_a_damaged_presentation_time_in_a_transport_stream(tmp_path, byte):
    """Bits of one picture's presentation time are flipped; its decoding time, beside it, is whole."""
    path = make_clip(tmp_path / "a.ts", audio_codec="mp2", options={"bf": "3"})
    whole = clip(path)
    data = bytearray(path.read_bytes())
    # A PES header: start code, stream id 0xe0, length, "10", both times are there, header length, presentation time.
    headers = [i for i in range(len(data) - 20) if data[i : i + 4] == b"\0\0\1\xe0" and data[i + 7] & 0xC0 == 0xC0]
    data[headers[len(headers) // 2] + 9 + byte] ^= (0x02, 0x40, 0x08)[byte]  # 6.6 hours, 6.2 minutes, 11.7 s
    path.write_bytes(data)
    frames, sound, meta = clip(path)
    assert meta.duration_s == pytest.approx(whole[2].duration_s, abs=0.001)
    assert "clock_jump" not in meta.flags
    assert len(frames) == len(whole[0])
    assert np.allclose([time_shown(f) for f in frames], [time_shown(f) for f in whole[0]], atol=0.1)
    assert np.array_equal(sound, whole[1])
