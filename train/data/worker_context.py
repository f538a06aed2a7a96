"""How worker processes are started, and what of a run that was killed is cleaned up.

The queues of workers have named semaphores, 32 bytes each in /dev/shm, which the helper process of multiprocessing
removes when a run ends or is killed; where that helper is killed, too (a container that is stopped, the OOM killer on a
whole group), they stay. So each run lists its own in a note beside them and holds a lock on it, which the kernel frees
with the process, and the next run removes what notes without a holder list. Nothing of a live run is touched.
"""

from __future__ import annotations

import fcntl
import os
import uuid
import weakref
from multiprocessing import get_context
from multiprocessing.context import BaseContext, ForkServerContext, SpawnContext
from multiprocessing.synchronize import BoundedSemaphore, Lock, RLock, Semaphore
from pathlib import Path
from typing import Literal, TypeVar

SHARED = Path("/dev/shm")
NOTE = "omniloom.semaphores."
_Sem = TypeVar("_Sem", Lock, RLock, Semaphore, BoundedSemaphore)


def worker_context(method: Literal["forkserver", "spawn"]) -> BaseContext:
    """The context of multiprocessing that starts workers, once leavings of dead runs are gone."""
    if not os.access(SHARED, os.W_OK):  # another system: its semaphores have no files
        return get_context(method)
    sweep(SHARED)
    return _ForkServer() if method == "forkserver" else _Spawn()


def sweep(folder: Path) -> None:
    """Removes the semaphores of runs that are dead, and their notes."""
    for note in sorted(folder.glob(f"{NOTE}*")):
        try:
            opened = os.open(note, os.O_RDWR)
        except OSError:
            continue  # gone meanwhile, or another user's
        try:
            fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
            for line in note.read_text(encoding="ascii").splitlines():
                name, _, inode = line.partition(" ")
                _remove(folder / name, inode)
            note.unlink(missing_ok=True)
        except BlockingIOError:
            continue  # its run is alive
        finally:
            os.close(opened)


def _remove(path: Path, inode: str) -> None:
    """Only the file that was noted: its name may be another run's by now."""
    try:
        if str(path.stat().st_ino) == inode:
            path.unlink()
    except FileNotFoundError:
        return


class SemaphoreNote:
    """The list of this process's own, locked as long as the process or this object lives."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._path = folder / f"{NOTE}{os.getpid()}.{uuid.uuid4().hex[:8]}"
        self._opened = self._locked()
        weakref.finalize(self, _end, self._path, self._opened)

    def _locked(self) -> int:
        while True:
            opened = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
            fcntl.flock(opened, fcntl.LOCK_EX)
            if self._path.exists() and self._path.stat().st_ino == os.fstat(opened).st_ino:
                return opened
            os.close(opened)  # somebody swept it away before it was locked

    def add(self, name: str) -> None:
        """name: of a file in the folder."""
        try:
            inode = (self.folder / name).stat().st_ino
        except FileNotFoundError:
            return  # has no name any more: nothing to clean
        os.write(self._opened, f"{name} {inode}\n".encode("ascii"))


def _end(path: Path, opened: int) -> None:
    path.unlink(missing_ok=True)
    os.close(opened)


class _Noting(BaseContext):
    """Notes every semaphore that is made through it; queues and events make theirs so."""

    def __init__(self) -> None:
        self._note = SemaphoreNote(SHARED)

    def _noted(self, made: _Sem) -> _Sem:
        semlock = made._semlock  # type: ignore[attr-defined]  # the name stands nowhere else
        self._note.add(f"sem.{semlock.name.lstrip('/')}")
        return made

    def Lock(self) -> Lock:  # noqa: N802  # the name is multiprocessing's
        return self._noted(super().Lock())

    def RLock(self) -> RLock:  # noqa: N802
        return self._noted(super().RLock())

    def Semaphore(self, value: int = 1) -> Semaphore:  # noqa: N802
        return self._noted(super().Semaphore(value))

    def BoundedSemaphore(self, value: int = 1) -> BoundedSemaphore:  # noqa: N802
        return self._noted(super().BoundedSemaphore(value))


class _ForkServer(_Noting, ForkServerContext):
    pass


class _Spawn(_Noting, SpawnContext):
    pass
