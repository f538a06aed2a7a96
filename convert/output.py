"""An output directory that appears whole or not at all, and a journal by which a killed run goes on.

Everything is written to `OUTPUT.partial`; finished files are noted, synced, in its journal. The directory takes its
name when all is done, so a reader never sees half of it. A second run of the same conversion skips the files in the
journal, or finds the output finished and does nothing. One process at a time works on an output.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import threading
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import xxhash

from convert.small_files import parse_json, read_object
from schemas.errors import ConfigError, OmniloomError, ResumableError

JOURNAL = "journal.jsonl"
REPORT = "omniloom_conversion.json"


OTHER_INPUTS = "it was made of other inputs or with other options"  # see `OutputDirectory.difference`


class OutputDirectory:
    """`check` -> `open` -> write files with `temporary` and `finish` -> `commit`; `discard` when the conversion cannot
    succeed.

    fingerprint: of everything that decides about the bytes. begun: the same in a few words, for who comes later with
    other inputs.
    """

    def __init__(self, path: Path, fingerprint: str, begun: str = "") -> None:
        if path.name in ("", ".."):
            raise ConfigError(f"{path}: cannot be the output; give the name of a directory that does not exist yet")
        self.path = path
        self.partial = path.with_name(path.name + ".partial")
        self.fingerprint, self.begun = fingerprint, begun
        self.finished: dict[str, dict[str, Any]] = {}
        self.committed = False
        self._lock: int | None = None
        self._writing = threading.Lock()

    def check(self, resume: bool = True) -> bool:
        """True when the output of this very conversion is there already. Changes nothing on the disk.

        ConfigError for all that a run would meet: something else under the name, a place where nothing can be written,
        an unfinished conversion of other inputs (unless resume is False), another process at work.
        """
        try:
            if self._is_finished():
                return True
            self._check_place()
            if _is_there(self.partial):
                self._check_partial(resume)
        except OSError as error:
            raise ConfigError(f"{self.path}: cannot be the output: {(error.strerror or str(error)).lower()}") from error
        return False

    def tidy(self) -> None:
        """Of a finished output: a kill may have left its journal."""
        (self.path / JOURNAL).unlink(missing_ok=True)

    def open(self, resume: bool) -> None:
        """Takes the directory for this process and reads what an earlier run of the same conversion finished.

        resume: False starts anew. ConfigError when another conversion was left unfinished here or is being written.
        """
        self.partial.mkdir(parents=True, exist_ok=True)
        self._lock = _locked(self.partial)
        try:
            self._check_partial(resume, locked=True)
        except ConfigError:
            self.close()
            raise
        journal = self.partial / JOURNAL
        for line in (_read_journal(journal) if resume else [])[1:]:
            if self._is_there(line["file"], line["size"]):
                self.finished[line["file"]] = line
        self._remove_strays()
        head = {"fingerprint": self.fingerprint, "begun": self.begun}
        write_atomic(journal, "".join(json.dumps(entry) + "\n" for entry in (head, *self.finished.values())).encode())

    def _is_finished(self) -> bool:
        """ConfigError when something else has the name."""
        if not self.path.exists() or (self.path.is_dir() and not any(self.path.iterdir())):
            return False
        reason = self.difference() if self.path.is_dir() else "it is no directory"
        if reason is None:
            return True
        raise ConfigError(
            f"{self.path}: exists and is not the result of this conversion: {reason}; choose another output"
        )

    def difference(self) -> str | None:
        """What tells the directory from the finished output of this very conversion, None when nothing does: of what
        its own record says of inputs, options and files; weights are not read."""
        try:
            report = read_object(self.path / REPORT)
            time = (self.path / REPORT).stat().st_mtime_ns
            sizes, digests = dict(report["files"]), dict(report["small_files"])
        except FileNotFoundError:
            return f"it has no {REPORT}"
        except (ConfigError, LookupError, TypeError, ValueError):
            return f"its {REPORT} is damaged"
        if report.get("fingerprint") != self.fingerprint:
            return OTHER_INPUTS
        for name in (*sizes, *digests):
            path = self.path / name
            if not path.is_file():
                return f"its {name} is missing"
            state = path.stat()
            same = state.st_size == sizes[name] if name in sizes else _digest_of(path) == digests[name]
            if not same:
                return f"its {name} was changed"
            if name in sizes and state.st_mtime_ns != time:
                return f"its {name} was written to later, or copied without its time (see `verify`)"
        return None

    def source_fingerprint(self) -> str | None:
        """Of what the finished output was made of, apart from its base; None where its record does not say."""
        found = read_object(self.path / REPORT).get("source_fingerprint")
        return found if isinstance(found, str) else None

    def other_begun(self) -> bool:
        """Whether an unfinished conversion of other inputs or options is in the way, which `open` without resume throws
        away."""
        lines = _read_journal(self.partial / JOURNAL)
        return bool(lines) and lines[0]["fingerprint"] != self.fingerprint

    def _check_place(self) -> None:
        """A directory can be made there, and what is there already, an empty one, can be replaced."""
        if self.path.is_symlink():
            target = os.readlink(self.path)
            raise ConfigError(f"{self.path}: is a link to {target}; give that name itself, or remove the link")
        above = next(path for path in self.path.absolute().parents if os.path.lexists(path))
        if not above.is_dir():
            raise ConfigError(f"{self.path}: cannot be the output: {above} is no directory")
        if not os.access(above, os.W_OK | os.X_OK):
            raise ConfigError(f"{self.path}: cannot be the output: {above} may not be written to")

    def _check_partial(self, resume: bool, *, locked: bool = False) -> None:
        if self.partial.is_symlink() or not self.partial.is_dir():
            raise ConfigError(f"{self.partial}: is no directory, and the output is written there first; move it away")
        if not locked:
            os.close(_locked(self.partial))
        names = {path.name for path in self.partial.iterdir()}
        lines = _read_journal(self.partial / JOURNAL)
        if not lines and names - {JOURNAL, f"{JOURNAL}.tmp"}:
            raise ConfigError(
                f"{self.partial}: holds files that no conversion wrote, and the output is written there first; "
                "move them away"
            )
        if resume and lines and lines[0]["fingerprint"] != self.fingerprint:
            raise ConfigError(
                f"{self.partial}: holds an unfinished conversion of other inputs or options (it was begun as "
                f"{lines[0].get('begun')}, and this is {self.begun}); repeat that command to finish it, or give "
                "--no-resume to throw away what it wrote and start anew"
            )

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
        """The directory takes its name; the journal is gone from it. Nothing behind the rename can fail: by then the
        output is there."""
        self._stamp()
        sync_directory(self.partial)
        try:
            if self.path.exists():
                self.path.rmdir()  # an empty directory, as `check` saw
            self.partial.rename(self.path)
        except OSError as error:  # somebody put something there in the meantime
            raise ResumableError(
                f"{self.path}: is in the way of the finished output ({(error.strerror or str(error)).lower()}); "
                "move it away and run the same command again"
            ) from error
        self.committed = True
        with suppress(OSError):  # a parent that may not be read; `tidy` takes the journal away the next time
            sync_directory(self.path.parent)
            self.tidy()
        self.close()

    def _stamp(self) -> None:
        """Weight files and record get one time of change, by which a file that was written to later is told."""
        time = (self.partial / REPORT).stat().st_mtime_ns
        for name in (REPORT, *self.finished):
            os.utime(self.partial / name, ns=(time, time))

    def discard(self) -> None:
        """Leaves nothing behind of what this process wrote."""
        if self._lock is not None and not self.committed:  # else the directory is another's, or the output
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


def _is_there(path: Path) -> bool:
    """True for anything under the name, a dangling link, too. OSError for a name that cannot be."""
    try:
        path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


def _locked(directory: Path) -> int:
    """A descriptor that holds the directory's lock. ConfigError when another process has it."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(descriptor)
        raise ConfigError(f"{directory}: another process is writing this output") from error
    return descriptor


