"""Histograms as small inline SVG that takes its colours from the page, so that it follows light and dark."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from markupsafe import Markup, escape

from pack.preview.texts import size

WIDTH, HEIGHT, BASE = 200, 100, 80  # of the drawing; bars stand on BASE, labels lie under it


@dataclass(frozen=True)
class Histogram:
    """bars: (what the bar counts, its count); low, high: labels at the two ends of the axis; summary: one line."""

    title: str
    bars: list[tuple[str, int]]
    low: str
    high: str
    summary: str


def of_counts(title: str, unit: str, edges: Sequence[float], counts: Sequence[int]) -> Histogram | None:
    """From counts per bin: counts[i] lies between edges[i] and edges[i + 1]. None when all counts are 0."""
    total = sum(counts)
    if not total:
        return None
    filled = [i for i, n in enumerate(counts) if n]
    first, last = filled[0], filled[-1]  # empty bins at both ends are left out
    bars = [(between(edges[i], edges[i + 1], unit), counts[i]) for i in range(first, last + 1)]
    passed, median = 0, first
    for i in filled:
        passed += counts[i]
        if 2 * passed >= total:
            median = i
            break
    summary = f"{counted(total)}, median in {between(edges[median], edges[median + 1], unit)}"
    low, high = with_unit(edges[first], unit), with_unit(edges[last + 1], unit)
    return Histogram(title, bars, low, high if high != low else "", summary)


def of_numbers(title: str, unit: str, values: Sequence[float], bins: int = 16) -> Histogram | None:
    """Of the values themselves; None without values."""
    if not len(values):
        return None
    counts, edges = np.histogram(np.asarray(values, dtype="float64"), bins)
    histogram = of_counts(title, unit, [float(e) for e in edges], [int(n) for n in counts])
    assert histogram is not None
    return replace(histogram, summary=f"{counted(len(values))}, median {with_unit(float(np.median(values)), unit)}")


def counted(number: int) -> str:
    return f"{number:,} value{'s' * (number != 1)}"


def between(low: float, high: float, unit: str) -> str:
    """'2 s to 4 s'; one number when both ends are the same."""
    first, last = with_unit(low, unit), with_unit(high, unit)
    return first if first == last else f"{first} to {last}"


def with_unit(value: float, unit: str) -> str:
    return size(int(value)) if unit == "bytes" else f"{short(value)} {unit}".strip()


def draw(histogram: Histogram) -> Markup:
    """The SVG; its accessible name is the title with the summary."""
    most = max((count for _, count in histogram.bars), default=0) or 1
    step = WIDTH / len(histogram.bars)
    gap = min(2.0, step / 5)
    bars = []
    for i, (name, count) in enumerate(histogram.bars):
        height = (BASE - 14) * count / most
        bars.append(
            Markup('<rect x="{:.1f}" y="{:.1f}" width="{:.1f}" height="{:.1f}"><title>{}: {:,}</title></rect>').format(
                i * step, BASE - height, min(step - gap, 46), height, name, count
            )
        )
    label = escape(f"{histogram.title}: {histogram.summary}")
    return Markup(
        '<svg class="histogram" viewBox="0 0 {w} {h}" role="img" aria-label="{label}">'
        '<text x="0" y="10">{most:,}</text><line x1="0" y1="{b}" x2="{w}" y2="{b}"/><g>{bars}</g>'
        '<text x="0" y="{t}">{low}</text><text x="{w}" y="{t}" text-anchor="end">{high}</text></svg>'
    ).format(
        w=WIDTH, h=HEIGHT, b=BASE, t=BASE + 16, label=label, most=most, bars=Markup("").join(bars),
        low=histogram.low, high=histogram.high,
    )  # fmt: skip


def short(value: float) -> str:
    """A number in at most four significant digits: 0.5, 23.98, 1,280, 1.2e+06."""
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    if abs(value) >= 1e6:
        return f"{value:.2g}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
