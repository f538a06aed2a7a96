"""Random access to rows: the one place that knows MDS.

A packed source is read through streaming's `LocalDataset` on a sub-index of the lanes that this rank serves. (Not
through `StreamingDataset`: opening one enters collectives of a process group and leaves shared memory behind when it is
killed, and of what it adds, the plan needs nothing.) Remote shards lie in the node's cache, where `fetch` put them.
Every sample is checked: its media against their crc, its meta against the rows table.

The store travels to worker processes and opens its files there.
"""

from __future__ import annotations

import io
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from pydantic import ValidationError
from streaming import LocalDataset

from schemas.errors import IncompleteSourceError, SchemaError, VerificationError
from schemas.sample import PackedSample, PackedVideo, SampleMeta, from_columns
from train.data.meta_check import meta_hash
from train.data.packed_files import is_remote, local_path, read_file
from train.data.shard_cache import ShardCache
from train.data.shard_index import Shard, file_digest, write_sub_index
from train.data.text_files import KEPT_BLOCKS, TextFiles, TextReader
from train.data.text_types import TextRow

ROWS_FILE = "rows.parquet"
_KEPT_TABLES = 4  # rows tables of which a worker keeps what it read


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
    dataset; shards: the same shards; cache: None for a local dataset; metas: int64, `meta_hash` of each of their rows
    by the rows tables, empty to check none.
    """

    dataset: str
    view: str
    numbers: np.ndarray
    shards: list[Shard]
    cache: CacheSpec | None = None
    metas: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64), repr=False)
    _opened: LocalDataset | None = field(default=None, repr=False)
    _lost: dict[int, str] = field(default_factory=dict, repr=False)  # shards that cannot be had, and why
    _tables: OrderedDict[str, dict[tuple[str, int], str]] = field(default_factory=OrderedDict, repr=False)

    @classmethod
    def make(
        cls,
        dataset: str,
        shards: Sequence[Shard],
        numbers: np.ndarray,
        views: Path,
        cache: CacheSpec | None = None,
        metas: np.ndarray | None = None,
    ) -> PackedPart:
        """Writes the sub-index of shards `numbers` of a dataset. views: folder that holds sub-indexes; metas: of all
        rows of the dataset."""
        mine = [shards[number] for number in numbers]
        if cache is None:
            root = local_path(dataset)
        else:
            root = cache_of(dataset, cache).folder
        view = write_sub_index(views, mine, lambda name: root / name)
        light = [replace(shard, entry={}) for shard in mine]  # it travels to every worker
        made = cls(dataset.rstrip("/"), str(view), np.asarray(numbers, np.int64), light, cache)
        if metas is not None and len(metas):
            starts = np.concatenate([[0], np.cumsum([shard.rows for shard in shards])])
            made.metas = np.concatenate([metas[starts[n] : starts[n + 1]] for n in made.numbers])
        return made

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_opened": None, "_lost": {}, "_tables": OrderedDict()}

    def shard(self, number: int) -> Shard:
        """KeyError for a shard that is not served here."""
        place = int(np.searchsorted(self.numbers, number))
        if place == len(self.numbers) or self.numbers[place] != number:
            raise KeyError(f"shard {number} of {self.dataset} is not served by this rank")
        return self.shards[place]

    def lose(self, number: int, reason: str) -> None:
        """The shard cannot be had: its rows are not looked for."""
        self._lost[number] = reason

    def read(self, number: int, index: int) -> PackedSample:
        """The sample, checked. SchemaError names shard and sample; a damaged copy in the cache is fetched again, once:
        a shard that is damaged in the store, too, is lost. OmniloomError: the store does not answer."""
        shard = self.shard(number)
        where = f"{self.dataset}/{shard.name}: sample {index}"
        if number in self._lost:
            raise SchemaError(f"{where}: {self._lost[number]}")
        try:
            return self._read(shard, number, index)
        except (SchemaError, OSError) as error:
            if self.cache is None:
                raise SchemaError(f"{where}: {_brief(error)}") from error
        self._fetch_again(self.cache, shard, number, where)
        try:
            return self._read(shard, number, index)
        except (SchemaError, OSError) as error:
            raise SchemaError(f"{where}: {_brief(error)}") from error

    def _fetch_again(self, spec: CacheSpec, shard: Shard, number: int, where: str) -> None:
        cache = cache_of(self.dataset, spec)
        cache.pin(shard)
        try:
            if not (cache.has(shard) and file_digest(cache.path(shard.name), shard) == shard.digest):
                cache.fetch(shard, again=True)
        except (VerificationError, IncompleteSourceError) as error:
            self.lose(number, _brief(error))
            raise SchemaError(f"{where}: {_brief(error)}") from error
        finally:
            cache.unpin(shard)
            cache.close()

    def _read(self, shard: Shard, number: int, index: int) -> PackedSample:
        if self._opened is None:
            self._opened = LocalDataset(self.view)
            self._firsts = np.concatenate([[0], np.cumsum([s.rows for s in self.shards])])
        row = int(self._firsts[int(np.searchsorted(self.numbers, number))]) + index
        try:
            columns = self._opened[row]
        except Exception as error:  # bytes that are no sample raise what their decoders please
            if isinstance(error, OSError):
                raise
            raise SchemaError(f"cannot be decoded: {type(error).__name__}: {error}") from error
        sample = from_columns(columns)
        if len(self.metas) and meta_hash(columns["meta"]) != self.metas[row]:
            raise SchemaError(
                f"the meta of {sample.meta.id} is not that of {ROWS_FILE}; the shard is damaged or was changed after "
                f"packing: run `omniloom pack verify {self.dataset}`"
            )
        return sample

    def meta(self, number: int, index: int) -> SampleMeta:
        """The meta of a sample from the rows table of its partition, without its shard. SchemaError."""
        shard = self.shard(number)
        folder, _, name = shard.name.rpartition("/")
        table_name = f"{folder}/{ROWS_FILE}" if folder else ROWS_FILE
        where = f"{self.dataset}/{table_name}"
        metas = self._tables.pop(table_name, None) or self._metas(table_name, where)
        self._tables[table_name] = metas
        if len(self._tables) > _KEPT_TABLES:
            self._tables.popitem(last=False)
        if (name, index) not in metas:
            raise SchemaError(f"{where} has no row for sample {index} of {name}")
        try:
            return SampleMeta.model_validate_json(metas[name, index])
        except ValidationError as error:
            raise SchemaError(f"{where} cannot be read: {_brief(error)}") from error

    def _metas(self, table_name: str, where: str) -> dict[tuple[str, int], str]:
        data = read_file(self.dataset, table_name)
        if data is None:
            raise SchemaError(f"{where} does not exist")
        try:
            table = pq.read_table(io.BytesIO(data), columns=["shard", "index_in_shard", "meta"])
            shards, indexes, metas = (table.column(name).to_pylist() for name in table.column_names)
        except (pa.ArrowException, OSError, KeyError) as error:
            raise SchemaError(f"{where} cannot be read: {_brief(error)}") from error
        return dict(zip(zip(shards, indexes, strict=True), metas, strict=True))


def cache_of(dataset: str, spec: CacheSpec, limit: int | None = None) -> ShardCache:
    """The cache of a remote dataset. limit: bytes; only who fetches ahead needs it."""
    return ShardCache(Path(spec.folder), dataset, spec.fingerprint, limit, spec.retries)


def hollow(meta: SampleMeta) -> PackedSample:
    """A sample with empty blobs in the place of its media: what is laid out for one that cannot be read."""
    videos = [PackedVideo([], b"" if video.audio else None) for video in meta.videos]
    return PackedSample(meta, videos, [b""] * len(meta.audios), [b""] * len(meta.images))


@dataclass
class TextPart:
    """A text source. files: all of it; blocks are its shards; kept: blocks that are in use at a time."""

    files: TextFiles
    kept: int = KEPT_BLOCKS
    _reader: TextReader | None = field(default=None, repr=False)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_reader": None}

    def read(self, block: int, index: int) -> TextRow:
        """VerificationError when the file was changed since it was scanned."""
        if self._reader is None:
            self._reader = TextReader(self.files, self.kept)
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
