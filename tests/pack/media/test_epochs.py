"""Which jumps of the clock are joins of recordings, which are damage, and which are pauses."""

from fractions import Fraction

import av
import numpy as np
import pytest

from pack.media.epochs import Clock, common_jumps
from tests.media_factory import beep_times, make_clip, picture, time_shown
from tests.pack.media.loading import clip


def part(path, seconds, shows_from, sound=True):
    """Bytes of a transport stream whose pictures show shows_from s and later."""
    draw = lambda t, w, h: picture(t + shows_from, w, h)  # noqa: E731
    return make_clip(path, seconds, audio_codec="mp2" if sound else None, draw=draw, options={"bf": "2"}).read_bytes()


@pytest.mark.parametrize("silent", [{1}, {2}, {0}, {0, 2}, {1, 2}, set()], ids=str)
def test_joined_parts_of_which_some_have_no_sound(tmp_path, silent):
    lengths = [3.0, 2.0, 3.0]
    starts = [0.0, 3.0, 5.0]
    parts = [
        part(tmp_path / f"{i}.ts", n, s, i not in silent)
        for i, (n, s) in enumerate(zip(lengths, starts, strict=True))
    ]  # fmt: skip
    (tmp_path / "j.ts").write_bytes(b"".join(parts))
    frames, sound, meta = clip(tmp_path / "j.ts")
    assert "clock_jump" in meta.flags
    assert meta.duration_s == pytest.approx(8.0, abs=0.15)
    # Sound reaches beyond the pictures of its part by a frame or two; so far the next part is put off.
    assert np.abs(np.array([time_shown(f) for f in frames]) - meta.frame_times_s).max() < 0.25
    # The sound of a part starts anew: beeps at its own whole seconds.
    beeps = [
        s + k for i, (n, s) in enumerate(zip(lengths, starts, strict=True)) if i not in silent for k in range(1, int(n))
    ]
    assert beep_times(sound / 32768) == pytest.approx(beeps, abs=0.15)


def steady(count, step_s, start_s=0.0):
    return start_s + step_s * np.arange(count)


def clocks(*streams):
    """Clocks of streams given as (times, positions in the file)."""
    found = []
    for times, position in streams:
        jumps = (np.flatnonzero(np.diff(times) < -0.2) + 1).tolist()
        found.append(Clock(np.asarray(times), np.asarray(position), jumps, float(np.median(np.diff(times)))))
    return found


def interleaved(*parts):
    """Streams of joined parts, each given as ((times of stream 0, times of stream 1), ...), laid out by time."""
    times, position, at = [[], []], [[], []], 0
    for streams in parts:
        order = sorted((t, s) for s, part_times in enumerate(streams) for t in part_times)
        for t, s in order:
            times[s].append(t)
            position[s].append(at)
            at += 1
    return clocks(*zip(times, position, strict=True))


V, A = 1 / 25, 0.024


def test_a_join_of_two_parts_with_both_streams():
    found = common_jumps(interleaved((steady(100, V), steady(160, A)), (steady(50, V), steady(80, A))))
    assert found == [(100, 160)]


def test_a_part_without_sound_in_the_middle_of_one_clock():
    """An insert that counts from 0, between two halves of a recording."""
    found = common_jumps(
        interleaved((steady(100, V), steady(166, A)), (steady(75, V), []), (steady(100, V, 4.0), steady(160, A, 4.0)))
    )
    assert found == [(100, 166)]


def test_the_last_of_two_joins_close_together_has_no_sound():
    found = common_jumps(
        interleaved((steady(30, V), steady(50, A)), (steady(40, V), steady(66, A)), (steady(40, V), []))
    )
    assert found == [(30, 50), (70, 116)]


def test_damage_in_one_stream_alone_is_no_epoch():
    times = steady(200, V)
    times[100:] -= 1.5
    other = steady(333, A)
    position = [np.argsort(np.argsort(np.r_[steady(200, V), other]))[:200], None]
    position[1] = np.argsort(np.argsort(np.r_[steady(200, V), other]))[200:]
    assert common_jumps(clocks((times, position[0]), (other, position[1]))) == []
    assert common_jumps(clocks((times, position[0]))) == [(100,)]


def test_streams_that_change_their_clock_a_second_apart():
    """A sender's clock is set anew; sound is sent later than the pictures that it belongs to."""
    video, audio = np.r_[steady(100, V), steady(100, V)], np.r_[steady(166, A), steady(166, A)]
    sent = np.argsort(np.argsort(np.r_[steady(200, V), steady(332, A, 0.9)]))
    assert common_jumps(clocks((video, sent[:200]), (audio, sent[200:]))) == [(100, 166)]


@pytest.mark.parametrize("name", ["a.mkv", "a.mp4"])
@pytest.mark.parametrize("audio_codec", [None, "aac"])
def test_a_picture_held_for_long_is_no_join(tmp_path, name, audio_codec):
    path = tmp_path / name
    with av.open(str(path), "w") as out:
        stream = out.add_stream("libx264", rate=30, options={"bf": "0", "threads": "1"})
        stream.width, stream.height, stream.pix_fmt = 64, 48, "yuv420p"
        stream.codec_context.time_base = Fraction(1, 600)
        if audio_codec:
            track = out.add_stream(audio_codec, rate=16000, layout="mono")
        for k in range(60):
            shows = 1.0 if k < 30 else 8.0
            frame = av.VideoFrame.from_ndarray(picture(shows, 64, 48), format="rgb24")
            frame.pts, frame.time_base = 20 * k + (700 * 600 if k >= 30 else 0), Fraction(1, 600)
            out.mux(stream.encode(frame))
        out.mux(stream.encode(None))
        if audio_codec:
            for start in (0, 701):
                silence = av.AudioFrame.from_ndarray(np.zeros((1, 16000), np.float32), format="fltp", layout="mono")
                silence.sample_rate, silence.time_base, silence.pts = 16000, Fraction(1, 16000), start * 16000
                out.mux(track.encode(silence))
            out.mux(track.encode(None))
    frames, _, meta = clip(path, fps=0.1)
    assert "clock_jump" not in meta.flags
    assert meta.duration_s == pytest.approx(702, abs=0.2)
    assert len(frames) == 71
    assert [round(time_shown(f)) for f in frames] == [1] * 71
    assert meta.gaps_s == [pytest.approx((1.0, 701.0), abs=0.1)]
