"""`omniloom doctor`: what this machine has for the work, what is missing, and what to do about it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.status import Status
from rich.table import Table
from rich.text import Text

from jobs import doctor_checks as checks
from jobs.doctor_checks import Check

# what a part of omniloom does not work without, beside its packages; None: whatever is checked
NEEDS: dict[str, tuple[str, ...] | None] = {"pack": None, "train": ("Python", "Streaming"), "convert": ("Python",)}
SLOW = ("Streaming",)  # which imports it
COLOURS = {"ok": "green", "warn": "yellow", "fail": "bold red"}

app = typer.Typer()


@app.command()
def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print the findings as JSON.")] = False,
    path: Annotated[Path, typer.Option(help="A folder on the disk that will hold the packed shards.")] = Path("."),
) -> None:
    """Check this machine: packages, codecs, memory, disk, Ray, GPU. Exit code 1 when something needed is missing."""
    console = Console()
    if as_json:
        done = list(run_checks(path, lambda name: None))
        typer.echo(json.dumps([asdict(check) for check in done], indent=2))
    else:
        done = []
        with console.status("looking at this machine ...") as status:
            console.print(_row(Text(""), "check", "found"))
            for check in run_checks(path, partial(_begin, status, console.is_terminal)):
                console.print(_row(Text(check.status, COLOURS[check.status]), check.name, check.found))
                done.append(check)
        _advise(console, done)
    if any(check.status == "fail" for check in done):
        raise typer.Exit(1)


def planned_checks(path: Path) -> dict[str, Callable[[], Check]]:
    """Every check by its name, in the order in which they are told."""
    return {
        "Python": checks.check_python,
        "Packages": checks.check_packages,
        "Streaming": checks.check_streaming,
        "Decoders": checks.check_decoders,
        "Filters": checks.check_filters,
        "CPU": checks.check_cpus,
        "Memory": checks.check_memory,
        "Disk": partial(checks.check_disk, path),
        "/dev/shm": checks.check_shm,
        "Open files": checks.check_open_files,
        "Ray": checks.check_ray,
        "Object stores": checks.check_object_stores,
        "GPU": checks.check_gpu,
    }


def run_checks(path: Path, begin: Callable[[str], object]) -> Iterator[Check]:
    """Each check when it is done. begin: is given its name before."""
    for name, check in planned_checks(path).items():
        begin(name)
        yield check()


def readiness(done: list[Check]) -> list[str]:
    """Which of pack, train and convert this machine is ready for, and what keeps it from the others."""
    failed = {check.name for check in done if check.status == "fail"}
    ready, lines = [], []
    for part, needs in NEEDS.items():
        reasons = sorted(failed if needs is None else failed & set(needs))
        if part != "pack":  # whose packages are a check
            reasons += checks.unmet_requirements(part)[1]
        if reasons:
            lines.append(f"Not ready to {part}: {', '.join(reasons)}.")
        else:
            ready.append(part)
    if ready:
        *first, last = ready
        lines.insert(0, f"Ready to {', '.join(first)} and {last}." if first else f"Ready to {last}.")
    if "train" in ready and any(check.found == checks.NO_GPU for check in done):
        lines.append("Without a GPU, training is for tiny models, as that of the demo.")
    return lines


def _begin(status: Status, on_terminal: bool, name: str) -> None:
    status.update(f"checking {name} ...")
    if not on_terminal and name in SLOW:  # where no status is seen
        typer.echo(f"checking {name} takes seconds ...", err=True)


def _row(status: Text, name: str, found: str) -> Table:
    """A line of its own, which is printed when its check is done; columns are as wide as those of the others."""
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(width=max(map(len, COLOURS)))
    table.add_column(width=max(map(len, planned_checks(Path()))))
    table.add_column(overflow="fold")
    table.add_row(status, name, Text(found))
    return table


def _advise(console: Console, done: list[Check]) -> None:
    for check in done:
        if check.advice:
            console.print(Text.assemble("\n", (check.name, "bold"), f": {check.advice}"))
    console.print()
    if failed := sum(check.status == "fail" for check in done):
        console.print(f"{failed} needed thing{'s' * (failed != 1)} missing.")
    for line in readiness(done):
        console.print(Text(line))
