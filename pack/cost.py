"""What a row will probably take in the shards, from its manifest line alone: planning opens no media."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from pack.config import PackConfig
from schemas.manifest import MEDIA_KEYS
from schemas.media_items import MediaType

# Where the manifest gives neither duration nor size: a clip of half a minute, a minute of sound, a photo.
DEFAULT_DURATION_S: dict[MediaType, float] = {"video": 30.0, "audio": 60.0, "image": 0.0}
JPEG_BYTES_PER_PIXEL = 0.4  # quality 95, 4:2:0, 672x384 real picture: 105 kB a frame
PNG_BYTES_PER_PIXEL = 1.6
TYPICAL_PIXELS = 672 * 384
ROW_BYTES = 2048  # conversation and meta


class CostModel:
    """Estimated output bytes of a row, for one configuration."""

    def __init__(self, config: PackConfig) -> None:
        video, image = config.video, config.image
        pixels = TYPICAL_PIXELS if video.max_pixels is None else min(video.max_pixels, TYPICAL_PIXELS)
        self.frame = pixels * (PNG_BYTES_PER_PIXEL if video.codec == "png" else JPEG_BYTES_PER_PIXEL)
        self.image = 4 * TYPICAL_PIXELS * (PNG_BYTES_PER_PIXEL if image.codec == "png" else JPEG_BYTES_PER_PIXEL)
        self.fps, self.max_frames = video.fps, video.max_frames
        self.sound = config.audio.sample_rate * (2.0 if config.audio.codec == "wav" else 1.2)
        self.default = {kind: self._lasting(kind, DEFAULT_DURATION_S[kind]) for kind in MEDIA_KEYS}

    def _lasting(self, kind: MediaType, seconds: float) -> float:
        if kind == "image":
            return self.image
        frames = min(seconds * self.fps, self.max_frames) if kind == "video" else 0.0
        return frames * self.frame + seconds * self.sound

    def __call__(self, row: Mapping[str, Any]) -> float:
        """Bytes. A malformed row costs what its well-formed part costs."""
        total = float(ROW_BYTES)
        for kind, keys in MEDIA_KEYS.items():
            for key in keys:
                media = row.get(key)
                if media:
                    total += sum(self._medium(kind, m) for m in (media if isinstance(media, list) else [media]))
        return total

    def _medium(self, kind: MediaType, medium: Any) -> float:
        if not isinstance(medium, Mapping):
            return self.default[kind]
        start, end = _number(medium.get("start")), _number(medium.get("end"))
        seconds = end - start if end > start else _number(medium.get("duration_s"))
        if seconds > 0:
            return self._lasting(kind, seconds)
        size = medium.get("bytes")
        if isinstance(size, bytes):
            return float(len(size))
        if _number(size) > 0:
            return _number(size)
        frames = medium.get("frames")
        return len(frames) * self.frame if isinstance(frames, list) else self.default[kind]


def _number(value: Any) -> float:
    """The number, or 0 for what is none."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    return float(value) if is_number else 0.0
