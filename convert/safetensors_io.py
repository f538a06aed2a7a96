"""safetensors files: read box by box, and laid out before a single tensor is known.

A header needs names, shapes and dtypes only, so it is written first and tensors go to their places as they come. What
a file says about itself is checked before it is believed: ranges without gap or overlap that fit their shapes and end
where the file ends, and an index that names exactly what the files hold.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import xxhash

from convert.file_states import FileStates
from convert.open_files import OpenFiles
from convert.printing import printable
from convert.small_files import JSON_LIMIT, parse_json, read_object, read_small
from convert.tensors import Box, TensorInfo, box_shape, check_box, full_box
from schemas.errors import ConfigError, IncompleteSourceError, SchemaError, UnsafeInputError, UnsupportedError

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
HEADER_LIMIT = 100 * 1024 * 1024  # bytes; the format's own limit

MAX_DIMENSIONS = 16
MAX_NUMBER = 1 << 56

DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
NAMES: dict[torch.dtype, str] = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True)
class Layout:
    """A safetensors file as bytes: its header (with the length before it) and where each tensor lies in the file."""

    header: bytes
    spans: Mapping[str, tuple[int, int]]
    tensors: Mapping[str, TensorInfo]
    metadata: Mapping[str, str]

    @property
    def size(self) -> int:
        """Bytes of the whole file."""
        return max((stop for _, stop in self.spans.values()), default=len(self.header))


def lay_out(tensors: Mapping[str, TensorInfo], metadata: Mapping[str, str] | None = None) -> Layout:
    """The layout of a file with these tensors in this order, the wider dtypes first so that every one is aligned."""
    entries: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    ranges: dict[str, tuple[int, int]] = {}
    end = 0
    for name, info in sorted(tensors.items(), key=lambda item: -item[1].dtype.itemsize):  # stable
        ranges[name] = (end, end + info.nbytes)
        entries[name] = {
            "dtype": NAMES[info.dtype],
            "shape": list(info.shape),
            "data_offsets": [end, end + info.nbytes],
        }
        end += info.nbytes
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    header = len(text).to_bytes(8, "little") + text
    spans = {name: (len(header) + start, len(header) + stop) for name, (start, stop) in ranges.items()}
    return Layout(header, spans, dict(tensors), dict(metadata or {}))


def read_layout(path: Path) -> Layout:
    """The checked header of a file. IncompleteSourceError when the file is cut short, SchemaError for any other lie."""
    if not path.is_file():  # a pipe would be waited for
        raise IncompleteSourceError(f"{path}: is no file")
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > HEADER_LIMIT:
            raise SchemaError(f"{path}: is not a safetensors file (its header would have {length} bytes)")
        text = file.read(length)
    if len(text) < length:
        raise IncompleteSourceError(f"{path}: is cut short: {size} bytes, its header alone has {length + 8}")
    entries = parse_json(text, f"{path}: its header is damaged", SchemaError)
    if not isinstance(entries, dict):
        raise SchemaError(f"{path}: its header is damaged: it is no object")
    metadata = entries.pop("__metadata__", None) or {}
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise SchemaError(f"{path}: its header is damaged: __metadata__ does not hold texts only")
    parsed = {name: _entry(path, name, entry) for name, entry in entries.items()}
    base, end = 8 + length, 0
    for name, (_, (start, stop)) in sorted(parsed.items(), key=lambda item: item[1][1]):
        if start != end:
            raise SchemaError(f"{path}: {name} begins at byte {start}, the tensor before it ends at {end}")
        end = stop
    if base + end != size:
        kind = IncompleteSourceError if base + end > size else SchemaError
        raise kind(f"{path}: has {size} bytes, its header says {base + end}")
    spans = {name: (base + start, base + stop) for name, (_, (start, stop)) in parsed.items()}
    return Layout(
        length.to_bytes(8, "little") + text, spans, {name: info for name, (info, _) in parsed.items()}, metadata
    )


def _entry(path: Path, name: str, entry: Any) -> tuple[TensorInfo, tuple[int, int]]:
    """(shape and dtype, bytes [start, stop) behind the header) of one tensor. Every number is checked before it is
    used: a header may hold anything."""
    if not name.isprintable():
        raise UnsafeInputError(f"{path}: holds a tensor called {ascii(name)[:200]}, which is no name of a tensor")
    damaged = f"{path}: its header is damaged: {name}"
    if not isinstance(entry, dict) or not {"dtype", "shape", "data_offsets"} <= entry.keys():
        raise SchemaError(f"{damaged} has no dtype, shape and data_offsets")
    if not isinstance(entry["dtype"], str):
        raise SchemaError(f"{damaged} has the dtype {ascii(entry['dtype'])[:60]}")
    if entry["dtype"] not in DTYPES:
        raise UnsupportedError(f"{path}: {name} has the dtype {printable(entry['dtype'])[:60]}, which is not handled")
    shape, offsets = _numbers(entry["shape"]), _numbers(entry["data_offsets"])
    if shape is None or len(shape) > MAX_DIMENSIONS:
        raise SchemaError(f"{damaged} has the shape {ascii(entry['shape'])[:60]}")
    if offsets is None or len(offsets) != 2:
        raise SchemaError(f"{damaged} has the data_offsets {ascii(entry['data_offsets'])[:60]}")
    info, (start, stop) = TensorInfo(shape, DTYPES[entry["dtype"]]), offsets
    if stop - start != info.nbytes:
        raise SchemaError(f"{path}: {name} is said to be {info} in {stop - start} bytes; that is {info.nbytes} bytes")
    return info, (start, stop)


def _is_plain(file: str) -> bool:
    """True for the name of a file in the same folder."""
    return file.isprintable() and Path(file).name == file and file not in ("", ".", "..")


def _numbers(values: Any) -> tuple[int, ...] | None:
    """Whole numbers that a file or a tensor can have, None for anything else."""
    if not isinstance(values, list) or not all(type(value) is int and 0 <= value <= MAX_NUMBER for value in values):
        return None
    return tuple(values)


def weight_files(folder: Path) -> dict[str, tuple[str, ...] | None]:
    """Weight file -> the names that the index says it holds, None for a model in one file, as transformers looks
    for them. UnsafeInputError for a file name that leaves the folder."""
    if (folder / SINGLE_FILE).exists():
        return {SINGLE_FILE: None}
    index = folder / INDEX_FILE
    if not index.is_file():
        if list(folder.glob("*.bin")):
            raise UnsupportedError(f"{folder}: holds pickled .bin weights only; save them as safetensors first")
        raise ConfigError(f"{folder}: has neither {SINGLE_FILE} nor {INDEX_FILE}")
    weight_map = read_object(index, SchemaError).get("weight_map")
    if not isinstance(weight_map, dict):
        raise SchemaError(f"{index}: is no index of safetensors files: it has no weight_map")
    files: dict[str, list[str]] = {}
    for name, file in weight_map.items():
        if not isinstance(file, str) or not _is_plain(file):
            where = f"{index}: {printable(name)} is said to lie in {ascii(file)[:200]}"
            raise UnsafeInputError(f"{where}; only files beside the index are read")
        files.setdefault(file, []).append(name)
    return {file: tuple(names) for file, names in sorted(files.items())}


class SafetensorsReader:
    """A Hugging Face model directory's weights; see `convert.tensors.TensorReader`.

    files: as `weight_files` gives them, for a directory that is no model's. index: the bytes of the file that names
    the others, None where there is none.
    """

    def __init__(self, folder: Path, files: Mapping[str, Sequence[str] | None] | None = None) -> None:
        self.folder = folder
        self.layouts: dict[str, Layout] = {}
        self.file_of: dict[str, str] = {}
        files_of = weight_files(folder) if files is None else files
        self._states = FileStates(folder / file for file in files_of)
        for file, names in files_of.items():
            path = folder / file
            if not path.exists():
                raise IncompleteSourceError(f"{path}: no such file; the index names {len(names or ())} tensors in it")
            layout = read_layout(path)
            _check_index(path, layout, names)
            self.layouts[file] = layout
            for name in layout.tensors:
                if name in self.file_of:
                    raise SchemaError(f"{name} is both in {self.file_of[name]} and in {file}")
                self.file_of[name] = file
        self.tensors: dict[str, TensorInfo] = {n: i for lay in self.layouts.values() for n, i in lay.tensors.items()}
        self.skipped: dict[str, str] = {}
        index = files is None and SINGLE_FILE not in self.layouts
        self.index = read_small(folder / INDEX_FILE, JSON_LIMIT) if index else None
        self.fingerprint = self._fingerprint()
        self._files = OpenFiles()

    @property
    def bytes_read(self) -> int:
        return self._files.bytes_read

    def read(self, name: str, box: Box | None = None) -> torch.Tensor:
        info, file = self.tensors[name], self.file_of[name]
        box = full_box(info.shape) if box is None else box
        check_box(name, box, info.shape)
        tensor = torch.empty(box_shape(box), dtype=info.dtype)
        start = self.layouts[file].spans[name][0]
        buffer, at = raw_bytes(tensor), 0
        for offset, length in runs(info, box):
            self._files.read_into(self.folder / file, start + offset, buffer[at : at + length])
            at += length
        return tensor

    def changed(self) -> Iterable[Path]:
        return self._states.changed()

    def location(self, name: str) -> tuple[str, int]:
        file = self.file_of[name]
        return file, self.layouts[file].spans[name][0]

    def _fingerprint(self) -> str:
        digest = xxhash.xxh3_128(self.index or b"")
        for file, layout in self.layouts.items():
            state = (self.folder / file).stat()
            digest.update(f"{file}:{state.st_size}:{state.st_mtime_ns}:".encode() + layout.header)
        return digest.hexdigest()


def _check_index(path: Path, layout: Layout, names: Sequence[str] | None) -> None:
    if names is None:
        return
    lacking, surplus = set(names) - layout.tensors.keys(), layout.tensors.keys() - set(names)
    if lacking:
        raise IncompleteSourceError(
            f"{path}: lacks {len(lacking)} tensors that the index names, such as {printable(min(lacking))}"
        )
    if surplus:
        raise SchemaError(
            f"{path}: holds {len(surplus)} tensors that the index does not name, such as {printable(min(surplus))}"
        )


def raw_bytes(tensor: torch.Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor, writable, without a copy."""
    return tensor.reshape(-1).view(torch.uint8).numpy().data


def runs(info: TensorInfo, box: Box) -> Iterable[tuple[int, int]]:
    """(offset, length) in bytes of each contiguous stretch of a box, in the order of the box's elements."""
    width = info.dtype.itemsize
    if not math.prod(box_shape(box)):
        return
    whole = len(box)  # dimensions from here on are taken whole
    while whole and box[whole - 1] == (0, info.shape[whole - 1]):
        whole -= 1
    strides = [math.prod(info.shape[d + 1 :]) for d in range(len(box))]
    if not whole:
        yield 0, info.nbytes
        return
    start, stop = box[whole - 1]
    length = (stop - start) * strides[whole - 1] * width
    offsets = [start * strides[whole - 1]]
    for d in reversed(range(whole - 1)):
        offsets = [i * strides[d] + offset for i in range(*box[d]) for offset in offsets]
    for offset in offsets:
        yield offset * width, length
