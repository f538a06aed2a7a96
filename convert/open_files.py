"""Files kept open for reading by position, from any number of threads, never more than the process may have."""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from pathlib import Path

from schemas.errors import IncompleteSourceError

MAX_IDLE = 128  # a checkpoint of a large run has thousands of files, a process often 1024 descriptors


class _Open:
    """A descriptor and how many threads read from it now."""

    def __init__(self, path: Path) -> None:
        self.descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        self.users = 0


class OpenFiles:
    """bytes_read: what was taken from the files so far."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: OrderedDict[Path, _Open] = OrderedDict()  # the least recently used first
        self.bytes_read = 0

    def read_into(self, path: Path, offset: int, buffer: memoryview) -> None:
        """Fills the buffer from the file at this offset. IncompleteSourceError when the file ends before."""
        file, done = self._acquire(path), 0
        try:
            while done < len(buffer):
                count = os.preadv(file.descriptor, [buffer[done:]], offset + done)
                if not count:
                    raise IncompleteSourceError(f"{path}: ends before byte {offset + len(buffer)}, which is needed")
                done += count
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(path)) from error
        finally:
            self._release(file, done)

    def close(self) -> None:
        with self._lock:
            for file in self._open.values():
                os.close(file.descriptor)
            self._open.clear()

    def __del__(self) -> None:
        self.close()

    def _acquire(self, path: Path) -> _Open:
        with self._lock:
            if path not in self._open:
                self._open[path] = _Open(path)
            self._open.move_to_end(path)
            self._open[path].users += 1
            return self._open[path]

    def _release(self, file: _Open, count: int) -> None:
        with self._lock:
            self.bytes_read += count
            file.users -= 1
            surplus = len(self._open) - MAX_IDLE
            for path in [path for path, open_ in self._open.items() if not open_.users][: max(0, surplus)]:
                os.close(self._open.pop(path).descriptor)
