"""What the user sees while a conversion runs: a bar with GB/s and the time left, or plain lines; and a clean stop."""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from schemas.errors import ResumableError

LINE_EVERY_S = 5.0
BAR_EVERY_S = 0.2
_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class _Stopped(BaseException):
    """No Exception: code that turns every fault of a file into an error of its own must not take a signal for one."""


class Meter:
    """Counts the bytes of one phase after the other, from any thread."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.title, self.total, self.done = "planning", 0, 0
        self._resumed = 0  # bytes that an earlier run had done, which say nothing about the speed
        self._clock, self._began = clock, clock()
        self._lock = threading.Lock()

    def begin(self, title: str, total: int, resumed: int) -> None:
        with self._lock:
            self.title, self.total, self.done, self._resumed = title, total, resumed, resumed
            self._began = self._clock()

    def add(self, count: int) -> None:
        with self._lock:
            self.done += count

    def say(self) -> str:
        """`12.34 of 61.07 GB, 1.21 GB/s, 0:40 left`; the time that has passed where no bytes are counted."""
        seconds = max(self._clock() - self._began, 1e-3)
        if not self.total:
            return f"{seconds:.0f} s"
        speed = (self.done - self._resumed) / seconds
        text = f"{gigabytes(self.done)} of {gigabytes(self.total)} GB, {gigabytes(speed)} GB/s"
        left = (self.total - self.done) / speed if speed else 0
        return f"{text}, {int(left // 60)}:{int(left % 60):02d} left" if speed and self.done < self.total else text


def gigabytes(count: float) -> str:
    """Two decimals, more for what would be 0.00."""
    return f"{count / 1e9:.2f}" if count >= 1e8 else f"{count / 1e9:.4f}"


@contextmanager
def shown(meter: Meter) -> Iterator[None]:
    """Shows a meter on stderr while the block runs: a bar on a terminal, else a line every few seconds."""
    console = Console(file=sys.stderr, highlight=False)
    finished = threading.Event()
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[said]}"))
    progress = Progress(*columns, console=console, auto_refresh=False, transient=True)
    task = progress.add_task(meter.title, total=meter.total, said="")

    def refresh() -> None:
        while not finished.wait(BAR_EVERY_S if console.is_terminal else LINE_EVERY_S):
            if console.is_terminal:
                progress.update(
                    task,
                    description=meter.title,
                    completed=meter.done,
                    total=meter.total,
                    said=meter.say(),
                    refresh=True,
                )
            else:
                console.print(f"{meter.title}: {meter.say()}", soft_wrap=True)

    thread = threading.Thread(target=refresh, name="convert-progress", daemon=True)
    if console.is_terminal:
        progress.start()
    thread.start()
    try:
        yield
    finally:
        finished.set()
        thread.join()
        if console.is_terminal:
            progress.stop()


@contextmanager
def stoppable() -> Iterator[None]:
    """SIGINT and SIGTERM raise ResumableError in the main thread, once; finished files stay for the next run."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    stopped = False

    def stop(number: int, _frame: FrameType | None) -> None:
        nonlocal stopped
        if not stopped:  # a second Ctrl-C must not tear the clean end
            stopped = True
            raise _Stopped(signal.Signals(number).name)

    before = {number: signal.signal(number, stop) for number in _SIGNALS}
    try:
        yield
    except _Stopped as stop_:
        raise ResumableError(f"stopped by {stop_}; the same command goes on from here") from None
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
