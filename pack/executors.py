"""The same `write_partition` on local processes or on Ray Data.

Task descriptions go in, receipts come out; media never pass between processes. Both report every outcome as it comes
and leave it to the caller to compare plan and commits afterwards.
"""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import pickle
import signal
import socket
import sys
import traceback
import warnings
from collections import deque
from collections.abc import Generator, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess
from typing import Any

from pack.config import ExecutorConfig
from pack.guard import OOM_EXIT, end_with_parent, environment, one_thread_each, start_process
from pack.isolate import describe_exit
from pack.row import MEDIA_MODULES, MediaLoader
from pack.signals import Stoppable
from pack.task import PartitionTask, Receipt
from schemas import errors
from schemas.errors import OmniloomError, SchemaError, VerificationError

MAX_DEATHS = 3  # of a partition's worker, in one round
_REACH_S = 15.0
RAY_OBJECT_STORE_BYTES = 256 << 20  # only task descriptions and receipts go through it


@dataclass(frozen=True)
class Failure:
    """A partition that was not committed. fatal: no other one would fare better (full disk, changed manifest...)."""

    partition: str
    message: str
    kind: str = "OmniloomError"
    fatal: bool = False
    traceback: str = ""

    def to_error(self) -> OmniloomError:
        kind = getattr(errors, self.kind, OmniloomError)
        return kind(self.message) if issubclass(kind, OmniloomError) else OmniloomError(self.message)


@dataclass(frozen=True)
class WorkerDied:
    """A worker ended while it had this partition, which is run again in isolation."""

    partition: str
    how: str


Outcome = Receipt | Failure | WorkerDied


def run_tasks(
    tasks: Sequence[PartitionTask], executor: ExecutorConfig, media: MediaLoader | None, stop: Stoppable
) -> Generator[Outcome, None, None]:
    """One round over the tasks; outcomes in the order in which they come. Closing the iterator ends all workers."""
    if executor.kind == "local":
        yield from _run_local(tasks, count_workers(executor), media)
    else:
        yield from _run_ray(tasks, executor, media, stop)


def count_workers(executor: ExecutorConfig) -> int:
    return executor.workers or len(os.sched_getaffinity(0))


def _attempt(task: PartitionTask, media: MediaLoader | None) -> Receipt | Failure:
    """write_partition, with its errors as values that cross any process boundary."""
    from pack.partition import write_partition  # noqa: PLC0415  # torch: seconds, and only workers need it

    try:
        return write_partition(task, media)
    except Exception as error:  # noqa: BLE001  # reported to the job, which decides
        known = isinstance(error, OmniloomError)
        said = str(error) if known else f"{type(error).__name__}: {error}"
        fatal = known and not isinstance(error, (VerificationError, SchemaError))
        kind = type(error).__name__ if known else "OmniloomError"
        return Failure(task.partition.name, said, kind, fatal, traceback.format_exc())


@dataclass
class _Worker:
    process: ForkServerProcess
    pipe: Connection
    task: PartitionTask | None = None


def _run_local(tasks: Sequence[PartitionTask], workers: int, media: MediaLoader | None) -> Iterator[Outcome]:
    todo = deque(tasks)
    deaths: dict[str, int] = {}
    pool: list[_Worker] = []
    try:
        while todo or any(worker.task for worker in pool):
            idle = sum(worker.task is None for worker in pool)
            for _ in range(min(workers - len(pool), len(todo) - idle)):
                pool.append(_start_worker(media))
            for worker in pool:
                if worker.task is None and todo:
                    worker.task = todo.popleft()
                    worker.pipe.send(worker.task)
            ready = wait([worker.pipe for worker in pool] + [worker.process.sentinel for worker in pool])
            for worker in list(pool):
                if worker.pipe in ready or worker.process.sentinel in ready:
                    yield from _collect(worker, pool, todo, deaths)
    finally:
        for worker in pool:
            worker.process.kill()
        for worker in pool:
            worker.process.join()
            worker.pipe.close()


def _start_worker(media: MediaLoader | None) -> _Worker:
    ours, theirs = multiprocessing.Pipe()
    preload = ["pack.partition", *(MEDIA_MODULES if media is None else [])]
    process = start_process(_worker_main, (theirs, media), "omniloom-pack", preload)
    theirs.close()
    return _Worker(process, ours)


def _collect(
    worker: _Worker, pool: list[_Worker], todo: deque[PartitionTask], deaths: dict[str, int]
) -> Iterator[Outcome]:
    """The outcome of a worker that has spoken or ended."""
    task = worker.task
    try:
        outcome = worker.pipe.recv() if worker.pipe.poll() else None
    except (EOFError, ConnectionResetError):
        outcome = None
    if outcome is not None:
        worker.task = None
        yield outcome
        return
    worker.process.join(10)
    pool.remove(worker)
    worker.pipe.close()
    if task is None:
        return
    code = worker.process.exitcode
    how = "too much memory" if code == OOM_EXIT else describe_exit(code)
    name = task.partition.name
    deaths[name] = deaths.get(name, 0) + 1
    if deaths[name] >= MAX_DEATHS:
        yield Failure(name, f"partition {name}: its worker ended {deaths[name]} times, the last time with {how}")
        return
    todo.appendleft(replace(task, isolated=True))
    yield WorkerDied(name, how)


