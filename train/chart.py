"""One line chart as SVG."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

WIDTH, HEIGHT = 460, 220
LEFT, RIGHT, TOP, BOTTOM = 52, 452, 10, 196
MAX_POINTS = 600  # per curve; more are averaged
HEAD, FOOT = 24, 26  # of a chart in a file of its own: title and legend
FILE_STYLE = """
:root { --c0: #2563eb; --c1: #d9480f; --c2: #2b8a3e; --c3: #9c36b5; --c4: #a16207; --c5: #0b7285; --c6: #c2255c;
  --c7: #5f3dc4 }
svg { background: #fff } text { fill: #666; font: 11px system-ui, sans-serif } .title { fill: #333; font-size: 13px }
.grid { stroke: #8884 } .raw { opacity: .35 } .cursor { display: none }
path { fill: none; stroke-width: 1.6; stroke-linejoin: round }
"""


@dataclass(frozen=True)
class Curve:
    """points: (step, value), by rising step."""

    name: str
    points: Sequence[tuple[int, float]]


def chart_svg(
    curves: Sequence[Curve], raw: Sequence[Curve] = (), *, from_zero: bool, ceiling: float | None = None
) -> tuple[str, dict[str, Any]]:
    """(the picture, what a cursor on it shows). The first curve lies on top. raw: drawn faintly below; from_zero: the
    axis begins at 0; ceiling: the axis is made for values up to it, larger ones lie at its end."""
    thin = [Curve(curve.name, thinned(curve.points)) for curve in curves]
    faint = [Curve(curve.name, thinned(curve.points)) for curve in raw]
    values = [value for curve in (*thin, *faint) for _, value in curve.points]
    steps = sorted({step for curve in thin for step, _ in curve.points})
    first, last = steps[0], steps[-1]
    low, high = min(values), max(values) if ceiling is None else ceiling
    ticks = axis_ticks(min(low, 0.0) if from_zero else low, high)
    bottom, top = ticks[0], ticks[-1]

    def x(step: float) -> float:
        return LEFT + (step - first) / ((last - first) or 1) * (RIGHT - LEFT)

    def y(value: float) -> float:
        return BOTTOM - (min(value, top) - bottom) / (top - bottom) * (BOTTOM - TOP)

    parts = [f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img">']
    for tick, said in zip(ticks, tick_labels(ticks), strict=True):
        at = f"{y(tick):.1f}"
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{RIGHT}" y1="{at}" y2="{at}"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{y(tick) + 4:.1f}" text-anchor="end">{said}</text>')
    for step in step_ticks(first, last):
        anchor = "end" if x(step) > RIGHT - 20 else "middle"
        parts.append(f'<text x="{x(step):.1f}" y="{BOTTOM + 17}" text-anchor="{anchor}">{step:,}</text>')
    for kind, group in (("raw", faint), ("", thin)):
        for number, curve in reversed(list(enumerate(group))):
            points = " L".join(f"{x(step):.1f} {y(value):.1f}" for step, value in curve.points)
            dot = " l0.01 0" if len(curve.points) == 1 else ""
            style = f"stroke: var(--c{number % 8}); stroke-linecap: round" + ("; stroke-width: 5" if dot else "")
            parts.append(f'<path class="{kind}" style="{style}" d="M{points}{dot}"/>')
    parts.append(f'<line class="cursor" y1="{TOP}" y2="{BOTTOM}" x1="0" x2="0"/></svg>')
    by_step = [{step: label(value) for step, value in curve.points} for curve in thin]
    data = {
        "width": WIDTH,
        "frame": [LEFT, RIGHT],
        "range": [first, last],
        "steps": steps,
        "values": [[found.get(step) for step in steps] for found in by_step],
    }
    return "".join(parts), data


def chart_file(title: str, curves: Sequence[Curve], *, from_zero: bool) -> str:
    """An SVG that stands alone, with a legend."""
    picture, _ = chart_svg(curves, from_zero=from_zero)
    placed = picture.replace("<svg ", f'<svg y="{HEAD}" width="{WIDTH}" height="{HEIGHT}" ', 1)
    whole = HEAD + HEIGHT + FOOT
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {whole}" width="{2 * WIDTH}">',
        f'<style>{FILE_STYLE}</style><text class="title" x="{LEFT}" y="17">{html.escape(title)}</text>{placed}',
    ]
    for number, curve in enumerate(curves):
        x = LEFT + number * (RIGHT - LEFT) / len(curves)
        parts.append(
            f'<path style="stroke: var(--c{number % 8}); stroke-width: 4" d="M{x:.1f} {whole - 14} h12"/>'
            f'<text x="{x + 17:.1f}" y="{whole - 10}">{html.escape(curve.name)}</text>'
        )
    return "".join([*parts, "</svg>\n"])


def thinned(points: Sequence[tuple[int, float]]) -> list[tuple[int, float]]:
    """At most MAX_POINTS: means of runs of equal length; the last point stays as it is."""
    if len(points) <= MAX_POINTS:
        return list(points)
    run = math.ceil((len(points) - 1) / (MAX_POINTS - 1))
    found = []
    for start in range(0, len(points) - 1, run):
        part = points[start : min(start + run, len(points) - 1)]
        found.append((part[len(part) // 2][0], sum(value for _, value in part) / len(part)))
    return [*found, points[-1]]


def axis_ticks(low: float, high: float) -> list[float]:
    """Round values from below `low` to above `high`, 4 to 7 of them."""
    if low == high:
        low, high = (low - abs(low) * 0.1, high + abs(high) * 0.1) if low else (0.0, 1.0)
    step = _round_step((high - low) / 5)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [i * step for i in range(first, max(last, first + 1) + 1)]


def step_ticks(first: int, last: int) -> list[int]:
    """Round steps inside the range, its beginning where there is no other."""
    step = max(int(_round_step((last - first) / 5)), 1) if last > first else 1
    found = [i for i in range(math.ceil(first / step) * step, last + 1, step)]
    return found or [first]


def tick_labels(ticks: Sequence[float]) -> list[str]:
    """With as many digits as it takes to tell them apart."""
    for digits in range(4, 17):
        found = [label(tick, digits) for tick in ticks]
        if len(set(found)) == len(found):
            break
    return found


def label(value: float, digits: int = 4) -> str:
    """`0.0123`, `1.2k`, `3.4M`, `1e-05`. digits: significant ones, one less of very small and large values."""
    size = abs(value)
    if size >= 1e15 or 0 < size < 1e-3:
        return f"{value:.{digits - 1}g}"
    for limit, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e4, "k")):
        if size >= limit:
            return f"{value / (1e3 if letter == 'k' else limit):.{digits}g}{letter}"
    return f"{value:.{digits}g}"


def _round_step(about: float) -> float:
    """1, 2 or 5 times a power of ten, not below `about`."""
    power = 10.0 ** math.floor(math.log10(about))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= about * (1 - 1e-9))
