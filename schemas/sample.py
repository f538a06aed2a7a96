"""The packed sample: in memory, as MDS columns, and the framing of its media. Checked both ways.

In memory a sample is a `PackedSample`; `as_offline_av` gives the offline A/V dict that trainers of this field know:
{"videos": [{"frames": list[bytes], "audio": bytes | None, "video_fps": float, "audio_fps": int}], "audios": [bytes],
"images": [bytes], "conversations": canonical turns}. On disk it is one MDS sample with the columns of `COLUMNS`:

    id: str        source: str        meta: json = SampleMeta        media: bytes = frame_blobs([...])

`media` holds every encoded blob of the sample in this order: for each video its frames, then its sound if it has one;
then the standalone audios; then the images. Framing: u32 count, u32 length[count], the blobs; all little-endian.

All times are in seconds on the clip's own clock: t = 0 is the first decoded picture or sound sample of the clip (of the
span, when a span was asked for), whichever is first.
"""

from __future__ import annotations

import math
import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    JsonValue,
    Strict,
    ValidationError,
    model_validator,
)

from schemas.conversation import Turn, canonical_turns, check_turns
from schemas.errors import SchemaError

SHARD_VERSION: Literal[1] = 1
COLUMNS: dict[str, str] = {"id": "str", "source": "str", "media": "bytes", "meta": "json"}
MAX_MEDIA_BYTES = 2**32 - 2**20  # MDS offsets are u32; the rest is room for the other columns

Seconds = Annotated[float, Field(allow_inf_nan=False)]
Span = Annotated[tuple[Seconds, Seconds], Strict(False)]  # a list when it comes from JSON


def _finite(value: JsonValue) -> JsonValue:
    """ValueError for NaN and infinity anywhere inside: JSON has no form for them."""
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{value} is not finite; JSON has no form for it")
    for inner in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        _finite(inner)
    return value


Json = Annotated[JsonValue, AfterValidator(_finite)]

FLAGS: dict[str, str] = {
    "truncated": "the stream ends before the container says",
    "decode_errors": "packets were damaged; decode_errors counts them",
    "missing_media": "a hole of over 0.1 s in the stream (lost packets or a held picture); gaps_s has its span",
    "silent": "the whole sound stays under -60 dBFS",
    "clipped": "samples beyond full scale were clipped",
    "non_finite": "NaN or infinite samples were replaced by silence",
    "priming_kept": "the container does not say how many encoder-delay samples to drop",
    "antiphase": "the channels cancel in the mono mix",
    "rate_changed": "the sample rate or channel count changes inside the stream",
    "size_changed": "the picture size changes inside the stream; the first one holds",
    "vfr": "the source has no constant picture rate",
    "rotated": "a display matrix was applied",
    "stretched": "the sample aspect ratio was applied to the width",
    "interlaced": "fields were deinterlaced",
    "hdr": "PQ or HLG was tone-mapped to SDR",
    "alpha": "transparency was composited over white",
    "clock_jump": "timestamps jump back; a new epoch follows the old one",
    "fps_lowered": "fps is below the one asked for (source rate, max_frames or max_tokens)",
    "fps_raised": "fps is above the one asked for (min_frames)",
    "several_tracks": "the file has more than one track of this kind; origin.stream_index has the chosen one",
    "held_start": "the first picture is over 20 ms later than t = 0, and is shown from t = 0 on",
    "still": "the picture is one still image",
    "no_audio": "the file has no sound",
}


