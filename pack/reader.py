"""Reading packed samples by place: of a merged dataset or of one partition, local or in an object store.

Only byte offsets of the MDS layout (shard = u32 n | u32[n + 1] offsets | config JSON | samples; sample = u32 sizes of
the columns, then their bodies, columns sorted by name); everything that is read is checked against the shard's own
size.
"""

from __future__ import annotations

import json
import struct
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from pack.storage import Storage, open_storage
from schemas.dataset import DatasetCard
from schemas.errors import IncompleteSourceError, SchemaError
from schemas.sample import COLUMNS, PackedSample, SampleMeta, from_columns, parse_meta

INDEX_FILE = "index.json"
CARD_FILE = "dataset.json"
NAMES = sorted(COLUMNS)
_SIZES = struct.Struct(f"<{len(NAMES)}I")


@dataclass(frozen=True)
class ShardInfo:
    """One entry of an index. name: of the file relative to the output; hashes: algorithm -> hex digits."""

    name: str
    samples: int
    bytes: int
    hashes: dict[str, str]


def parse_index(data: bytes, folder: str, where: str) -> list[ShardInfo]:
    """The shards of an index.json that lies in `folder`. SchemaError for shards that omniloom does not write."""
    try:
        index = json.loads(data)
        return [_shard(entry, folder, where) for entry in index["shards"]]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise SchemaError(f"{where} is no index of MDS shards: {type(error).__name__}: {error}") from error


def _shard(entry: dict[str, Any], folder: str, where: str) -> ShardInfo:
    found = dict(zip(entry["column_names"], entry["column_encodings"], strict=True))
    if entry["format"] != "mds" or entry["version"] != 2 or found != COLUMNS or entry["compression"] is not None:
        raise SchemaError(f"{where}: shard {entry['raw_data']['basename']} has columns {found}; a sample has {COLUMNS}")
    raw = entry["raw_data"]
    name = f"{folder}/{raw['basename']}" if folder else raw["basename"]
    return ShardInfo(name, int(entry["samples"]), int(raw["bytes"]), dict(raw["hashes"]))


class ShardReader:
    """Random access to the samples of one shard; reads only what is asked for."""

    def __init__(self, storage: Storage, info: ShardInfo) -> None:
        self.storage, self.info = storage, info
        self.where = storage.url(info.name)
        head = storage.read(info.name, 0, 4 + 4 * (info.samples + 1))
        if len(head) < 4 + 4 * (info.samples + 1):
            raise SchemaError(f"{self.where} has {len(head)} bytes, less than the offsets of {info.samples} samples")
        (count,) = struct.unpack_from("<I", head)
        if count != info.samples:
            raise SchemaError(f"{self.where} says it has {count} samples; the index says {info.samples}")
        self.offsets: np.ndarray = np.frombuffer(head, "<u4", offset=4)
        if (np.diff(self.offsets.astype(np.int64)) < _SIZES.size).any() or int(self.offsets[-1]) != info.bytes:
            raise SchemaError(f"{self.where}: its offsets do not rise to its size of {info.bytes} bytes")

    def __len__(self) -> int:
        return self.info.samples

    def columns(self, index: int) -> dict[str, Any]:
        """The MDS columns of a sample. SchemaError names shard and sample."""
        begin, end = int(self.offsets[index]), int(self.offsets[index + 1])
        data = self.storage.read(self.info.name, begin, end - begin)
        if len(data) != end - begin:
            raise SchemaError(
                f"{self.where}: sample {index} has {len(data)} of {end - begin} bytes; the file is cut off"
            )
        return decode_columns(data, f"{self.where}: sample {index}")

    def sample(self, index: int) -> PackedSample:
        try:
            return from_columns(self.columns(index))
        except SchemaError as error:
            raise SchemaError(_placed(error, f"{self.where}: sample {index}")) from error

    def sample_id(self, index: int) -> str:
        """The id of a sample; `id` is the first column."""
        begin = int(self.offsets[index])
        (size,) = struct.unpack("<I", self.storage.read(self.info.name, begin, 4))
        name: str = _decode(
            "id", self.storage.read(self.info.name, begin + _SIZES.size, size), f"{self.where}: {index}"
        )
        return name

    def meta(self, index: int) -> SampleMeta:
        """The meta of a sample, without reading its media."""
        begin, end = int(self.offsets[index]), int(self.offsets[index + 1])
        sizes = _SIZES.unpack(self.storage.read(self.info.name, begin, _SIZES.size))
        if sum(sizes) + _SIZES.size != end - begin:
            raise SchemaError(f"{self.where}: sample {index}: its columns do not add up to its {end - begin} bytes")
        columns: dict[str, Any] = {}
        place = begin + _SIZES.size
        for name, size in zip(NAMES, sizes, strict=True):
            data = b"" if name == "media" else self.storage.read(self.info.name, place, size)
            columns[name] = _decode(name, data, f"{self.where}: sample {index}")
            place += size
        return parse_meta(columns)


