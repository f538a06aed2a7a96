"""What the user sees and what stays: progress, events.jsonl, the summary at the end."""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn, TimeElapsedColumn
from rich.table import Table

from pack.readme import human_bytes, plural
from pack.storage import Storage
from schemas.dataset import DatasetCard
from schemas.errors import FILTER_REASONS

EVENTS_FILE = "events.jsonl"
LINE_EVERY_S = 5.0  # where the output is no terminal
_POLL_S = 0.5
_OBJECT_FLUSH_S = 60.0


class Events:
    """events.jsonl of an output: one JSON object per line, {"time", "event", ...}."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self._waiting: list[str] = []
        self._flushed = time.monotonic()

    def add(self, event: str, **fields: Any) -> None:
        record = {"time": datetime.now(UTC).isoformat(timespec="milliseconds"), "event": event, **fields}
        self._waiting.append(json.dumps(record))
        local = self._storage.local_path(EVENTS_FILE) is not None
        if local or time.monotonic() - self._flushed > _OBJECT_FLUSH_S:  # an object is rewritten for each line
            self.flush()

    def flush(self) -> None:
        lines, self._waiting, self._flushed = self._waiting, [], time.monotonic()
        if lines:
            self._storage.append(EVENTS_FILE, "\n".join(lines))


def read_events(storage: Storage) -> list[dict[str, Any]]:
    """All events; a last line that is being written is left out."""
    data = storage.try_read(EVENTS_FILE) or b""
    found = []
    for line in data.decode(errors="replace").splitlines():
        try:
            found.append(json.loads(line))
        except ValueError:
            continue  # cut off by a full disk or a kill; the events beside it hold
    return found


@dataclass
class Counts:
    """Where a job stands. media_s: seconds of picture or sound; *_before: what was done when this run began."""

    rows: int = 0
    rejects: int = 0
    media_s: float = 0.0
    bytes: int = 0

    def plus(self, others: Iterable[Counts]) -> Counts:
        sums = Counts(self.rows, self.rejects, self.media_s, self.bytes)
        for other in others:
            sums.rows += other.rows
            sums.rejects += other.rejects
            sums.media_s += other.media_s
            sums.bytes += other.bytes
        return sums


def stderr_console() -> Console:
    return Console(file=sys.stderr, highlight=False)


class _Said(ProgressColumn):
    """The numbers of the bar's `said` field."""

    def render(self, task: Task) -> str:
        return str(task.fields.get("said", ""))


@contextmanager
def bar(
    title: str, total: float | None = None, unit: str = "bytes", line_every_s: float = LINE_EVERY_S
) -> Iterator[Told]:
    """A progress bar on stderr (a plain line now and then when that is no terminal). unit: `bytes`, or the name of what
    is counted."""
    told = Told(total, unit)
    with _shown(stderr_console(), title, told.say, lambda: (told.done, told.total), line_every_s):
        yield told


class Told:
    """Sums what a step reports."""

    def __init__(self, total: float | None, unit: str) -> None:
        self.total, self.unit, self.done, self.began = total, unit, 0.0, time.monotonic()

    def expect(self, total: float) -> None:
        self.total = total

    def advance(self, amount: float) -> None:
        self.done += amount

    def say(self) -> str:
        speed = self.done / max(time.monotonic() - self.began, 1e-3)
        if self.unit == "bytes":
            whole = f" of {human_bytes(self.total)}" if self.total else ""
            return f"{human_bytes(self.done)}{whole}, {human_bytes(speed)}/s"
        whole = f" of {self.total:,.0f}" if self.total else ""
        return f"{self.done:,.0f}{whole} {self.unit}, {speed:,.0f}/s"


@contextmanager
def job_progress(
    total_rows: int,
    poll: Callable[[], Counts],
    before: Counts,
    at_work: Callable[[], bool] = lambda: True,
    line_every_s: float = LINE_EVERY_S,
) -> Iterator[None]:
    """The bar of `run`: rows, hours of media per second, bytes, rejects, time left. poll: reads where the job stands;
    at_work: whether a worker has begun, which takes Ray half a minute."""
    began = time.monotonic()
    latest = before

    def done() -> tuple[float, float | None]:
        nonlocal latest
        latest = poll()
        return latest.rows, total_rows

    def say() -> str:
        if not at_work():
            return f"{latest.rows:,} of {total_rows:,} rows, workers are starting"
        return job_line(latest, before, total_rows, time.monotonic() - began)

    with _shown(stderr_console(), "packing", say, done, line_every_s):
        yield


