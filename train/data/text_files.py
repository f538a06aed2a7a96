"""Random access to the rows of JSONL and Parquet files, for text that trains without being packed.

A file counts as blocks of rows, which take the place of shards: 256 lines of a JSONL file, a row group of a Parquet
file. Paths are local or anything that fsspec opens.
"""

from __future__ import annotations

import json
import uuid
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, NamedTuple

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import xxhash

from schemas.errors import ConfigError, IncompleteSourceError, RowError, VerificationError

BLOCK_ROWS = 256
_FORMATS: dict[str, Literal["jsonl", "parquet"]] = {".jsonl": "jsonl", ".ndjson": "jsonl", ".parquet": "parquet"}
_KEPT_BLOCKS = 8  # decoded blocks that a reader keeps
_READ_BYTES = 16 << 20
_BOM = b"\xef\xbb\xbf"


class TextRow(NamedTuple):
    """One row as it stands in its file. number: in the file, from 0, blank lines not counted; value: the row, or why
    it is none."""

    file: str
    number: int
    value: dict[str, Any] | str

    def mapping(self) -> dict[str, Any]:
        """The row; RowError `bad_row`."""
        if isinstance(self.value, str):
            raise RowError("bad_row", f"{self.file}, row {self.number}: {self.value}")
        return self.value


@dataclass(frozen=True)
class TextFile:
    """starts: int64 [blocks + 1], bytes before each block (JSONL) or row groups before it (Parquet); rows: int64
    [blocks]; hashes: uint64 [blocks], of the bytes of each block (JSONL); content: hash of the file's bytes."""

    path: str
    format: Literal["jsonl", "parquet"]
    starts: np.ndarray
    rows: np.ndarray
    hashes: np.ndarray
    content: str


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

    def read_block(self, block: int) -> list[TextRow]:
        """All rows of one block. VerificationError when the file was changed since it was scanned."""
        number = int(np.searchsorted(self._first_blocks, block, side="right")) - 1
        file, place = self.files[number], block - int(self._first_blocks[number])
        first = int(file.rows[:place].sum())
        values = _parquet_block(file, place) if file.format == "parquet" else _jsonl_block(file, place)
        if values is None or len(values) != file.rows[place]:
            raise VerificationError(
                f"{file.path} was changed while it was in use: rows {first} to {first + int(file.rows[place]) - 1} are "
                "others now; start again with the files as they are to stay"
            )
        return [TextRow(file.path, first + i, value) for i, value in enumerate(values)]

    def __iter__(self) -> Iterator[TextRow]:
        """All rows in order."""
        for block in range(len(self.block_rows)):
            yield from self.read_block(block)


class TextReader:
    """Reads single rows, and keeps the blocks it read last."""

    def __init__(self, files: TextFiles) -> None:
        self.files = files
        self._kept: OrderedDict[int, list[TextRow]] = OrderedDict()

    def read(self, block: int, index: int) -> TextRow:
        rows = self._kept.pop(block, None) or self.files.read_block(block)
        self._kept[block] = rows
        if len(self._kept) > _KEPT_BLOCKS:
            self._kept.popitem(last=False)
        return rows[index]


def scan_text(path: str, advance: Callable[[int], None] | None = None, cache: Path | None = None) -> TextFiles:
    """Finds the rows of a file, or of all JSONL and Parquet files below a folder, by name.

    advance: called with the bytes that were read; cache: folder where what was found in a file is kept until the file
    is written again. ConfigError for a path without such files, IncompleteSourceError for one that does not exist.
    """
    fs, root = fsspec.url_to_fs(path)
    if not fs.exists(root):
        raise IncompleteSourceError(f"data source {path} does not exist")
    found = {name: fs.info(name) for name in (sorted(fs.find(root)) if fs.isdir(root) else [root])}
    known = {fs.unstrip_protocol(name): info for name, info in found.items() if _suffix(name) in _FORMATS}
    if not known:
        raise ConfigError(f"data source {path} has no file that ends in {', '.join(_FORMATS)}")
    files = tuple(_kept_or_scanned(name, info, cache, advance) for name, info in known.items())
    if not sum(len(file.rows) for file in files):
        raise ConfigError(f"data source {path} has no rows")
    return TextFiles(files)


