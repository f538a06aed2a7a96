"""Packed samples made by hand: frames whose colour tells their number, sounds that are known sines."""

from __future__ import annotations

import io
import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import simplejpeg
import soundfile

from schemas.dataset import DatasetCard, Histogram, Reject, Totals, add_totals, totals_of
from schemas.sample import (
    COLUMNS,
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


def jpeg(level: int, width: int = 64, height: int = 48) -> bytes:
    return simplejpeg.encode_jpeg(np.full((height, width, 3), level, np.uint8), quality=90)


def sine(duration_s: float, amplitude: float = 0.5, start_s: float = 0.0, codec: str = "wav") -> bytes:
    """A 440 Hz sine that begins at start_s; before it there is silence."""
    t = np.arange(round(duration_s * RATE)) / RATE
    samples = amplitude * np.sin(2 * np.pi * 440 * t) * (t >= start_s)
    out = io.BytesIO()
    soundfile.write(out, samples, RATE, format=codec.upper(), subtype="PCM_16")
    return out.getvalue()


def audio_meta(duration_s: float, **more: Any) -> AudioMeta:
    fields: dict[str, Any] = {"codec": "wav", "sample_rate": RATE, "num_samples": round(duration_s * RATE)}
    fields |= {"duration_s": round(duration_s * RATE) / RATE, "origin": Origin(uri="clip.mp4", codec="aac")}
    return AudioMeta(**(fields | more))


def video(
    duration_s: float,
    fps: float = 2.0,
    audio_s: float | None = None,
    size: tuple[int, int] = (64, 48),
    audio: dict[str, Any] | None = None,
    **more: Any,
) -> tuple[PackedVideo, VideoMeta]:
    """Frames on the grid k / fps; audio_s: length of its sound; audio, more: other fields of the two metas."""
    times = [k / fps for k in range(max(1, int(np.ceil((duration_s - 0.01) * fps))))]
    frames = [jpeg(20 + 13 * k % 220, *size) for k in range(len(times))]
    heard = None if audio_s is None else audio_meta(audio_s, **(audio or {}))
    sound = None if heard is None else sine(audio_s or 0.0, start_s=heard.start_s, codec=heard.codec)
    fields: dict[str, Any] = {"num_frames": len(times), "width": size[0], "height": size[1], "codec": "jpeg"}
    fields |= {"video_fps": fps, "frame_times_s": times, "shown_times_s": times, "duration_s": duration_s}
    fields |= {"sampling": "time_grid", "audio": heard, "origin": Origin(uri="clip.mp4", codec="h264")}
    return PackedVideo(frames, sound), VideoMeta(**(fields | more))


def image(width: int = 40, height: int = 30) -> tuple[bytes, ImageMeta]:
    meta = ImageMeta(width=width, height=height, codec="jpeg", origin=Origin(uri="picture.jpg"))
    return jpeg(128, width, height), meta


def sample(
    name: str,
    videos: Sequence[tuple[PackedVideo, VideoMeta]] = (),
    audios: Sequence[tuple[bytes, AudioMeta]] = (),
    images: Sequence[tuple[bytes, ImageMeta]] = (),
    source: str = "made",
    conversation: Any = None,
    **more: Any,
) -> PackedSample:
    """A whole sample; its conversation names every medium once unless one is given."""
    slots = [("video", None)] * len(videos) + [("audio", None)] * len(audios) + [("image", None)] * len(images)
    turns = conversation or [["user", *slots, ("text", "What is it?")], ["assistant", ("text", "A test.")]]
    packed = [v for v, _ in videos]
    media = frame_blobs(media_blobs(packed, [a for a, _ in audios], [i for i, _ in images]))
    meta = SampleMeta(
        id=name,
        source=source,
        conversation=turns,
        videos=[m for _, m in videos],
        audios=[m for _, m in audios],
        images=[m for _, m in images],
        provenance=Provenance(manifest="clips.jsonl", row=0, preprocessor="made", versions={"omniloom": "0"}),
        media_bytes=len(media),
        media_crc32=zlib.crc32(media),
        **more,
    )
    return PackedSample(meta, packed, [a for a, _ in audios], [i for i, _ in images])


def reject(name: str, reason: str, detail: str, source: str = "made") -> Reject:
    return Reject(id=name, source=source, manifest="clips.jsonl", row=7, stage="video", reason=reason, detail=detail)


def card(samples: Sequence[PackedSample], rejects: Sequence[Reject] = (), name: str = "made") -> DatasetCard:
    metas = [s.meta for s in samples]
    totals = totals_of(metas, len(metas), rejects) if metas or rejects else add_totals([Totals()])
    durations = [v.duration_s for m in metas for v in m.videos]
    edges = [0.0, 1.0, 5.0, 60.0, 86400.0]
    counts = np.histogram(durations, edges)[0].tolist()
    return DatasetCard(
        shard_version=1,
        name=name,
        created="2026-01-02T03:04:05Z",
        fingerprint="0123456789abcdef",
        totals=totals,
        bytes=totals.media_bytes,
        shards=1,
        partitions=1,
        partitions_planned=1,
        sources={"made": len(metas)},
        histograms={"video_s": Histogram(unit="s", edges=edges, counts=counts)} if durations else {},
        versions={"omniloom": "0.1.0"},
        columns=COLUMNS,
        config={"manifest": "clips.jsonl"},
    )
