"""Short hands for media tests: load a file, decode what came out."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import soundfile
from PIL import Image

from pack.config import PackConfig
from pack.media.load import load_audio, load_video
from schemas.sample import AudioMeta, VideoMeta
from schemas.sources import FileSource


def config(rows: dict[str, Any] | None = None, audio: dict[str, Any] | None = None, **video: Any) -> PackConfig:
    """A configuration that keeps sizes and stores PNG, so that pixels can be compared."""
    video = {"resize": "none", "min_frames": 1, "codec": "png", **video}
    return PackConfig(manifest="m.jsonl", output="out", video=video, rows=rows or {}, audio=audio or {})


def pictures(blobs: list[bytes]) -> np.ndarray:
    """uint8 [n, h, w, 3]."""
    return np.stack([np.asarray(Image.open(io.BytesIO(b)).convert("RGB")) for b in blobs])


def samples(blob: bytes) -> np.ndarray:
    """int16 [n]."""
    data, _ = soundfile.read(io.BytesIO(blob), dtype="int16")
    return data


def clip(path: Path, span: tuple[float | None, float | None] = (None, None), **video: Any):  # type: ignore[no-untyped-def]
    """(frames uint8 [n, h, w, 3], sound int16 [n] or None, VideoMeta)."""
    packed, meta = load_video(FileSource(str(path), *span), config(**video))
    assert isinstance(meta, VideoMeta)
    return pictures(packed.frames), None if packed.audio is None else samples(packed.audio), meta


def sound(path: Path, span: tuple[float | None, float | None] = (None, None)) -> tuple[np.ndarray, AudioMeta]:
    """(int16 [n], AudioMeta)."""
    blob, meta = load_audio(FileSource(str(path), *span), config())
    return samples(blob), meta
