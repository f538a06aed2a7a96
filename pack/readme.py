"""README.md of a packed dataset: what is in it, what was left out and why, and how to read it."""

from __future__ import annotations

from schemas.dataset import DatasetCard, Histogram
from schemas.errors import REJECT_REASONS

_BAR = 30  # characters of the longest bar


def readme_text(card: DatasetCard) -> str:
    """Markdown; the same card gives the same text."""
    totals = card.totals
    lines = [
        f"# {card.name}",
        "",
        "Paired audio/video samples in MosaicML Streaming (MDS) shards, packed by omniloom.",
        "",
        "| | |",
        "| --- | --- |",
        f"| manifest rows | {totals.rows_in:,} |",
        f"| packed | {totals.rows_packed:,} |",
        f"| rejected | {sum(totals.rejected.values()):,} |",
        f"| samples | {totals.samples:,} |",
        f"| video | {totals.video_hours:.2f} h in {totals.videos:,} clips, {totals.frames:,} frames |",
        f"| sound | {totals.audio_hours:.2f} h ({totals.audios:,} standalone) |",
        f"| images | {totals.images:,} |",
        f"| size | {human_bytes(card.bytes)} in {plural(card.shards, 'shard')} |",
        f"| partitions | {card.partitions:,} of {card.partitions_planned:,} |",
        f"| fingerprint | `{card.fingerprint}` |",
        f"| created | {card.created} |",
    ]
    if not card.complete:
        lines += ["", "**Incomplete:** partitions are missing; it was merged with `--allow-partial`."]
    if totals.rejected:
        lines += ["", "## Rejected rows", "", "| reason | rows | meaning |", "| --- | ---: | --- |"]
        lines += [f"| {reason} | {count:,} | {REJECT_REASONS[reason]} |" for reason, count in totals.rejected.items()]
        lines += ["", "`omniloom pack rejects .` lists them; `omniloom pack retry-rejected .` tries them again."]
    if totals.flags:
        lines += ["", "## Flags of media", "", "| flag | media |", "| --- | ---: |"]
        lines += [f"| {flag} | {count:,} |" for flag, count in totals.flags.items()]
    if card.sources:
        lines += ["", "## Sources", "", "| source | samples |", "| --- | ---: |"]
        lines += [f"| {source} | {count:,} |" for source, count in card.sources.items()]
    for name, found in card.histograms.items():
        lines += ["", f"## {name} ({found.unit})", "", "```", *_bars(found), "```"]
    lines += ["", "## Reading it", "", *_reading(), ""]
    return "\n".join(lines)


def _reading() -> list[str]:
    return [
        "```python",
        "from streaming import StreamingDataset",
        "from schemas.sample import from_columns",
        "",
        'dataset = StreamingDataset(local=".", batch_size=1)',
        "sample = from_columns(dataset[0])   # frames, sound, times, conversation",
        "```",
    ]


def _bars(found: Histogram) -> list[str]:
    most = max([*found.counts, 1])
    filled = [i for i, count in enumerate(found.counts) if count]
    lines = []
    for i in range(filled[0], filled[-1] + 1) if filled else ():
        low, high, count = found.edges[i], found.edges[i + 1], found.counts[i]
        bar = "#" * max(round(_BAR * count / most), 1 if count else 0)
        lines.append(f"{low:>10g} - {high:<10g} {count:>10,} {bar}".rstrip())
    return lines


def human_bytes(size: float) -> str:
    """'3.4 MB'; powers of 1000."""
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if size < 1000 or unit == "TB":
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    raise AssertionError("unreachable")


def plural(count: int, word: str) -> str:
    """'1 shard', '2,000 shards'."""
    return f"{count:,} {word}{'' if count == 1 else 's'}"
