"""Clips that are pictures already: frames extracted before packing, and animated WebP."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import soxr

from pack.config import PackConfig
from pack.media.audio import is_silent
from pack.media.budget import fit_budget
from pack.media.encode import encode_picture, encode_sound
from pack.media.fetch import local_file
from pack.media.image import animation_frames, animation_times, open_image, upright_rgb
from pack.media.picture import Rgb, resize
from pack.media.timeline import Grid, choose_grid, is_variable_rate, on_screen, source_rate
from schemas.errors import RowError
from schemas.geometry import audio_tokens, frame_pixel_limits, smart_resize
from schemas.sample import AudioMeta, Origin, PackedVideo, VideoMeta
from schemas.sources import BytesSource, FileSource, FramesSource

AudioLoader = Callable[[FileSource | BytesSource, PackConfig], tuple[bytes, AudioMeta]]
STORED_FORMATS = {"jpeg": "JPEG", "png": "PNG"}


def load_frames(source: FramesSource, config: PackConfig, load_audio: AudioLoader) -> tuple[PackedVideo, VideoMeta]:
    """Extracted frames at source.video_fps and their sound.

    Frames that are stored right already are kept byte for byte. fps is lowered to the configured one by leaving out
    frames, as for a clip; never raised.
    """
    pictures = source.frames
    count = len(pictures)
    if count == 0:
        raise RowError("empty_video", f"{source.name}: no frames", "video")
    times = np.arange(count) / source.video_fps
    sound = None if source.audio is None else _load_sound(source, config, load_audio)
    first = pictures[0] if isinstance(pictures, np.ndarray) else _decoded(pictures[0], f"{source.name}[0]", config)[0]
    tokens = 0 if sound is None else audio_tokens(round(sound[1].duration_s * 16000))
    grid, (height, width) = _grid(times, count / source.video_fps, first, source.name, config, tokens)
    index = on_screen(times, grid.times)
    if isinstance(pictures, np.ndarray):
        blobs = _store(((int(i), pictures[i]) for i in np.unique(index)), (height, width), config)
    else:
        blobs = _store_encoded(pictures, np.unique(index), (height, width), source.name, config)
    if sound is None and config.rows.missing_audio == "reject":
        raise RowError("no_audio", f"{source.name}: no sound, and rows.missing_audio is reject", "audio")
    meta = _meta(source.name, "frames", times, count / source.video_fps, grid, index, (width, height), config, sound)
    return PackedVideo([blobs[int(i)] for i in index], sound[0] if sound else None), meta


def load_animation(
    data: bytes, name: str, config: PackConfig, span: tuple[float, float]
) -> tuple[PackedVideo, VideoMeta]:
    """An animated WebP as a silent clip. span: (start, length) in s; the length is inf without an end."""
    starts, whole_s = animation_times(data, name)
    times, end_s = np.array(starts) - span[0], min(whole_s - span[0], span[1])
    if end_s <= 0:
        raise RowError("empty_span", f"{name}: no picture in the asked span", "video")
    first = next(animation_frames(data, name, {0}))[1]
    grid, (height, width) = _grid(times, end_s, first, name, config, 0)
    index = on_screen(times, grid.times)
    wanted = {int(i) for i in index}
    blobs = _store(animation_frames(data, name, wanted), (height, width), config)
    if config.rows.missing_audio == "reject":
        raise RowError("no_audio", f"{name}: no sound, and rows.missing_audio is reject", "audio")
    meta = _meta(name, "webp", times, end_s, grid, index, (width, height), config, None)
    return PackedVideo([blobs[int(i)] for i in index]), meta


def _grid(
    times: np.ndarray, end_s: float, first: Rgb, name: str, config: PackConfig, sound_tokens: int
) -> tuple[Grid, tuple[int, int]]:
    """(frame grid, (height, width)); the first picture decides the size."""
    video = config.video
    grid = choose_grid(end_s, source_rate(times), video.fps, video.min_frames, video.max_frames)
    size_of = partial(_final_size, first, name, config)
    return fit_budget(grid, end_s, video, sound_tokens, size_of, name)


def _final_size(rgb: Rgb, name: str, config: PackConfig, num_frames: int, at_most: float | None) -> tuple[int, int]:
    height, width = rgb.shape[:2]
    video = config.video
    if video.resize == "none":
        return height, width
    low, high = frame_pixel_limits(num_frames, video.factor, video.min_pixels, video.max_pixels, video.total_pixels)
    if at_most is not None:
        high = max(min(high, at_most), 1.0)
        low = min(low, high)
    try:
        return smart_resize(height, width, video.factor, low, high)
    except ValueError as error:
        raise RowError("aspect_ratio", f"{name}: {error}", "video") from None


def _store(pictures: Iterable[tuple[int, Rgb]], size: tuple[int, int], config: PackConfig) -> dict[int, bytes]:
    """{number: encoded}. size: (height, width)."""
    video = config.video
    return {
        number: encode_picture(resize(rgb, size[1], size[0]), video.codec, video.quality) for number, rgb in pictures
    }


def _store_encoded(
    pictures: Any, wanted: np.ndarray, size: tuple[int, int], name: str, config: PackConfig
) -> dict[int, bytes]:
    """As `_store`; what is stored right already is kept byte for byte."""
    blobs: dict[int, bytes] = {}
    for number in wanted.tolist():
        rgb, data, as_stored = _decoded(pictures[number], f"{name}[{number}]", config)
        if as_stored and rgb.shape[:2] == size:
            blobs[number] = data
        else:
            blobs[number] = encode_picture(resize(rgb, size[1], size[0]), config.video.codec, config.video.quality)
    return blobs


def _decoded(picture: FileSource | BytesSource, name: str, config: PackConfig) -> tuple[Rgb, bytes, bool]:
    """(RGB, the bytes, whether they are of the stored format and need no turning)."""
    data = _read(picture, config)
    image = open_image(data, name)
    rgb, flags = upright_rgb(image, name)
    return rgb, data, image.format == STORED_FORMATS[config.video.codec] and image.mode == "RGB" and not flags


def _read(picture: FileSource | BytesSource, config: PackConfig) -> bytes:
    if isinstance(picture, BytesSource):
        return picture.data
    with local_file(picture, config.rows.allowed_roots) as (path, _):
        return Path(path).read_bytes()


def _load_sound(source: FramesSource, config: PackConfig, load_audio: AudioLoader) -> tuple[bytes, AudioMeta]:
    if isinstance(source.audio, (FileSource, BytesSource)):
        return load_audio(source.audio, config)
    waveform = np.asarray(source.audio)
    if waveform.ndim != 1 or source.audio_fps is None:
        raise RowError("bad_row", f"{source.name}: sound as an array is 1-D and needs audio_fps", "audio")
    if waveform.dtype.kind in "iu":
        waveform = waveform / float(np.iinfo(waveform.dtype).max + 1)
    waveform = waveform.astype(np.float32)
    if not len(waveform):
        raise RowError("empty_audio", f"{source.name}: sound of 0 samples", "audio")
    finite = np.isfinite(waveform)
    if source.audio_fps != config.audio.sample_rate:
        waveform = soxr.resample(np.where(finite, waveform, 0), source.audio_fps, config.audio.sample_rate, "HQ")
    else:
        waveform = np.where(finite, waveform, 0)
    samples = np.clip(np.rint(waveform * 32768), -32768, 32767).astype(np.int16)
    found = {
        "silent": is_silent(samples),
        "clipped": bool(np.abs(waveform).max() > 1.01),
        "non_finite": not finite.all(),
    }
    meta = AudioMeta(
        codec=config.audio.codec,
        sample_rate=config.audio.sample_rate,
        num_samples=len(samples),
        duration_s=len(samples) / config.audio.sample_rate,
        flags=[name for name, is_so in found.items() if is_so],
        origin=Origin(uri=source.name, container="array", sample_rate=source.audio_fps, channels=1),
    )
    return encode_sound(samples, config.audio.codec, config.audio.sample_rate), meta


def _meta(
    name: str,
    container: str,
    times: np.ndarray,
    end_s: float,
    grid: Grid,
    index: np.ndarray,
    size: tuple[int, int],
    config: PackConfig,
    sound: tuple[bytes, AudioMeta] | None,
) -> VideoMeta:
    found = {
        "no_audio": sound is None,
        "vfr": is_variable_rate(times),
        "still": len(times) == 1,
        "fps_lowered": grid.lowered,
        "fps_raised": grid.raised,
    }
    return VideoMeta(
        num_frames=grid.num_frames,
        width=size[0],
        height=size[1],
        codec=config.video.codec,
        video_fps=grid.fps,
        frame_times_s=[round(float(t), 6) for t in grid.times],
        shown_times_s=[round(float(times[i]), 6) for i in index],
        duration_s=round(end_s, 6),
        sampling="given" if container == "frames" else "time_grid",
        flags=[flag for flag, is_so in found.items() if is_so],
        origin=Origin(uri=name, container=container, fps=source_rate(times)),
        audio=sound[1] if sound else None,
    )
