"""Standalone images, animations that only Pillow reads, and frames that were extracted before: all by Pillow."""

from __future__ import annotations

import io
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps, UnidentifiedImageError

from pack.config import PackConfig
from pack.media.encode import encode_picture
from pack.media.picture import Rgb, over_white, resize
from schemas.errors import RowError
from schemas.geometry import image_pixel_limits, smart_resize
from schemas.sample import ImageMeta, Origin

# Raster formats only: Pillow also "opens" PostScript, by running it.
FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "AVIF", "JPEG2000", "PPM", "TGA", "ICO", "DDS", "QOI")


def open_image(data: bytes, name: str) -> Image.Image:
    """The opened image, not yet decoded; RowError bad_image."""
    try:
        return Image.open(io.BytesIO(data), formats=FORMATS)
    except UnidentifiedImageError:
        raise RowError("bad_image", f"{name}: no image format that is known", "image") from None
    except (Image.DecompressionBombError, OSError, ValueError, SyntaxError) as error:
        raise RowError("bad_image", f"{name}: {error}", "image") from None


def upright_rgb(image: Image.Image, name: str) -> tuple[Rgb, list[str]]:
    """(uint8 [h, w, 3], flags) of the current frame: EXIF orientation applied, transparency over white."""
    flags = []
    try:
        if image.getexif().get(ORIENTATION, 1) != 1:
            flags.append("rotated")
        turned = ImageOps.exif_transpose(image)
        if turned.mode.startswith("I") or turned.mode == "F":
            return _high_depth(np.asarray(turned)), flags
        if turned.mode in ("RGBA", "LA", "PA", "RGBa", "La") or "transparency" in turned.info:
            rgba = np.asarray(turned.convert("RGBA"))
            if rgba[..., 3].min() < 255:
                flags.append("alpha")
            return over_white(rgba), flags
        return np.asarray(turned.convert("RGB")).copy(), flags
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise RowError("bad_image", f"{name}: {error}", "image") from None


def _high_depth(values: NDArray[np.generic]) -> Rgb:
    """16-bit, 32-bit and float greyscale -> RGB; integers over 255 count as 16 bit, what is not finite as black."""
    grey = np.nan_to_num(values.astype(np.float64), posinf=0.0, neginf=0.0)
    if grey.max(initial=0) > 255:
        grey /= 257.0
    elif values.dtype.kind == "f" and grey.max(initial=0) <= 1.0:
        grey *= 255.0
    return np.repeat(np.clip(np.rint(grey), 0, 255).astype(np.uint8)[..., None], 3, axis=2)


def encode_image(data: bytes, name: str, config: PackConfig) -> tuple[bytes, ImageMeta]:
    """An image file -> (stored bytes, its description) by `config.image`. Of an animation the first frame is taken.

    Raises RowError: bad_image, aspect_ratio.
    """
    image = open_image(data, name)
    source_size, animated = image.size, getattr(image, "n_frames", 1) > 1
    rgb, flags = upright_rgb(image, name)
    if config.image.resize == "model":
        low, high = image_pixel_limits(config.video.factor, config.image.min_pixels, config.image.max_pixels)
        try:
            height, width = smart_resize(rgb.shape[0], rgb.shape[1], config.video.factor, low, high)
        except ValueError as error:
            raise RowError("aspect_ratio", f"{name}: {error}", "image") from None
        rgb = resize(rgb, width, height)
    blob = encode_picture(rgb, config.image.codec, config.image.quality)
    if animated:
        flags.append("still")
    origin = Origin(uri=name, container=(image.format or "").lower(), width=source_size[0], height=source_size[1])
    meta = ImageMeta(width=rgb.shape[1], height=rgb.shape[0], codec=config.image.codec, flags=flags, origin=origin)
    return blob, meta


ORIENTATION = 0x0112  # EXIF tag


def is_webp(data: bytes) -> bool:
    """Whether this is WebP, whose animations libavformat does not play."""
    return data[:4] == b"RIFF" and data[8:12] == b"WEBP"


def animation_times(data: bytes, name: str) -> tuple[list[float], float]:
    """(start of each frame, end of the last) in s. Frames without a duration last 0.1 s, as browsers do it."""
    image, times, now = open_image(data, name), [], 0.0
    try:
        for k in range(getattr(image, "n_frames", 1)):
            image.seek(k)
            image.load()
            times.append(now)
            now += (image.info.get("duration") or 100) / 1000
    except (EOFError, OSError, ValueError) as error:
        if not times:
            raise RowError("bad_image", f"{name}: {error}", "video") from None
    return times, now


def animation_frames(data: bytes, name: str, wanted: set[int]) -> Iterator[tuple[int, Rgb]]:
    """(number, RGB) of the wanted frames, in order."""
    image = open_image(data, name)
    for k in sorted(wanted):
        image.seek(k)
        yield k, upright_rgb(image, name)[0]
