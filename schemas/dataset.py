"""What a packed dataset says about itself: rows table, partition commits, rejected rows, dataset card.

    DATASET/parts/<partition>/   shards, rows.parquet, rejects.jsonl, _COMMIT (a `PartitionCommit`)
    DATASET/dataset.json         the `DatasetCard`

All are strict records with JSON both ways: `record.to_json()` and `Record.from_json(text)`; a file that misses a field,
has one more or another version is refused with a SchemaError.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, JsonValue, ValidationError, field_validator, model_validator

from schemas.errors import REJECT_REASONS, SchemaError
from schemas.sample import FLAGS, AudioMeta, ImageMeta, SampleMeta, VideoMeta

DATASET_VERSION: Literal[1] = 1

Stage = Literal["row", "preprocess", "fetch", "video", "audio", "image", "encode", "isolate"]

Count = Annotated[int, Field(ge=0)]
Amount = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Hash64 = Annotated[str, Field(pattern=r"^[0-9a-f]{16}$")]

# Columns of rows.parquet: name -> type, in pyarrow's names. One row per sample, in the order of the shards; `meta` is
# the whole `SampleMeta` as JSON, the other columns are what lengths, statistics and audits filter by.
ROWS_COLUMNS: dict[str, str] = {
    "id": "string",
    "source": "string",
    "shard": "string",
    "index_in_shard": "int64",
    "manifest": "string",
    "row": "int64",
    "num_videos": "int32",
    "num_audios": "int32",
    "num_images": "int32",
    "num_frames": "int64",
    "video_s": "float64",
    "audio_s": "float64",
    "text_chars": "int64",
    "media_bytes": "int64",
    "media_crc32": "int64",
    "flags": "list<string>",
    "meta": "string",
}

R = TypeVar("R", bound="JsonRecord")


class JsonRecord(BaseModel):
    """Base: frozen, no unknown key, no silent conversion; JSON in both directions."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    def to_json(self, indent: int | None = None) -> str:
        """Keys in the order of the fields; the same record gives the same text."""
        return json.dumps(self.model_dump(mode="json"), ensure_ascii=False, indent=indent, allow_nan=False)

    @classmethod
    def from_json(cls: type[R], text: str | bytes, name: str = "") -> R:
        """SchemaError, with `name` (the file), for text that is not exactly such a record."""
        try:
            return cls.model_validate_json(text)
        except ValidationError as error:
            faults = [f"{'.'.join(map(str, fault['loc'])) or 'text'}: {fault['msg']}" for fault in error.errors()]
            raise SchemaError(f"{name or cls.__name__}: {'; '.join(faults)}") from None


class FileEntry(JsonRecord):
    """A file beside a commit. xxh3_64: of its bytes, 16 hex digits."""

    bytes: Count
    xxh3_64: Hash64


class Reject(JsonRecord):
    """A manifest row that was not packed. row: number in the manifest file, from 0; media: uris of the row; attempts:
    how often it was tried."""

    id: str
    source: str
    manifest: str
    row: Count
    stage: Stage
    reason: str
    detail: str
    media: list[str] = []
    attempts: Annotated[int, Field(ge=1)] = 1

    @field_validator("reason")
    @classmethod
    def _known(cls, reason: str) -> str:
        if reason not in REJECT_REASONS:
            raise ValueError(f"unknown reject reason {reason!r}; known: {', '.join(REJECT_REASONS)}")
        return reason


class Totals(JsonRecord):
    """Sums over samples. rows_in = rows_packed + rejected; one row makes several samples under video.split_s;
    video_s, audio_s: seconds of picture and of stored sound (a video's own and standalone); flags: number of media per
    flag."""

    rows_in: Count = 0
    rows_packed: Count = 0
    samples: Count = 0
    rejected: dict[str, Count] = {}
    media_bytes: Count = 0
    video_s: Amount = 0.0
    audio_s: Amount = 0.0
    frames: Count = 0
    videos: Count = 0
    audios: Count = 0
    images: Count = 0
    flags: dict[str, Count] = {}

    @model_validator(mode="after")
    def _adds_up(self) -> Totals:
        unknown = sorted((self.rejected.keys() - REJECT_REASONS.keys()) | (self.flags.keys() - FLAGS.keys()))
        if unknown:
            raise ValueError(f"unknown reject reasons or flags: {', '.join(unknown)}")
        if self.rows_in != self.rows_packed + sum(self.rejected.values()):
            lost = f"{self.rows_packed} packed and {sum(self.rejected.values())} rejected"
            raise ValueError(f"{self.rows_in} rows in, but {lost}")
        if self.samples < self.rows_packed:
            raise ValueError(f"{self.rows_packed} rows packed, but only {self.samples} samples")
        return self

    @property
    def video_hours(self) -> float:
        return self.video_s / 3600

    @property
    def audio_hours(self) -> float:
        return self.audio_s / 3600