def job_line(now: Counts, before: Counts, total_rows: int, seconds: float) -> str:
    """'120 of 200 rows, 0.31 h, 0.0021 h/s, 34.1 MB, 3 rejected, 0:12 left'."""
    rows, media_s = now.rows - before.rows, now.media_s - before.media_s
    words = [
        f"{now.rows:,} of {total_rows:,} rows",
        f"{now.media_s / 3600:.2f} h",
        f"{media_s / 3600 / max(seconds, 1e-3):.4f} h/s",
        human_bytes(now.bytes),
        f"{now.rejects:,} rejected",
    ]
    if rows > 0 and now.rows < total_rows:
        left = (total_rows - now.rows) * seconds / rows
        words.append(f"{clock(left)} left")
    return ", ".join(words)


def clock(seconds: float) -> str:
    """'1:02:03' or '2:03'."""
    whole = int(seconds)
    hours, minutes = whole // 3600, whole // 60 % 60
    return f"{hours}:{minutes:02d}:{whole % 60:02d}" if hours else f"{minutes}:{whole % 60:02d}"


@contextmanager
def _shown(
    console: Console,
    title: str,
    say: Callable[[], str],
    done: Callable[[], tuple[float, float | None]],
    line_every_s: float,
) -> Iterator[None]:
    """Refreshes the bar, or prints a line now and then, from a thread of its own while the block runs."""
    finished = threading.Event()
    if console.is_terminal:
        columns = (TextColumn("{task.description}"), BarColumn(), _Said(), TimeElapsedColumn())
        progress = Progress(*columns, console=console, auto_refresh=False, transient=True)
        task = progress.add_task(title, total=None)

        def show() -> None:
            completed, total = done()
            progress.update(task, completed=completed, total=total, said=say(), refresh=True)

        period = _POLL_S
    else:
        progress = None

        def show() -> None:
            done()
            console.print(f"{title}: {say()}", soft_wrap=True)

        period = line_every_s

    def refresh() -> None:
        while not finished.wait(period):
            show()

    thread = threading.Thread(target=refresh, name="omniloom-progress", daemon=True)
    if progress is not None:
        progress.start()
    thread.start()
    try:
        yield
    finally:
        finished.set()
        thread.join()
        if progress is not None:
            progress.stop()


def summary_table(card: DatasetCard, location: str) -> Table:
    """What became of the job, for people."""
    totals = card.totals
    table = Table(title=None, show_header=False, box=None, pad_edge=False)
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    rejected = sum(totals.rejected.values())
    table.add_row("rows", f"{totals.rows_in:,} in, {totals.rows_packed:,} packed, {rejected:,} rejected")
    for reason, count in totals.rejected.items():
        table.add_row("", f"{count:,} {reason}")
    table.add_row("samples", f"{totals.samples:,} from {plural(card.partitions, 'partition')}")
    table.add_row(
        "media",
        f"{totals.video_hours:.3f} h video ({totals.frames:,} frames), {totals.audio_hours:.3f} h sound, "
        f"{totals.images:,} images",
    )
    table.add_row("size", f"{human_bytes(card.bytes)} in {plural(card.shards, 'shard')}")
    table.add_row("dataset", location)
    return table


def bad_rows(card: DatasetCard) -> tuple[int, int]:
    """(rejected rows, all rows), without those that a filter left out."""
    rejected = card.totals.rejected
    filtered = sum(rejected.get(reason, 0) for reason in FILTER_REASONS)
    return sum(rejected.values()) - filtered, card.totals.rows_in - filtered


def bad_ratio(card: DatasetCard) -> float:
    """Share of rejected rows among those that no filter left out."""
    bad, rows = bad_rows(card)
    return bad / rows if rows else 0.0
