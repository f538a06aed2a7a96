"""The curves of a training as one HTML page that needs nothing else: drawn from metrics.jsonl, opened from disk."""

from __future__ import annotations

import html
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from statistics import median, median_low
from typing import Any

from convert.output import write_atomic
from train.chart import Curve, chart_svg, label
from train.metric_writers import read_metrics
from train.panels import Panel, panels_of

PLOTS_FILE = "metrics.html"
SMOOTHED = 20  # log lines that a smoothed curve averages over, once there are as many
MANY = 8  # curves that one chart can show, as many as it has colours
FAR_ABOVE = 4  # times the median: where values begin that a chart may cut off


STYLE = """
:root { color-scheme: light dark; --line: #8884; --text: #333; --dim: #777; --back: #fff; --card: #f7f7f8;
  --c0: #2563eb; --c1: #d9480f; --c2: #2b8a3e; --c3: #9c36b5;
  --c4: #a16207; --c5: #0b7285; --c6: #c2255c; --c7: #5f3dc4 }
@media (prefers-color-scheme: dark) { :root { --text: #ddd; --dim: #999; --back: #16181d; --card: #1f2229;
  --c0: #74a9ff; --c1: #ff9f6b; --c2: #69db7c; --c3: #e599f7;
  --c4: #ffd43b; --c5: #66d9e8; --c6: #faa2c1; --c7: #b197fc } }
body { margin: 0; padding: 20px 24px; background: var(--back); color: var(--text) }
body { font: 14px/1.45 system-ui, sans-serif }
h1 { font-size: 20px; margin: 0 0 2px } h2 { font-size: 14px; margin: 0 } p { margin: 0; color: var(--dim) }
main { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(420px, 100%), 1fr)); gap: 14px }
main { margin-top: 16px }
section { background: var(--card); border-radius: 8px; padding: 12px 14px; min-width: 0 }
svg { display: block; width: 100%; height: auto; touch-action: pan-y } svg text { fill: var(--dim); font-size: 11px }
.grid { stroke: var(--line) } .raw { opacity: .35 } .cursor { stroke: var(--dim); visibility: hidden }
path { fill: none; stroke-width: 1.6; vector-effect: non-scaling-stroke; stroke-linejoin: round }
ul { list-style: none; margin: 4px 0 0; padding: 0; display: flex; flex-wrap: wrap; gap: 2px 14px; font-size: 12px }
li::before { content: ""; display: inline-block; width: 10px; height: 3px; margin: 0 5px 3px 0; background: var(--c) }
li b { font-variant-numeric: tabular-nums; font-weight: 600 }
"""
SCRIPT = """
for (const section of document.querySelectorAll('section')) {
  const svg = section.querySelector('svg'), cursor = svg.querySelector('.cursor');
  const data = JSON.parse(section.querySelector('script').textContent);
  const [left, right] = data.frame, [first, last] = data.range, values = [...section.querySelectorAll('li b')];
  const said = section.querySelector('p'), before = said.textContent, ends = values.map(value => value.textContent);
  svg.addEventListener('pointermove', event => {
    const box = svg.getBoundingClientRect(), x = (event.clientX - box.left) / box.width * data.width;
    const step = first + (x - left) / (right - left) * (last - first);
    const off = data.steps.map(it => Math.abs(it - step)), at = off.indexOf(Math.min(...off));
    const there = left + (data.steps[at] - first) / ((last - first) || 1) * (right - left);
    cursor.setAttribute('x1', there); cursor.setAttribute('x2', there); cursor.style.visibility = 'visible';
    said.textContent = 'step ' + data.steps[at];
    values.forEach((value, i) => { value.textContent = data.values[i][at] ?? '\\u2013'; });
  });
  svg.addEventListener('pointerleave', () => {
    cursor.style.visibility = 'hidden'; said.textContent = before;
    values.forEach((value, i) => { value.textContent = ends[i]; });
  });
}
"""


def write_plots(metrics: Path, page: Path, title: str) -> None:
    """Draws a metrics.jsonl. Nothing is written while it has no line."""
    lines = read_metrics(metrics)
    if lines:
        write_atomic(page, plots_html(lines, title).encode())


def plots_html(lines: Sequence[Mapping[str, Any]], title: str) -> str:
    """The page of metrics in the order of their steps."""
    names = {name: None for line in lines for name in line}
    sections = [text for panel in panels_of(names) if (text := _section(panel, names, lines))]
    last = lines[-1]
    said = [f"step {last['step']:,}"]
    tokens = next((line["tokens_total"] for line in reversed(lines) if "tokens_total" in line), None)
    said += [f"{tokens:,} tokens"] if isinstance(tokens, int) else []
    said += [str(last["time"])] if "time" in last else []
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{html.escape(title)}</title>'
        f'<meta name="viewport" content="width=device-width"><style>{STYLE}</style>'
        f"<h1>{html.escape(title)}</h1><p>{html.escape(', '.join(said))}</p>"
        f"<main>{''.join(sections)}</main><script>{SCRIPT}</script></html>\n"
    )


