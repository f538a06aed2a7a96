"""The index of a torch distributed checkpoint (`.metadata`), read without executing it and checked against the files.

What comes out can be trusted: every tensor is tiled exactly by its chunks, every chunk has one record, every record
lies within one file of the checkpoint's own folder, and no two records share a byte.
"""

from __future__ import annotations

import gc
import hashlib
import math
import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from convert.printing import printable
from convert.restricted_pickle import is_inert, load_metadata
from convert.tensors import Box, TensorInfo, box_shape
from schemas.errors import ConfigError, IncompleteSourceError, UnsafeInputError, UnsupportedError

METADATA_FILE = ".metadata"
MAX_DIMENSIONS = 16
METADATA_LIMIT = 4 << 30  # bytes; the index of 147,000 records has 46 MB


@dataclass(frozen=True, slots=True)
class Record:
    """Bytes [offset, offset + length) of a file in the checkpoint's folder."""

    file: str
    offset: int
    length: int


@dataclass(frozen=True, slots=True)
class Chunk:
    """A box of a tensor and the record that holds it."""

    box: Box
    record: Record


@dataclass(frozen=True, slots=True)
class StoredTensor:
    info: TensorInfo
    chunks: tuple[Chunk, ...]


@dataclass(frozen=True)
class DcpIndex:
    directory: Path
    tensors: Mapping[str, StoredTensor]  # those that were asked for
    others: frozenset[str]  # the tensors that were not
    objects: frozenset[str]  # entries that are pickled Python objects: never read
    files: Mapping[str, int]  # every file that holds records -> its size
    fingerprint: str


def read_index(directory: Path, wanted: Callable[[str], bool] = lambda name: True) -> DcpIndex:
    """Reads and checks `.metadata`. wanted: of which tensors the chunks are needed; files and byte ranges are checked
    for all.

    ConfigError when there is none; UnsafeInputError for a pickle that wants to run something, for paths outside the
    folder and for records that overlap; UnsupportedError for record formats that are not handled;
    IncompleteSourceError for missing and truncated files and for tensors with a gap.
    """
    path = directory / METADATA_FILE
    if not path.is_file():
        raise ConfigError(f"{directory} has no {METADATA_FILE}: not a torch distributed checkpoint")
    if path.stat().st_size > METADATA_LIMIT:
        raise UnsafeInputError(f"{path} has {path.stat().st_size} bytes, more than an index needs")
    data = path.read_bytes()
    with _no_collector():
        return _checked(directory, path, data, wanted)


