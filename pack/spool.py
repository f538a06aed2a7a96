"""The samples of one row on their way from `pack_row` to the shard writer.

One sample stays in memory; from the second on they go to a file, so that a later span that fails rejects the whole
row and memory stays that of one sample. The same file carries samples from an isolated child process.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from schemas.errors import RowError, VerificationError
from schemas.sample import PackedSample, to_columns

_HEAD = struct.Struct("<4Q")  # bytes of id, source, media, meta
Columns = dict[str, Any]


def shard_bytes(columns: Columns) -> int:
    """Bytes of a sample inside a shard: a u32 size for each column, and the columns."""
    text = len(columns["id"].encode()) + len(columns["source"].encode())
    return 4 * len(columns) + text + len(columns["media"]) + len(json.dumps(columns["meta"]))


def _too_large(sample_id: str, size: int, limit: int) -> RowError:
    detail = (
        f"sample {sample_id} takes {size / 2**20:.1f} MiB and a shard holds {limit / 2**20:.1f}; raise "
        "pack.shard.size_mb, or make it smaller: pack.video.fps, max_frames, max_pixels, max_tokens or split_s"
    )
    return RowError("too_large", detail, "encode")


class RowSpool:
    """Holds a row's samples. limit: bytes of a sample that a shard holds; RowError `too_large` above."""

    def __init__(self, path: Path, limit: int, in_memory: bool = True) -> None:
        self.path, self.limit, self.in_memory = path, limit, in_memory
        self._first: Columns | None = None
        self._file: BinaryIO | None = None
        self.count = 0

    def fill(self, samples: Iterable[PackedSample]) -> None:
        """Takes all samples of a row; whatever they raise passes through."""
        self.close()
        for sample in samples:
            columns = to_columns(sample)
            size = shard_bytes(columns)
            if size > self.limit:
                raise _too_large(columns["id"], size, self.limit)
            self.count += 1
            if self.count == 1 and self.in_memory:
                self._first = columns
                continue
            self._spill(columns)
        if self._file is not None:
            self._file.flush()

    def _spill(self, columns: Columns) -> None:
        if self._file is None:
            self._file = open(self.path, "wb")  # noqa: SIM115  # closed by `close`
            if self._first is not None:
                _write(self._file, self._first)
                self._first = None
        _write(self._file, columns)

    def samples(self) -> Iterator[Columns]:
        """The samples, in order; once."""
        if self._first is not None:
            first, self._first = self._first, None  # large: the writer's copy is enough
            yield first
        elif self.count:
            yield from read_spool(self.path, self.count)

    def adopt(self, count: int) -> None:
        """Takes over the file that another process filled with `count` samples."""
        self.close(keep_file=True)
        self.count = count

    def close(self, keep_file: bool = False) -> None:
        """Forgets the samples and removes the file."""
        if self._file is not None:
            self._file.close()
        if not keep_file:
            self.path.unlink(missing_ok=True)
        self._first, self._file, self.count = None, None, 0


def _write(file: BinaryIO, columns: Columns) -> None:
    parts = [columns["id"].encode(), columns["source"].encode(), columns["media"], json.dumps(columns["meta"]).encode()]
    file.write(_HEAD.pack(*map(len, parts)))
    for part in parts:
        file.write(part)


def read_spool(path: Path, count: int) -> Iterator[Columns]:
    """The `count` samples of a spool file."""
    with open(path, "rb") as file:
        for _ in range(count):
            head = file.read(_HEAD.size)
            sizes = _HEAD.unpack(head) if len(head) == _HEAD.size else ()
            parts = [file.read(size) for size in sizes]
            if not parts or tuple(map(len, parts)) != sizes:
                raise VerificationError(f"{path} ends before its {count} samples")
            name, source, media, meta = parts
            yield {"id": name.decode(), "source": source.decode(), "media": media, "meta": json.loads(meta)}
