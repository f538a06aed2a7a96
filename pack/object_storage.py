"""The output of a packing job in an object store, or any other file system of fsspec.

There is no rename, so an attempt's files go under `parts/<partition>/<attempt>/` and a conditional put of
`commits/<partition>.json`, which names the attempt, makes them count.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import fsspec
import xxhash

from pack.storage import COMMIT_FILE, Committed, Entry, Storage, explain_io, remove_tree
from schemas.errors import ConfigError

_BATCH_OBJECTS = 1000  # small objects fetched at once


class ObjectStorage(Storage):
    """A prefix of an object store, or any other file system of fsspec."""

    def __init__(self, location: str) -> None:
        self.location = location.rstrip("/")
        try:
            self.fs, self.root = fsspec.core.url_to_fs(self.location, use_listings_cache=False)
        except (ValueError, ImportError) as error:
            raise ConfigError(f"pack.output: cannot open {location}: {error}") from error
        digest = xxhash.xxh3_64_hexdigest(self.location.encode())
        self.staging_root = Path(tempfile.gettempdir()) / f"omniloom-{os.getuid()}-{digest}"

    def check_writable(self) -> None:
        """Only a write would tell."""

    def _path(self, name: str) -> str:
        return f"{self.root}/{name}" if name else self.root

    def read(self, name: str, start: int = 0, length: int | None = None) -> bytes:
        if length is None and start == 0:
            return self.fs.cat_file(self._path(name))
        if length == 0:
            return b""
        try:
            return self.fs.cat_file(self._path(name), start=start, end=None if length is None else start + length)
        except FileNotFoundError:
            raise
        except OSError:  # stores refuse a range that begins at or behind the end
            if start < self.size(name):
                raise
            return b""

    def write(self, name: str, data: bytes) -> None:
        with explain_io("cannot write", self.url(name)):
            self.fs.pipe_file(self._path(name), data)

    def append(self, name: str, text: str) -> None:
        """Objects cannot grow: the log is read and put again, so it is for few lines."""
        self.write(name, (self.try_read(name) or b"") + text.encode() + b"\n")

    def exists(self, name: str) -> bool:
        return self.fs.exists(self._path(name))

    def size(self, name: str) -> int:
        return int(self.fs.info(self._path(name))["size"])

    def files(self, folder: str) -> list[Entry]:
        try:
            found = self.fs.find(self._path(folder), detail=True)
        except FileNotFoundError:
            return []
        skip = len(self.root) + 1
        return [Entry(p[skip:], int(i["size"]), _modified(i)) for p, i in sorted(found.items())]

    def remove(self, name: str) -> None:
        try:
            self.fs.rm(self._path(name), recursive=True)
        except FileNotFoundError:
            return

    def part_folders(self) -> list[tuple[str, str]]:
        folders = {"/".join(entry.name.split("/")[:3]) for entry in self.files("parts")}
        return [(folder.split("/")[1], folder) for folder in sorted(folders)]

    def committed_names(self) -> set[str]:
        return {entry.name.removeprefix("commits/").removesuffix(".json") for entry in self.files("commits")}

    def read_commits(self, partitions: Iterable[str]) -> Iterator[Committed]:
        there = self.committed_names()
        wanted = [partition for partition in partitions if partition in there]
        for name, data in zip(wanted, self.read_many([f"commits/{name}.json" for name in wanted]), strict=True):
            record = json.loads(data)
            yield Committed(name, record["folder"], record["commit"].encode())

    def read_many(self, names: Sequence[str]) -> Iterator[bytes]:
        for start in range(0, len(names), _BATCH_OBJECTS):
            paths = [self._path(name) for name in names[start : start + _BATCH_OBJECTS]]
            found = self.fs.cat(paths)  # concurrently
            yield from (found[path] for path in paths) if isinstance(found, dict) else [found]

    def publish(self, folder: Path, partition: str, attempt: str) -> bool:
        prefix = f"parts/{partition}/{attempt}"
        for path in sorted(folder.iterdir()):
            self.fs.put_file(str(path), self._path(f"{prefix}/{path.name}"))
        record = {"folder": prefix, "commit": (folder / COMMIT_FILE).read_text(encoding="utf-8")}
        try:
            # a conditional put: exactly one of any number of attempts gets through
            self.fs.pipe_file(self._path(f"commits/{partition}.json"), json.dumps(record).encode(), mode="create")
            won = True
        except FileExistsError:
            self.remove(prefix)
            won = False
        remove_tree(folder)
        return won

    def local_path(self, name: str) -> Path | None:
        return None


def _modified(info: dict[str, Any]) -> float:
    stamp = info.get("LastModified") or info.get("mtime") or info.get("updated") or info.get("created")
    if isinstance(stamp, int | float):
        return float(stamp)
    return stamp.timestamp() if isinstance(stamp, datetime) else time.time()
