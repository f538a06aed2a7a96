"""safetensors output written by several threads at once: headers first, every tensor to its place once it is made.

Work goes file by file, within a file in the order in which its sources lie on disk.
"""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import xxhash

from convert.fill import slabs
from convert.ledger import Recipe
from convert.output import OutputDirectory
from convert.safetensors_io import INDEX_FILE, SafetensorsReader, raw_bytes
from convert.shards import OutputFile, index_bytes
from convert.tensors import TensorReader
from convert.threads import Progress, Task, run_all
from schemas.errors import IncompleteSourceError

COPY_BYTES = 64 << 20  # of a base file at once
_NO_KERNEL_COPY = (errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP)


class SafetensorsOutput:
    """The weight files of a model directory; see `convert.job.Output`."""

    def __init__(self, files: Sequence[OutputFile], base: SafetensorsReader | None = None) -> None:
        """base: the model whose files these are like."""
        self.files, self._base = tuple(files), base

    @property
    def sizes(self) -> Mapping[str, int]:
        return {file.name: file.layout.size for file in self.files}

    @property
    def bytes_copied(self) -> int:
        return sum(stop - start for file in self.files for _, (start, stop) in file.copies.values())

    def key(self) -> Iterator[bytes]:
        for file in self.files:
            yield f"{file.name}\0".encode() + file.layout.header
            for name, recipe in sorted(file.recipes.items()):
                yield f"{name}\0{recipe.pieces}".encode()

    def write(self, reader: TensorReader, out: OutputDirectory, workers: int, progress: Progress) -> None:
        opened: list[_OpenOutput] = []
        try:
            run_all(self._tasks(reader, out, progress, opened), workers)
        finally:
            for output in opened:
                output.close()

    def small_files(self, out: OutputDirectory) -> Mapping[str, bytes]:
        index = index_bytes(self.files, self._base)
        return {} if index is None else {INDEX_FILE: index}

    def _tasks(
        self, reader: TensorReader, out: OutputDirectory, progress: Progress, opened: list[_OpenOutput]
    ) -> Iterator[Task]:
        for file in self.files:
            if file.name in out.finished:
                continue
            made = sorted(file.recipes.values(), key=lambda recipe: _place(recipe, reader))
            copies = _copies(file)
            output = _OpenOutput(file, out, len(made) + len(copies))
            opened.append(output)
            for recipe in made:
                yield partial(_make, output, recipe, reader, progress)
            for copy in copies:
                yield partial(_copy, output, copy, progress)


class _OpenOutput:
    """An output file in the making; the thread that does its last task closes it."""

    def __init__(self, file: OutputFile, out: OutputDirectory, tasks: int) -> None:
        self.file, self.out = file, out
        self.hashes: dict[str, str] = {}
        self._left = tasks
        self._lock = threading.Lock()
        self._descriptor = -1
        if not tasks:  # a file without a byte of tensors is its header
            self._left = 1
            self.descriptor()
            self.task_done()

    def descriptor(self) -> int:
        """Opened, with its header written and its full size set, by the first who asks."""
        with self._lock:
            if self._descriptor < 0:
                flags = os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
                self._descriptor = os.open(self.out.temporary(self.file.name), flags, 0o644)
                os.truncate(self._descriptor, self.file.layout.size)
                write_all(self._descriptor, memoryview(self.file.layout.header), 0)
            return self._descriptor

    def task_done(self) -> None:
        with self._lock:
            self._left -= 1
            if self._left:
                return
        os.fsync(self._descriptor)
        self.close()
        self.out.finish(self.file.name, {"tensors": self.hashes})

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def _make(output: _OpenOutput, recipe: Recipe, reader: TensorReader, progress: Progress, stop: threading.Event) -> None:
    descriptor, at = output.descriptor(), output.file.layout.spans[recipe.target][0]
    digest = xxhash.xxh3_64()
    for slab in slabs(recipe, reader):
        if stop.is_set():
            return
        data = raw_bytes(slab)
        digest.update(data)
        write_all(descriptor, data, at)
        at += len(data)
        progress(len(data))
    output.hashes[recipe.target] = digest.hexdigest()
    output.task_done()


@dataclass(frozen=True)
class _Copied:
    """Bytes [start, stop) of a base file go to `at`."""

    source: Path
    start: int
    stop: int
    at: int


def _copies(file: OutputFile) -> list[_Copied]:
    """The base's bytes, neighbours joined, in parts that keep several threads busy."""
    joined: list[_Copied] = []
    for tensor, (source, (start, stop)) in file.copies.items():
        at = file.layout.spans[tensor][0]
        last = joined[-1] if joined else None
        if last and (last.source, last.stop, last.at + last.stop - last.start) == (source, start, at):
            joined[-1] = _Copied(source, last.start, stop, last.at)
        elif start < stop:
            joined.append(_Copied(source, start, stop, at))
    return [
        _Copied(copy.source, start, min(start + COPY_BYTES, copy.stop), copy.at + start - copy.start)
        for copy in joined
        for start in range(copy.start, copy.stop, COPY_BYTES)
    ]


def _copy(output: _OpenOutput, copy: _Copied, progress: Progress, stop: threading.Event) -> None:
    """By the kernel where the file systems allow it: no byte passes through this process."""
    descriptor, start, at = output.descriptor(), copy.start, copy.at
    with copy.source.open("rb") as source:
        while start < copy.stop:
            if stop.is_set():
                return
            count = _copy_some(source.fileno(), descriptor, copy.stop - start, start, at)
            if not count:
                raise IncompleteSourceError(f"{copy.source}: ends at byte {start}; {copy.stop} are needed")
            start, at = start + count, at + count
            progress(count)
    output.task_done()


def _copy_some(source: int, target: int, count: int, start: int, at: int) -> int:
    """Copies at most `count` bytes; how many, 0 at the end of the source."""
    if hasattr(os, "copy_file_range"):  # Linux
        try:
            return os.copy_file_range(source, target, count, start, at)
        except OSError as error:
            if error.errno not in _NO_KERNEL_COPY:
                raise
    data = os.pread(source, min(count, 1 << 20), start)
    write_all(target, memoryview(data), at)
    return len(data)


def _place(recipe: Recipe, reader: TensorReader) -> tuple[str, int]:
    return min((reader.location(piece.source) for piece in recipe.pieces[:1]), default=("", 0))


def write_all(descriptor: int, data: memoryview, offset: int) -> None:
    """Every byte at its place; a write may do less at a time."""
    done = 0
    while done < len(data):
        done += os.pwrite(descriptor, data[done:], offset + done)
