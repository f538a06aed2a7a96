"""Random access to the rows of JSONL and Parquet files, for text that trains without being packed.

A file counts as blocks of rows, which take the place of shards; a block whose bytes are not those that were scanned is
refused. Paths are local or anything that fsspec opens.
"""

from __future__ import annotations

import logging
import zipfile
import zlib
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from io import BytesIO
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import xxhash

from schemas.errors import ConfigError, IncompleteSourceError, VerificationError
from train.data.durable import write_durably
from train.data.packed_files import is_remote, with_retries
from train.data.text_jsonl import read_jsonl, scan_jsonl
from train.data.text_parquet import read_parquet, scan_parquet
from train.data.text_types import Block, Format, TextFile, TextRow

KEPT_BLOCKS = 64
KEPT_BYTES = 512 << 20  # of the blocks that a reader keeps
_FORMATS: dict[str, Format] = {".jsonl": "jsonl", ".ndjson": "jsonl", ".parquet": "parquet"}
_HIDDEN = (".", "_")  # beginnings of names that are no rows: what others write beside them, or have not finished
_SCAN_VERSION = 2
_ARRAYS = ("rows", "spans", "hashes", "groups", "firsts")

log = logging.getLogger("omniloom.train")


@dataclass(frozen=True)
class TextFiles:
    """The files of one source, in order. Picklable."""

    files: tuple[TextFile, ...]

    @cached_property
    def block_rows(self) -> np.ndarray:
        """int64 [blocks]: rows of each block, over all files."""
        return np.concatenate([file.rows for file in self.files])

    @property
    def num_rows(self) -> int:
        return int(self.block_rows.sum())

    @cached_property
    def fingerprint(self) -> str:
        """Changes whenever the rows or their order do, not with where the files lie."""
        return xxhash.xxh3_128_hexdigest("\n".join(file.content for file in self.files).encode())

    @cached_property
    def _first_blocks(self) -> np.ndarray:
        return np.concatenate([[0], np.cumsum([len(file.rows) for file in self.files])])

    def open_block(self, block: int) -> tuple[str, int, Block]:
        """(file, number of its first row, rows) of one block. VerificationError when the file was changed since it was
        scanned; what was found in it is forgotten then, so that the next start finds it as it is."""
        number = int(np.searchsorted(self._first_blocks, block, side="right")) - 1
        file, place = self.files[number], block - int(self._first_blocks[number])
        first = int(file.rows[:place].sum())
        found = _read(file, place)
        if found is None or len(found) != file.rows[place]:
            if file.kept:
                Path(file.kept).unlink(missing_ok=True)
            raise VerificationError(
                f"{file.path} was changed while it was in use: rows {first} to {first + int(file.rows[place]) - 1} are "
                "others now; start again with the files as they are to stay"
            )
        return file.path, first, found

    def read_block(self, block: int) -> list[TextRow]:
        """All rows of one block; raises what `open_block` raises."""
        path, first, rows = self.open_block(block)
        return [TextRow(path, first + index, rows.value(index)) for index in range(len(rows))]

    def __iter__(self) -> Iterator[TextRow]:
        """All rows in order."""
        for block in range(len(self.block_rows)):
            yield from self.read_block(block)


class TextReader:
    """Reads single rows, and keeps the blocks it read last. kept: blocks at most, and never more than KEPT_BYTES."""

    def __init__(self, files: TextFiles, kept: int = KEPT_BLOCKS) -> None:
        self.files, self._limit = files, kept
        self._kept: OrderedDict[int, tuple[str, int, Block]] = OrderedDict()
        self._bytes = 0

    def read(self, block: int, index: int) -> TextRow:
        """VerificationError as `TextFiles.open_block`."""
        found = self._kept.pop(block, None)
        if found is None:
            found = self.files.open_block(block)
            self._bytes += found[2].nbytes
        self._kept[block] = found
        while len(self._kept) > 1 and (len(self._kept) > self._limit or self._bytes > KEPT_BYTES):
            _, (_, _, old) = self._kept.popitem(last=False)
            self._bytes -= old.nbytes
        path, first, rows = found
        return TextRow(path, first + index, rows.value(index))


