"""Progress on stderr of what a user waits for: a bar in a terminal, a plain line now and then elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from train.launch import under_torchrun

FIRST_LINE_S = 3.0
LINE_EVERY_S = 10.0
MODEL_CODE = "torch and the model's code"


def say_loading(what: str = MODEL_CODE) -> None:
    """A line before imports that take seconds. Nothing where they are done already, nor in a rank: its launcher said
    what ranks begin with."""
    if "torch" not in sys.modules and not under_torchrun():
        typer.echo(f"loading {what} ...", err=True)


def say_starting(ranks: int) -> None:
    """The same of a launcher, which loads nothing itself."""
    typer.echo(f"starting {ranks} rank{'s' * (ranks != 1)}, loading {MODEL_CODE} ...", err=True)


@contextmanager
def progress(title: str, total: int | None, unit: str) -> Iterator[Callable[[int], None]]:
    """Gives a function that is told how many more are done."""
    console = Console(file=sys.stderr, highlight=False)
    if not console.is_terminal:
        yield _Lines(console, title, total, unit).advance
        return
    columns = (TextColumn(title), BarColumn(), MofNCompleteColumn(), TextColumn(unit), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as shown:
        task = shown.add_task(title, total=total)
        yield lambda count: shown.advance(task, count)


class _Lines:
    """'counting tokens: 12,000 of 80,000 rows, 1,500/s'."""

    def __init__(self, console: Console, title: str, total: int | None, unit: str) -> None:
        self.console, self.title, self.total, self.unit = console, title, total, unit
        self.done, self.began = 0, time.monotonic()
        self.next_line = self.began + FIRST_LINE_S

    def advance(self, count: int) -> None:
        self.done += count
        now = time.monotonic()
        if now < self.next_line:
            return
        self.next_line = now + LINE_EVERY_S
        of = f" of {self.total:,}" if self.total is not None else ""
        speed = self.done / (now - self.began)
        self.console.print(f"{self.title}: {self.done:,}{of} {self.unit}, {speed:,.0f}/s")
