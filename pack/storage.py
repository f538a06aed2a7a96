"""Where a packing job writes: a local folder, or a prefix of an object store through fsspec.

Names are relative to the output and use `/`. A partition appears whole or not at all: locally a finished folder is
renamed into `parts/`; in an object store, which has no rename, the files go under an attempt prefix and one conditional
put of `commits/<partition>.json` names the attempt that counts.
"""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import xxhash

from schemas.errors import ConfigError, OmniloomError, VerificationError

COMMIT_FILE = "_COMMIT"
REJECTS_FILE = "rejects.jsonl"
_HASH_BLOCK = 16 << 20
# Faults of the machine, not of a row: they end the partition instead of rejecting the row that met them.
MACHINE_ERRNOS = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EMFILE, errno.ENFILE})
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
_DENIED = frozenset({errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST})


@dataclass(frozen=True)
class Entry:
    """One file. name: relative to the output; size: bytes; modified: seconds since the epoch."""

    name: str
    size: int
    modified: float


@dataclass(frozen=True)
class Committed:
    """A committed partition. folder: where its files lie, relative to the output; commit: the bytes of its commit
    file."""

    partition: str
    folder: str
    commit: bytes


@contextmanager
def explain_io(doing: str, location: str) -> Iterator[None]:
    """Turns the operating system's refusal to write into one line that says what to do."""
    try:
        yield
    except OSError as error:
        said = f"{doing} {location}: {error.strerror or error}"
        if error.errno in _FULL:
            raise OmniloomError(
                f"{said}; free some space and run the same command again: it goes on from here"
            ) from error
        if error.errno in _DENIED or isinstance(error, PermissionError):
            raise ConfigError(f"{said}; choose an output that this user may write (pack.output)") from error
        raise OmniloomError(said) from error


class Storage(ABC):
    """One output location."""

    location: str
    staging_root: Path  # local folder of the attempts that run on this machine

    @abstractmethod
    def read(self, name: str, start: int = 0, length: int | None = None) -> bytes:
        """`length` bytes from `start` on (all when None); FileNotFoundError when there is no such file."""

    @abstractmethod
    def write(self, name: str, data: bytes) -> None:
        """Creates or replaces a file atomically and durably."""

    @abstractmethod
    def append(self, name: str, text: str) -> None:
        """Adds a line to a log file."""

    @abstractmethod
    def exists(self, name: str) -> bool: ...

    @abstractmethod
    def size(self, name: str) -> int:
        """Bytes of a file; FileNotFoundError."""

    @abstractmethod
    def files(self, folder: str) -> list[Entry]:
        """All files below a folder, at any depth, sorted by name."""

    @abstractmethod
    def remove(self, name: str) -> None:
        """Removes a file or a folder with everything in it; nothing when there is none."""

    @abstractmethod
    def part_folders(self) -> list[tuple[str, str]]:
        """(partition, folder) of every folder below parts/, whether it counts or not."""

    @abstractmethod
    def committed_names(self) -> set[str]:
        """The partitions that are committed, by one listing."""

    @abstractmethod
    def read_commits(self, partitions: Iterable[str]) -> Iterator[Committed]:
        """The commits of these partitions, in the order asked for; those that are not there are left out."""

    @abstractmethod
    def read_many(self, names: Sequence[str]) -> Iterator[bytes]:
        """The bytes of many small files, in order; FileNotFoundError."""

    @abstractmethod
    def publish(self, folder: Path, partition: str, attempt: str) -> bool:
        """Commits the finished local folder; False when another attempt was first. `folder` is gone afterwards."""

    @abstractmethod
    def local_path(self, name: str) -> Path | None:
        """The path of a file on this machine, or None when it lies in an object store."""

    @abstractmethod
    def check_writable(self) -> None:
        """ConfigError when it is plain already that nothing can be written here; writes nothing."""

    def url(self, name: str) -> str:
        """The full address of a name, for people."""
        return f"{self.location.rstrip('/')}/{name}" if name else self.location

    def new_staging(self, attempt: str) -> Path:
        """A fresh, empty local folder for one attempt at a partition, of the name `guard.attempt_name`."""
        with explain_io("cannot make a folder below", str(self.staging_root)):
            folder = self.staging_root / attempt
            folder.mkdir(parents=True)
        return folder

    def try_read(self, name: str) -> bytes | None:
        """The bytes of a file, or None when there is no such file."""
        try:
            return self.read(name)
        except (FileNotFoundError, NotADirectoryError):
            return None


def open_storage(location: str) -> Storage:
    """The storage of a folder, `file://`, `s3://`, `gs://`... ConfigError for an unknown scheme."""
    if location.startswith("file://"):
        location = location[len("file://") :]
    if "://" in location:
        from pack.object_storage import ObjectStorage  # noqa: PLC0415  # it builds on this module

        return ObjectStorage(location)
    return LocalStorage(Path(location).expanduser())