@contextmanager
def _no_collector() -> Iterator[None]:
    """Half a million small objects that all stay: the cyclic garbage collector would walk over them again and again
    (7.4 s with it, 2.4 s without, for the index of a 30B mixture of experts and its optimizer)."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _checked(directory: Path, path: Path, data: bytes, wanted: Callable[[str], bool]) -> DcpIndex:
    root = load_metadata(data, str(path))
    if not (is_inert(root, "Metadata") or is_inert(root, "MCoreMetadata")):
        raise UnsupportedError(f"{path} holds a {type(root).__name__}, not checkpoint metadata")
    fields = _state(root, path)
    entries, storage = fields.get("state_dict_metadata"), fields.get("storage_data")
    fields.clear()  # the saving plans of all ranks are most of the memory, and nobody needs them
    if not isinstance(entries, dict) or not isinstance(storage, dict):
        raise UnsupportedError(f"{path} has no state_dict_metadata or no storage_data")
    records = _records(storage, path)
    files = _check_files(directory, (record for per_name in records.values() for record in per_name.values()))
    tensors: dict[str, StoredTensor] = {}
    others: set[str] = set()
    objects: set[str] = set()
    for name, entry in entries.items():
        if not isinstance(name, str) or not name.isprintable():
            raise UnsafeInputError(f"{path} has an entry called {_shown(name)}, which is no name of a tensor")
        if is_inert(entry, "TensorStorageMetadata") and not wanted(name):
            others.add(name)
            records.pop(name, None)
        elif is_inert(entry, "TensorStorageMetadata"):
            tensors[name] = _tensor(name, _state(entry, path), records.pop(name, {}), path)
        elif is_inert(entry, "BytesStorageMetadata"):
            objects.add(name)
            records.pop(name, None)
        else:
            raise UnsupportedError(f"{path}: {name} is a {type(entry).__name__}, neither a tensor nor an object")
    if records:
        raise UnsafeInputError(f"{path} has records of {_names(records)}, which it does not declare")
    return DcpIndex(
        directory, tensors, frozenset(others), frozenset(objects), files, _fingerprint(directory, data, files)
    )


def _names(names: Iterable[str]) -> str:
    ordered = sorted(names)
    more = f" and {len(ordered) - 3} more" if len(ordered) > 3 else ""
    return ", ".join(ordered[:3]) + more


def _shown(value: Any) -> str:
    """A value of the pickle for a message: it may be anything, nested however deep."""
    return ascii(value)[:200] if isinstance(value, str | int | float | bool | None) else f"a {type(value).__name__}"


def _state(value: Any, path: Path, of: str = "") -> dict[str, Any]:
    state = getattr(value, "state", None)
    if not isinstance(state, dict):
        raise UnsupportedError(f"{path}: {of}a {type(value).__name__}, has no fields")
    return state


def _transforms(value: Any) -> str:
    return ", ".join(map(_shown, value)) if isinstance(value, list | tuple) else _shown(value)


def _sizes(value: Any, what: str) -> tuple[int, ...]:
    """The numbers of a torch.Size."""
    if type(value) is not torch.Size or len(value) > MAX_DIMENSIONS or (value and min(value) < 0):
        raise UnsafeInputError(f"{what} is not a tuple of sizes")
    return tuple(value)


def _records(storage: dict[Any, Any], path: Path) -> dict[str, dict[tuple[int, ...] | None, Record]]:
    """name -> chunk offset (None for an object) -> record."""
    records: defaultdict[str, dict[tuple[int, ...] | None, Record]] = defaultdict(dict)
    while storage:  # taken out one by one, so that memory does not hold them twice
        key, value = storage.popitem()
        index, info = _state(key, path), _state(value, path)
        name = index.get("fqn")
        what = f"{path}: the record of {printable(name) if isinstance(name, str) else _shown(name)}"
        if not is_inert(key, "MetadataIndex") or not is_inert(value, "_StorageInfo") or not isinstance(name, str):
            raise UnsupportedError(f"{what} is a {type(key).__name__} -> {type(value).__name__}")
        if info.get("transform_descriptors"):
            raise UnsupportedError(
                f"{what} went through {_transforms(info['transform_descriptors'])} when it was written; "
                "save the checkpoint without stream transforms"
            )
        file, offset, length = info.get("relative_path"), info.get("offset"), info.get("length")
        if not isinstance(file, str) or file in ("", ".", "..") or set(file) & set("/\\") or not file.isprintable():
            raise UnsafeInputError(
                f"{what} points to {_shown(file)}, which is not a file name in the checkpoint's folder"
            )
        if type(offset) is not int or type(length) is not int or offset < 0 or length < 0:
            raise UnsafeInputError(f"{what} has the byte range {_shown(offset)} + {_shown(length)}")
        at = None if index.get("offset") is None else _sizes(index["offset"], what)
        if at in records[name]:
            raise UnsafeInputError(f"{what} at {at} stands there twice")
        records[name][at] = Record(file, offset, length)
    return dict(records)


def _check_files(directory: Path, records: Iterable[Record]) -> dict[str, int]:
    """Sizes of the files; each lies in the folder, holds its records, and the records do not overlap."""
    ranges: defaultdict[str, list[tuple[int, int]]] = defaultdict(list)
    for record in records:
        ranges[record.file].append((record.offset, record.length))
    folder = directory.resolve()
    files: dict[str, int] = {}
    for name, spans in sorted(ranges.items()):
        path = directory / name
        if Path(os.path.realpath(path)).parent != folder:  # resolve() fails on a link to itself
            raise UnsafeInputError(f"{path} is a link that leaves the checkpoint's folder; copy the file instead")
        if not path.is_file():
            raise IncompleteSourceError(f"{path} does not exist, the index has {len(spans)} records in it")
        files[name] = path.stat().st_size
        end = 0
        for offset, length in sorted(spans):
            if offset < end:
                raise UnsafeInputError(f"{path}: records overlap at byte {offset}; the index is not to be trusted")
            end = offset + length
        if end > files[name]:
            raise IncompleteSourceError(
                f"{path} is truncated: it has {files[name]} bytes, the index has records up to byte {end}"
            )
    return files


def _tensor(
    name: str, fields: dict[str, Any], records: dict[tuple[int, ...] | None, Record], path: Path
) -> StoredTensor:
    what = f"{path}: {name}"
    shape = _sizes(fields.get("size"), f"the size of {name}")
    info = TensorInfo(shape, _dtype(fields.get("properties"), what))
    chunks: list[Chunk] = []
    listed = fields.get("chunks") or []
    if not isinstance(listed, list | tuple):
        raise UnsafeInputError(f"{what} has {_shown(listed)} for its chunks")
    for chunk in listed:
        state = _state(chunk, path, f"a chunk of {name}, ")
        start, size = (_sizes(state.get(key), f"{key} of {name}") for key in ("offsets", "sizes"))
        box = tuple((a, a + n) for a, n in zip(start, size, strict=False))
        if not len(start) == len(size) == len(shape) or any(
            stop > extent for (_, stop), extent in zip(box, shape, strict=True)
        ):
            raise UnsafeInputError(f"{what} has a chunk at {start} of size {size} outside its shape {shape}")
        if start not in records:
            raise IncompleteSourceError(f"{what} has no record for its chunk at {start}")
        record, nbytes = records.pop(start), math.prod(size) * info.dtype.itemsize
        if record.length < nbytes:
            raise IncompleteSourceError(
                f"{what}: the chunk at {start} needs {nbytes} bytes, its record has {record.length}"
            )
        chunks.append(Chunk(box, record))
    if records:
        raise UnsafeInputError(f"{what} has records at {sorted(map(str, records))[:3]} that are no chunks of it")
    covered = sum(math.prod(box_shape(chunk.box)) for chunk in chunks)
    if covered < info.numel:
        raise IncompleteSourceError(f"{what} has gaps: its chunks hold {covered} of {info.numel} elements")
    return StoredTensor(info, tuple(chunks))


def _dtype(properties: Any, what: str) -> torch.dtype:
    state = getattr(properties, "state", None)
    if isinstance(state, dict):
        dtype, layout = state.get("dtype"), state.get("layout")
    elif isinstance(state, tuple) and len(state) >= 2:
        dtype, layout = state[:2]
    else:
        raise UnsupportedError(f"{what} has no properties")
    if not isinstance(dtype, torch.dtype):
        raise UnsupportedError(f"{what} has no known dtype")
    if is_inert(layout, "_get_layout") and layout.args != ("torch.strided",):
        raise UnsupportedError(f"{what} has the layout {_transforms(layout.args)}, not torch.strided")
    return dtype


def _fingerprint(directory: Path, metadata: bytes, files: Mapping[str, int]) -> str:
    """Of the index, which has an id of its own in every checkpoint that torch saved, and of the files' sizes and times:
    equal shapes give equal sizes, so without times other weights would pass for the same."""
    digest = hashlib.sha256(metadata)
    for name, size in sorted(files.items()):
        digest.update(f"{name}\0{size}\0{(directory / name).stat().st_mtime_ns}\0".encode())
    return digest.hexdigest()
