"""What the page says about the dataset as a whole."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pack.preview import plots
from pack.preview.texts import length, size
from schemas.dataset import DatasetCard, Reject
from schemas.yaml_source import dump_yaml

MOST_REJECTED = 200  # rows in the table of rejected rows
MOST_SOURCES = 12  # named in the details
TITLES = {
    "video_s": "Video duration",
    "audio_s": "Sound duration",
    "video_fps": "Frame rate",
    "frames": "Frames per video",
    "width": "Frame width",
    "height": "Frame height",
    "text_chars": "Text per sample",
    "media_bytes": "Media per sample",
}
UNITS = {"Hz": "fps", "frames": "", "characters": "chars"}


@dataclass(frozen=True)
class Tile:
    """tone: good | bad | empty."""

    label: str
    value: str
    tone: str = ""


@dataclass(frozen=True)
class PageFacts:
    """rejects_by_reason: the most frequent first; rejected: the first MOST_REJECTED of num_rejected rows; details: how
    the dataset was made, as (name, value)."""

    name: str
    made_by: str
    tiles: list[Tile]
    num_rejected: int
    rejects_by_reason: list[tuple[str, int]]
    rejected: Sequence[Reject]
    histograms: list[plots.Histogram]
    details: list[tuple[str, str]]
    config: str


def facts_of(card: DatasetCard, rejects: Sequence[Reject], loudness_dbfs: Sequence[float]) -> PageFacts:
    """loudness_dbfs: RMS level of every sound on the page; only those are decoded."""
    totals = card.totals
    num_rejected = sum(totals.rejected.values())
    histograms = [
        plots.of_counts(TITLES.get(name, name), UNITS.get(h.unit, h.unit), h.edges, h.counts)
        for name, h in card.histograms.items()
    ]
    loudness = plots.of_numbers("Loudness (RMS)", "dBFS", loudness_dbfs)
    return PageFacts(
        name=card.name,
        made_by=card.versions.get("omniloom", ""),
        tiles=_tiles(card, num_rejected),
        num_rejected=num_rejected,
        rejects_by_reason=ranked(totals.rejected),
        rejected=rejects[:MOST_REJECTED],
        histograms=[h for h in (*histograms, loudness) if h],
        details=[
            ("made", card.created),
            ("fingerprint", card.fingerprint),
            ("shards", f"{card.shards:,} with {card.bytes:,} bytes; shard version {card.shard_version}"),
            ("partitions", f"{card.partitions:,} of {card.partitions_planned:,} committed"),
            ("sources", _some([f"{name} ({n:,})" for name, n in ranked(card.sources)])),
            ("flags", ", ".join(f"{name} ({n:,})" for name, n in ranked(totals.flags)) or "none"),
            ("versions", ", ".join(f"{name} {version}" for name, version in card.versions.items())),
        ],
        config=dump_yaml({"pack": card.config}),
    )


def _tiles(card: DatasetCard, num_rejected: int) -> list[Tile]:
    totals = card.totals
    tiles = [
        Tile("Rows", f"{totals.rows_in:,}"),
        Tile("Packed", f"{totals.rows_packed:,}", "good" if totals.rows_packed else ""),
        Tile("Rejected", f"{num_rejected:,}", "bad" if num_rejected else ""),
    ]
    if totals.samples != totals.rows_packed:
        tiles.append(Tile("Samples", f"{totals.samples:,}"))
    tiles += [Tile("Video", length(totals.video_s)), Tile("Sound", length(totals.audio_s))]
    tiles += [Tile("Frames", f"{totals.frames:,}"), Tile("Media", size(totals.media_bytes))]
    tiles.append(Tile("Shards", f"{card.shards:,}"))
    if not card.complete:
        tiles.append(Tile("Partitions", f"{card.partitions:,} of {card.partitions_planned:,}", "bad"))
    return tiles


def ranked(counts: Mapping[str, int]) -> list[tuple[str, int]]:
    return sorted(((k, n) for k, n in counts.items() if n), key=lambda item: (-item[1], item[0]))


def _some(names: list[str]) -> str:
    more = f", and {len(names) - MOST_SOURCES:,} more" if len(names) > MOST_SOURCES else ""
    return ", ".join(names[:MOST_SOURCES]) + more
