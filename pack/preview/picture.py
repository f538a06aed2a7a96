"""A stored picture in small."""

from __future__ import annotations

import base64
import io
from dataclasses import dataclass

from PIL import Image, UnidentifiedImageError

THUMB_HEIGHT = 160  # pixels, at most
THUMB_QUALITY = 80


@dataclass(frozen=True)
class Thumb:
    """A picture in small. url is None when the stored bytes do not decode; then error says why."""

    url: str | None
    width: int
    height: int
    error: str = ""


def thumbnail(data: bytes) -> Thumb:
    """The stored picture at most THUMB_HEIGHT pixels high, as a data URL."""
    try:
        with Image.open(io.BytesIO(data)) as image:
            size = image.size
            image.draft("RGB", (size[0], THUMB_HEIGHT))
            small = image.convert("RGB")
    except (UnidentifiedImageError, OSError) as error:
        return Thumb(None, THUMB_HEIGHT * 4 // 3, THUMB_HEIGHT, f"these {len(data):,} bytes do not decode: {error}")
    height = min(THUMB_HEIGHT, size[1])
    width = min(max(1, round(size[0] * height / size[1])), 4 * THUMB_HEIGHT)
    out = io.BytesIO()
    small.resize((width, height), Image.Resampling.LANCZOS).save(out, "JPEG", quality=THUMB_QUALITY)
    return Thumb(f"data:image/jpeg;base64,{base64.b64encode(out.getvalue()).decode()}", width, height)
