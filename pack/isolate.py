"""Running rows one by one, in this process or in a child under a watchdog that ends it hard.

In the child mode a row that crashes, hangs or swells takes only its own process with it: it is retried once alone in a
fresh child, then rejected as `crashed`, `timeout` or `oom`.
"""

from __future__ import annotations

import multiprocessing
import signal
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any, Protocol

import psutil

from pack.config import PackConfig
from pack.guard import GIB, RowTimer, end_with_parent, start_process
from pack.row import MEDIA_MODULES, MediaLoader, as_row_error, default_media, pack_row
from pack.spool import RowSpool
from schemas.errors import OmniloomError, RowError
from schemas.manifest import content_key, parse_row
from schemas.registry import load_preprocessors

_START_S = 300.0  # a child imports codecs and the user's modules before its first row
_POLL_S = 0.05


@dataclass(frozen=True)
class RowTask:
    """One row to pack. value: the raw row, or why it is none; base: folder of relative paths; location: (manifest file,
    row number from 0); occurrence: equal rows before it; offset: its place in the partition."""

    offset: int
    value: dict[str, Any] | str
    base: str
    location: tuple[str, int]
    occurrence: int

    def names(self) -> tuple[str, str]:
        """(id, source) for reports, whatever is wrong with the row."""
        if isinstance(self.value, Mapping):
            source = self.value.get("source")
            given = self.value.get("id")
            source = source if isinstance(source, str) else ""
            if isinstance(given, str | int) and not isinstance(given, bool) and given != "":
                return str(given), source
            with suppress(RowError):
                return f"{content_key(self.value):016x}" + (f"-{self.occurrence}" if self.occurrence else ""), source
        return f"{self.location[0].rsplit('/', 1)[-1]}#row{self.location[1]}", ""


class Runner(Protocol):
    """Packs one row into the spool it was made with."""

    def run(self, task: RowTask) -> RowError | None:
        """None when the spool holds the row's samples, else what the row is rejected with."""

    def close(self) -> None: ...


def fill_from_row(task: RowTask, config: PackConfig, media: MediaLoader, spool: RowSpool) -> RowError | None:
    """Parses and packs a row into the spool."""
    try:
        if isinstance(task.value, str):
            raise RowError("bad_row", task.value, "row")
        row = parse_row(
            task.value,
            base=task.base,
            location=task.location,
            occurrence=task.occurrence,
            frames_fps=config.video.fps,
        )
        spool.fill(pack_row(row, config, media))
    except BaseException as error:  # noqa: BLE001  # as_row_error raises what is no row's fault again
        spool.close()
        return as_row_error(error)
    return None


class DirectRunner:
    """Runs rows in this process, under a timer that ends the process."""

    def __init__(self, config: PackConfig, media: MediaLoader, spool: RowSpool) -> None:
        self._config, self._media, self._spool = config, media, spool
        self._timer = RowTimer(config.rows.timeout_s)

    def run(self, task: RowTask) -> RowError | None:
        with self._timer:
            return fill_from_row(task, self._config, self._media, self._spool)

    def close(self) -> None:
        self._timer.close()


