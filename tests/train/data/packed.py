"""Packed samples made in memory: pictures as PNG (no loss), sound as WAV, with the meta that packing would write."""

from __future__ import annotations

import io
import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import soundfile
from PIL import Image

from schemas.conversation import Turn
from schemas.sample import (
    AudioMeta,
    ImageMeta,
    Origin,
    PackedSample,
    PackedVideo,
    Provenance,
    SampleMeta,
    VideoMeta,
    frame_blobs,
    media_blobs,
)

RATE = 16000


@dataclass(frozen=True)
class Clip:
    """frames: uint8 [T, H, W, 3] at fps Hz; sound: int16 [n] at 16 kHz, or None."""

    frames: np.ndarray
    fps: float
    sound: np.ndarray | None = None


def packed_sample(
    turns: list[Turn],
    clips: Sequence[Clip] = (),
    sounds: Sequence[np.ndarray] = (),
    images: Sequence[np.ndarray] = (),
    key: str = "row",
) -> PackedSample:
    """turns bind the media by order; sounds: int16 [n]; images: uint8 [H, W, 3]."""
    videos = [PackedVideo([png(f) for f in c.frames], None if c.sound is None else wav(c.sound)) for c in clips]
    audios, pictures = [wav(s) for s in sounds], [png(i) for i in images]
    media = frame_blobs(media_blobs(videos, audios, pictures))
    meta = SampleMeta(
        id=key,
        source="made",
        conversation=turns,
        videos=[_video_meta(clip) for clip in clips],
        audios=[sound_meta(sound) for sound in sounds],
        images=[
            ImageMeta(width=i.shape[1], height=i.shape[0], codec="png", origin=Origin(uri="image")) for i in images
        ],
        provenance=Provenance(manifest="made", row=0, preprocessor="none", versions={}),
        media_bytes=len(media),
        media_crc32=zlib.crc32(media),
    )
    return PackedSample(meta, videos, audios, pictures)


def png(picture: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(picture).save(buffer, format="PNG", compress_level=0)
    return buffer.getvalue()


def wav(samples: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    soundfile.write(buffer, samples, RATE, subtype="PCM_16", format="WAV")
    return buffer.getvalue()


def sound_meta(samples: np.ndarray) -> AudioMeta:
    return AudioMeta(
        codec="wav", sample_rate=RATE, num_samples=len(samples), duration_s=len(samples) / RATE, origin=Origin(uri="s")
    )


def _video_meta(clip: Clip) -> VideoMeta:
    count, height, width, _ = clip.frames.shape
    times = [round(k / clip.fps, 6) for k in range(count)]
    return VideoMeta(
        num_frames=count,
        width=width,
        height=height,
        codec="png",
        video_fps=clip.fps,
        frame_times_s=times,
        shown_times_s=times,
        duration_s=count / clip.fps,
        sampling="time_grid",
        origin=Origin(uri="clip"),
        audio=None if clip.sound is None else sound_meta(clip.sound),
    )
