"""Media of a packed sample as data URLs, byte for byte as they are stored; the frames of a clip as one Motion-JPEG
file, which the decoders of inference servers open as they open any video."""

from __future__ import annotations

import base64
import struct
from collections.abc import Sequence
from fractions import Fraction

from schemas.errors import RowError
from schemas.sample import PackedSample

_HAS_INDEX = 0x10
_KEY_FRAME = 0x10


def data_url(kind: str, data: bytes) -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def image_url(sample: PackedSample, index: int) -> str:
    return data_url(f"image/{sample.meta.images[index].codec}", sample.images[index])


def audio_url(sample: PackedSample, index: int) -> str:
    return data_url(f"audio/{sample.meta.audios[index].codec}", sample.audios[index])


def video_url(sample: PackedSample, index: int, form: str) -> str:
    """form: avi or jpeg (`server.video_format`). RowError for frames that are stored as PNG."""
    meta, frames = sample.meta.videos[index], sample.videos[index].frames
    if meta.codec != "jpeg":
        raise RowError(
            "bad_row", f"video {index} has {meta.codec} frames; a server gets them as JPEG (pack.video.codec)"
        )
    if form == "jpeg":
        return "data:video/jpeg;base64," + ",".join(base64.b64encode(frame).decode() for frame in frames)
    return data_url("video/x-msvideo", motion_jpeg(frames, meta.video_fps, meta.width, meta.height))


def motion_jpeg(frames: Sequence[bytes], fps: float, width: int, height: int) -> bytes:
    """An AVI of these JPEG pictures, unchanged, at a constant rate. (Microsoft's AVI RIFF file format: `hdrl` with one
    stream of type vids, codec MJPG; `movi`; `idx1`.)"""
    rate = Fraction(fps).limit_denominator(100_000)
    largest = max(map(len, frames))
    main = struct.pack(
        "<14I", round(1e6 / fps), 0, 0, _HAS_INDEX, len(frames), 0, 1, largest, width, height, 0, 0, 0, 0
    )
    stream = b"vidsMJPG" + struct.pack(
        "<IHHIIIIIIII4H",
        *(0, 0, 0, 0, rate.denominator, rate.numerator, 0, len(frames), largest, 0xFFFFFFFF, 0),
        *(0, 0, width, height),
    )
    picture = struct.pack("<IiiHH4sIiiII", 40, width, height, 1, 24, b"MJPG", width * height * 3, 0, 0, 0, 0)
    header = _list(b"hdrl", _chunk(b"avih", main) + _list(b"strl", _chunk(b"strh", stream) + _chunk(b"strf", picture)))
    chunks, index, place = [], [], 4
    for frame in frames:
        chunks.append(_chunk(b"00dc", frame))
        index.append(struct.pack("<4sIII", b"00dc", _KEY_FRAME, place, len(frame)))
        place += len(chunks[-1])
    body = header + _list(b"movi", b"".join(chunks)) + _chunk(b"idx1", b"".join(index))
    return b"RIFF" + struct.pack("<I", 4 + len(body)) + b"AVI " + body


def _chunk(name: bytes, data: bytes) -> bytes:
    return name + struct.pack("<I", len(data)) + data + b"\0" * (len(data) % 2)


def _list(name: bytes, data: bytes) -> bytes:
    return _chunk(b"LIST", name + data)