def _digest_of(path: Path) -> str:
    """`digest` of a file; the index of a large distributed checkpoint is not that small."""
    state = xxhash.xxh3_64()
    with path.open("rb") as file:
        while part := file.read(1 << 20):
            state.update(part)
    return state.hexdigest()


def digest(content: bytes) -> str:
    """The xxh3_64 of a small file, as the record notes it."""
    return xxhash.xxh3_64(content).hexdigest()


def _read_journal(path: Path) -> list[dict[str, Any]]:
    """The head of a journal and its whole lines after it, [] where there is no journal of ours; the last line may have
    been cut by a kill."""
    lines: list[dict[str, Any]] = []
    if not path.is_file() or path.is_symlink():
        return lines
    for text in path.read_bytes().splitlines():
        try:
            line = parse_json(text, path)
        except ConfigError:
            break
        if not isinstance(line, dict) or not _is_entry(line, head=not lines):
            break
        lines.append(line)
    return lines


def _is_entry(line: Mapping[str, Any], head: bool) -> bool:
    if head:
        return isinstance(line.get("fingerprint"), str)
    name = line.get("file")
    return isinstance(name, str) and Path(name).name == name and type(line.get("size")) is int


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


def check_space(path: Path, needed: int, kind: type[OmniloomError] = ResumableError) -> None:
    """ResumableError, or another kind, when the file system of a directory, which may not be there yet, lacks this many
    bytes."""
    there = next(folder for folder in (path, *path.absolute().parents) if folder.is_dir())
    free = shutil.disk_usage(there).free
    if free < needed:
        raise kind(
            f"{path}: {needed / 1e9:.2f} GB are still to be written and only {free / 1e9:.2f} GB are free; "
            "make room and run the same command again"
        )
