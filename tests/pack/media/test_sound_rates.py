"""Sound whose sample rate changes inside a transport stream is all there, and in step."""

from fractions import Fraction

import av
import numpy as np
import pytest

from tests.media_factory import beep_times, make_clip
from tests.pack.media.loading import clip, later

GROUPED = {"max_delay": "700000"}  # several frames of sound share a PES packet, as other programs write them


def hummed(path, rate, codec):
    """Three seconds of a steady 440 Hz tone under pictures."""
    with av.open(str(path), "w") as out:
        video = out.add_stream("libx264", rate=30, options={"bf": "2"})
        video.width, video.height, video.pix_fmt = 64, 48, "yuv420p"
        track = out.add_stream(codec, rate=rate)
        track.layout = "mono"
        for i in range(90):
            frame = av.VideoFrame(64, 48, "yuv420p")
            frame.pts, frame.time_base = i, Fraction(1, 30)
            out.mux(video.encode(frame))
        out.mux(video.encode(None))
        tone = (0.4 * np.sin(2 * np.pi * 440 * np.arange(3 * rate) / rate)).astype(np.float32)
        for begin in range(0, len(tone), 1024):
            frame = av.AudioFrame.from_ndarray(tone[None, begin : begin + 1024], format="flt", layout="mono")
            frame.sample_rate, frame.time_base, frame.pts = rate, Fraction(1, rate), begin
            out.mux(track.encode(frame))
        out.mux(track.encode(None))
    return path


def joined(tmp_path, rates, codec):
    """Recordings of different rates, one behind the other on one clock."""
    parts = []
    for i, rate in enumerate(rates):
        source = hummed(tmp_path / f"{i}.mp4", rate, codec)
        parts.append(later(source, tmp_path / f"{i}.ts", 1 + 3 * i, GROUPED).read_bytes())
    path = tmp_path / "joined.ts"
    path.write_bytes(b"".join(parts))
    return path


@pytest.mark.parametrize(
    "rates",
    [(48000, 24000), (48000, 16000), (24000, 48000), (16000, 48000), (44100, 48000), (48000, 24000, 48000)],
)
def test_a_rate_change_of_aac_loses_nothing(tmp_path, rates):
    _, x, meta = clip(joined(tmp_path, rates, "aac"))
    assert "rate_changed" in meta.audio.flags
    assert abs(len(x) / 16000 - 3 * len(rates)) < 0.12
    level = np.sqrt((x[: len(x) // 160 * 160].reshape(-1, 160).astype(float) ** 2).mean(1)) / 32768
    inside = level[20 : 300 * len(rates) - 10]
    assert (inside < 0.05).mean() <= 0.01
    assert meta.audio.gaps_s == []
    assert "clock_jump" not in meta.flags
    assert "decode_errors" not in meta.audio.flags


@pytest.mark.parametrize(
    ("codec", "rates"), [("mp2", (48000, 32000)), ("ac3", (48000, 32000)), ("ac3", (32000, 48000))]
)
def test_other_codecs_stay_whole(tmp_path, codec, rates):
    _, x, meta = clip(joined(tmp_path, rates, codec))
    assert abs(len(x) / 16000 - 6) < 0.12
    level = np.sqrt((x[: len(x) // 160 * 160].reshape(-1, 160).astype(float) ** 2).mean(1)) / 32768
    assert (level[20:590] < 0.05).mean() <= 0.01
    assert "rate_changed" in meta.audio.flags


@pytest.mark.parametrize("rates", [(48000, 24000), (48000, 16000), (24000, 48000), (16000, 48000)])
def test_beeps_stay_in_step_behind_a_rate_change(tmp_path, rates):
    parts = []
    for i, rate in enumerate(rates):
        source = make_clip(tmp_path / f"{i}.mp4", 3.0, rate=rate, options={"bf": "2"})
        parts.append(later(source, tmp_path / f"{i}.ts", 1 + 3 * i, GROUPED).read_bytes())
    (tmp_path / "j.ts").write_bytes(b"".join(parts))
    _, x, meta = clip(tmp_path / "j.ts")
    zero_s = meta.shown_times_s[0]
    beeps = beep_times(x / 32768)
    expected = np.array([1, 2, 4, 5]) + zero_s
    assert beeps == pytest.approx(expected, abs=0.025)