def decode_columns(data: bytes, where: str) -> dict[str, Any]:
    """The columns of one encoded sample."""
    sizes = _SIZES.unpack_from(data)
    if sum(sizes) + _SIZES.size != len(data):
        raise SchemaError(f"{where}: its columns add up to {sum(sizes) + _SIZES.size} bytes, it has {len(data)}")
    columns: dict[str, Any] = {}
    place = _SIZES.size
    for name, size in zip(NAMES, sizes, strict=True):
        columns[name] = _decode(name, data[place : place + size], where)
        place += size
    return columns


def _decode(name: str, data: bytes, where: str) -> Any:
    try:
        if COLUMNS[name] == "bytes":
            return data
        return data.decode() if COLUMNS[name] == "str" else json.loads(data)
    except ValueError as error:
        raise SchemaError(f"{where}: column {name} is damaged: {error}") from error


def _placed(error: SchemaError, where: str) -> str:
    return str(error) if str(error).startswith(where) else f"{where}: {error}"


class PackedDataset:
    """The samples of an output, in the order of its index.

    location: an output of `omniloom pack` (a folder or URL with the merged index), or one partition folder of it.
    `dataset[i]` is sample i, whole and checked; `dataset.meta(i)` leaves its media unread.
    """

    def __init__(self, location: str) -> None:
        self.storage = open_storage(location)
        data = self.storage.try_read(INDEX_FILE)
        if data is None:
            raise IncompleteSourceError(
                f"{self.storage.url(INDEX_FILE)} does not exist: no packed dataset, or one that is not merged yet"
            )
        self.shards = parse_index(data, "", self.storage.url(INDEX_FILE))
        self._starts = [0]
        for shard in self.shards:
            self._starts.append(self._starts[-1] + shard.samples)
        self._open: tuple[int, ShardReader] | None = None

    def __len__(self) -> int:
        return self._starts[-1]

    def __getitem__(self, index: int) -> PackedSample:
        reader, place = self._locate(index)
        return reader.sample(place)

    def __iter__(self) -> Iterator[PackedSample]:
        return (self[i] for i in range(len(self)))

    def meta(self, index: int) -> SampleMeta:
        reader, place = self._locate(index)
        return reader.meta(place)

    def sample_id(self, index: int) -> str:
        """The id of a sample, from a few bytes."""
        reader, place = self._locate(index)
        return reader.sample_id(place)

    def metas(self) -> Iterator[SampleMeta]:
        return (self.meta(i) for i in range(len(self)))

    def locate(self, index: int) -> tuple[ShardInfo, int]:
        """(shard, place in it) of a sample."""
        reader, place = self._locate(index)
        return reader.info, place

    def card(self) -> DatasetCard | None:
        """The dataset card; None when there is none (a partition folder)."""
        data = self.storage.try_read(CARD_FILE)
        return None if data is None else DatasetCard.from_json(data, self.storage.url(CARD_FILE))

    def _locate(self, index: int) -> tuple[ShardReader, int]:
        if not -len(self) <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        index %= len(self)
        place = bisect_right(self._starts, index) - 1
        if self._open is None or self._open[0] != place:
            self._open = (place, ShardReader(self.storage, self.shards[place]))
        return self._open[1], index - self._starts[place]
