"""`omniloom pack status`: where a job stands, from another shell or after it has ended. Reads only."""

from __future__ import annotations

import socket
import time
from dataclasses import asdict, dataclass, field
from datetime import datetime
from typing import Any

import psutil

from pack.guard import read_crumbs
from pack.job import FINISHED_FILE
from pack.plan_file import load_plan
from pack.reader import CARD_FILE, INDEX_FILE
from pack.readme import human_bytes
from pack.rejects import read_plan_commits
from pack.report import Counts, clock, read_events
from pack.standing import committed_counts, standing
from pack.storage import Storage


@dataclass(frozen=True)
class Attempt:
    """A partition in the making. alive: None when its worker runs on another machine; age_s: since its last row."""

    partition: str
    host: str
    pid: int
    row: int
    id: str
    rows_done: int
    rows_total: int
    isolated: bool
    alive: bool | None
    age_s: float


@dataclass(frozen=True)
class Status:
    """rows: of the manifest; rejected: after retries; left_s: estimated time, None when nothing tells."""

    location: str
    state: str
    partitions_planned: int
    partitions_committed: int
    rows_planned: int
    rows_done: int
    rejected: int
    media_hours: float
    bytes: int
    left_s: float | None
    last_event: dict[str, Any] | None
    attempts: list[Attempt] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def read_status(storage: Storage) -> Status:
    """IncompleteSourceError when nothing is planned in this output."""
    plan = load_plan(storage)
    commits = read_plan_commits(storage, plan)
    names = {commit.planned.name for commit in commits}
    crumbs = [(crumb, age) for _, crumb, age in read_crumbs(storage.staging_root) if crumb.partition not in names]
    attempts, running = [], []
    for crumb, written in crumbs:
        alive = None if not crumb.is_local else not crumb.owner_is_dead
        where = (crumb.partition, crumb.host, crumb.pid, crumb.row, crumb.id, crumb.rows_done, crumb.rows_total)
        attempts.append(Attempt(*where, crumb.isolated, alive, round(time.time() - written, 1)))
        if alive is not False:
            running.append(Counts(crumb.rows_done, crumb.rejects, crumb.media_s, crumb.bytes))
    now = standing(plan, committed_counts(commits), running)
    events = read_events(storage)
    rows = plan.rows
    return Status(
        location=storage.location,
        state=_state(storage, len(commits), len(plan.partitions), bool(running), _job_is_alive(events)),
        partitions_planned=len(plan.partitions),
        partitions_committed=len(commits),
        rows_planned=rows,
        rows_done=now.rows,
        rejected=now.rejects,
        media_hours=now.media_s / 3600,
        bytes=now.bytes,
        left_s=_left(events, now.rows, rows) if running else None,
        last_event=events[-1] if events else None,
        attempts=attempts,
    )


def _job_is_alive(events: list[dict[str, Any]]) -> bool:
    """Whether the process that started last, on this machine, is still there."""
    last = next((e for e in reversed(events) if e.get("event") in ("started", "stopped", "finished")), None)
    if last is None or last["event"] != "started" or last.get("host") != socket.gethostname():
        return False
    return psutil.pid_exists(int(last["pid"]))


def _state(storage: Storage, committed: int, planned: int, running: bool, alive: bool) -> str:
    if committed < planned:
        if running:
            return "running"
        return "its workers are starting" if alive else "not running; `omniloom pack run` goes on from here"
    if not (storage.exists(INDEX_FILE) and storage.exists(CARD_FILE)):
        return "packed, not merged"
    return "finished" if storage.exists(FINISHED_FILE) else "merged, not verified"


def _left(events: list[dict[str, Any]], done: int, total: int) -> float | None:
    """Seconds left, by the pace since the last start."""
    started = next((event for event in reversed(events) if event.get("event") == "started"), None)
    if started is None or done <= started["rows"]:
        return None
    seconds = time.time() - datetime.fromisoformat(started["time"]).timestamp()
    return (total - done) * seconds / (done - started["rows"])


def status_lines(status: Status) -> list[str]:
    """The status, for people."""
    left = f", {clock(status.left_s)} left" if status.left_s is not None else ""
    lines = [
        f"{status.location}: {status.state}",
        f"partitions  {status.partitions_committed:,} of {status.partitions_planned:,} committed",
        f"rows        {status.rows_done:,} of {status.rows_planned:,}, {status.rejected:,} rejected{left}",
        f"media       {status.media_hours:.3f} h, {human_bytes(status.bytes)}",
    ]
    for a in status.attempts:
        life = {True: "", False: ", its worker is dead", None: " (another machine)"}[a.alive]
        mode = ", isolated" if a.isolated else ""
        lines.append(
            f"  {a.partition}  {a.rows_done} of {a.rows_total} rows, at row {a.row} ({a.id}) for {a.age_s:.0f} s, "
            f"{a.host} pid {a.pid}{mode}{life}"
        )
    return lines
