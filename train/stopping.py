"""Stopping at the end of a step, on all ranks at the same one, when a signal says so.

Schedulers send SIGTERM or SIGUSR1 before they take a machine away, and not to all ranks at once. Each step therefore
begins by summing, over ranks, who was told; the sum is on its way while the step computes and is read at its end, so
that it costs no waiting. A signal that comes after the beginning of a step ends the next one.
"""

from __future__ import annotations

import signal
import threading
from datetime import timedelta
from types import FrameType, TracebackType
from typing import cast

import torch
import torch.distributed as dist

SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
TIMEOUT = timedelta(hours=2)  # of the exchange; ranks may differ by as much as a save or an evaluation takes


class Stopper:
    """Of one rank. A context: signals are caught inside it. A second SIGINT interrupts at once.

    group: of CPU tensors, used for nothing else; None makes one where there are several ranks (a collective call).
    reason: the name of the signal that this rank got, or `another rank`.
    """

    def __init__(self, world_size: int = 1, group: dist.ProcessGroup | None = None) -> None:
        if group is None and world_size > 1:
            group = cast(dist.ProcessGroup, dist.new_group(backend="gloo", timeout=TIMEOUT))
        self._group = group
        self._told = torch.zeros(1, dtype=torch.int32)
        self._work: dist.Work | None = None
        self._before: dict[int, object] = {}
        self._received: str | None = None
        self._number: int | None = None
        self._stop = False
        self.reason: str | None = None

    def __enter__(self) -> Stopper:
        if threading.current_thread() is threading.main_thread():  # elsewhere Python sets no handlers
            self._before = {number: signal.signal(number, self._on_signal) for number in SIGNALS}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
        self._before = {}

    def hand_back(self) -> None:
        """Leaves the context. A signal that came too late for the last exchange goes to who had signals before it."""
        self.__exit__(None, None, None)
        if self._number is not None and not self._stop:
            signal.raise_signal(self._number)

    def request(self, reason: str) -> None:
        """Asks all ranks to stop, as a signal does."""
        self._received = self._received or reason

    def begin_step(self) -> None:
        """Sends off whether this rank was told to stop; a collective call that does not wait."""
        self._told = torch.tensor([int(self._received is not None)], dtype=torch.int32)
        if self._group is not None:
            self._work = dist.all_reduce(self._told, op=dist.ReduceOp.SUM, group=self._group, async_op=True)

    def should_stop(self) -> bool:
        """At the end of a step: whether any rank was told before its beginning; the same on every rank."""
        if self._work is not None:
            self._work.wait()
            self._work = None
        if int(self._told) and not self._stop:
            self._stop, self.reason = True, self._received or "another rank"
        return self._stop

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        if number == signal.SIGINT and self._received is not None:
            raise KeyboardInterrupt
        self._number = number
        self.request(signal.Signals(number).name)
