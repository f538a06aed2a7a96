"""One raw row of a manifest: which media, which conversation, under which id.

    {"id"?, "source"?, "videos": [...], "audios": [...], "images": [...], "conversations" | "messages": ..., ...}

The singular keys `video`, `audio`, `image` (and `question_audio`) are accepted. A medium is a path or URL, encoded
bytes, a data URL, or a mapping: {"path", "start"?, "end"?, "duration_s"?, "bytes"?, "use_audio_in_video"?}; a video
also {"frames": [...], "audio"?, "video_fps"?, "audio_fps"?}, {"video": array [T, H, W, 3], ...} or a list of frames; a
sound also {"array", "sampling_rate"}. Media that stand in content parts are taken, in order, where the row has no list
of that kind. `pack.plan` reads the files; `schemas.media_items` parses one medium.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import xxhash

from schemas.media_items import DEFAULT_FRAMES_FPS, MediaType, bad, parse_file, parse_video
from schemas.messages import CONVERSATION_KEYS, media_in_parts
from schemas.nearest import is_typo
from schemas.sources import BytesSource, FileSource, FramesSource, Source
from schemas.wording import is_unicode, short

__all__ = ["BytesSource", "FileSource", "FramesSource", "ManifestRow", "Source", "content_key", "parse_row"]

MEDIA_KEYS: dict[MediaType, tuple[str, ...]] = {
    "video": ("videos", "video"),
    "audio": ("audios", "audio", "question_audio"),
    "image": ("images", "image"),
}
OWN_KEYS = frozenset(
    ["id", "source", "use_audio_in_video", *CONVERSATION_KEYS, *(key for keys in MEDIA_KEYS.values() for key in keys)]
)


@dataclass(frozen=True)
class ManifestRow:
    """id, source: of the row; videos, audios, images: media in marker order; conversations: what the preprocessor gets;
    location: (manifest file, row number from 0); fields: every other key of the row."""

    id: str
    source: str
    videos: tuple[Source, ...]
    audios: tuple[FileSource | BytesSource, ...]
    images: tuple[FileSource | BytesSource, ...]
    conversations: Any
    location: tuple[str, int]
    fields: dict[str, Any]


def parse_row(
    raw: Any,
    *,
    base: str,
    location: tuple[str, int],
    occurrence: int = 0,
    frames_fps: float = DEFAULT_FRAMES_FPS,
) -> ManifestRow:
    """The row, or RowError `bad_row` that names the key and the value.

    base: folder (or URL) that relative paths start from; occurrence: number of equal rows before this one, for the
    default id; frames_fps: rate in Hz of extracted frames that come without `video_fps`. Without a conversation key
    the preprocessor gets the whole row.
    """
    if not isinstance(raw, Mapping):
        raise bad(f"a row is a mapping, not {short(raw)}")
    if not all(isinstance(key, str) for key in raw):
        raise bad(f"the keys of a row are strings, not {short(next(key for key in raw if not isinstance(key, str)))}")
    conversations = _conversations(raw)
    media = {kind: _media_items(raw, kind) for kind in MEDIA_KEYS}
    _check_typos(raw)
    media |= _media_of_parts(conversations, media)
    use_audio = raw.get("use_audio_in_video")
    if use_audio is not None and not isinstance(use_audio, bool):
        raise bad(f"use_audio_in_video is {short(use_audio)}; it is true or false")
    keep = True if use_audio is None else use_audio
    return ManifestRow(
        id=_row_id(raw, occurrence),
        source=_text(raw, "source") or "",
        videos=tuple(parse_video(item, where, base, keep, frames_fps) for item, where in media["video"]),
        audios=tuple(parse_file(item, where, base, "audio") for item, where in media["audio"]),
        images=tuple(parse_file(item, where, base, "image") for item, where in media["image"]),
        conversations=conversations,
        location=location,
        fields={key: value for key, value in raw.items() if key not in OWN_KEYS},
    )


def content_key(raw: Any) -> int:
    """64 bits of the row's content: the same in every process, whatever the order of its keys."""
    try:
        text = _ENCODE(raw)
    except (TypeError, ValueError, RecursionError) as error:
        raise bad(f"the row has a value that cannot be hashed: {error}") from None
    return int(xxhash.xxh3_64_intdigest(text.encode("utf-8", "surrogatepass")))


