"""Pictures and sound -> the bytes that are stored."""

from __future__ import annotations

import io

import numpy as np
import simplejpeg
import soundfile
from numpy.typing import NDArray
from PIL import Image

MAX_JPEG_SIDE = 65535


def encode_picture(rgb: NDArray[np.uint8], codec: str, quality: int) -> bytes:
    """uint8 [h, w, 3] -> JPEG 4:2:0 of this quality, or PNG (quality is not used)."""
    if codec == "jpeg":
        return simplejpeg.encode_jpeg(np.ascontiguousarray(rgb), quality, "RGB", "420", fastdct=False)
    buffer = io.BytesIO()
    Image.fromarray(rgb).save(buffer, format="PNG", compress_level=3)
    return buffer.getvalue()


def encode_sound(samples: NDArray[np.int16], codec: str, sample_rate: int) -> bytes:
    """int16 [n] -> a WAV or FLAC file, one channel, 16 bit."""
    buffer = io.BytesIO()
    soundfile.write(buffer, samples, sample_rate, subtype="PCM_16", format=codec.upper())
    return buffer.getvalue()