def scan_text(path: str, advance: Callable[[int], None] | None = None, cache: Path | None = None) -> TextFiles:
    """Finds the rows of a file, or of all JSONL and Parquet files below a folder, by name; files and folders whose
    names begin with a dot or an underscore are left out.

    advance: called with the bytes that were read; cache: folder where what was found in a file is kept until the file
    is written again. ConfigError for a path without such files, IncompleteSourceError for one that does not exist,
    OmniloomError for a store that does not answer.
    """
    known = (
        with_retries(lambda: _find(path), f"data source {path} cannot be listed") if is_remote(path) else _find(path)
    )
    if not known:
        raise ConfigError(f"data source {path} has no file that ends in {', '.join(_FORMATS)}")
    files = tuple(_kept_or_scanned(name, info, cache, advance) for name, info in known.items())
    if not sum(len(file.rows) for file in files):
        raise ConfigError(f"data source {path} has no rows")
    return TextFiles(files)


def _find(path: str) -> dict[str, dict[str, Any]]:
    fs, root = fsspec.url_to_fs(path)
    if not fs.exists(root):
        raise IncompleteSourceError(f"data source {path} does not exist")
    if not fs.isdir(root):
        names = [root] if _suffix(root) in _FORMATS else []
    else:
        names = [n for n in sorted(fs.find(root)) if _suffix(n) in _FORMATS and not _is_hidden(n.removeprefix(root))]
    return {fs.unstrip_protocol(name): fs.info(name) for name in names}


def is_text_path(path: str) -> bool:
    """Whether a path names a text file by its ending."""
    return _suffix(path) in _FORMATS


def _is_hidden(below: str) -> bool:
    return any(part.startswith(_HIDDEN) for part in below.split("/"))


def _suffix(path: str) -> str:
    name = path.rsplit("/", 1)[-1]
    return "." + name.rsplit(".", 1)[-1].lower() if "." in name else ""


def _read(file: TextFile, place: int) -> Block | None:
    """None when the block is not the one that was scanned."""
    read: Callable[[TextFile, int], Block | None] = read_parquet if file.format == "parquet" else read_jsonl
    try:
        if is_remote(file.path):
            return with_retries(lambda: read(file, place), f"{file.path} cannot be read")
        return read(file, place)
    except FileNotFoundError:
        return None


def _kept_or_scanned(
    path: str, info: dict[str, Any], cache: Path | None, advance: Callable[[int], None] | None
) -> TextFile:
    stamp = [info.get(key) for key in ("size", "mtime", "ETag", "etag", "LastModified", "last_modified")]
    name = xxhash.xxh3_128_hexdigest(f"{_SCAN_VERSION} {path} {stamp}".encode())
    kept = None if cache is None else cache / f"{name}.npz"
    if kept is not None and kept.is_file() and (known := _load(kept, path)) is not None:
        return known

    def scan() -> TextFile:
        return scan_parquet(path) if _FORMATS[_suffix(path)] == "parquet" else scan_jsonl(path, advance)

    file = with_retries(scan, f"{path} cannot be read") if is_remote(path) else scan()
    if kept is None:
        return file
    buffer = BytesIO()
    np.savez(
        buffer,
        allow_pickle=False,
        size=np.int64(file.size),
        content=np.str_(file.content),
        **{name: getattr(file, name) for name in _ARRAYS},
    )
    try:
        write_durably(kept, buffer.getvalue())
    except OSError as error:
        log.warning("what was found in %s is not kept (%s: %s)", path, kept.parent, error.strerror)
        return file
    return replace(file, kept=str(kept))


def _load(kept: Path, path: str) -> TextFile | None:
    """None, and it is said, for a damaged one."""
    try:
        with np.load(kept, allow_pickle=False) as stored:
            arrays = {name: stored[name] for name in _ARRAYS}
            size, content = int(stored["size"]), str(stored["content"])
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        log.warning("%s is damaged and is made again: %s", kept, error)
        return None
    return TextFile(path, _FORMATS[_suffix(path)], **arrays, size=size, content=content, kept=str(kept))
