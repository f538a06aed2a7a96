"""What every benchmark prints and writes: claims with their goals, and the machine they were measured on."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table


@dataclass(frozen=True)
class Claim:
    """claim: what was measured; goal: the bound in words, e.g. `<= 1.5`; met: None when there is no bound."""

    claim: str
    value: float
    unit: str
    goal: str
    met: bool | None
    conditions: str


def at_most(claim: str, value: float, bound: float, unit: str, conditions: str) -> Claim:
    """A claim that holds while value <= bound."""
    return Claim(claim, _rounded(value), unit, f"<= {bound:g}", value <= bound, conditions)


def at_least(claim: str, value: float, bound: float, unit: str, conditions: str) -> Claim:
    """A claim that holds while value >= bound."""
    return Claim(claim, _rounded(value), unit, f">= {bound:g}", value >= bound, conditions)


def _rounded(value: float) -> float:
    """Four places, or four digits of what is smaller than that shows."""
    return round(value, 4) if abs(value) >= 0.1 else float(f"{value:.4g}")


def machine() -> str:
    """Processor and cores, for the conditions of a measurement."""
    name = platform.processor() or platform.machine()
    for line in Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []:
        if line.startswith("model name"):
            name = line.split(":", 1)[1].strip()
            break
    return f"{name}, {len(os.sched_getaffinity(0))} cores"


def report(title: str, claims: Iterable[Claim], json_file: Path | None) -> bool:
    """Prints the table, writes the JSON list; returns whether every bound was met."""
    claims = list(claims)
    table = Table(title=f"{title} ({machine()})")
    for column in ("claim", "value", "goal", "met", "conditions"):
        table.add_column(column, overflow="fold")
    for c in claims:
        met = "" if c.met is None else ("yes" if c.met else "[red]no[/red]")
        table.add_row(c.claim, f"{c.value:g} {c.unit}", c.goal, met, c.conditions)
    Console().print(table)
    if json_file is not None:
        json_file.write_text(json.dumps([asdict(c) for c in claims], indent=1) + "\n")
    return all(c.met is not False for c in claims)