class Histogram(JsonRecord):
    """counts[i]: number of values in [edges[i], edges[i + 1]), the last one closed; unit: of the edges."""

    unit: str
    edges: list[float]
    counts: list[Count]

    @model_validator(mode="after")
    def _fits(self) -> Histogram:
        if len(self.edges) != len(self.counts) + 1 or sorted(self.edges) != self.edges:
            raise ValueError(f"{len(self.counts)} counts need {len(self.counts) + 1} rising edges, not {self.edges}")
        return self


class PartitionCommit(JsonRecord):
    """The last file of a partition: it is there when, and only when, the partition is whole.

    partition: number in the plan; key: of the rows it holds; fingerprint: of everything that changes bytes; files: name
    relative to the partition -> size and hash, this file left out; sources: samples per source; histograms: parts of
    the card's, so that merging need not open the rows tables.
    """

    version: Literal[1] = DATASET_VERSION
    partition: Count
    key: str
    fingerprint: str
    totals: Totals
    files: dict[str, FileEntry]
    sources: dict[str, Count] = {}
    histograms: dict[str, Histogram] = {}
    versions: dict[str, str]


class DatasetCard(JsonRecord):
    """dataset.json. bytes: of all shard files; partitions: numbers of committed and of planned ones; columns: of the
    MDS shards; rows_columns: of the rows table; config: the resolved configuration."""

    version: Literal[1] = DATASET_VERSION
    shard_version: Count
    name: str
    created: str
    fingerprint: str
    totals: Totals
    bytes: Count
    shards: Count
    partitions: Count
    partitions_planned: Count
    sources: dict[str, Count] = {}
    histograms: dict[str, Histogram] = {}
    versions: dict[str, str]
    columns: dict[str, str]
    rows_columns: dict[str, str] = ROWS_COLUMNS
    config: dict[str, JsonValue]

    @property
    def complete(self) -> bool:
        return self.partitions == self.partitions_planned


def rows_record(meta: SampleMeta, shard: str, index_in_shard: int) -> dict[str, Any]:
    """The row of the rows table for one sample: a value for each of `ROWS_COLUMNS`."""
    sounds = [*(video.audio for video in meta.videos if video.audio), *meta.audios]
    texts = [part[1] for turn in meta.conversation for part in turn[1:] if part[0] == "text"]
    return {
        "id": meta.id,
        "source": meta.source,
        "shard": shard,
        "index_in_shard": index_in_shard,
        "manifest": meta.provenance.manifest,
        "row": meta.provenance.row,
        "num_videos": len(meta.videos),
        "num_audios": len(meta.audios),
        "num_images": len(meta.images),
        "num_frames": sum(video.num_frames for video in meta.videos),
        "video_s": float(sum(video.duration_s for video in meta.videos)),
        "audio_s": float(sum(sound.duration_s for sound in sounds)),
        "text_chars": sum(len(text or "") for text in texts),
        "media_bytes": meta.media_bytes,
        "media_crc32": meta.media_crc32,
        "flags": sorted(set(_flags(meta))),
        "meta": meta.model_dump_json(),
    }


def totals_of(samples: Iterable[SampleMeta], rows_packed: int, rejects: Sequence[Reject]) -> Totals:
    """Totals of one partition. rows_packed: rows that made the samples."""
    records = [rows_record(meta, "", 0) | {"all_flags": _flags(meta)} for meta in samples]
    flags, rejected = _tally(flag for r in records for flag in r["all_flags"]), _tally(r.reason for r in rejects)
    return Totals(
        rows_in=rows_packed + len(rejects),
        rows_packed=rows_packed,
        samples=len(records),
        rejected=rejected,
        media_bytes=sum(r["media_bytes"] for r in records),
        video_s=float(sum(r["video_s"] for r in records)),
        audio_s=float(sum(r["audio_s"] for r in records)),
        frames=sum(r["num_frames"] for r in records),
        videos=sum(r["num_videos"] for r in records),
        audios=sum(r["num_audios"] for r in records),
        images=sum(r["num_images"] for r in records),
        flags=flags,
    )


def add_totals(parts: Iterable[Totals]) -> Totals:
    """The sum, field by field."""
    sums: dict[str, Any] = Totals().model_dump()
    for part in parts:
        for name, value in part.model_dump().items():
            if isinstance(value, dict):
                for key, count in value.items():
                    sums[name][key] = sums[name].get(key, 0) + count
            else:
                sums[name] += value
    return Totals.model_validate({n: dict(sorted(v.items())) if isinstance(v, dict) else v for n, v in sums.items()})


def _flags(meta: SampleMeta) -> list[str]:
    """The flags of every medium of a sample, a flag as often as it stands."""
    sounds = [video.audio for video in meta.videos if video.audio]
    media: list[VideoMeta | AudioMeta | ImageMeta] = [*meta.videos, *sounds, *meta.audios, *meta.images]
    return [flag for medium in media for flag in medium.flags]


def _tally(names: Iterable[str]) -> dict[str, int]:
    counts: dict[str, int] = {}
    for name in names:
        counts[name] = counts.get(name, 0) + 1
    return dict(sorted(counts.items()))
