"""One record of a `.distcp` file: where the bytes of its tensor lie.

A record is a whole `torch.save` archive (zip) inside the file; its member `data/0` holds the tensor, uncompressed.
So the bytes can be read straight from the file once the small header agrees with the index of the checkpoint.
"""

from __future__ import annotations

import io
import math
import struct
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from convert.archives import DAMAGED_ARCHIVE, check_members, read_members
from convert.printing import printable
from convert.restricted_pickle import is_inert, load_tensor_header
from convert.tensors import TensorInfo
from schemas.errors import IncompleteSourceError, OmniloomError, UnsafeInputError, UnsupportedError

ReadAt = Callable[[int, int], bytes]  # (offset within the record, size) -> bytes

_LOCAL_HEADER = struct.Struct("<4s5H3I2H")
_HEAD, _TAIL = 2048, 1024  # the header members come first, the directory last: two reads find everything
_MAX_PICKLE = 1 << 20  # bytes; the header of one tensor has about 200

_MAX_DIRECTORY = 4 << 20  # bytes of the archive's directory; that of one tensor has about 500

_STORAGES = {
    "DoubleStorage": torch.float64, "FloatStorage": torch.float32, "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16, "LongStorage": torch.int64, "IntStorage": torch.int32,
    "ShortStorage": torch.int16, "CharStorage": torch.int8, "ByteStorage": torch.uint8, "BoolStorage": torch.bool,
}  # fmt: skip


@dataclass(frozen=True)
class Place:
    """The offset within a record of its tensor's first byte, and the CRC32 of all its bytes; 0 for none."""

    start: int
    checksum: int


@dataclass(frozen=True)
class SavedTensor:
    """What `data.pkl` of a record says of its tensor, in elements."""

    dtype: torch.dtype
    storage_size: int
    storage_offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]


class _Window(io.RawIOBase):
    """The record as a file of its own; its first and last bytes are read once."""

    def __init__(self, read_at: ReadAt, length: int) -> None:
        self._read_at, self._length, self._position = read_at, length, 0
        self._head = read_at(0, min(_HEAD, length))
        self._tail = read_at(max(0, length - _TAIL), min(_TAIL, length))

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        origin = (0, self._position, self._length)[whence]
        if origin + offset < 0:
            raise OSError("seek before the record's beginning")
        self._position = origin + offset
        return self._position

    def read(self, size: int = -1) -> bytes:
        start = min(self._position, self._length)
        stop = self._length if size < 0 else min(self._length, start + size)
        self._position = stop
        tail = self._length - len(self._tail)
        if stop <= len(self._head):
            return self._head[start:stop]
        if start >= tail:
            return self._tail[start - tail : stop - tail]
        if stop - start > _MAX_DIRECTORY:
            raise zipfile.BadZipFile(f"its directory would have {stop - start} bytes")
        return self._read_at(start, stop - start)


def data_start(read_at: ReadAt, length: int, expected: TensorInfo, what: str) -> Place | None:
    """Where the tensor's bytes lie within the record: contiguous and little-endian.

    expected: what the index says of the tensor. None when the record is valid but stored in another way (a view with
    strides, a larger storage, other byte order, compressed), so that `load_record` must read it.
    UnsupportedError for a record that is no `torch.save` archive; IncompleteSourceError where record and index differ.
    """
    window = _Window(read_at, length)
    if window.read(4) != b"PK\x03\x04":
        raise UnsupportedError(f"{what} is not a torch.save archive; written by another storage backend?")
    try:
        with zipfile.ZipFile(window) as archive:
            members = {info.filename.partition("/")[2]: info for info in archive.infolist()}
            small = [members["data.pkl"], *(members[name] for name in ("byteorder",) if name in members)]
            pickled, *orders = read_members(archive, small, _MAX_PICKLE, what)
            saved = _saved_tensor(pickled, what)
            order = orders[0] if orders else b"little"
    except DAMAGED_ARCHIVE as error:
        raise IncompleteSourceError(f"{what} is damaged: {type(error).__name__}: {printable(str(error))}") from error
    if saved is None:
        return None
    _compare(saved, expected, what)
    data = members.get("data/0")
    plain = order == b"little" and saved.storage_offset == 0 and _is_contiguous(saved.shape, saved.stride)
    if not plain or saved.storage_size != expected.numel or (data is not None and data.compress_type):
        return None
    if expected.numel == 0:
        return Place(0, 0)
    if data is None or data.file_size != expected.nbytes or data.compress_size != expected.nbytes:
        size = "no data" if data is None else f"{data.file_size} bytes of data"
        raise IncompleteSourceError(f"{what} has {size}, the index says {expected} ({expected.nbytes} bytes)")
    header = _LOCAL_HEADER.unpack(read_at(data.header_offset, _LOCAL_HEADER.size))
    start = data.header_offset + _LOCAL_HEADER.size + header[-2] + header[-1]
    if header[0] != b"PK\x03\x04" or start + expected.nbytes > length:
        raise IncompleteSourceError(f"{what} is damaged: its data does not lie within its {length} bytes")
    return Place(start, getattr(data, "CRC", 0))


