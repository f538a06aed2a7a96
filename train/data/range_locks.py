"""Locks between the processes of a node that end with their holder, however it ends."""

from __future__ import annotations

import fcntl
import os
import struct
from pathlib import Path

import xxhash


class RangeLocks:
    """Locks on numbered bytes of one file, which the kernel frees when this object or its process ends. Two objects
    exclude each other, also in one process."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)

    def close(self) -> None:
        """Frees all of them."""
        os.close(self._file)

    def share(self, name: str) -> None:
        """Waits until no other object owns it."""
        self._set(fcntl.F_OFD_SETLKW, fcntl.F_RDLCK, name)

    def own(self, name: str) -> None:
        """Waits until no other object shares or owns it."""
        self._set(fcntl.F_OFD_SETLKW, fcntl.F_WRLCK, name)

    def try_own(self, name: str) -> bool:
        try:
            self._set(fcntl.F_OFD_SETLK, fcntl.F_WRLCK, name)
        except (BlockingIOError, PermissionError):
            return False
        return True

    def free(self, name: str) -> None:
        self._set(fcntl.F_OFD_SETLK, fcntl.F_UNLCK, name)

    def _set(self, command: int, kind: int, name: str) -> None:
        fcntl.fcntl(self._file, command, struct.pack("hhqqi", kind, os.SEEK_SET, _slot(name), 1, 0))


def _slot(name: str) -> int:
    """A byte that stands for a name. Two names on one byte only pin each other."""
    return int(xxhash.xxh3_64_intdigest(name.encode()) >> 2)
