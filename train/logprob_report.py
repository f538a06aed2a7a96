"""How a comparison of two dumps is told: a table, and a picture of how far the tokens are apart."""

from __future__ import annotations

import html
from pathlib import Path

import numpy as np

from convert.output import write_atomic
from train.logprob_compare import LogprobAgreement
from train.logprob_read import TokenTable

WIDTH, HEIGHT = 640, 300
LEFT, RIGHT, TOP, BOTTOM = 56, 626, 34, 256
PER_DECADE = 4  # bars
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
    """Tokens that are exactly equal stand at the left end."""
    size = np.abs(found.differences.astype(np.float64))
    low, high = _decades(size)
    edges = 10.0 ** np.linspace(low, high, (high - low) * PER_DECADE + 1)
    names, codes = found.kinds
    present = [(name, size[codes == code]) for code, name in enumerate(names) if (codes == code).any()]
    shares = {name: np.histogram(values.clip(edges[0], edges[-1]), edges)[0] / len(values) for name, values in present}
    highest = max(float(share.max()) for share in shares.values())
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img"><style>{STYLE}</style>',
        f'<text class="title" x="{LEFT}" y="20">share of tokens by |d|: '
        f"{html.escape(Path(found.first).name)} and {html.escape(Path(found.second).name)}</text>",
    ]
    for power in range(low, high + 1):
        x = _x(power, low, high)
        parts.append(f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{TOP}" y2="{BOTTOM}"/>')
        parts.append(f'<text x="{x:.1f}" y="{BOTTOM + 17}" text-anchor="middle">1e{power}</text>')
    for part in range(5):
        y = BOTTOM - part / 4 * (BOTTOM - TOP)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{100 * highest * part / 4:.3g}%</text>')
    for number, (name, share) in enumerate(shares.items()):
        colour = COLOURS[number % len(COLOURS)]
        parts.append(f'<path stroke="{colour}" d="{_steps(np.log10(edges), share / highest, low, high)}"/>')
        x = LEFT + number * 142
        parts.append(f'<rect x="{x}" y="{BOTTOM + 28}" width="12" height="4" fill="{colour}"/>')
        mean = float(size[codes == names.index(name)].mean())
        parts.append(f'<text x="{x + 17}" y="{BOTTOM + 35}">{html.escape(name)}, mean {mean:.2g}</text>')
    return "".join([*parts, "</svg>\n"])


def _decades(size: np.ndarray) -> tuple[int, int]:
    """Powers of ten around the differences that are not 0."""
    some = size[size > 0]
    if not len(some):
        return -9, -8
    low, high = int(np.floor(np.log10(some.min()))), int(np.ceil(np.log10(some.max()) + 1e-9))
    return max(low, high - 12), max(high, low + 1)


def _x(power: float, low: int, high: int) -> float:
    return LEFT + (power - low) / (high - low) * (RIGHT - LEFT)


def _steps(edges: np.ndarray, heights: np.ndarray, low: int, high: int) -> str:
    """The outline of the bars."""
    corners = [f"M{_x(float(edges[0]), low, high):.1f} {BOTTOM}"]
    for left, right, height in zip(edges[:-1], edges[1:], heights, strict=True):
        y = BOTTOM - float(height) * (BOTTOM - TOP)
        corners.append(f"L{_x(float(left), low, high):.1f} {y:.1f} L{_x(float(right), low, high):.1f} {y:.1f}")
    return " ".join([*corners, f"L{_x(float(edges[-1]), low, high):.1f} {BOTTOM}"])
