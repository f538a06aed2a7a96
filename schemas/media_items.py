"""One medium of a manifest row -> a `Source`. Every fault is a RowError `bad_row` that names the key and the value."""

from __future__ import annotations

import base64
import binascii
import math
import posixpath
import re
import struct
from collections.abc import Mapping, Sequence
from dataclasses import replace
from os.path import isabs, normpath
from os.path import join as join_path
from typing import Any, Literal
from urllib.parse import unquote, unquote_to_bytes

import numpy as np

from schemas.errors import RowError
from schemas.sources import BytesSource, FileSource, FramesSource, Source
from schemas.wording import is_unicode, known_names, short

MAX_INLINE_BYTES = 2**30  # of a data URL, decoded
DEFAULT_FRAMES_FPS = 2.0  # of {"frames": ...} without video_fps
DEFAULT_ARRAY_FPS = 30.0  # of {"video": array} without video_fps

MediaType = Literal["video", "audio", "image"]
PATH_KEYS = ("path", "uri", "url", "video", "audio", "image")
SPAN_KEYS = {"start": ("start", "video_start", "start_s"), "end": ("end", "video_end", "end_s")}
FILE_KEYS = (*PATH_KEYS, *(k for keys in SPAN_KEYS.values() for k in keys), "duration_s", "bytes", "use_audio_in_video")
FRAMES_KEYS = ("frames", "video", "audio", "video_fps", "audio_fps", "use_audio_in_video")
ARRAY_KEYS = ("array", "sampling_rate", "path")

_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")


def parse_video(item: Any, where: str, base: str, use_audio: bool, frames_fps: float) -> Source:
    """A video of any form. use_audio: of the row, where the medium itself says nothing; frames_fps: in Hz, the rate of
    extracted frames that come without one."""
    if isinstance(item, np.ndarray) or (isinstance(item, list | tuple) and item):
        item = {"video": item} if isinstance(item, np.ndarray) else {"frames": item}
    if isinstance(item, Mapping) and _is_frames(item):
        return _frames(item, where, base, use_audio, frames_fps)
    source = parse_file(item, where, base, "video")
    asked = item.get("use_audio_in_video") if isinstance(item, Mapping) else None
    return replace(source, use_audio=use_audio if asked is None else _flag(asked, f"{where}.use_audio_in_video"))


def parse_file(item: Any, where: str, base: str, kind: MediaType) -> FileSource | BytesSource:
    """A path, URL, data URL, bytes, or a mapping with one of them."""
    if isinstance(item, str):
        return _locate(item, where, base)
    if isinstance(item, bytes | bytearray | memoryview):
        return BytesSource(bytes(item), where)
    if not isinstance(item, Mapping):
        raise bad(f"{where} is {short(item)}; it is a path, URL, bytes or a mapping with a path")
    if kind == "audio" and item.get("array") is not None:
        return _wav(item, where)
    _known_keys(item, FILE_KEYS + (("sampling_rate", "array") if kind == "audio" else ()), where)
    data = item.get("bytes")
    if isinstance(data, bytes | bytearray | memoryview):  # the {"bytes", "path"} of a datasets feature
        if any(item.get(key) is not None for keys in SPAN_KEYS.values() for key in keys):
            raise bad(f"{where} has bytes and a span; a span needs a path")
        return BytesSource(bytes(data), str(item.get("path") or where))
    given = [key for key in PATH_KEYS if item.get(key) is not None]
    if len(given) != 1:
        raise bad(f"{where} has {' and '.join(given) or 'none'} of {', '.join(PATH_KEYS)}; it needs one of them")
    path = item[given[0]]
    if not isinstance(path, str):
        raise bad(f"{where}.{given[0]} is {short(path)}; it is a path or URL")
    return _with_span(_locate(path, f"{where}.{given[0]}", base), item, where, kind)


def resolve(path: str, where: str, base: str) -> str:
    """An absolute local path, or the URL as it is. base: the manifest's folder, local or a URL."""
    if not path or "\0" in path or not is_unicode(path):
        raise bad(f"{where} is {short(path)}; a path is not empty, has no NUL and no half of a surrogate pair")
    if path[:7].lower() == "file://":
        host, slash, rest = path[7:].partition("/")
        if host not in ("", "localhost") or not slash:
            raise bad(f"{where} is {short(path)}; a file URL is file:///absolute/path of this machine")
        return unquote("/" + rest)
    if _SCHEME.match(path) or isabs(path):
        return path
    if _SCHEME.match(base):
        scheme, rest = base.split("://", 1)
        return f"{scheme}://{posixpath.normpath(posixpath.join(rest, path))}"
    joined = join_path(base, path)
    return joined if ".." in joined.split("/") else normpath(joined)  # `link/..` is not what its text says


