"""Signals to stop that come where no step ends: while a training is built, and behind its last save.

A scheduler's SIGTERM or SIGUSR1 ends there what runs, as Ctrl-C does, and the exit code says that the same line goes
on. In between they wait for the end of a step (`train.stopping`).
"""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType

from schemas.errors import StoppedError

SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
BEFORE = "before the first step: nothing was there to save; the same line begins again"


class StoppedOutsideError(StoppedError):
    """Of this rank alone, not at the end of a step: the others may be anywhere."""


class _Told(KeyboardInterrupt):
    """Passes whoever handles `Exception`."""


class OutsideSteps:
    """A context: inside it SIGTERM and SIGUSR1 end what runs, with a StoppedOutsideError `SIGTERM {said}`. The first
    one alone does, so that what is tidied up because of it is brought to its end. Contexts of others, such as the one
    that waits for the end of a step, take the signals over while they are open. said may change on the way."""

    def __init__(self, said: str = BEFORE) -> None:
        self.said = said
        self._before: dict[int, object] = {}
        self._told: str | None = None

    def __enter__(self) -> OutsideSteps:
        if threading.current_thread() is threading.main_thread():  # elsewhere Python sets no handlers
            self._before = {number: signal.signal(number, self._on_signal) for number in SIGNALS}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
        self._before = {}
        if error is not None and self._told is not None:  # what fails meanwhile fails because of it
            raise StoppedOutsideError(f"{self._told} {self.said}") from error

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        if self._told is None:
            self._told = signal.Signals(number).name
            raise _Told