class IsolatedRunner:
    """Runs rows in a child process. suspects: offsets of rows that ended a worker before; they get one try, alone."""

    def __init__(
        self, config: PackConfig, media: MediaLoader | None, spool: RowSpool, suspects: frozenset[int] = frozenset()
    ) -> None:
        self._config, self._media, self._spool, self._suspects = config, media, spool, suspects
        self._child: ForkServerProcess | None = None
        self._pipe: Connection | None = None
        self._watched: psutil.Process | None = None
        self._ceiling = 0.0

    def run(self, task: RowTask) -> RowError | None:
        self._spool.close()
        again = task.offset in self._suspects
        if again:
            self._end()
        outcome = self._try(task)
        if outcome is not None and outcome.stage == "isolate" and self._child is None and not again:
            outcome = self._try(task)
        if again:
            self._end()
        return outcome

    def close(self) -> None:
        self._end()

    def _try(self, task: RowTask) -> RowError | None:
        if self._child is None:
            self._start()
        assert self._pipe is not None and self._child is not None
        try:
            self._pipe.send(task)
        except (BrokenPipeError, ConnectionResetError):
            return self._died()
        cause = self._wait()
        if cause is not None:
            self._end()
            return cause
        try:
            answer = self._pipe.recv()
        except (EOFError, ConnectionResetError):
            return self._died()
        if isinstance(answer, RowError):
            return answer
        if isinstance(answer, BaseException):
            raise answer
        self._spool.adopt(answer)
        return None

    def _wait(self) -> RowError | None:
        """Until the child answers or is gone (None), or exceeds a limit (why)."""
        assert self._pipe is not None and self._watched is not None
        rows = self._config.rows
        deadline = time.monotonic() + rows.timeout_s
        while not self._pipe.poll(_POLL_S):
            if time.monotonic() > deadline:
                return RowError("timeout", f"still running after rows.timeout_s = {rows.timeout_s:g} s", "isolate")
            with suppress(psutil.NoSuchProcess):
                if self._watched.memory_info().rss > self._ceiling:
                    limit = f"rows.max_memory_gb = {rows.max_memory_gb:g}"
                    return RowError("oom", f"took more memory than {limit} allows", "isolate")
        return None

    def _died(self) -> RowError:
        assert self._child is not None
        self._child.join(10)
        code = self._child.exitcode
        self._end()
        return RowError("crashed", f"ended its process twice, the last time with {describe_exit(code)}", "isolate")

    def _start(self) -> None:
        ours, theirs = multiprocessing.Pipe()
        arguments = (theirs, self._config, self._media, str(self._spool.path), self._spool.limit)
        preload = ["pack.isolate", *(MEDIA_MODULES if self._media is None else [])]
        child = start_process(_child_main, arguments, "omniloom-row", preload)
        theirs.close()
        self._child, self._pipe = child, ours
        try:
            ready = ours.recv() if ours.poll(_START_S) else None
        except (EOFError, ConnectionResetError):
            ready = None
        if ready is not True:
            child.join(1)
            code = child.exitcode
            self._end()
            if isinstance(ready, BaseException):
                raise ready
            raise OmniloomError(f"the process for single rows did not start: {describe_exit(code)}")
        self._watched = psutil.Process(child.pid)
        self._ceiling = self._watched.memory_info().rss + self._config.rows.max_memory_gb * GIB

    def _end(self) -> None:
        if self._child is None:
            return
        self._child.kill()
        self._child.join()
        self._child.close()
        if self._pipe is not None:
            self._pipe.close()
        self._child, self._pipe, self._watched = None, None, None


def describe_exit(code: int | None) -> str:
    """'exit code 7' or 'signal 11 (SIGSEGV)'."""
    if code is None:
        return "no exit code"
    if code >= 0:
        return f"exit code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = "unknown"
    hint = ": killed from outside, often for lack of memory" if -code == signal.SIGKILL else ""
    return f"signal {-code} ({name}{hint})"


def _child_main(pipe: Connection, config: PackConfig, media: MediaLoader | None, spool_path: str, limit: int) -> None:
    """The life of the child: rows come in, (count) or the error goes out, samples go through the spool file."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the job's own process decides what an interrupt means
    end_with_parent()
    try:
        load_preprocessors(config.imports)
        loader = default_media() if media is None else media
    except OmniloomError as error:
        pipe.send(error)
        return
    spool = RowSpool(Path(spool_path), limit, in_memory=False)
    timer = RowTimer(config.rows.timeout_s + 60)  # in case the parent is gone while a row hangs
    pipe.send(True)
    while True:
        try:
            task = pipe.recv()
        except EOFError:
            return
        try:
            with timer:
                outcome: Any = fill_from_row(task, config, loader, spool)
        except BaseException as error:  # noqa: BLE001  # the parent raises it
            outcome = error
        pipe.send(spool.count if outcome is None else outcome)