def is_text_path(path: str) -> bool:
    """Whether a path names a text file by its ending."""
    return _suffix(path) in _FORMATS


def _suffix(path: str) -> str:
    name = path.rsplit("/", 1)[-1]
    return "." + name.rsplit(".", 1)[-1].lower() if "." in name else ""


def _kept_or_scanned(
    path: str, info: dict[str, Any], cache: Path | None, advance: Callable[[int], None] | None
) -> TextFile:
    stamp = [info.get(key) for key in ("size", "mtime", "ETag", "etag", "LastModified", "last_modified")]
    kept = None if cache is None else cache / f"{xxhash.xxh3_128_hexdigest(f'{path} {stamp}'.encode())}.npz"
    if kept is not None and kept.is_file():
        with np.load(kept, allow_pickle=False) as stored:
            content = str(stored["content"])
            return TextFile(path, _FORMATS[_suffix(path)], stored["starts"], stored["rows"], stored["hashes"], content)
    file = _scan_parquet(path) if _FORMATS[_suffix(path)] == "parquet" else _scan_jsonl(path, advance)
    if kept is not None:
        kept.parent.mkdir(parents=True, exist_ok=True)
        beside = kept.with_name(f".{kept.stem}.{uuid.uuid4().hex[:8]}.npz")
        np.savez(beside, starts=file.starts, rows=file.rows, hashes=file.hashes, content=file.content)
        beside.replace(kept)
    return file


def _scan_jsonl(path: str, advance: Callable[[int], None] | None) -> TextFile:
    content, block = xxhash.xxh3_128(), xxhash.xxh3_64()
    starts, rows, hashes, place, inside = [0], [], [], 0, 0
    with fsspec.open(path, "rb") as file:
        for line in file:
            if _is_row(line):
                if inside == BLOCK_ROWS:
                    starts.append(place)
                    rows.append(inside)
                    hashes.append(block.intdigest())
                    inside = 0
                    block.reset()
                inside += 1
            content.update(line)
            block.update(line)
            place += len(line)
            if advance is not None:
                advance(len(line))
    if inside:
        starts.append(place)
        rows.append(inside)
        hashes.append(block.intdigest())
    return TextFile(
        path, "jsonl", np.array(starts), np.array(rows, np.int64), np.array(hashes, np.uint64), content.hexdigest()
    )


def _is_row(line: bytes) -> bool:
    stripped = line.strip()
    return bool(stripped) and stripped != _BOM


def _jsonl_block(file: TextFile, place: int) -> list[dict[str, Any] | str] | None:
    """None when its bytes are not those that were scanned."""
    start, end = int(file.starts[place]), int(file.starts[place + 1])
    with fsspec.open(file.path, "rb") as opened:
        opened.seek(start)
        data = opened.read(end - start)
    if xxhash.xxh3_64_intdigest(data) != int(file.hashes[place]):
        return None
    return [_parse(line) for line in data.split(b"\n") if _is_row(line)]


def _parse(line: bytes) -> dict[str, Any] | str:
    try:
        value = json.loads(line.removeprefix(_BOM))
    except ValueError as error:
        return f"is no JSON: {error}"
    return value if isinstance(value, dict) else f"is a JSON {type(value).__name__}, not an object"


def _scan_parquet(path: str) -> TextFile:
    content = xxhash.xxh3_128()
    try:
        with fsspec.open(path, "rb") as opened:
            while block := opened.read(_READ_BYTES):
                content.update(block)
            opened.seek(0)
            meta = pq.ParquetFile(opened).metadata
    except (pa.ArrowException, OSError) as error:
        raise ConfigError(f"{path} cannot be read as Parquet: {error}") from error
    rows = np.array([meta.row_group(i).num_rows for i in range(meta.num_row_groups)], np.int64)
    kept = np.flatnonzero(rows)
    return TextFile(
        path, "parquet", np.append(kept, len(rows)), rows[kept], np.zeros(0, np.uint64), content.hexdigest()
    )


def _parquet_block(file: TextFile, place: int) -> list[dict[str, Any] | str] | None:
    try:
        with fsspec.open(file.path, "rb") as opened:
            table = pq.ParquetFile(opened).read_row_group(int(file.starts[place]))
    except (pa.ArrowException, IndexError):
        return None
    return list(table.to_pylist())
