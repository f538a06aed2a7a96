"""Clips with known right answers, made in code with PyAV: no fixture files, no ffmpeg program.

In every clip the left half of the picture is white and a 1 kHz tone sounds during [k, k + 0.1) s for each whole second
k >= 1; the right half shows the time as a grey level: t = (grey - 30) / 25.
"""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from pathlib import Path

import av
import numpy as np

GREY_ZERO, GREY_PER_S = 30, 25


def picture(time_s: float, width: int = 160, height: int = 120) -> np.ndarray:
    """uint8 [height, width, 3] of the clip at time_s."""
    image = np.zeros((height, width, 3), np.uint8)
    image[:, : width // 2] = 255 if time_s >= 1 and time_s % 1 < 0.1 - 1e-6 else 16
    image[:, width // 2 :] = min(255, round(GREY_ZERO + GREY_PER_S * time_s))
    return image


def tone(seconds: float, rate: int, start_s: float = 0.0, amplitude: float = 0.5) -> np.ndarray:
    """float32 [n]: the beeps of the clip from start_s on."""
    t = np.arange(round(seconds * rate)) / rate + start_s
    return np.where((t >= 1) & (t % 1 < 0.1), amplitude * np.sin(2 * np.pi * 1000 * t), 0).astype(np.float32)


def time_shown(image: np.ndarray) -> float:
    """The time that a picture shows by its right half."""
    height, width = image.shape[:2]
    grey = image[height // 4 : 3 * height // 4, int(width * 0.7) : int(width * 0.95)].mean()
    return (grey - GREY_ZERO) / GREY_PER_S


def beep_times(samples: np.ndarray, rate: int = 16000) -> list[float]:
    """Onsets of tones in s, 5 ms steps."""
    block = rate // 200
    level = np.sqrt((samples[: len(samples) // block * block].astype(np.float64).reshape(-1, block) ** 2).mean(1))
    on = level > 0.03
    starts = np.flatnonzero(on & ~np.r_[False, on[:-1]]) * block / rate
    return [float(round(t, 3)) for i, t in enumerate(starts) if i == 0 or t - starts[i - 1] > 0.3]


def make_clip(
    path: Path,
    seconds: float = 6.0,
    fps: float | Fraction = 30,
    size: tuple[int, int] = (160, 120),
    codec: str | None = "libx264",
    options: dict[str, str] | None = None,
    audio_codec: str | None = "aac",
    rate: int = 48000,
    layout: str = "mono",
    audio_start_s: float = 0.0,
    channel: int | None = None,
    draw: Callable[[float, int, int], np.ndarray] = picture,
    times: list[float] | None = None,
    pixel_format: str = "yuv420p",
    container_options: dict[str, str] | None = None,
    silent_first_track: bool = False,
) -> Path:
    """Writes a clip. times: picture times for a variable rate; channel: the only one with sound; audio_start_s: the
    sound track begins then."""
    with av.open(str(path), "w", options=container_options or {}) as out:
        video = None
        if codec is not None:
            rate_ = Fraction(fps).limit_denominator(100000)
            video = out.add_stream(codec, rate=rate_)
            video.width, video.height = size
            video.pix_fmt = pixel_format
            video.bit_rate = 1_000_000
            video.options = {"g": "30", **(options or {})}
            video.codec_context.thread_count = 1
            if times is not None:
                video.codec_context.time_base = Fraction(1, 600)
        tracks = []
        if audio_codec is not None:
            for _ in range(2 if silent_first_track else 1):
                track = out.add_stream(audio_codec, rate=rate)
                track.layout = layout
                tracks.append(track)
        if video is not None:
            _write_pictures(out, video, seconds, Fraction(fps).limit_denominator(100000), size, draw, times)
        for i, track in enumerate(tracks):
            amplitude = 0.0 if silent_first_track and i == 0 else 0.5
            sound = tone(seconds - audio_start_s, rate, audio_start_s, amplitude)
            _write_sound(out, track, sound, rate, layout, audio_start_s, channel)
    return path


def _write_pictures(out, stream, seconds, fps, size, draw, times) -> None:  # type: ignore[no-untyped-def]
    base = Fraction(1, 600) if times is not None else 1 / fps
    for i, t in enumerate(times if times is not None else [float(k / fps) for k in range(round(seconds * fps))]):
        frame = av.VideoFrame.from_ndarray(draw(t, *size), format="rgb24")
        frame.pts, frame.time_base = (round(t * 600) if times is not None else i), base
        out.mux(stream.encode(frame))
    out.mux(stream.encode(None))


def _write_sound(out, stream, sound, rate, layout, start_s, channel) -> None:  # type: ignore[no-untyped-def]
    channels = av.AudioLayout(layout).nb_channels
    block = 1024
    for begin in range(0, len(sound), block):
        part = sound[begin : begin + block]
        planes = np.zeros((channels, len(part)), np.float32)
        planes[slice(None) if channel is None else channel] = part
        packed = np.ascontiguousarray(planes.T).reshape(1, -1)  # planar frames hold at most 8 channels
        frame = av.AudioFrame.from_ndarray(packed, format="flt", layout=layout)
        frame.sample_rate, frame.time_base = rate, Fraction(1, rate)
        frame.pts = begin + round(start_s * rate)
        out.mux(stream.encode(frame))
    out.mux(stream.encode(None))
