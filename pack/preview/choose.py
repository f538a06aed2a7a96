"""Which samples the page shows: spread over the dataset, and with one of every kind that it holds. No randomness."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from pack.preview.timeline import spread

Kinds = frozenset[tuple[str, str]]

MOST = 200  # samples on one page, however many sources and flags there are


def kinds_of(row: Mapping[str, Any]) -> Kinds:
    """What makes a sample worth a look, from its row of the rows table: its source, its flags, its media."""
    media = [name for name in ("videos", "audios", "images") if row[f"num_{name}"]] or ["text only"]
    if row["num_videos"] and not row["audio_s"]:
        media.append("silent video")
    named = [("source", row["source"]), *(("flag", f) for f in row["flags"]), *(("media", m) for m in media)]
    return frozenset(named)


def choose(samples: Iterable[tuple[int, Kinds]], total: int, wanted: int) -> list[int]:
    """Positions of the samples to show, rising. samples: (position, kinds) of all `total` samples or of a part of them.

    At least one sample of every kind, then evenly spread ones up to `wanted`; more than `wanted` only when the kinds
    need it, never over MOST.
    """
    first: dict[tuple[str, str], int] = {}
    kinds: dict[int, Kinds] = {}
    counts: Counter[tuple[str, str]] = Counter()
    for position, found in samples:
        counts.update(found)
        for kind in found:
            if first.setdefault(kind, position) == position:
                kinds[position] = found
    chosen: set[int] = set()
    covered: set[tuple[str, str]] = set()
    # the rarest kinds first: their samples often show the common ones as well; flags before sources
    for kind in sorted(first, key=lambda k: (k[0] == "source", counts[k], first[k], k)):
        if kind not in covered and len(chosen) < MOST:
            chosen.add(first[kind])
            covered |= kinds[first[kind]]
    for position in [*spread(total, wanted), *range(total)]:
        if len(chosen) >= wanted:
            break
        chosen.add(position)
    return sorted(chosen)