def load_record(data: bytes, expected: TensorInfo, what: str) -> torch.Tensor:
    """The tensor of a record by `torch.load(weights_only=True)`, checked against the index; errors as `data_start`."""
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            check_members(archive, what)
            size = sum(info.file_size for info in archive.infolist())
    except DAMAGED_ARCHIVE as error:
        raise IncompleteSourceError(f"{what} is damaged: {type(error).__name__}: {printable(str(error))}") from error
    if size > max(len(data), expected.nbytes) + _MAX_PICKLE:
        raise UnsafeInputError(f"{what} would unpack to {size} bytes, the index says {expected}")
    try:
        loaded: Any = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except Exception as error:
        # torch raises many kinds here; all mean that the slice holds no plain tensor
        message = printable(str(error).splitlines()[0])[:300] if str(error) else type(error).__name__
        raise UnsafeInputError(f"{what} cannot be loaded as plain weights: {message}") from error
    if not isinstance(loaded, torch.Tensor) or loaded.layout != torch.strided:
        raise UnsupportedError(f"{what} holds a {type(loaded).__name__}, not a plain tensor")
    found = TensorInfo(tuple(loaded.shape), loaded.dtype)
    if found != expected:
        raise IncompleteSourceError(f"{what} holds {found}, the index says {expected}")
    return loaded.detach().contiguous()


def _saved_tensor(header: bytes, what: str) -> SavedTensor | None:
    """None for a header in another form than that of one plain tensor."""
    try:
        root = load_tensor_header(header, what)
    except OmniloomError:
        return None  # a parameter, a subclass, or a forbidden object: torch's own weights_only reader decides
    if not is_inert(root, "_rebuild_tensor_v2") or len(root.args) < 4:
        return None
    storage, offset, shape, stride = root.args[:4]
    if not all(isinstance(part, tuple) for part in (storage, shape, stride)) or len(shape) != len(stride):
        return None
    if len(storage) != 5 or storage[0] != "storage" or storage[2] != "0":
        return None
    dtype = _STORAGES.get(getattr(storage[1], "__name__", ""))
    numbers = (storage[4], offset, *shape, *stride)
    if dtype is None or not all(type(number) is int and number >= 0 for number in numbers):
        return None
    return SavedTensor(dtype, storage[4], offset, tuple(shape), tuple(stride))


def _compare(saved: SavedTensor, expected: TensorInfo, what: str) -> None:
    found = TensorInfo(saved.shape, saved.dtype)
    if found != expected:
        raise IncompleteSourceError(f"{what} holds {found}, the index says {expected}")
    last = saved.storage_offset + sum((n - 1) * step for n, step in zip(saved.shape, saved.stride, strict=True))
    if math.prod(saved.shape) and last >= saved.storage_size:
        raise IncompleteSourceError(f"{what} holds {saved.storage_size} elements, the index says {expected}")


def _is_contiguous(shape: tuple[int, ...], stride: tuple[int, ...]) -> bool:
    step = 1
    for size, here in zip(reversed(shape), reversed(stride), strict=True):
        if size != 1 and here != step:
            return False
        step *= size
    return True
