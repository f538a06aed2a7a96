"""SIGINT and SIGTERM end a job cleanly: what is committed stays, what is in the making is removed, exit code 5."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from schemas.errors import ResumableError

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Stoppable:
    """`with Stoppable() as stop:` makes the signals raise ResumableError in the main thread; `stop.install()` again
    after a library took the handlers over. Outside the main thread it does nothing."""

    def __init__(self) -> None:
        self._before: dict[int, object] = {}
        self._stopped = False
        self._holding = False
        self._held: int | None = None

    @contextmanager
    def hold(self) -> Iterator[None]:
        """Signals wait until the block is over: for libraries that an exception in the middle would leave broken."""
        self._holding = True
        try:
            yield
        finally:
            self._holding = False
            self.install()  # such libraries may have taken the handlers over
        if self._held is not None:
            self._stop(self._held, None)

    def install(self) -> None:
        if threading.current_thread() is threading.main_thread():
            for number in _SIGNALS:
                signal.signal(number, self._stop)

    def _stop(self, number: int, _frame: FrameType | None) -> None:
        if self._stopped:
            return  # cleaning up already; a second Ctrl-C must not tear that
        if self._holding:
            self._held = number
            return
        self._stopped = True
        raise ResumableError(f"stopped by {signal.Signals(number).name}; the same command goes on from here")

    def __enter__(self) -> Stoppable:
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.getsignal(number) for number in _SIGNALS}
        self.install()
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]  # what getsignal gave
