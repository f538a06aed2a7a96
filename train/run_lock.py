"""One run at a time in an output folder: two would overwrite each other's checkpoints and curves."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
from pathlib import Path
from typing import IO

from schemas.errors import ConfigError

LOCK_FILE = "run.lock"
HELD = (errno.EACCES, errno.EAGAIN)


class RunLock:
    """Holds a folder until it is released or this process ends, however it ends. The lock is one of the open file,
    which processes that this one starts do not inherit; most network file systems know such locks. note: what is to be
    told where the file system has none, or None."""

    def __init__(self, folder: Path) -> None:
        """Makes the folder. ConfigError: another run trains there, or the folder cannot be written to."""
        self.note: str | None = None
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._file: IO[str] = (folder / LOCK_FILE).open("a+")
        except OSError as error:
            raise ConfigError(f"train.checkpoint.output_dir: {folder} cannot be written to: {error}") from error
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in HELD:
                self._file.seek(0)
                owner = self._file.read(200).strip() or "another process"
                self._file.close()
                raise ConfigError(
                    f"train.checkpoint.output_dir: {owner} is training into {folder}; wait for it, stop it, or write "
                    "another folder"
                ) from error
            self.note = f"{folder}: the file system has no locks ({error}), so a second run there would not be noticed"
        self._file.truncate(0)
        self._file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
        self._file.flush()

    def release(self) -> None:
        """Another run may begin there."""
        self._file.close()
