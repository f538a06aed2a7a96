"""sampling: qwen takes the very pictures, sizes, pixels and samples that qwen-omni-utils takes."""

import sys
import warnings
from fractions import Fraction

import av
import numpy as np
import pytest

from schemas.errors import RowError
from schemas.geometry import smart_nframes
from tests.media_factory import make_clip
from tests.pack.media.loading import clip

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import librosa
    from qwen_omni_utils.v2_5.vision_process import fetch_video

CLIPS = [
    (25, 5.28, (1280, 720), 44100),
    (Fraction(2997, 100), 3, (640, 360), 48000),
    (Fraction(30000, 1001), 10, (320, 240), 44100),
    (24, 2.5, (1920, 1080), 48000),
    (60, 4, (854, 480), 22050),
    (12, 7, (200, 300), 48000),
    (25, 0.28, (320, 240), 44100),
    (15, 11, (1000, 60), 8000),
    (10, 12, (480, 864), 48000),
    (50, 1.5, (720, 576), 32000),
    (1, 12, (320, 180), 44100),
]


@pytest.fixture(scope="module", params=CLIPS, ids=lambda c: f"{float(c[0]):.2f}fps-{c[1]}s-{c[2][0]}x{c[2][1]}")
def source(request, tmp_path_factory):
    fps, seconds, size, rate = request.param
    rng = np.random.default_rng(0)
    noise = rng.integers(0, 255, (size[1] // 8 + 1, size[0] // 8 + 1, 3), np.uint8)

    def draw(t, width, height):
        grown = np.roll(noise, int(t * 20), axis=1).repeat(8, 0).repeat(8, 1)
        return np.ascontiguousarray(grown[:height, :width])

    path = tmp_path_factory.mktemp("qwen") / "a.mp4"
    return make_clip(path, seconds, fps, size, rate=rate, layout="stereo", draw=draw, options={"preset": "ultrafast"})


@pytest.mark.parametrize("fps", [1.0, 2.0, 3.5])
def test_pictures_sizes_and_rate(source, fps):
    (expected, details), sample_fps = fetch_video(
        {"video": str(source), "fps": fps},
        image_patch_size=16,
        return_video_sample_fps=True,
        return_video_metadata=True,
    )
    frames, _, meta = clip(source, sampling="qwen", resize="model", fps=fps, min_frames=4)
    assert frames.shape == (len(expected), *expected.shape[2:], 3)
    assert np.array_equal(frames, expected.permute(0, 2, 3, 1).numpy())
    assert meta.video_fps == pytest.approx(sample_fps, rel=1e-12)
    count = len(details["frames_indices"])
    assert count == smart_nframes(details["total_num_frames"], details["fps"], fps, 4, 768)
    shown = [round(t * details["fps"]) for t in meta.shown_times_s]
    assert shown == [int(i) for i in details["frames_indices"]]


def test_sound(source):
    """The online path decodes with a program and resamples with librosa; the same samples come from libav directly."""
    with av.open(str(source)) as container:
        rate = container.streams.audio[0].rate
        channels = np.concatenate([f.to_ndarray() for f in container.decode(audio=0)], axis=1)
    expected = librosa.resample(librosa.to_mono(channels), orig_sr=rate, target_sr=16000)
    _, sound, _ = clip(source, sampling="qwen", min_frames=4)
    assert len(sound) == len(expected)
    assert np.abs(sound / 32768 - np.clip(expected, -1, 1)).max() < 4 / 32768


def test_spans_take_the_same_pictures(source):
    start, end = (1.0, 3.3) if clip(source)[2].duration_s >= 4 else (0.05, 0.24)
    span = {"video_start": start, "video_end": end}
    expected = fetch_video({"video": str(source), "fps": 2.0, **span}, image_patch_size=16)
    frames, _, _ = clip(source, (start, end), sampling="qwen", resize="model", min_frames=4)
    assert np.array_equal(frames, expected.permute(0, 2, 3, 1).numpy())
    assert "decord" in sys.modules, "the reader that qwen-omni-utils took"


def make_uneven(path, late_s=0.0, hole_s=0.0):
    """A video of 25 pictures/s and 5 s whose first picture comes behind the first sound, with a hole after 2 s."""
    with av.open(str(path), "w") as container:
        sound = container.add_stream("pcm_s16le", rate=16000, layout="mono")
        noise = av.AudioFrame.from_ndarray(np.zeros((1, 6 * 16000), np.int16), "s16", "mono")
        noise.rate, noise.pts, noise.time_base = 16000, 0, Fraction(1, 16000)
        stream = container.add_stream("libx264", rate=25, options={"preset": "ultrafast", "bf": "0"})
        stream.width, stream.height, stream.pix_fmt, stream.time_base = 160, 128, "yuv420p", Fraction(1, 1000)
        stream.codec_context.time_base = Fraction(1, 1000)
        for number in range(125):
            shade = np.full((128, 160, 3), 2 * number, np.uint8)
            shade[:, : number + 8] //= 2
            picture = av.VideoFrame.from_ndarray(shade, "rgb24")
            picture.pts = round(1000 * (late_s + number / 25 + (hole_s if number >= 50 else 0.0)))
            picture.time_base = Fraction(1, 1000)
            container.mux(stream.encode(picture))
        container.mux(stream.encode(None))
        container.mux(sound.encode(noise))
        container.mux(sound.encode(None))
    return path


UNEVEN = {
    "even": {},
    "a late start": {"late_s": 0.7},
    "a hole": {"hole_s": 2.0},
    "both": {"late_s": 0.7, "hole_s": 2.0},
}
SPANS = [(1.3, 3.9), (1.0, 3.0), (2.0, 4.0), (1.1, 2.3), (0.7, 2.2), (3.0, None), (None, 2.3), (2.3, 4.7)]


@pytest.mark.parametrize("kind", UNEVEN)
def test_spans_are_counted_in_pictures(tmp_path, kind):
    """By their number and the average rate alone, as qwen-omni-utils does, whenever they are shown."""
    path = make_uneven(tmp_path / "a.mkv", **UNEVEN[kind])
    for start, end in SPANS:
        span = {name: t for name, t in (("video_start", start), ("video_end", end)) if t is not None}
        asked = {"video": str(path), "fps": 2.0, **span}
        expected, rate = fetch_video(asked, image_patch_size=16, return_video_sample_fps=True)
        frames, _, meta = clip(path, (start, end), sampling="qwen", resize="model", min_frames=4)
        assert meta.video_fps == pytest.approx(rate, rel=1e-12), (start, end)
        assert np.array_equal(frames, expected.permute(0, 2, 3, 1).numpy()), (start, end)


def test_a_span_behind_the_last_picture_is_empty(tmp_path):
    path = make_uneven(tmp_path / "a.mkv", hole_s=2.0)
    with pytest.raises(RowError) as found:  # pictures are shown there, and none is counted there
        clip(path, (6.9, 7.0), sampling="qwen", resize="model", min_frames=4)
    assert found.value.reason == "empty_span"