class Record(BaseModel):
    """Base of what is stored: frozen, no unknown key, no silent conversion."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class Origin(Record):
    """Where a medium came from, and what the source was.

    clock_zero_s: the container time that is t = 0 here; span_s: what was asked for, on the file's own clock from its
    first sample; rotation: degrees counter-clockwise that were applied; sar: sample aspect ratio of the source.
    """

    uri: str
    container: str = ""
    stream_index: int | None = None
    codec: str = ""
    span_s: Span | None = None
    clock_zero_s: Seconds = 0.0
    declared_s: Seconds | None = None
    width: int | None = None
    height: int | None = None
    fps: Seconds | None = None
    pixel_format: str | None = None
    rotation: int = 0
    mirrored: bool = False
    sar: Seconds = 1.0
    color: str | None = None
    sample_rate: int | None = None
    channels: int | None = None
    layout: str | None = None


class AudioMeta(Record):
    """One encoded mono sound. start_s: when the source's own sound begins on the clip's clock (the samples before it
    are silence); duration_s = num_samples / sample_rate; gaps_s: holes that became silence."""

    codec: Literal["wav", "flac"]
    sample_rate: Annotated[int, Field(gt=0)]
    num_samples: Annotated[int, Field(ge=0)]
    duration_s: Seconds
    start_s: Seconds = 0.0
    flags: list[str] = []
    decode_errors: int = 0
    gaps_s: list[Span] = []
    origin: Origin


class VideoMeta(Record):
    """Frames of one clip, and its sound.

    video_fps: the effective rate of the stored frames; frame_times_s[k]: the grid time of frame k; shown_times_s[k]:
    the time of the picture on screen then; duration_s: end of the picture; width, height: of the stored frames.
    """

    num_frames: Annotated[int, Field(gt=0)]
    width: Annotated[int, Field(gt=0)]
    height: Annotated[int, Field(gt=0)]
    codec: Literal["jpeg", "png"]
    video_fps: Annotated[float, Field(gt=0, allow_inf_nan=False)]
    frame_times_s: list[Seconds]
    shown_times_s: list[Seconds]
    duration_s: Seconds
    sampling: Literal["time_grid", "qwen", "given"]
    flags: list[str] = []
    decode_errors: int = 0
    gaps_s: list[Span] = []
    origin: Origin
    audio: AudioMeta | None = None

    @model_validator(mode="after")
    def _times_match(self) -> VideoMeta:
        if not self.num_frames == len(self.frame_times_s) == len(self.shown_times_s):
            times = f"{len(self.frame_times_s)} frame times, {len(self.shown_times_s)} shown times"
            raise ValueError(f"{self.num_frames} frames, {times}")
        return self


class ImageMeta(Record):
    """One encoded image."""

    width: Annotated[int, Field(gt=0)]
    height: Annotated[int, Field(gt=0)]
    codec: Literal["jpeg", "png"]
    flags: list[str] = []
    origin: Origin


class Provenance(Record):
    """Which row made the sample, and with what. row: number in the manifest file, from 0."""

    manifest: str
    row: int
    preprocessor: str
    versions: dict[str, str]


class SampleMeta(Record):
    """All of a sample but its bytes. extra: what the preprocessor kept beside the conversation (choices, answer...)."""

    version: Literal[1] = SHARD_VERSION
    id: Annotated[str, Field(min_length=1)]
    source: str
    conversation: Annotated[list[Turn], BeforeValidator(canonical_turns)]
    videos: list[VideoMeta] = []
    audios: list[AudioMeta] = []
    images: list[ImageMeta] = []
    extra: dict[str, Json] = {}
    provenance: Provenance
    media_bytes: int
    media_crc32: int

    @model_validator(mode="after")
    def _consistent(self) -> SampleMeta:
        check_turns(self.conversation, len(self.videos), len(self.audios), len(self.images))
        sounds = [video.audio for video in self.videos if video.audio]
        media: list[VideoMeta | AudioMeta | ImageMeta] = [*self.videos, *self.audios, *self.images, *sounds]
        unknown = {f for m in media for f in m.flags} - FLAGS.keys()
        if unknown:
            raise ValueError(f"unknown flags {sorted(unknown)}; known: {', '.join(FLAGS)}")
        return self


def frame_blobs(blobs: Sequence[bytes]) -> bytes:
    """u32 count | u32 length[count] | blobs."""
    total = 4 + 4 * len(blobs) + sum(map(len, blobs))
    if total > MAX_MEDIA_BYTES:
        raise SchemaError(f"media of {total} bytes; a sample holds at most {MAX_MEDIA_BYTES}")
    return b"".join([struct.pack(f"<{len(blobs) + 1}I", len(blobs), *map(len, blobs)), *blobs])


def unframe_blobs(media: bytes) -> list[bytes]:
    """The inverse of `frame_blobs`; refuses bytes that are missing or left over."""
    if len(media) < 4:
        raise SchemaError(f"media of {len(media)} bytes has no header")
    (count,) = struct.unpack_from("<I", media)
    start = 4 + 4 * count
    if start > len(media):
        raise SchemaError(f"media of {len(media)} bytes cannot list {count} blobs")
    lengths = struct.unpack_from(f"<{count}I", media, 4)
    if start + sum(lengths) != len(media):
        raise SchemaError(f"media has {len(media)} bytes; its header adds up to {start + sum(lengths)}")
    blobs = []
    for length in lengths:
        blobs.append(media[start : start + length])
        start += length
    return blobs


@dataclass(frozen=True)
class PackedVideo:
    """frames: encoded pictures in time order; audio: the encoded sound, or None."""

    frames: list[bytes]
    audio: bytes | None = None


@dataclass(frozen=True)
class PackedSample:
    """A sample with its bytes: meta.videos[i] describes videos[i], and so on."""

    meta: SampleMeta
    videos: list[PackedVideo] = field(default_factory=list)
    audios: list[bytes] = field(default_factory=list)
    images: list[bytes] = field(default_factory=list)

    def as_offline_av(self) -> dict[str, Any]:
        """The dict of the module docstring."""
        videos = []
        for video, meta in zip(self.videos, self.meta.videos, strict=True):
            rate = meta.audio.sample_rate if meta.audio else 0
            videos.append(
                {"frames": video.frames, "audio": video.audio, "video_fps": meta.video_fps, "audio_fps": rate}
            )
        turns = self.meta.conversation
        return {"videos": videos, "audios": self.audios, "images": self.images, "conversations": turns}


def media_blobs(videos: Sequence[PackedVideo], audios: Sequence[bytes], images: Sequence[bytes]) -> list[bytes]:
    """All blobs of a sample, in the order of the module docstring."""
    blobs: list[bytes] = []
    for video in videos:
        blobs += video.frames
        if video.audio is not None:
            blobs.append(video.audio)
    return [*blobs, *audios, *images]


def to_columns(sample: PackedSample) -> dict[str, Any]:
    """The MDS columns of a sample; SchemaError for a meta that does not describe the bytes."""
    _check_counts(sample)
    blobs = media_blobs(sample.videos, sample.audios, sample.images)
    foreign = [type(blob).__name__ for blob in blobs if not isinstance(blob, bytes)]
    if foreign:
        raise SchemaError(f"sample {sample.meta.id}: media are bytes, not {foreign[0]}")
    media = frame_blobs(blobs)
    if (len(media), zlib.crc32(media)) != (sample.meta.media_bytes, sample.meta.media_crc32):
        raise SchemaError(f"sample {sample.meta.id}: meta has another size or crc than its media")
    meta = sample.meta.model_dump(mode="json")
    return {"id": sample.meta.id, "source": sample.meta.source, "media": media, "meta": meta}


def from_columns(columns: dict[str, Any]) -> PackedSample:
    """The sample of one MDS row; refuses unknown, missing or mistyped columns, a wrong crc and another version."""
    meta, blobs = parse_meta(columns), unframe_blobs(columns["media"])
    if zlib.crc32(columns["media"]) != meta.media_crc32:
        raise SchemaError(f"sample {meta.id}: the crc of its media is not the stored one; the shard is damaged")
    rest = iter(blobs)
    try:
        videos = [
            PackedVideo([next(rest) for _ in range(v.num_frames)], next(rest) if v.audio else None) for v in meta.videos
        ]
        audios, images = [next(rest) for _ in meta.audios], [next(rest) for _ in meta.images]
    except (StopIteration, RuntimeError):
        raise SchemaError(f"sample {meta.id}: {len(blobs)} blobs are fewer than its meta describes") from None
    if (left := sum(1 for _ in rest)) != 0:
        raise SchemaError(f"sample {meta.id}: {left} blobs more than its meta describes")
    return PackedSample(meta, videos, audios, images)


def parse_meta(columns: dict[str, Any]) -> SampleMeta:
    """The checked `SampleMeta` of one MDS row, without touching its media."""
    if columns.keys() != COLUMNS.keys():
        raise SchemaError(f"columns {sorted(columns)}; a sample has exactly {sorted(COLUMNS)}")
    types = {"id": str, "source": str, "media": bytes, "meta": dict}
    wrong = {k: type(columns[k]).__name__ for k, t in types.items() if not isinstance(columns[k], t)}
    if wrong:
        raise SchemaError(f"columns of a wrong type: {wrong}")
    version = columns["meta"].get("version")
    if version != SHARD_VERSION:
        raise SchemaError(f"sample {columns['id']} has shard version {version}; this omniloom reads {SHARD_VERSION}")
    try:
        meta = SampleMeta.model_validate(columns["meta"])
    except ValidationError as error:
        faults = [f"{'.'.join(map(str, fault['loc']))}: {fault['msg']}" for fault in error.errors()]
        raise SchemaError(f"sample {columns['id']}: meta: {'; '.join(faults)}") from None
    if (meta.id, meta.source) != (columns["id"], columns["source"]):
        raise SchemaError(f"sample {columns['id']}: id or source differ between column and meta")
    return meta


def _check_counts(sample: PackedSample) -> None:
    meta = sample.meta
    pairs: list[tuple[str, Sequence[Any], Sequence[Any]]] = [
        ("videos", sample.videos, meta.videos),
        ("audios", sample.audios, meta.audios),
        ("images", sample.images, meta.images),
    ]
    for name, blobs, metas in pairs:
        if len(blobs) != len(metas):
            raise SchemaError(f"sample {meta.id}: {len(blobs)} {name} and {len(metas)} descriptors")
    for i, (video, described) in enumerate(zip(sample.videos, meta.videos, strict=True)):
        if len(video.frames) != described.num_frames or (video.audio is None) != (described.audio is None):
            raise SchemaError(f"sample {meta.id}: video {i} has {len(video.frames)} frames, its meta says otherwise")
