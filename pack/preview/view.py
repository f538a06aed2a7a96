"""One packed sample as the page shows it: media on their time axes, conversation, flags, provenance."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

from pack.preview.picture import Thumb, thumbnail
from pack.preview.texts import flag_texts, origin_facts, size
from pack.preview.timeline import Timeline, audio_timeline, video_timeline
from pack.preview.tokens import TokenLayout, TokenPainter
from schemas.conversation import Part as CanonicalPart
from schemas.conversation import Turn as CanonicalTurn
from schemas.sample import ImageMeta, PackedSample


@dataclass(frozen=True)
class Still:
    anchor: str
    title: str
    facts: str
    thumb: Thumb
    flags: list[tuple[str, str]]
    origins: list[tuple[str, list[tuple[str, str]]]]


@dataclass(frozen=True)
class Part:
    """A piece of a turn: a text, or a media slot with the anchor of its medium."""

    kind: str
    text: str
    anchor: str = ""


@dataclass(frozen=True)
class Turn:
    role: str
    parts: list[Part]


@dataclass(frozen=True)
class SampleView:
    anchor: str
    id: str
    source: str
    facts: str
    search: str
    flags: list[str]
    timelines: list[Timeline]
    stills: list[Still]
    turns: list[Turn]
    extra: str
    provenance: list[tuple[str, str]]
    tokens: TokenLayout | None = None


def view_sample(
    sample: PackedSample, number: int, max_frames: int, max_sound_bytes: int, painter: TokenPainter | None = None
) -> SampleView:
    """The view of one sample; number: its place on the page, from 0, which names its anchors; painter: lays out its
    tokens."""
    meta, anchor = sample.meta, f"s{number}"
    timelines = [
        video_timeline(f"{anchor}-video{i}", f"video {i + 1}", video, described, max_frames, max_sound_bytes)
        for i, (video, described) in enumerate(zip(sample.videos, meta.videos, strict=True))
    ]
    timelines += [
        audio_timeline(f"{anchor}-audio{i}", f"audio {i + 1}", data, described, max_sound_bytes)
        for i, (data, described) in enumerate(zip(sample.audios, meta.audios, strict=True))
    ]
    stills = [
        _still(f"{anchor}-image{i}", f"image {i + 1}", data, described)
        for i, (data, described) in enumerate(zip(sample.images, meta.images, strict=True))
    ]
    flags = sorted({name for pairs in [*(t.flags for t in timelines), *(i.flags for i in stills)] for name, _ in pairs})
    made = meta.provenance
    versions = ", ".join(f"{name} {version}" for name, version in made.versions.items())
    return SampleView(
        anchor=anchor,
        id=meta.id,
        source=meta.source,
        facts=_sample_facts(sample),
        search=" ".join([meta.id, meta.source, *flags]).lower(),
        flags=flags,
        timelines=timelines,
        stills=stills,
        turns=_turns(anchor, meta.conversation),
        extra=json.dumps(meta.extra, indent=2, ensure_ascii=False) if meta.extra else "",
        provenance=[
            ("manifest", f"{made.manifest}, row {made.row}"),
            ("preprocessor", made.preprocessor),
            ("versions", versions),
            ("media", f"{meta.media_bytes:,} bytes, crc32 {meta.media_crc32:08x}"),
            ("shard version", str(meta.version)),
        ],
        tokens=painter.layout(meta) if painter is not None else None,
    )


def _still(anchor: str, title: str, data: bytes, meta: ImageMeta) -> Still:
    facts = f"{meta.width} x {meta.height}, {meta.codec.upper()}"
    return Still(anchor, title, facts, thumbnail(data), flag_texts(meta.flags), [("image", origin_facts(meta.origin))])


def _sample_facts(sample: PackedSample) -> str:
    counts = [(len(sample.videos), "video"), (len(sample.audios), "audio"), (len(sample.images), "image")]
    named = [f"{n} {word}{'s' * (n != 1)}" for n, word in counts if n] or ["text only"]
    return ", ".join([*named, size(sample.meta.media_bytes)])


def _turns(anchor: str, conversation: Sequence[CanonicalTurn]) -> list[Turn]:
    numbers = {"video": 0, "audio": 0, "image": 0}
    turns = []
    for turn in conversation:
        pieces = []
        for kind, payload in cast("list[CanonicalPart]", turn[1:]):
            if kind == "text":
                pieces.append(Part("text", payload or ""))
            else:
                pieces.append(Part(kind, f"{kind} {numbers[kind] + 1}", f"{anchor}-{kind}{numbers[kind]}"))
                numbers[kind] += 1
        turns.append(Turn(str(turn[0]), pieces))
    return turns
