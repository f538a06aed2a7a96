"""Checks of one sample against its own description: one clock, and media that are what the meta says."""

from __future__ import annotations

import io
import struct
from itertools import pairwise

import simplejpeg
import soundfile

from schemas.errors import SchemaError
from schemas.sample import AudioMeta, ImageMeta, PackedSample, VideoMeta

_TIME_S = 1e-6
_PNG = b"\x89PNG\r\n\x1a\n"


def check_sample(sample: PackedSample) -> None:
    """SchemaError, with the medium and the numbers, unless times, sizes and rates of the sample agree."""
    for i, (video, meta) in enumerate(zip(sample.videos, sample.meta.videos, strict=True)):
        where = f"video {i}"
        _check_times(meta, where)
        for k, frame in enumerate(video.frames):
            _check_picture(frame, meta, f"{where} frame {k}")
        if meta.audio is not None and video.audio is not None:
            _check_sound(video.audio, meta.audio, f"{where}'s sound")
    for i, (sound, described) in enumerate(zip(sample.audios, sample.meta.audios, strict=True)):
        _check_sound(sound, described, f"audio {i}")
    for i, (image, pictured) in enumerate(zip(sample.images, sample.meta.images, strict=True)):
        _check_picture(image, pictured, f"image {i}")


def _check_times(meta: VideoMeta, where: str) -> None:
    times, shown = meta.frame_times_s, meta.shown_times_s
    for name, values in (("frame_times_s", times), ("shown_times_s", shown)):
        if any(b < a for a, b in pairwise(values)):
            raise SchemaError(f"{where}: {name} do not rise")
    if meta.sampling != "time_grid":
        return
    for k, time_s in enumerate(times):
        if abs(time_s - k / meta.video_fps) > _TIME_S * max(1.0, time_s):
            raise SchemaError(
                f"{where}: frame {k} is at {time_s} s; at {meta.video_fps} Hz it is {k / meta.video_fps} s"
            )
    if times[-1] > meta.duration_s + _TIME_S:
        raise SchemaError(f"{where}: its last frame is at {times[-1]} s, its picture ends at {meta.duration_s} s")


def _check_sound(data: bytes, meta: AudioMeta, where: str) -> None:
    if abs(meta.duration_s - meta.num_samples / meta.sample_rate) > _TIME_S:
        raise SchemaError(f"{where}: {meta.num_samples} samples at {meta.sample_rate} Hz are not {meta.duration_s} s")
    try:
        header = soundfile.info(io.BytesIO(data))
    except (soundfile.LibsndfileError, RuntimeError) as error:
        raise SchemaError(f"{where} is no readable {meta.codec}: {error}") from error
    found = (header.format.lower(), header.frames, header.samplerate, header.channels)
    expected = (meta.codec, meta.num_samples, meta.sample_rate, 1)
    if found != expected:
        raise SchemaError(f"{where}: its header says (format, samples, Hz, channels) {found}, the meta {expected}")


def _check_picture(data: bytes, meta: VideoMeta | ImageMeta, where: str) -> None:
    if meta.codec == "png":
        if data[:8] != _PNG or len(data) < 24:
            raise SchemaError(f"{where} is no PNG")
        width, height = struct.unpack(">2I", data[16:24])
    else:
        try:
            height, width, *_ = simplejpeg.decode_jpeg_header(data)
        except ValueError as error:
            raise SchemaError(f"{where} is no readable JPEG: {error}") from error
    if (width, height) != (meta.width, meta.height):
        raise SchemaError(f"{where} has {width}x{height} pixels, the meta says {meta.width}x{meta.height}")
