"""Stored media as data URLs: byte for byte, and an AVI that a decoder opens."""

from __future__ import annotations

import base64
import io

import av
import numpy as np
import pytest
import simplejpeg

from jobs.rollout.media_urls import audio_url, image_url, motion_jpeg, video_url
from schemas.errors import RowError
from tests.jobs.rollout.server import data_of, read_video
from tests.train.data.packed import Clip, packed_sample


def test_an_avi_holds_the_stored_pictures_at_their_rate(prompts):
    sample = prompts["clip1"].sample
    frames, meta = sample.videos[0].frames, sample.meta.videos[0]
    video = read_video(video_url(sample, 0, "avi"))
    assert video.jpegs == frames
    assert video.fps == meta.video_fps
    with av.open(io.BytesIO(data_of(video_url(sample, 0, "avi")))) as container:
        pictures = [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]
    assert len(pictures) == len(frames)
    for picture, frame in zip(pictures, frames, strict=True):
        expected = simplejpeg.decode_jpeg(frame)
        assert picture.shape == expected.shape
        assert np.abs(picture.astype(int) - expected).mean() < 2  # another decoder's rounding


@pytest.mark.parametrize(("fps", "count", "size"), [(2.0, 1, (2, 2)), (29.97, 7, (33, 65)), (0.3, 5, (64, 16))])
def test_rates_sizes_and_odd_lengths(fps, count, size):
    rng = np.random.default_rng(0)
    frames = [simplejpeg.encode_jpeg(rng.integers(0, 255, (*size, 3), np.uint8), 90) for _ in range(count)]
    with av.open(io.BytesIO(motion_jpeg(frames, fps, size[1], size[0]))) as container:
        stream = container.streams.video[0]
        assert (stream.height, stream.width) == size
        assert float(stream.average_rate) == pytest.approx(fps, rel=1e-4)
        times = [float(packet.pts * packet.time_base) for packet in container.demux(stream) if packet.size]
        assert times == pytest.approx([k / fps for k in range(count)], rel=1e-4)


def test_frames_one_by_one(prompts):
    sample = prompts["clip0"].sample
    head, _, rest = video_url(sample, 0, "jpeg").partition(",")
    assert head == "data:video/jpeg;base64"
    assert [base64.b64decode(part) for part in rest.split(",")] == sample.videos[0].frames


def test_images_and_sounds(prompts):
    image, sound = prompts["image"].sample, prompts["sound"].sample
    assert image_url(image, 0).startswith("data:image/jpeg;base64,")
    assert data_of(image_url(image, 0)) == image.images[0]
    assert audio_url(sound, 0).startswith("data:audio/wav;base64,")
    assert data_of(audio_url(sound, 0)) == sound.audios[0]


def test_png_frames_are_refused():
    clip = Clip(np.zeros((2, 8, 8, 3), np.uint8), 2.0)
    sample = packed_sample([["user", ("video", None)], ["assistant", ("text", "x")]], [clip])
    with pytest.raises(RowError, match="has png frames; a server gets them as JPEG"):
        video_url(sample, 0, "avi")