def _plain(value: Any) -> Any:
    """What JSON has no form for, under a key of its own so that it equals no text."""
    if isinstance(value, bytes | bytearray | memoryview):
        return {"\0bytes": xxhash.xxh3_128_hexdigest(value)}
    if isinstance(value, np.ndarray):
        if value.dtype.hasobject:
            return {"\0array": value.tolist()}
        shape = [str(value.dtype), list(value.shape)]
        return {"\0array": [*shape, xxhash.xxh3_128_hexdigest(np.ascontiguousarray(value).tobytes())]}
    if isinstance(value, np.generic):
        return value.item()
    return {f"\0{type(value).__name__}": str(value)}  # dates and decimals of parquet


_ENCODE = json.JSONEncoder(ensure_ascii=False, sort_keys=True, separators=(",", ":"), default=_plain).encode


def _row_id(raw: Mapping[str, Any], occurrence: int) -> str:
    given = raw.get("id")
    if given is None:
        return f"{content_key(raw):016x}" + (f"-{occurrence}" if occurrence else "")
    if isinstance(given, int | np.integer) and not isinstance(given, bool):
        return str(given)
    if not isinstance(given, str) or not given or not is_unicode(given):
        raise bad(f"id is {short(given)}; it is a string that is not empty, or an integer")
    return given


def _text(raw: Mapping[str, Any], key: str) -> str | None:
    value = raw.get(key)
    if value is not None and not (isinstance(value, str) and is_unicode(value)):
        raise bad(f"{key} is {short(value)}; it is a string")
    return value


def _conversations(raw: Mapping[str, Any]) -> Any:
    for key in CONVERSATION_KEYS:
        value = raw.get(key)
        if isinstance(value, np.ndarray):
            value = value.tolist()
        if value:
            return value
    return dict(raw)


def _media_items(raw: Mapping[str, Any], kind: MediaType) -> list[tuple[Any, str]]:
    """(medium, where) of the row's own keys for this kind."""
    given = [key for key in MEDIA_KEYS[kind] if not _empty(raw.get(key))]
    if len(given) > 1:
        raise bad(f"the row has {' and '.join(given)}; it needs one of them")
    if not given:
        return _typed_path(raw, kind)
    key, value = given[0], raw[given[0]]
    several = isinstance(value, list | tuple) or (isinstance(value, np.ndarray) and value.dtype.hasobject)
    return [(item, f"{key}[{i}]") for i, item in enumerate(value)] if several else [(value, key)]


def _typed_path(raw: Mapping[str, Any], kind: MediaType) -> list[tuple[Any, str]]:
    """`path` of a row whose `data_type` says what it is, as Video-R1 has it: "a.mp4" with video, or
    {"image": "a.jpg", "audio": "a.wav"} with image_audio."""
    path, kinds = raw.get("path"), raw.get("data_type")
    if not isinstance(kinds, str) or kind not in kinds.split("_"):
        return []
    if isinstance(path, Mapping):
        return [] if _empty(path.get(kind)) else [(path[kind], f"path.{kind}")]
    return [(path, "path")] if isinstance(path, str) and path and kinds == kind else []


def _empty(value: Any) -> bool:
    return value is None or (isinstance(value, str | list | tuple | Mapping) and not value)


def _media_of_parts(
    conversations: Any, own: Mapping[MediaType, list[tuple[Any, str]]]
) -> dict[MediaType, list[tuple[Any, str]]]:
    """Media inside content parts, for the kinds that have no list in the row."""
    found: dict[MediaType, list[tuple[Any, str]]] = {}
    for kind, medium, where in media_in_parts(conversations):
        if kind != "text" and not own[kind]:
            found.setdefault(kind, []).append((medium, where))
    for kind, items in found.items():
        missing = [where for medium, where in items if medium is None]
        if missing and len(missing) < len(items):
            raise bad(f"{missing[0]} names no {kind}, other parts do, and the row has no {MEDIA_KEYS[kind][0]}")
    return {kind: items for kind, items in found.items() if items[0][0] is not None}


def _check_typos(raw: Mapping[str, Any]) -> None:
    has_conversation = any(key in raw for key in CONVERSATION_KEYS)
    for key, value in raw.items():
        if key in OWN_KEYS or _empty(value) or isinstance(value, bool | int | float):
            continue
        meant = _slip_of(key)
        if meant is not None and not (has_conversation and meant in CONVERSATION_KEYS):
            raise bad(f"unknown key {key!r}; did you mean {meant!r}?")


@functools.lru_cache(maxsize=4096)  # all rows of a manifest have the same few keys
def _slip_of(key: str) -> str | None:
    names = [*(name for names in MEDIA_KEYS.values() for name in names), *CONVERSATION_KEYS]
    return next((name for name in names if is_typo(key, name)), None)