def decode_data_url(url: str, where: str) -> bytes:
    """The bytes of data:[<type>][;base64],<data>; at most MAX_INLINE_BYTES."""
    head, comma, data = url.partition(",")
    if not comma:
        raise bad(f"{where}: a data URL is data:<type>;base64,<data>; this one has no comma: {short(url)}")
    encoded = head.lower().endswith(";base64")
    size = len(data) * 3 // 4 if encoded else len(data)
    if size > MAX_INLINE_BYTES:
        raise bad(f"{where}: a data URL of {size} bytes; the limit is {MAX_INLINE_BYTES}, use a file")
    if not encoded:
        return unquote_to_bytes(data)
    compact = "".join(unquote(data).split()) if "%" in data or not data.isalnum() else data
    compact = compact.replace("-", "+").replace("_", "/")
    try:
        return base64.b64decode(compact + "=" * (-len(compact) % 4), validate=True)
    except (binascii.Error, ValueError) as error:
        raise bad(f"{where}: the base64 of the data URL is damaged ({len(data)} characters): {error}") from None


def number(value: Any, where: str, *, positive: bool = False) -> float:
    """A finite number >= 0 (> 0)."""
    if isinstance(value, bool) or not isinstance(value, int | float | np.integer | np.floating):
        raise bad(f"{where} is {short(value)}; it is a number")
    if not math.isfinite(value) or value < 0 or (positive and value == 0):
        raise bad(f"{where} is {value}; it is finite and {'> 0' if positive else '>= 0'}")
    return float(value)


def bad(detail: str) -> RowError:
    return RowError("bad_row", detail)


def _locate(path: str, where: str, base: str) -> FileSource | BytesSource:
    if path[:5].lower() == "data:":
        return BytesSource(decode_data_url(path, where), where)
    return FileSource(resolve(path, where, base))


def _with_span(source: FileSource | BytesSource, item: Mapping[str, Any], where: str, kind: MediaType) -> Any:
    times: dict[str, float | None] = {}
    for name, keys in SPAN_KEYS.items():
        given = [key for key in keys if item.get(key) is not None]
        if len(given) > 1:
            raise bad(f"{where} has {' and '.join(given)}, which mean the same")
        times[name] = number(item[given[0]], f"{where}.{given[0]}") if given else None
    start, end = times["start"], times["end"]
    if (start, end) != (None, None) and (isinstance(source, BytesSource) or kind == "image"):
        raise bad(f"{where} has a span; only a video or sound from a file has one")
    if end is not None and end <= (start or 0):
        raise bad(f"{where}: start {start or 0} is not before end {end}")
    if isinstance(source, BytesSource):
        return source
    duration, size = item.get("duration_s"), item.get("bytes")
    return replace(
        source,
        start_s=start,
        end_s=end,
        duration_s=None if duration is None else number(duration, f"{where}.duration_s"),
        num_bytes=None if size is None else int(number(size, f"{where}.bytes")),
    )


def _is_frames(item: Mapping[str, Any]) -> bool:
    return item.get("frames") is not None or isinstance(item.get("video"), list | tuple | np.ndarray)


def _frames(item: Mapping[str, Any], where: str, base: str, use_audio: bool, frames_fps: float) -> FramesSource:
    _known_keys(item, FRAMES_KEYS, where)
    layout = "frames" if item.get("frames") is not None else "video"
    if layout == "frames" and item.get("video") is not None:
        raise bad(f"{where} has frames and video; it needs one of them")
    frames, name = item[layout], f"{where}.{layout}"
    if layout == "frames" and isinstance(frames, list | tuple) and not _nested(frames):
        parsed: Any = tuple(parse_file(f, f"{name}[{i}]", base, "image") for i, f in enumerate(frames))
    else:
        parsed = _picture_array(frames, name)
    if len(parsed) == 0:
        raise bad(f"{name} is empty; a video has at least one frame")
    rate = item.get("video_fps")
    default = frames_fps if layout == "frames" else DEFAULT_ARRAY_FPS
    video_fps = default if rate is None else number(rate, f"{where}.video_fps", positive=True)
    asked = item.get("use_audio_in_video")
    keep = use_audio if asked is None else _flag(asked, f"{where}.use_audio_in_video")
    audio, audio_fps = _frames_audio(item, where, base) if keep else (None, None)
    return FramesSource(parsed, video_fps, audio, audio_fps, where)


