"""How a comparison of two dumps is told: a table, and a picture of how far the tokens are apart."""

from __future__ import annotations

import html
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from convert.output import write_atomic
from train.chart import axis_ticks
from train.logprob_compare import LogprobAgreement
from train.logprob_read import TokenTable

WIDTH = 640
LEFT, RIGHT, TOP, BOTTOM = 56, 626, 34, 256
PER_DECADE = 4  # bars
SLOT, SLOT_WIDTH = 1.0, 0.5  # left of the axis, in decades: room for the bar of 0, and its width
LETTER = 6.8  # mean width at 12 px
COLOURS = ("#2563eb", "#d9480f", "#2b8a3e", "#9c36b5", "#a16207")
STYLE = (
    "svg { background: #fff; font: 12px system-ui, sans-serif } text { fill: #555 }"
    " .title { fill: #222; font-size: 14px }"
    " .grid { stroke: #ddd } path { fill: none; stroke-width: 1.6 }"
    " @media (prefers-color-scheme: dark) { svg { background: #16181d } text { fill: #aaa } .title { fill: #eee }"
    " .grid { stroke: #333 } }"
)


def agreement_lines(found: LogprobAgreement, first: TokenTable, second: TokenTable) -> list[str]:
    """d = log-probability in the first dump - that in the second."""
    width = max(len("media"), *(len(f"{group.by} {group.name}") for group in found.groups))
    lines = [
        f"{'tokens of':<{width}} {'count':>9} {'mean |d|':>10} {'max |d|':>10} {'mean d':>10}  worst sample, mean |d|"
    ]
    for group in found.groups:
        name = group.name if group.by == group.name else f"{group.by} {group.name}"
        lines.append(
            f"{name:<{width}} {group.count:>9} {group.mean_abs:>10.3g} {group.max_abs:>10.3g} {group.mean:>10.2g}  "
            f"{group.worst_sample}, {group.worst_sample_mean_abs:.3g}"
        )
    far = found.groups[0].largest
    lines.append(
        f"furthest apart: {far.id} at {far.index}"
        + ("" if far.token is None else f", token {far.token}")
        + f": {far.first:.6g} and {far.second:.6g}"
    )
    for row in found.features:
        alone = f", {row.alone} media in one dump alone" if row.alone else ""
        lines.append(
            f"features of {row.kind}, {row.part}: {row.count} media, mean |d| {row.mean_abs:.3g}, max |d| "
            f"{row.max_abs:.3g}, {row.relative:.3g} of the greatest value, most in {row.worst or 'none'}{alone}"
        )
    for table, (tokens, samples) in ((first, found.only_first), (second, found.only_second)):
        if tokens:
            lines.append(f"only in {table.path}: {tokens} tokens; {samples} samples as a whole")
        if table.without:
            lines.append(f"{table.path}: {table.without} tokens have no log-probability and are left out")
    if found.untold:
        lines.append(f"{found.untold} tokens were matched by their place alone: one dump does not tell their ids")
    return lines


def write_histogram(path: Path, found: LogprobAgreement) -> None:
    """An SVG: share of the tokens of each modality by |d|, on a logarithmic axis."""
    write_atomic(path, histogram_svg(found).encode())


def histogram_svg(found: LogprobAgreement) -> str:
    """Tokens that are exactly equal have a bar of their own, left of the axis."""
    size = np.abs(found.differences.astype(np.float64))
    low, high = _decades(size)
    names, codes = found.kinds
    present = [(name, size[codes == code]) for code, name in enumerate(names) if (codes == code).any()]
    shares = {name: _shares(values, low, high) for name, values in present}
    ticks = axis_ticks(0.0, 100 * max(float(share.max()) for share in shares.values()))
    parts = [
        f'<text class="title" x="{LEFT}" y="20">share of the tokens of each modality by |d|: '
        f"{html.escape(Path(found.first).name)} and {html.escape(Path(found.second).name)}</text>",
    ]
    below = "less" if ((size > 0) & (size < 10.0**low)).any() else "0"
    places = [(low - SLOT + SLOT_WIDTH / 2, below), *((power, f"1e{power}") for power in range(low, high + 1))]
    for power, said in places:
        x = _x(power, low, high)
        if said != below:
            parts.append(f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{TOP}" y2="{BOTTOM}"/>')
        parts.append(f'<text x="{x:.1f}" y="{BOTTOM + 17}" text-anchor="middle">{said}</text>')
    parts.append(f'<text x="{(LEFT + RIGHT) / 2}" y="{BOTTOM + 34}" text-anchor="middle">|d|, nats</text>')
    for tick in ticks:
        y = BOTTOM - tick / ticks[-1] * (BOTTOM - TOP)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{tick:.6g}%</text>')
    for number, share in enumerate(shares.values()):
        path = _bars(100 * share / ticks[-1], low, high)
        parts.append(f'<path stroke="{COLOURS[number % len(COLOURS)]}" d="{path}"/>')
    legend, height = _legend([f"{name}, mean {float(values.mean()):.2g}" for name, values in present])
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img"><style>{STYLE}</style>'
    return "".join([head, *parts, *legend, "</svg>\n"])


def _legend(entries: Sequence[str]) -> tuple[list[str], int]:
    """(marks with texts, in rows that are not wider than the picture; the height of all)."""
    parts: list[str] = []
    x, y = float(LEFT), BOTTOM + 54
    for number, text in enumerate(entries):
        width = 17 + LETTER * len(text)
        if x + width > RIGHT and x > LEFT:
            x, y = float(LEFT), y + 18
        parts.append(f'<rect x="{x:.1f}" y="{y - 7}" width="12" height="4" fill="{COLOURS[number % len(COLOURS)]}"/>')
        parts.append(f'<text x="{x + 17:.1f}" y="{y}">{html.escape(text)}</text>')
        x += width + 18
    return parts, y + 12


def _decades(size: np.ndarray) -> tuple[int, int]:
    """Powers of ten around the differences that are not 0."""
    some = size[size > 0]
    if not len(some):
        return -9, -8
    low, high = int(np.floor(np.log10(some.min()))), int(np.ceil(np.log10(some.max()) + 1e-9))
    return max(low, high - 12), max(high, low + 1)


def _shares(values: np.ndarray, low: int, high: int) -> np.ndarray:
    """[1 + bars]: of the values below 10^low, then of those in each bar."""
    edges = 10.0 ** np.linspace(low, high, (high - low) * PER_DECADE + 1)
    counts = np.histogram(values.clip(max=edges[-1]), edges)[0]
    return np.concatenate([[(values < edges[0]).sum()], counts]) / len(values)


def _x(power: float, low: int, high: int) -> float:
    return LEFT + (power - low + SLOT) / (high - low + SLOT) * (RIGHT - LEFT)


def _bars(heights: np.ndarray, low: int, high: int) -> str:
    """The outline of the bars, of heights from 0 to 1; the first one stands alone."""
    ends = np.linspace(low, high, (high - low) * PER_DECADE + 1)
    corners = []
    for group, edges in ((heights[:1], [low - SLOT, low - SLOT + SLOT_WIDTH]), (heights[1:], ends)):
        corners.append(f"M{_x(float(edges[0]), low, high):.1f} {BOTTOM}")
        for left, right, height in zip(edges[:-1], edges[1:], group, strict=True):
            y = BOTTOM - float(height) * (BOTTOM - TOP)
            corners.append(f"L{_x(float(left), low, high):.1f} {y:.1f} L{_x(float(right), low, high):.1f} {y:.1f}")
        corners.append(f"L{_x(float(edges[-1]), low, high):.1f} {BOTTOM}")
    return " ".join(corners)
