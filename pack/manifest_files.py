"""Manifest files: which there are, a fast scan of all rows for planning, and the rows of one partition.

A row's hash is the xxh3_64 of its line (JSONL) or its `content_key` (Parquet, Arrow). The plan freezes these hashes,
so that a manifest that changes under a running job is noticed instead of packed.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import xxhash

from schemas.errors import ManifestError, UnsupportedError
from schemas.manifest import content_key

Format = Literal["jsonl", "parquet", "arrow"]
_FORMATS: dict[str, Format] = {".jsonl": "jsonl", ".ndjson": "jsonl", ".parquet": "parquet", ".arrow": "arrow"}
_READ_BYTES = 4 << 20
_BATCH_ROWS = 4096


@dataclass(frozen=True)
class ManifestFile:
    """path: absolute path or URL; size: bytes; stamp: changes when the file is written (mtime or the store's own
    key)."""

    path: str
    format: Format
    size: int
    stamp: str

    @property
    def base(self) -> str:
        """The folder that relative media paths start from."""
        return self.path.rsplit("/", 1)[0]


class RawRow(NamedTuple):
    """number: in its file, from 0; text: the line (JSONL only); value: the row, or the error text when it is no object;
    start: byte offset of the line (JSONL) else 0."""

    number: int
    hash: int
    value: dict[str, Any] | str
    start: int = 0


def find_manifests(manifest: str | list[str]) -> list[ManifestFile]:
    """The files of `pack.manifest`, in the order given. ManifestError: missing, unreadable, empty list."""
    files: list[ManifestFile] = []
    for item in [manifest] if isinstance(manifest, str) else manifest:
        files += _expand(item)
    seen: set[str] = set()
    for file in files:
        if file.path in seen:
            raise ManifestError(f"pack.manifest names {file.path} twice")
        seen.add(file.path)
    return files


def _expand(item: str) -> list[ManifestFile]:
    path = item.removeprefix("file://")
    if "://" not in path:
        path = os.path.abspath(os.path.expanduser(path))
    fs, inner = _filesystem(path)
    try:
        info = fs.info(inner)
        if info["type"] != "directory":
            return [_describe(fs, path, info)]
        prefix = path.rstrip("/")[: len(path.rstrip("/")) - len(inner.rstrip("/"))]
        return [_describe(fs, prefix + p, fs.info(p)) for p in _folder_files(fs, inner, item)]
    except FileNotFoundError:
        raise ManifestError(f"pack.manifest: there is no {item}") from None
    except PermissionError as error:
        raise ManifestError(f"pack.manifest: {item} may not be read: {error.strerror or error}") from None


def _filesystem(path: str) -> tuple[Any, str]:
    try:
        return fsspec.core.url_to_fs(path, use_listings_cache=False) if "://" in path else fsspec.core.url_to_fs(path)
    except (ValueError, ImportError) as error:
        raise ManifestError(f"pack.manifest: cannot open {path}: {error}") from error


def _folder_files(fs: Any, folder: str, item: str) -> list[str]:
    """The data files of a Hugging Face datasets folder (`save_to_disk`), or of a folder of manifests."""
    if fs.exists(f"{folder}/dataset_dict.json"):
        splits = json.loads(fs.cat_file(f"{folder}/dataset_dict.json"))["splits"]
        raise ManifestError(f"pack.manifest: {item} holds the splits {', '.join(splits)}; name one: {item}/{splits[0]}")
    if fs.exists(f"{folder}/state.json"):
        state = json.loads(fs.cat_file(f"{folder}/state.json"))
        if state.get("_indices_files") or state.get("_indices_data_files"):
            raise UnsupportedError(f"pack.manifest: {item} has an index mapping; save it after `flatten_indices()`")
        return [f"{folder}/{entry['filename']}" for entry in state["_data_files"]]
    files = sorted(p for p in fs.find(folder) if os.path.splitext(p)[1] in _FORMATS)
    if not files:
        raise ManifestError(f"pack.manifest: the folder {item} has no state.json and no {', '.join(_FORMATS)} file")
    return files


def _describe(fs: Any, path: str, info: dict[str, Any]) -> ManifestFile:
    extension = os.path.splitext(path)[1].lower()
    if extension == ".json":
        kind: Format = "jsonl"
        _refuse_json_array(fs, path, info)
    elif extension in _FORMATS:
        kind = _FORMATS[extension]
    elif extension in (".gz", ".zst", ".bz2", ".xz"):
        raise UnsupportedError(f"pack.manifest: {path} is compressed; unpack it first (rows are found by byte range)")
    else:
        raise ManifestError(f"pack.manifest: {path} is none of {', '.join(_FORMATS)} and no datasets folder")
    return ManifestFile(path, kind, int(info["size"]), _stamp(fs, path, info["name"]))


def _stamp(fs: Any, path: str, inner: str) -> str:
    return str(fs.ukey(inner)) if "://" in path else str(os.stat(path).st_mtime_ns)


def current_stamp(file: ManifestFile) -> str:
    """The stamp of the file as it is now. ManifestError when it is gone."""
    fs, inner = _filesystem(file.path)
    try:
        return _stamp(fs, file.path, inner)
    except FileNotFoundError:
        raise ManifestError(f"the manifest {file.path} is gone; it was there when the job was planned") from None


def _refuse_json_array(fs: Any, path: str, info: dict[str, Any]) -> None:
    if fs.cat_file(info["name"], start=0, end=min(64, int(info["size"]))).lstrip()[:1] == b"[":
        raise UnsupportedError(f"pack.manifest: {path} is one JSON array; write one object per line (.jsonl)")


def scan_file(file: ManifestFile) -> Iterator[RawRow]:
    """All rows, in order. Rows that are no JSON object come with the error as their value."""
    if file.format == "jsonl":
        yield from _parse_lines(_lines(file, 0, file.size), 0)
        return
    for number, values in _batches(file, 0, None):
        for i, value in enumerate(values):
            yield RawRow(number + i, content_key(value), value)


def read_range(file: ManifestFile, row_start: int, rows: int, byte_start: int, byte_end: int) -> Iterator[RawRow]:
    """`rows` rows from `row_start` on; for JSONL the lines of [byte_start, byte_end)."""
    if file.format == "jsonl":
        yield from _parse_lines(_lines(file, byte_start, byte_end), row_start)
        return
    for number, values in _batches(file, row_start, rows):
        for i, value in enumerate(values):
            yield RawRow(number + i, content_key(value), value)


def _lines(file: ManifestFile, start: int, end: int) -> Iterator[tuple[int, bytes]]:
    """(byte offset, line without its line break) of every line that is not blank."""
    with _opened(file) as source:
        source.seek(start)
        position, left = start, end - start
        rest = b""
        while left > 0:
            block = source.read(min(_READ_BYTES, left))
            if not block:
                raise ManifestError(f"{file.path} ends at byte {position + len(rest)}; the plan reads up to {end}")
            left -= len(block)
            lines = (rest + block).split(b"\n")
            rest = lines.pop()
            for line in lines:
                if (stripped := line.strip()) and stripped != b"\xef\xbb\xbf":
                    yield position, stripped
                position += len(line) + 1
        if stripped := rest.strip():
            yield position, stripped


def _parse_lines(lines: Iterator[tuple[int, bytes]], number: int) -> Iterator[RawRow]:
    digest, loads = xxhash.xxh3_64_intdigest, json.loads
    for start, line in lines:
        if number == 0 and start == 0:
            line = line.removeprefix(b"\xef\xbb\xbf")  # a byte order mark
        try:
            value: Any = loads(line)
            if not isinstance(value, dict):
                value = f"the line is a JSON {type(value).__name__}, not an object"
        except (ValueError, RecursionError) as error:
            value = f"the line is not JSON: {error}"
        yield RawRow(number, digest(line), value, start)
        number += 1


def _opened(file: ManifestFile) -> Any:
    try:
        return fsspec.open(file.path, "rb").open() if "://" in file.path else open(file.path, "rb")
    except FileNotFoundError:
        raise ManifestError(f"the manifest {file.path} is gone") from None
    except PermissionError as error:
        raise ManifestError(f"the manifest {file.path} may not be read: {error.strerror or error}") from None


def _batches(file: ManifestFile, row_start: int, rows: int | None) -> Iterator[tuple[int, list[dict[str, Any]]]]:
    """(number of the first row, rows) in batches, of a Parquet or Arrow file; reads no row group before `row_start`."""
    try:
        with _opened(file) as source:
            batches = _parquet_batches(source, row_start) if file.format == "parquet" else _arrow_batches(source)
            end = None if rows is None else row_start + rows
            for number, batch in batches:
                low = max(row_start - number, 0)
                high = batch.num_rows if end is None else min(batch.num_rows, end - number)
                if low < high:
                    yield number + low, batch.slice(low, high - low).to_pylist()
                if end is not None and number + batch.num_rows >= end:
                    return
    except pa.ArrowInvalid as error:
        raise ManifestError(f"{file.path} is not a readable {file.format} file: {error}") from None


def _parquet_batches(source: Any, row_start: int) -> Iterator[tuple[int, pa.RecordBatch]]:
    table = pq.ParquetFile(source, pre_buffer=False)
    number = 0
    for group in range(table.num_row_groups):
        size = table.metadata.row_group(group).num_rows
        if number + size > row_start:
            inside = number
            for batch in table.iter_batches(_BATCH_ROWS, row_groups=[group], use_threads=False):
                yield inside, batch
                inside += batch.num_rows
        number += size


def _arrow_batches(source: Any) -> Iterator[tuple[int, pa.RecordBatch]]:
    """Batches of an Arrow stream (what `datasets` writes) or Arrow file."""
    magic = source.read(6)
    source.seek(0)
    number = 0
    if magic == b"ARROW1":
        reader = pa.ipc.open_file(source)
        whole: Iterator[pa.RecordBatch] = (reader.get_batch(i) for i in range(reader.num_record_batches))
    else:
        whole = iter(pa.ipc.open_stream(source))
    for batch in whole:
        for low in range(0, batch.num_rows, _BATCH_ROWS):
            yield number + low, batch.slice(low, _BATCH_ROWS)
        number += batch.num_rows
