"""Interlaced clips whose pictures change size, and clips so short that every picture comes out at their end."""

import numpy as np
import pytest

from tests.media_factory import make_clip, picture, time_shown
from tests.pack.media.loading import clip

TWO_FIELDS = {"x264-params": "tff=1:bframes=2"}


def interlaced(path, seconds, size=(160, 120), shows_from=0.0):
    draw = lambda t, w, h: picture(t + shows_from, w, h)  # noqa: E731
    return make_clip(path, seconds, fps=25, size=size, options=TWO_FIELDS, draw=draw, audio_codec="mp2")


@pytest.mark.parametrize("sizes", [((160, 128), (320, 256)), ((320, 256), (160, 128))])
def test_pictures_that_change_size_keep_the_first(tmp_path, sizes):
    parts = [interlaced(tmp_path / f"{i}.ts", 2.0, size, 2.0 * i).read_bytes() for i, size in enumerate(sizes)]
    (tmp_path / "j.ts").write_bytes(b"".join(parts))
    frames, _, meta = clip(tmp_path / "j.ts")
    assert frames.shape[1:3] == sizes[0][::-1]
    assert {"interlaced", "size_changed", "clock_jump"} <= set(meta.flags)
    assert len(frames) in (8, 9)
    assert np.allclose([time_shown(f) for f in frames], meta.frame_times_s, atol=0.15)


@pytest.mark.parametrize("name", ["a.ts", "a.mkv", "a.mp4"])
@pytest.mark.parametrize("count", [1, 2, 3])
def test_few_interlaced_pictures(tmp_path, name, count):
    path = interlaced(tmp_path / name, count / 25)
    frames, _, meta = clip(path, fps=25.0)
    assert "interlaced" in meta.flags
    assert len(frames) == count + (name == "a.ts")  # where the sound begins 10 ms before the pictures
    assert meta.duration_s == pytest.approx(count / 25, abs=0.03)
    assert np.allclose([time_shown(f) for f in frames], 0.0, atol=0.15)
