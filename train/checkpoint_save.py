"""A save that is under way in a thread: how far it is, what comes to it late, and how its checkpoint appears."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from train.checkpoint_io import amend_state
from train.checkpoint_layout import commit
from train.progress import progress

POLL_S = 0.2
MEGABYTE = 10**6


@dataclass
class Save:
    """Of a step, written to a temporary folder that takes its name when it is complete. nbytes: of all tensors over all
    ranks; error: why it ended before."""

    step: int
    temporary: Path
    nbytes: int
    thread: threading.Thread | None = None
    error: BaseException | None = None
    began: float = field(default_factory=time.monotonic)
    _late: dict[str, Any] = field(default_factory=dict)
    _named: Path | None = None
    _naming: threading.Lock = field(default_factory=threading.Lock)

    @property
    def running(self) -> bool:
        return self.thread is not None and self.thread.is_alive()

    def written(self) -> int:
        """Bytes that are on disk, of the ranks that share this file system."""
        sizes = 0
        for path in self.temporary.glob("*.distcp"):
            try:
                sizes += path.stat().st_size
            except FileNotFoundError:  # renamed just now
                return self.nbytes
        return sizes

    def wait(self, rank: int) -> None:
        """Until it has ended, with progress on rank 0."""
        assert self.thread is not None, "it was begun"
        with rank_progress(rank, f"saving step {self.step}", self.nbytes) as advance:
            said = 0
            while self.thread.is_alive():
                self.thread.join(POLL_S)  # in short waits, so that signals are handled
                now = min(self.written(), self.nbytes) if rank == 0 else 0
                advance(max(now - said, 0))
                said = max(now, said)

    def amend(self, values: Mapping[str, Any]) -> None:
        """Other values of keys of the state: the checkpoint appears with them, or is changed at once where it is there.
        Raises as `amend_state`."""
        with self._naming:
            if self._named is None:
                self._late |= values
            else:
                amend_state(self._named, values)

    def appear(self) -> Path:
        """The checkpoint takes its name, with what came late. When all ranks have written."""
        with self._naming:
            if self._late:
                amend_state(self.temporary, self._late)
            self._named = commit(self.temporary, self.step)
            return self._named


@contextmanager
def rank_progress(rank: int, title: str, nbytes: int) -> Iterator[Callable[[int], None]]:
    """Progress in megabytes on rank 0, told bytes; nothing elsewhere."""
    if rank != 0:
        yield lambda count: None
        return
    with progress(title, nbytes // MEGABYTE, "MB") as advance:
        done = 0

        def told(count: int) -> None:
            nonlocal done
            before, done = done // MEGABYTE, done + count
            advance(done // MEGABYTE - before)

        yield told
