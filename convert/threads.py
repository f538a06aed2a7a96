"""Tasks on several threads of this process: reading, writing and copying tensors release the interpreter's lock."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import torch

Progress = Callable[[int], None]  # bytes done since the last call
Task = Callable[[threading.Event], None]  # long tasks look at the event and return early once it is set


def run_all(tasks: Iterator[Task], workers: int) -> None:
    """Runs the tasks in about their order. The first error stops all and is raised; so does a signal's exception."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)  # every worker would have a pool of its own inside torch, as large as the machine
    try:
        _run_all(tasks, workers)
    finally:
        torch.set_num_threads(before)


def _run_all(tasks: Iterator[Task], workers: int) -> None:
    lock, stop = threading.Lock(), threading.Event()
    ended = threading.Semaphore(0)
    errors: list[BaseException] = []

    def next_task() -> Task | None:
        with lock:
            return None if stop.is_set() else next(tasks, None)

    def work() -> None:
        try:
            while (task := next_task()) is not None:
                task(stop)
        except BaseException as error:  # noqa: BLE001 - raised again by the thread that waits
            errors.append(error)
            stop.set()
        finally:
            ended.release()

    threads = [threading.Thread(target=work, name=f"convert-{i}") for i in range(workers)]
    for thread in threads:
        thread.start()
    try:
        # not by join: before Python 3.13 a signal's exception in it marks a running thread as ended
        for _ in threads:
            while not ended.acquire(timeout=0.2):  # in steps, so that a signal is seen
                pass
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    if errors:
        raise errors[0]
