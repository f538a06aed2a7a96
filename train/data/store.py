"""Random access to rows: the one place that knows MDS.

A packed source is read through streaming's `LocalDataset` on a sub-index of the lanes that this rank serves. (Not
through `StreamingDataset`: opening one enters collectives of a process group and leaves shared memory behind when it is
killed, and of what it adds, the plan needs nothing.) Remote shards lie in the node's cache, where `fetch` put them.
Every sample is checked against the crc of its media.

The store travels to worker processes and opens its files there.
"""

from __future__ import annotations

import io
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from pydantic import ValidationError
from streaming import LocalDataset

from schemas.errors import SchemaError, VerificationError
from schemas.sample import PackedSample, PackedVideo, SampleMeta, from_columns
from train.data.packed_files import is_remote, local_path, read_file
from train.data.shard_cache import ShardCache
from train.data.shard_index import Shard, write_sub_index
from train.data.text_files import TextFiles, TextReader, TextRow

ROWS_FILE = "rows.parquet"


@dataclass(frozen=True)
class CacheSpec:
    """How a worker reaches the cache of its node. folder: of the cache; fingerprint: of the dataset's index."""

    folder: str
    fingerprint: str
    retries: int = 3


@dataclass
class PackedPart:
    """The shards of one packed dataset that a rank serves.

    dataset: folder or URL; view: folder of the sub-index; numbers: int64, ascending numbers of the shards in the whole
    dataset; shards: the same shards; cache: None for a local dataset.
    """

    dataset: str
    view: str
    numbers: np.ndarray
    shards: list[Shard]
    cache: CacheSpec | None = None
    _opened: LocalDataset | None = field(default=None, repr=False)

    @classmethod
    def make(
        cls, dataset: str, shards: Sequence[Shard], numbers: np.ndarray, views: Path, cache: CacheSpec | None = None
    ) -> PackedPart:
        """Writes the sub-index of shards `numbers` of a dataset. views: folder that holds sub-indexes."""
        mine = [shards[number] for number in numbers]
        if cache is None:
            root = local_path(dataset)
        else:
            root = cache_of(dataset, cache).folder
        view = write_sub_index(views, mine, lambda name: root / name)
        light = [replace(shard, entry={}) for shard in mine]  # it travels to every worker
        return cls(dataset.rstrip("/"), str(view), np.asarray(numbers, np.int64), light, cache)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_opened": None}

    def shard(self, number: int) -> Shard:
        """KeyError for a shard that is not served here."""
        place = int(np.searchsorted(self.numbers, number))
        if place == len(self.numbers) or self.numbers[place] != number:
            raise KeyError(f"shard {number} of {self.dataset} is not served by this rank")
        return self.shards[place]

    def read(self, number: int, index: int) -> PackedSample:
        """The sample, checked. SchemaError names shard and sample; a damaged copy in the cache is fetched again."""
        shard = self.shard(number)
        try:
            return self._read(shard, number, index)
        except (SchemaError, OSError) as error:
            if self.cache is None:
                raise SchemaError(f"{self.dataset}/{shard.name}: sample {index}: {_brief(error)}") from error
        cache = cache_of(self.dataset, self.cache)
        cache.pin(shard)
        try:
            cache.fetch(shard, again=True)
            return self._read(shard, number, index)
        except (SchemaError, OSError) as error:
            raise SchemaError(f"{self.dataset}/{shard.name}: sample {index}: {_brief(error)}") from error
        finally:
            cache.unpin(shard)
            cache.close()

    def _read(self, shard: Shard, number: int, index: int) -> PackedSample:
        if self._opened is None:
            self._opened = LocalDataset(self.view)
            self._firsts = np.concatenate([[0], np.cumsum([s.rows for s in self.shards])])
        place = int(np.searchsorted(self.numbers, number))
        try:
            columns = self._opened[int(self._firsts[place]) + index]
        except (ValueError, IndexError, TypeError, zlib.error) as error:  # of bytes that are no sample
            raise SchemaError(f"cannot be decoded: {type(error).__name__}: {error}") from error
        return from_columns(columns)

    def meta(self, number: int, index: int) -> SampleMeta:
        """The meta of a sample from the rows table of its partition, without its shard. SchemaError."""
        shard = self.shard(number)
        folder, _, name = shard.name.rpartition("/")
        table_name = f"{folder}/{ROWS_FILE}" if folder else ROWS_FILE
        data = read_file(self.dataset, table_name)
        where = f"{self.dataset}/{table_name}"
        if data is None:
            raise SchemaError(f"{where} does not exist")
        try:
            wanted = [("shard", "=", name), ("index_in_shard", "=", index)]
            found = pq.read_table(io.BytesIO(data), columns=["meta"], filters=wanted).column("meta").to_pylist()
            if len(found) != 1:
                raise SchemaError(f"{where} has {len(found)} rows for sample {index} of {name}")
            return SampleMeta.model_validate_json(found[0])
        except (pa.ArrowException, OSError, KeyError, ValidationError) as error:
            raise SchemaError(f"{where} cannot be read: {_brief(error)}") from error


def cache_of(dataset: str, spec: CacheSpec, limit: int | None = None) -> ShardCache:
    """The cache of a remote dataset. limit: bytes; only who fetches ahead needs it."""
    return ShardCache(Path(spec.folder), dataset, spec.fingerprint, limit, spec.retries)


def hollow(meta: SampleMeta) -> PackedSample:
    """A sample with empty blobs in the place of its media: what is laid out for one that cannot be read."""
    videos = [PackedVideo([], b"" if video.audio else None) for video in meta.videos]
    return PackedSample(meta, videos, [b""] * len(meta.audios), [b""] * len(meta.images))


@dataclass
class TextPart:
    """A text source. files: all of it; blocks are its shards."""

    files: TextFiles
    _reader: TextReader | None = field(default=None, repr=False)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_reader": None}

    def read(self, block: int, index: int) -> TextRow:
        """VerificationError when the file was changed since it was scanned."""
        if self._reader is None:
            self._reader = TextReader(self.files)
        return self._reader.read(block, index)


def check_shards(part: PackedPart) -> None:
    """VerificationError for a local shard that is missing or has another size than the index says: better before the
    training than in the middle of it."""
    if is_remote(part.dataset):
        return
    root = local_path(part.dataset)
    for shard in part.shards:
        path = root / shard.name
        found = path.stat().st_size if path.exists() else None
        if found != shard.bytes:
            has = "does not exist" if found is None else f"has {found} bytes"
            raise VerificationError(
                f"{path} {has}; the index says {shard.bytes} bytes: run `omniloom pack verify {part.dataset}`"
            )


def _brief(error: Exception) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