def _frames_audio(item: Mapping[str, Any], where: str, base: str) -> tuple[Any, int | None]:
    """(BytesSource, FileSource or 1-D float32 array, its rate in Hz)."""
    audio, rate = item.get("audio"), item.get("audio_fps")
    audio_fps = None if rate is None else int(number(rate, f"{where}.audio_fps", positive=True))
    if audio is None:
        return None, audio_fps
    if isinstance(audio, list | tuple | np.ndarray):
        if audio_fps is None:
            raise bad(f"{where}.audio is an array without {where}.audio_fps, its rate in Hz")
        return _sound_array(audio, f"{where}.audio"), audio_fps
    if isinstance(audio, Mapping) and audio.get("array") is not None:
        return _wav(audio, f"{where}.audio"), None
    return parse_file(audio, f"{where}.audio", base, "audio"), audio_fps


def _nested(frames: Sequence[Any]) -> bool:
    return bool(frames) and isinstance(frames[0], list | tuple | np.ndarray)


def _picture_array(frames: Any, where: str) -> np.ndarray:
    """uint8 [T, H, W, 3] of an array or nested lists, [T, H, W, 3] or [T, 3, H, W]."""
    try:
        array = np.asarray(frames)
    except ValueError as error:
        raise bad(f"{where}: the frames have different shapes: {error}") from None
    if array.ndim == 4 and array.shape[-1] != 3 and array.shape[1] == 3:
        array = array.transpose(0, 2, 3, 1)
    if array.ndim != 4 or array.shape[-1] != 3:
        raise bad(f"{where} has shape {list(array.shape)}; pictures are [T, H, W, 3] or [T, 3, H, W]")
    if array.dtype != np.uint8:
        whole = np.issubdtype(array.dtype, np.integer)
        if not whole or (array.size and (array.min() < 0 or array.max() > 255)):
            raise bad(f"{where} is {array.dtype}; pictures are uint8, 0 to 255")
        array = array.astype(np.uint8)
    return np.ascontiguousarray(array)


def _sound_array(audio: Any, where: str) -> np.ndarray:
    """float32 [N]; integers of 16 or 32 bits are scaled to +-1."""
    try:
        array = np.asarray(audio)
    except ValueError as error:
        raise bad(f"{where} is no array: {error}") from None
    if array.ndim != 1:
        raise bad(f"{where} has shape {list(array.shape)}; a sound is one channel, [N]")
    if isinstance(audio, np.ndarray) and array.dtype in (np.int16, np.int32):
        return (array / -float(np.iinfo(array.dtype).min)).astype(np.float32)
    plain = array.dtype.kind == "f" or (not isinstance(audio, np.ndarray) and bool(np.isin(array, (-1, 0, 1)).all()))
    if not plain:
        raise bad(f"{where} is {array.dtype}; a sound is float in +-1, or an array of int16 or int32")
    return array.astype(np.float32)


def _wav(item: Mapping[str, Any], where: str) -> BytesSource:
    """{"array": [N], "sampling_rate": Hz} of a decoded datasets feature, as a 32-bit float WAV."""
    _known_keys(item, (*ARRAY_KEYS, "bytes"), where)
    if item.get("sampling_rate") is None:
        raise bad(f"{where} has an array without sampling_rate, its rate in Hz")
    rate = int(number(item["sampling_rate"], f"{where}.sampling_rate", positive=True))
    data = _sound_array(item["array"], f"{where}.array").astype("<f4").tobytes()
    form = struct.pack("<HHIIHH", 3, 1, rate, rate * 4, 4, 32)
    body = b"WAVEfmt " + struct.pack("<I", len(form)) + form + b"data" + struct.pack("<I", len(data)) + data
    return BytesSource(b"RIFF" + struct.pack("<I", len(body)) + body, str(item.get("path") or where))


def _flag(value: Any, where: str) -> bool:
    if not isinstance(value, bool):
        raise bad(f"{where} is {short(value)}; it is true or false")
    return value


def _known_keys(item: Mapping[str, Any], known: Sequence[str], where: str) -> None:
    unknown = [key for key in item if key not in known and item[key] is not None]
    if unknown:
        raise bad(f"{where} has the unknown key {unknown[0]!r}{known_names(str(unknown[0]), known)}")