def hash_file(storage: Storage, name: str, algorithm: str, advance: Callable[[int], None] | None = None) -> str:
    """Hex digits of a file's xxh3_64, sha1 or sha256; advance: told the bytes of every block."""
    digest = xxhash.xxh3_64() if algorithm == "xxh3_64" else hashlib.new(algorithm)
    start = 0
    while block := storage.read(name, start, _HASH_BLOCK):
        digest.update(block)
        start += len(block)
        if advance is not None:
            advance(len(block))
        if len(block) < _HASH_BLOCK:
            break
    return digest.hexdigest()


def fsync_tree(folder: Path) -> None:
    """Flushes every file below a folder, then the folders themselves."""
    for root, _, names in os.walk(folder):
        for name in names:
            _fsync(os.path.join(root, name))
        _fsync(root)


def _fsync(path: str | Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_atomic(path: Path, data: bytes) -> None:
    """Writes beside, fsyncs and renames, so that a reader sees the old file or the new one."""
    beside = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.tmp")
    try:
        with open(beside, "wb") as out:
            out.write(data)
            out.flush()
            os.fsync(out.fileno())
        os.replace(beside, path)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise
    _fsync(path.parent)


class LocalStorage(Storage):
    """A folder of this machine or of a shared file system."""

    def __init__(self, root: Path) -> None:
        self.root = Path(os.path.abspath(root))
        self.location = str(self.root)
        self.staging_root = self.root / "_tmp"

    def check_writable(self) -> None:
        there = self.root
        while not os.path.lexists(there):
            there = there.parent
        if not there.is_dir():
            raise ConfigError(f"pack.output: {there} is a file, not a folder")
        if not os.access(there, os.W_OK | os.X_OK):
            raise ConfigError(f"pack.output: {there} may not be written to by this user")

    def read(self, name: str, start: int = 0, length: int | None = None) -> bytes:
        with open(self.root / name, "rb") as file:
            file.seek(start)
            return file.read() if length is None else file.read(length)

    def write(self, name: str, data: bytes) -> None:
        path = self.root / name
        with explain_io("cannot write", str(path)):
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomic(path, data)

    def append(self, name: str, text: str) -> None:
        path = self.root / name
        with explain_io("cannot write", str(path)):
            path.parent.mkdir(parents=True, exist_ok=True)
            with open(path, "a", encoding="utf-8") as out:
                out.write(text + "\n")

    def exists(self, name: str) -> bool:
        return (self.root / name).exists()

    def size(self, name: str) -> int:
        return (self.root / name).stat().st_size

    def files(self, folder: str) -> list[Entry]:
        found = []
        for root, _, names in os.walk(self.root / folder):
            for name in names:
                path = Path(root, name)
                with _gone_is_fine():
                    status = path.stat()
                    found.append(Entry(path.relative_to(self.root).as_posix(), status.st_size, status.st_mtime))
        return sorted(found, key=lambda entry: entry.name)

    def remove(self, name: str) -> None:
        path = self.root / name
        with _gone_is_fine():
            if path.is_dir() and not path.is_symlink():
                remove_tree(path)
            else:
                path.unlink()

    def part_folders(self) -> list[tuple[str, str]]:
        return [(name, f"parts/{name}") for name in sorted(self.committed_names())]

    def committed_names(self) -> set[str]:
        try:
            with os.scandir(self.root / "parts") as entries:
                return {entry.name for entry in entries if entry.is_dir(follow_symlinks=False)}
        except FileNotFoundError:
            return set()

    def read_commits(self, partitions: Iterable[str]) -> Iterator[Committed]:
        for partition in partitions:
            folder = f"parts/{partition}"
            try:
                with open(f"{self.location}/{folder}/{COMMIT_FILE}", "rb") as file:
                    yield Committed(partition, folder, file.read())
            except FileNotFoundError:
                if (self.root / folder).is_dir():
                    raise VerificationError(
                        f"{self.root / folder} has no {COMMIT_FILE}: its files were changed after it was written; "
                        "remove that folder and run the job again"
                    ) from None

    def read_many(self, names: Sequence[str]) -> Iterator[bytes]:
        for name in names:
            with open(f"{self.location}/{name}", "rb") as file:
                yield file.read()

    def publish(self, folder: Path, partition: str, attempt: str) -> bool:
        target = self.root / "parts" / partition
        target.parent.mkdir(parents=True, exist_ok=True)
        fsync_tree(folder)
        try:
            os.rename(folder, target)
        except OSError as error:
            if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
                raise
            remove_tree(folder)
            return False
        _fsync(target.parent)
        return True

    def local_path(self, name: str) -> Path | None:
        return self.root / name


@contextmanager
def _gone_is_fine() -> Iterator[None]:
    """For listing and removing beside other processes that remove, too."""
    try:
        yield
    except FileNotFoundError:
        return


def remove_tree(folder: Path) -> None:
    """Removes a folder while others may remove parts of it, too."""
    for _ in range(5):
        try:
            shutil.rmtree(folder)
            return
        except FileNotFoundError:
            if not folder.exists():
                return
        except OSError as error:
            if error.errno != errno.ENOTEMPTY:
                raise
            time.sleep(0.05)  # a process that is just ending wrote one more file
    shutil.rmtree(folder)
