"""`omniloom doctor`: what this machine has for the work, what is missing, and what to do about it."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from jobs.doctor_checks import Check, run_checks

app = typer.Typer()


@app.command()
def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print the findings as JSON.")] = False,
    path: Annotated[Path, typer.Option(help="A folder on the disk that will hold the packed shards.")] = Path("."),
) -> None:
    """Check this machine: packages, codecs, memory, disk, Ray, GPU. Exit code 1 when something needed is missing."""
    console = Console()
    if as_json:
        checks = list(run_checks(path))
        typer.echo(json.dumps([asdict(check) for check in checks], indent=2))
    else:
        with console.status("looking at this machine ..."):
            checks = list(run_checks(path))
        console.print(_table(checks))
        _advise(console, checks)
    if any(check.status == "fail" for check in checks):
        raise typer.Exit(1)


def _table(checks: list[Check]) -> Table:
    colours = {"ok": "green", "warn": "yellow", "fail": "bold red"}
    table = Table(box=None, pad_edge=False)
    for column in ("", "check", "found"):
        table.add_column(column, overflow="fold")
    for check in checks:
        table.add_row(Text(check.status, colours[check.status]), check.name, Text(check.found))
    return table


def _advise(console: Console, checks: list[Check]) -> None:
    for check in checks:
        if check.advice:
            console.print(Text.assemble("\n", (check.name, "bold"), f": {check.advice}"))
    failed = sum(check.status == "fail" for check in checks)
    console.print(f"\n{failed} needed thing{'s' * (failed != 1)} missing." if failed else "\nReady to pack.")
