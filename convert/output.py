"""An output directory that appears whole or not at all, and a journal by which a killed run goes on.

Everything is written to `OUTPUT.partial`; finished files are noted, synced, in its journal. The directory takes its
name when all is done, so a reader never sees half of it. A second run of the same conversion skips the files in the
journal, or finds the output finished and does nothing. One process at a time works on an output.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from schemas.errors import ConfigError, ResumableError

JOURNAL = "journal.jsonl"
REPORT = "omniloom_conversion.json"


class OutputDirectory:
    """`open` -> write files with `temporary` and `finish` -> `commit`; `discard` when the conversion cannot succeed."""

    def __init__(self, path: Path, fingerprint: str) -> None:
        self.path = path
        self.partial = path.with_name(path.name + ".partial")
        self.fingerprint = fingerprint
        self.finished: dict[str, dict[str, Any]] = {}
        self._lock: int | None = None
        self._writing = threading.Lock()

    def is_done(self) -> bool:
        """True when the output of this very conversion is there already. ConfigError when something else is."""
        if not self.path.exists() or (self.path.is_dir() and not any(self.path.iterdir())):
            return False
        with contextlib.suppress(OSError, ValueError, LookupError, TypeError):
            report = json.loads((self.path / REPORT).read_bytes())
            sizes = {name: (self.path / name).stat().st_size for name in report["files"]}
            if report["fingerprint"] == self.fingerprint and report["files"] == sizes:
                (self.path / JOURNAL).unlink(missing_ok=True)
                return True
        raise ConfigError(f"{self.path}: exists and is not the result of this conversion; choose another output")

    def open(self, resume: bool) -> None:
        """Takes the directory for this process and reads what an earlier run of the same conversion finished.

        resume: False starts anew. ConfigError when another conversion was left unfinished here or is being written.
        """
        self.partial.mkdir(parents=True, exist_ok=True)
        self._lock = os.open(self.partial, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            self.close()
            raise ConfigError(f"{self.partial}: another process is writing this output") from error
        journal = self.partial / JOURNAL
        lines = _read_journal(journal) if resume else []
        if lines and lines[0].get("fingerprint") != self.fingerprint:
            self.close()
            raise ConfigError(
                f"{self.partial}: holds an unfinished conversion of other inputs or options; finish that one, "
                "or give --no-resume to start anew"
            )
        for line in lines[1:]:
            if self._is_there(line["file"], line["size"]):
                self.finished[line["file"]] = line
        self._remove_strays()
        head = {"fingerprint": self.fingerprint}
        write_atomic(journal, "".join(json.dumps(entry) + "\n" for entry in (head, *self.finished.values())).encode())

    def temporary(self, name: str) -> Path:
        """Where a file is written before `finish`."""
        return self.partial / f"{name}.tmp"

    def finish(self, name: str, notes: Mapping[str, Any]) -> None:
        """A synced temporary file is noted in the journal and takes its name, in this order, so that a file under its
        name is never made again. May be called from any thread."""
        entry = {"file": name, "size": self.temporary(name).stat().st_size, **notes}
        with self._writing, (self.partial / JOURNAL).open("ab") as journal:
            journal.write(json.dumps(entry).encode() + b"\n")
            journal.flush()
            os.fsync(journal.fileno())
            self.temporary(name).rename(self.partial / name)
            self.finished[name] = entry
        sync_directory(self.partial)

    def write(self, name: str, content: bytes) -> None:
        """A small file, made anew by every run."""
        write_atomic(self.partial / name, content)

    def commit(self) -> None:
        """The directory takes its name; the journal is gone from it."""
        sync_directory(self.partial)
        if self.path.exists():
            self.path.rmdir()  # an empty directory, as `is_done` saw
        self.partial.rename(self.path)
        sync_directory(self.path.parent)
        (self.path / JOURNAL).unlink()
        self.close()

    def discard(self) -> None:
        """Leaves nothing behind."""
        shutil.rmtree(self.partial)
        self.close()

    def close(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _is_there(self, name: str, size: int) -> bool:
        """True when a file of the journal is there; a kill may have come between its line and its name."""
        for path in (self.partial / name, self.temporary(name)):
            if path.exists() and path.stat().st_size == size:
                path.rename(self.partial / name)
                return True
        return False

    def _remove_strays(self) -> None:
        """What a killed run left half-written, and files that the journal does not know."""
        for path in self.partial.iterdir():
            if path.name not in self.finished and path.name != JOURNAL:
                shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()


def _read_journal(path: Path) -> list[dict[str, Any]]:
    """The whole lines of a journal; the last one may have been cut by a kill."""
    lines: list[dict[str, Any]] = []
    if path.exists():
        for line in path.read_bytes().splitlines():
            try:
                lines.append(json.loads(line))
            except ValueError:
                break
    return lines


def finished_files(path: Path) -> list[str]:
    """The files that an unfinished run towards this output has in its journal."""
    return [line["file"] for line in _read_journal(path.with_name(path.name + ".partial") / JOURNAL)[1:]]


def write_atomic(path: Path, content: bytes) -> None:
    """Writes beside, syncs, renames."""
    temporary = path.with_name(path.name + ".tmp")
    with temporary.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    temporary.rename(path)
    sync_directory(path.parent)


def sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def check_space(path: Path, needed: int) -> None:
    """ResumableError when the file system of a directory lacks this many bytes."""
    free = shutil.disk_usage(path).free
    if free < needed:
        raise ResumableError(
            f"{path}: {needed / 1e9:.2f} GB are still to be written and only {free / 1e9:.2f} GB are free; "
            "make room and run the same command again"
        )
