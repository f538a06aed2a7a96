"""What keeps a worker honest while it packs rows: a breadcrumb before each row, a timer, a memory watch, and an end
when its parent is gone."""

from __future__ import annotations

import faulthandler
import hashlib
import json
import multiprocessing
import os
import re
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import psutil

CRUMB_FILE = "crumb.json"
_ATTEMPT = re.compile(r"(.+)\.([^.-]+)-([0-9a-f]{8})-([0-9]+)-([0-9]+)-[0-9a-f]{8}")
OOM_EXIT = 79  # exit code of a worker that ended itself for memory
GIB = 2**30


@dataclass(frozen=True)
class Crumb:
    """What a worker is doing. job: of the run that started it; pid_started: creation time of the process, so that a
    reused pid is told apart; row: number of the row in hand in its manifest file, offset: in the partition's list (-1 =
    none); media_s: seconds of media packed."""

    job: str
    host: str
    pid: int
    pid_started: float
    partition: str
    rows_total: int
    row: int = -1
    offset: int = -1
    id: str = ""
    rows_done: int = 0
    rejects: int = 0
    media_s: float = 0.0
    bytes: int = 0
    isolated: bool = False

    @property
    def is_local(self) -> bool:
        """The owner runs, or ran, on this machine."""
        return self.host == socket.gethostname()

    @property
    def owner_is_dead(self) -> bool:
        """True only when the owner ran on this machine and is gone."""
        if not self.is_local:
            return False
        try:
            process = psutil.Process(self.pid)
            return abs(process.create_time() - self.pid_started) > 2 or process.status() == psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return True


def new_crumb(job: str, partition: str, rows_total: int, isolated: bool) -> Crumb:
    me = psutil.Process()
    return Crumb(job, socket.gethostname(), me.pid, me.create_time(), partition, rows_total, isolated=isolated)


def attempt_name(crumb: Crumb) -> str:
    """Name of an attempt's folder. It says who makes it: a process can end before its first breadcrumb, and while it
    removes the folder after its last."""
    owner = f"{_host_mark(crumb.host)}-{crumb.pid}-{int(crumb.pid_started)}"
    return f"{crumb.partition}.{crumb.job}-{owner}-{uuid.uuid4().hex[:8]}"


def _host_mark(host: str) -> str:
    return hashlib.blake2b(host.encode(), digest_size=4).hexdigest()


def _crumb_of_name(name: str) -> Crumb | None:
    """What the name of an attempt's folder says; None for other names."""
    if (found := _ATTEMPT.fullmatch(name)) is None:
        return None
    partition, job, mark, pid, started = found.groups()
    here = socket.gethostname()
    return Crumb(job, here if mark == _host_mark(here) else f"#{mark}", int(pid), float(started), partition, 0)


class CrumbWriter:
    """Rewrites the breadcrumb of one attempt; a reader sees the old one or the new one."""

    def __init__(self, folder: Path, crumb: Crumb) -> None:
        self.path, self.crumb = folder / CRUMB_FILE, crumb
        self.update()

    def update(self, **changes: int | float | str) -> None:
        self.crumb = replace(self.crumb, **changes)  # type: ignore[arg-type]  # checked by the dataclass's fields
        beside = self.path.with_suffix(".tmp")
        beside.write_text(json.dumps(asdict(self.crumb)), encoding="utf-8")
        os.replace(beside, self.path)

    def remove(self) -> None:
        self.path.unlink(missing_ok=True)


def read_crumbs(staging_root: Path) -> Iterator[tuple[Path, Crumb, float]]:
    """(attempt folder, its crumb, when it was written) of all attempts below a staging folder; a folder without a crumb
    has what its name says."""
    try:
        folders = sorted(staging_root.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return
    for folder in folders:
        path = folder / CRUMB_FILE
        try:
            yield folder, Crumb(**json.loads(path.read_text(encoding="utf-8"))), path.stat().st_mtime
        except (FileNotFoundError, NotADirectoryError):
            crumb = _crumb_of_name(folder.name)
            with suppress(FileNotFoundError):  # the attempt has just ended
                if crumb is not None:
                    yield folder, crumb, folder.stat().st_mtime
        except (ValueError, TypeError):
            continue  # of another version; `gc` removes it by age


def start_process(
    target: Callable[..., None], arguments: tuple[Any, ...], name: str, preload: list[str]
) -> ForkServerProcess:
    """Starts a process that shares no thread, lock or decoder with this one, but has slow imports done: it is forked
    from a server that has only imported the modules `preload`. One thread per library."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(preload)
    with one_thread_each():
        process = context.Process(target=_run_with, args=(dict(os.environ), target, arguments), name=name)
        process.start()
    return process


def _run_with(variables: dict[str, str], target: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    """The server has the environment of the moment it was started; a process gets the one of its own start."""
    os.environ.clear()
    os.environ.update(variables)
    target(*arguments)


def end_with_parent(poll_s: float = 0.5) -> None:
    """Ends this process soon after its parent died, so that a killed job leaves nobody behind."""
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(poll_s)
        os._exit(1)

    threading.Thread(target=watch, name="omniloom-parent-watch", daemon=True).start()


class MemoryWatch:
    """Ends this process with `OOM_EXIT` when it holds `limit_bytes` more than at the start; a thread, so code that
    never releases the interpreter lock is left to the watchdog of isolated mode."""

    def __init__(self, limit_bytes: float, poll_s: float = 0.1) -> None:
        self._process, self._poll_s = psutil.Process(), poll_s
        self._ceiling = self._process.memory_info().rss + limit_bytes
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="omniloom-memory-watch", daemon=True)

    def _watch(self) -> None:
        while not self._stop.wait(self._poll_s):
            if self._process.memory_info().rss > self._ceiling:
                os._exit(OOM_EXIT)

    def __enter__(self) -> MemoryWatch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()


class RowTimer:
    """`with timer:` ends this process when the block takes longer, even when it never releases the interpreter lock."""

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self._nowhere = open(os.devnull, "w")  # noqa: SIM115  # as long as the timer lives

    def __enter__(self) -> None:
        faulthandler.dump_traceback_later(self.timeout_s, exit=True, file=self._nowhere)

    def __exit__(self, *_: object) -> None:
        faulthandler.cancel_dump_traceback_later()

    def close(self) -> None:
        self._nowhere.close()


THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS")


@contextmanager
def environment(**variables: str) -> Iterator[None]:
    """Processes started inside get these environment variables."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def one_thread_each() -> AbstractContextManager[None]:
    """Processes started inside have one thread per library: partitions are the parallelism, and every library would
    start a thread per core in every worker."""
    return environment(**dict.fromkeys(THREAD_VARIABLES, "1"))