def _section(panel: Panel, names: Iterable[str], lines: Sequence[Mapping[str, Any]]) -> str:
    """'' when no line has any of the panel's metrics."""
    curves = [_curve(name, lines) for name in _present(panel.names, names)]
    curves = [Curve(_short(curve.name, panel), curve.points) for curve in curves if curve.points]
    if not curves:
        return ""
    if panel.spread and len(curves) > MANY:
        curves = _spread(curves, panel.spread)
    curves = _merged(curves)
    smooth = panel.smooth and len(curves[0].points) >= SMOOTHED
    drawn = [Curve(f"{curves[0].name} (smoothed)", _smoothed(curves[0].points))] if smooth else curves
    raw = curves if smooth else []
    ceiling = _ceiling(drawn) if panel.cut else None
    picture, data = chart_svg(drawn, raw, from_zero=panel.from_zero, ceiling=ceiling)
    legend = "".join(
        f'<li style="--c: var(--c{i % 8})">{html.escape(curve.name)} <b>{label(curve.points[-1][1])}</b></li>'
        for i, curve in enumerate(drawn)
    )
    about = panel.subtitle
    if ceiling is not None:
        value, step = max((value, -step) for curve in drawn for step, value in curve.points)
        about += f"; cut off: up to {label(value)} at step {-step:,}"
    # `<` cannot stand in a script element
    values = json.dumps(data).replace("<", "\\u003c")
    return (
        f"<section><h2>{html.escape(panel.title)}</h2><p>{html.escape(about)}</p>{picture}<ul>{legend}</ul>"
        f'<script type="application/json">{values}</script></section>'
    )


def _present(wanted: Iterable[str], names: Iterable[str]) -> list[str]:
    """In the order of the panel, then of `names`."""
    return [name for want in wanted for name in names if name == want or (want.endswith("/") and name.startswith(want))]


def _spread(curves: Sequence[Curve], of: str) -> list[Curve]:
    """The highest, the median and the lowest value at each step."""
    at: dict[int, list[float]] = {}
    for curve in curves:
        for step, value in curve.points:
            at.setdefault(step, []).append(value)
    kinds: dict[str, Callable[[list[float]], float]] = {"highest": max, "median": median, "lowest": min}
    return [
        Curve(f"{kind} of {len(curves)} {of}", [(step, function(at[step])) for step in sorted(at)])
        for kind, function in kinds.items()
    ]


def _merged(curves: Sequence[Curve]) -> list[Curve]:
    """Curves that lie on each other as one, with all their names."""
    names: dict[tuple[tuple[int, float], ...], list[str]] = {}
    for curve in curves:
        names.setdefault(tuple(curve.points), []).append(curve.name)
    return [Curve(", ".join(found), points) for points, found in names.items()]


def _ceiling(curves: Sequence[Curve]) -> float | None:
    """The largest value of all but a few that are far above the others, such as that of a first step that compiles;
    None when there is none to cut off."""
    values = sorted(value for curve in curves for _, value in curve.points)
    limit = FAR_ABOVE * max(median_low([value for _, value in curve.points]) for curve in curves)
    kept = [value for value in values if value <= limit]
    few = max(len(curves), len(values) // 20)
    return kept[-1] if 0 < len(values) - len(kept) <= few < len(kept) else None


def _curve(name: str, lines: Sequence[Mapping[str, Any]]) -> Curve:
    """Numbers only: what was not finite is a text, and a gap."""
    points = [
        (line["step"], float(line[name]))
        for line in lines
        if isinstance(line.get(name), int | float) and math.isfinite(line[name])
    ]
    return Curve(name, points)


def _smoothed(points: Sequence[tuple[int, float]]) -> list[tuple[int, float]]:
    """Mean over the log lines around each; over fewer at both ends, as many on one side as on the other."""
    half = min(SMOOTHED, len(points) // 10) // 2
    sums = [0.0, *accumulate(value for _, value in points)]
    found = []
    for i, (step, _) in enumerate(points):
        reach = min(half, i, len(points) - 1 - i)
        found.append((step, (sums[i + reach + 1] - sums[i - reach]) / (2 * reach + 1)))
    return found


def _short(name: str, panel: Panel) -> str:
    """What it is of: without the part that the panel's title says."""
    prefixes = [wanted[: wanted.rfind("/") + 1] for wanted in panel.names]
    return name.removeprefix(max((prefix for prefix in prefixes if name.startswith(prefix)), key=len))