def _worker_main(pipe: Connection, media: MediaLoader | None) -> None:
    """The life of a local worker: tasks in, outcomes out, until the pipe closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to the whole group; the job's own process ends us
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    end_with_parent()
    while True:
        try:
            task = pipe.recv()
        except EOFError:
            return
        pipe.send(_attempt(task, media))


def _run_ray(
    tasks: Sequence[PartitionTask], executor: ExecutorConfig, media: MediaLoader | None, stop: Stoppable
) -> Iterator[Outcome]:
    ray = _import_ray()
    started = not ray.is_initialized()
    if started:
        with stop.hold():
            _start_ray(ray, executor)
    try:
        _preflight(ray, tasks[0], media)
        _quiet(ray)
        items = [{"task": pickle.dumps(task)} for task in tasks]
        source = ray.data.from_items(items, override_num_blocks=len(items))
        options: dict[str, Any] = {"num_cpus": 1, "max_retries": MAX_DEATHS - 1}
        if executor.workers is not None:
            options["compute"] = ray.data.TaskPoolStrategy(size=executor.workers)

        def pack(item: dict[str, Any]) -> dict[str, str]:
            outcome = _attempt(pickle.loads(item["task"]), media)  # made above, in this job
            return {"kind": type(outcome).__name__, "outcome": json.dumps(asdict(outcome))}

        with warnings.catch_warnings():
            # max_retries is announced to become a named parameter; without it a row that kills its worker would be
            # tried for ever
            warnings.simplefilter("ignore")
            done = source.map(pack, **options)
        for row in done.iter_rows():
            fields = json.loads(row["outcome"])
            yield Receipt(**fields) if row["kind"] == "Receipt" else Failure(**fields)
    finally:
        if started:
            ray.shutdown()


def _preflight(ray: Any, task: PartitionTask, media: MediaLoader | None) -> None:
    """Runs one small task, so that workers that lack a module or a version are one clear error and not lost blocks."""

    def check() -> Failure | None:
        from pack.partition import prepare_worker  # noqa: PLC0415  # see _attempt

        try:
            prepare_worker(task, media)
        except OmniloomError as error:
            return Failure(task.partition.name, str(error), type(error).__name__, fatal=True)
        return None

    try:
        fault = ray.get(ray.remote(num_cpus=1)(check).remote())
    except ray.exceptions.RayError as error:
        lines = [line for line in str(error).splitlines() if line.strip()]
        raise OmniloomError(f"Ray's workers cannot run omniloom: {lines[-1].strip() if lines else error!r}") from error
    if fault is not None:
        raise fault.to_error()


def _quiet(ray: Any) -> None:
    """Ray's own bars and messages off: ours show rows and hours, Ray's only blocks."""
    context = ray.data.DataContext.get_current()
    context.enable_progress_bars = False
    context.enable_operator_progress_bars = False
    context.print_on_execution_start = False
    context.execution_no_progress_timeout_s = -1  # a partition may take long
    context.max_errored_blocks = -1  # a lost partition is found when plan and commits are compared
    for name in ("ray.data", "ray"):
        logging.getLogger(name).setLevel(logging.CRITICAL)


def _import_ray() -> Any:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_DATA_EXECUTION_NO_PROGRESS_TIMEOUT_S", "-1")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    # a dead worker is expected, retried and reported by us
    os.environ.setdefault("RAY_DEDUP_LOGS_SKIP_REGEX", r"worker died or was killed|retries remaining")
    import ray  # noqa: PLC0415  # seconds to import, and only this executor needs it
    import ray.data  # noqa: PLC0415

    return ray


def _start_ray(ray: Any, executor: ExecutorConfig) -> None:
    """Joins the cluster of `address` or RAY_ADDRESS, else starts a Ray of our own on this machine."""
    address = executor.address or os.environ.get("RAY_ADDRESS")
    options: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
    try:
        if address and address != "local":
            _check_reachable(address)
            ray.init(address=address, **options)
            return
        with environment(PYTHONPATH=os.pathsep.join(path for path in sys.path if path)), one_thread_each():
            ray.init(
                address="local",
                num_cpus=count_workers(executor),
                include_dashboard=False,
                object_store_memory=RAY_OBJECT_STORE_BYTES,
                **options,
            )
    except Exception as error:  # Ray raises bare ones, too, when its start takes longer than it waits
        where = f"the Ray cluster at {address}" if address else "a local Ray"
        said = " ".join(str(error).split())
        raise OmniloomError(f"cannot start or reach {where}: {said} (pack.executor.kind=local needs no Ray)") from error


def _check_reachable(address: str) -> None:
    """OSError at once where Ray itself would try for minutes. Addresses that are no host and port are left to Ray."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if host and port.isdecimal():
        socket.create_connection((host.strip("[]"), int(port)), timeout=_REACH_S).close()
