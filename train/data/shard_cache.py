"""The node's folder of downloaded shards: one copy for all ranks of a node, pinned while in use, limited in size.

    CACHE/shards/<dataset>/REMOTE        the URL that the shards are copies of
    CACHE/shards/<dataset>/<shard name>  a whole shard, checked against the hash in the dataset's index

Everything that processes tell one another is a lock of the operating system, which ends with its holder however that
ends: a run that was killed leaves no lock, no shared memory and no pin behind, only `.part` files, which the next
download of that shard removes, and `.room` files, which the next
search for room does. Only files below a folder with a REMOTE that names an object store are ever deleted.
"""

from __future__ import annotations

import glob
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import fsspec
import xxhash

from schemas.errors import ConfigError, IncompleteSourceError, VerificationError
from train.data.durable import sync_file, write_durably
from train.data.packed_files import is_remote, local_path, with_retries
from train.data.range_locks import RangeLocks
from train.data.shard_index import Shard, file_digest

REMOTE_FILE = "REMOTE"
PART, ROOM = ".part", ".room"  # endings: of a download in the making; of an empty file as long as one that is to come
_SHARDS = "shards"


class ShardCache:
    """The shards of one remote dataset below the cache folder. Threads may share an object, but fetch a shard once.

    limit: bytes of all datasets of the cache folder; None = no limit.
    """

    def __init__(self, folder: Path, dataset: str, fingerprint: str, limit: int | None, retries: int = 3) -> None:
        if not is_remote(dataset):
            raise ConfigError(f"data source {dataset} is local; it is read where it lies and never cached")
        self.dataset, self.limit, self.retries = dataset.rstrip("/"), limit, retries
        self.root = folder / _SHARDS
        key = xxhash.xxh3_64_hexdigest(f"{self.dataset}\n{fingerprint}".encode())
        self.folder = self.root / key
        self._prepare()
        self._pins, self._downloads = RangeLocks(self.root / ".pins"), RangeLocks(self.root / ".downloads")
        self._rooms = RangeLocks(self.root / ".rooms")
        self._pinned: dict[str, int] = {}
        self._lock = threading.Lock()

    def _prepare(self) -> None:
        note = self.folder / REMOTE_FILE
        if note.exists():
            return
        if self.folder.exists() and any(self.folder.iterdir()):
            raise ConfigError(f"data.cache.dir: {self.folder} has files that omniloom did not put there")
        self.folder.mkdir(parents=True, exist_ok=True)
        write_durably(note, f"{self.dataset}\n".encode())

    def close(self) -> None:
        """Lets go of every pin."""
        for locks in (self._pins, self._downloads, self._rooms):
            locks.close()

    def path(self, name: str) -> Path:
        return self.folder / name

    def has(self, shard: Shard) -> bool:
        try:
            return self.path(shard.name).stat().st_size == shard.bytes
        except FileNotFoundError:
            return False

    def pin(self, shard: Shard) -> None:
        """Nobody deletes the shard's file until as many `unpin`."""
        with self._lock:
            count = self._pinned.get(shard.name, 0)
            if count == 0:
                self._pins.share(self._key(shard.name))
            self._pinned[shard.name] = count + 1

    def unpin(self, shard: Shard) -> None:
        with self._lock:
            self._pinned[shard.name] -= 1
            if self._pinned[shard.name]:
                return
            del self._pinned[shard.name]
            if self.path(shard.name).exists():
                os.utime(self.path(shard.name))  # last use, for the choice of what goes first
            self._pins.free(self._key(shard.name))

    def _key(self, name: str) -> str:
        return f"{self.folder.name}/{name}"

    def fetch(self, shard: Shard, again: bool = False, stop: threading.Event | None = None) -> None:
        """Downloads the shard unless it is there, and checks its hash. again: even if it is there; stop: once it is
        set, nothing is tried again.

        The caller has pinned it. VerificationError: the remote's bytes are not those of the index;
        IncompleteSourceError: the remote has no such file; OmniloomError: the store failed `retries` + 1 times.
        """
        key = self._key(shard.name)
        self._downloads.own(key)
        try:
            if again or not self.has(shard):
                self._remove_parts(shard)
                self._download(shard, stop)
        finally:
            self._downloads.free(key)
            self.cancel([shard])

    def _remove_parts(self, shard: Shard) -> None:
        """What downloads that were killed left: a live one would hold the lock."""
        target = self.path(shard.name)
        for left in target.parent.glob(f"{glob.escape(target.name)}.*{PART}"):
            left.unlink(missing_ok=True)

    def _download(self, shard: Shard, stop: threading.Event | None = None) -> None:
        target = self.path(shard.name)
        target.parent.mkdir(parents=True, exist_ok=True)
        beside = target.with_name(f"{target.name}.{os.getpid()}{PART}")
        url = f"{self.dataset}/{shard.name}"
        failed = f"{url} cannot be downloaded to {target}"
        try:
            with_retries(lambda: self._copy(url, shard, beside), failed, self.retries, stop)
            beside.replace(target)
        except FileNotFoundError as error:
            raise IncompleteSourceError(f"{url} does not exist, but the dataset's index lists it") from error
        finally:
            beside.unlink(missing_ok=True)

    def _copy(self, url: str, shard: Shard, beside: Path) -> None:
        fs, path = fsspec.url_to_fs(url)
        fs.get_file(path, str(beside))
        if beside.stat().st_size != shard.bytes or file_digest(beside, shard) != shard.digest:
            raise VerificationError(
                f"{url}: {beside.stat().st_size} bytes with another {shard.algorithm} than the index says "
                f"({shard.bytes} bytes, {shard.digest}); run `omniloom pack verify {self.dataset}`"
            )
        sync_file(beside)

    def reserve(self, shards: list[Shard], forced: bool = False) -> bool:
        """Makes room for shards that are pinned and not there, and keeps it until they are fetched or `cancel`led.

        Deletes shards that nobody has pinned, least recently used first. False, with nothing reserved, when that is not
        enough; with `forced` the cache then grows over its limit.
        """
        if self.limit is None:
            return True
        needed = sum(shard.bytes for shard in shards)
        with self._making_room():
            files = sorted(self._cached_files(), key=lambda item: item[2])
            used = sum(size for _, size, _ in files)
            for path, size, _ in files:
                if used + needed <= self.limit:
                    break
                if self._delete(path):
                    used -= size
            fits = used + needed <= self.limit
            if fits or forced:
                for shard in shards:
                    room = self._room(shard)
                    room.parent.mkdir(parents=True, exist_ok=True)
                    with open(room, "wb") as file:
                        file.truncate(shard.bytes)  # counts as used, takes no space
        return fits

    def cancel(self, shards: list[Shard]) -> None:
        """Gives back what `reserve` kept."""
        for shard in shards:
            self._room(shard).unlink(missing_ok=True)

    def _room(self, shard: Shard) -> Path:
        return self.path(f"{shard.name}.{os.getpid()}{ROOM}")

    @contextmanager
    def _making_room(self) -> Iterator[None]:
        with self._lock:
            self._rooms.own("")
            try:
                yield
            finally:
                self._rooms.free("")

    def _cached_files(self) -> Iterator[tuple[Path, int, float]]:
        """(path, bytes, last use) of every shard of every remote dataset, and of the room that is kept for others."""
        for folder in sorted(self.root.iterdir()):
            if not folder.is_dir() or not _is_copy(folder):
                continue
            for base, _, names in os.walk(folder):
                for name in names:
                    if name == REMOTE_FILE or name.endswith(PART):
                        continue
                    path = Path(base, name)
                    try:
                        status = path.stat()
                    except FileNotFoundError:
                        continue
                    yield path, status.st_size, status.st_mtime

    def _delete(self, path: Path) -> bool:
        """Whether the file is gone now; False when somebody has its shard pinned. (Kept room is pinned, too: what a
        killed run kept is given back here.)"""
        folder, _, name = path.relative_to(self.root).as_posix().partition("/")
        if name.endswith(ROOM):
            name = name.removesuffix(ROOM).rpartition(".")[0]
        if folder == self.folder.name and name in self._pinned:
            return False  # an object's own locks do not exclude each other
        key = f"{folder}/{name}"
        if not self._pins.try_own(key):
            return False
        try:
            path.unlink(missing_ok=True)
        finally:
            self._pins.free(key)
        return True


def _is_copy(folder: Path) -> bool:
    """Whether the folder says that its files are copies of an object store's."""
    try:
        return is_remote((folder / REMOTE_FILE).read_text(encoding="utf-8").strip())
    except FileNotFoundError:
        return False


def check_cache_folder(folder: Path, sources: list[str]) -> None:
    """ConfigError when the cache folder and a local source lie inside each other."""
    cache = folder.resolve()
    for source in sources:
        if is_remote(source):
            continue
        path = local_path(source).resolve()
        if cache == path or cache.is_relative_to(path / "parts") or path.is_relative_to(cache / _SHARDS):
            raise ConfigError(f"data.cache.dir {folder} and the data source {source} lie inside each other")
