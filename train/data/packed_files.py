"""The files of a merged dataset, local or in an object store: its index, and reading one file."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import fsspec
import xxhash

from schemas.errors import ConfigError, IncompleteSourceError, OmniloomError, SchemaError
from schemas.sample import COLUMNS

INDEX_FILE = "index.json"
RETRIES = 3
_FIRST_WAIT_S = 0.5  # before something is tried again; doubled each time

log = logging.getLogger("omniloom.train")
Result = TypeVar("Result")


@dataclass(frozen=True)
class ShardEntry:
    """One shard of an index. folder: of its partition, below the dataset ("" for none)."""

    name: str
    folder: str
    rows: int
    bytes: int


@dataclass(frozen=True)
class PackedIndex:
    """A dataset's shards in order. fingerprint: changes whenever a shard does."""

    dataset: str
    shards: tuple[ShardEntry, ...]
    fingerprint: str

    @classmethod
    def read(cls, dataset: str) -> PackedIndex:
        """IncompleteSourceError when there is no index.json, SchemaError when it is none of omniloom's."""
        where = f"{dataset.rstrip('/')}/{INDEX_FILE}"
        data = read_file(dataset, INDEX_FILE)
        if data is None:
            raise no_index(dataset)
        try:
            shards = tuple(_shard(entry, where) for entry in json.loads(data)["shards"])
        except (ValueError, KeyError, TypeError) as error:
            raise SchemaError(f"{where} is no index of MDS shards: {type(error).__name__}: {error}") from error
        if not shards:
            raise IncompleteSourceError(f"{where} lists no shard; there is nothing to train on")
        return cls(dataset.rstrip("/"), shards, str(xxhash.xxh3_64_hexdigest(data)))

    @property
    def num_rows(self) -> int:
        return sum(shard.rows for shard in self.shards)


def _shard(entry: dict[str, object], where: str) -> ShardEntry:
    raw = entry["raw_data"]
    if not isinstance(raw, dict) or not isinstance(entry["column_names"], list):
        raise TypeError("raw_data or column_names is missing")
    name = str(raw["basename"])
    if sorted(entry["column_names"]) != sorted(COLUMNS):
        raise SchemaError(f"{where}: shard {name} has columns {entry['column_names']}; a sample has {list(COLUMNS)}")
    return ShardEntry(name, name.rpartition("/")[0], int(str(entry["samples"])), int(str(raw["bytes"])))


def is_remote(dataset: str) -> bool:
    return "://" in dataset and not dataset.startswith("file://")


def local_path(dataset: str) -> Path:
    """The folder of a dataset that is not remote."""
    return Path(dataset.removeprefix("file://"))


def no_index(dataset: str) -> IncompleteSourceError:
    """The error of a dataset without index.json: it is not merged, or there is no such folder at all. Stores have no
    folders, so nothing is said of those."""
    if not is_remote(dataset) and not local_path(dataset).is_dir():
        return IncompleteSourceError(
            f"there is no folder {dataset}; a packed dataset is what `omniloom pack` wrote (pack.output)"
        )
    return IncompleteSourceError(f"{dataset.rstrip('/')}/{INDEX_FILE} does not exist; `omniloom pack merge` makes it")


def read_file(dataset: str, name: str) -> bytes | None:
    """The bytes of DATASET/NAME; None when it does not exist. OmniloomError for a store that does not answer."""
    try:
        if not is_remote(dataset):
            return (local_path(dataset) / name).read_bytes()
        url = f"{dataset.rstrip('/')}/{name}"
        return with_retries(lambda: _read_url(url), f"{url} cannot be read")
    except FileNotFoundError:
        return None


def _read_url(url: str) -> bytes:
    with fsspec.open(url, "rb") as file:
        data: bytes = file.read()
        return data


def with_retries(
    call: Callable[[], Result], failed: str, retries: int = RETRIES, stop: threading.Event | None = None
) -> Result:
    """What `call` of an object store gives, tried up to `retries` + 1 times.

    FileNotFoundError and ConfigError are answers and pass at once; an OmniloomError of `call` passes after the last
    try. OmniloomError, beginning with `failed`, for anything else, because every client library has classes of its own.
    stop: no more waiting once it is set.
    """
    wait_s = _FIRST_WAIT_S
    for attempt in range(retries + 1):
        try:
            return call()
        except (FileNotFoundError, ConfigError):
            raise
        except Exception as error:
            reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            if attempt == retries or (stop is not None and stop.is_set()):
                if isinstance(error, OmniloomError):
                    raise
                tries = f"{attempt + 1} tries" if attempt else "1 try"
                raise OmniloomError(f"{failed} ({tries}): {reason}; run the same command again later") from error
            log.warning("%s: %s; trying again in %.1f s", failed, reason, wait_s)
            (stop or threading.Event()).wait(wait_s)
            wait_s *= 2
    raise AssertionError("the last try returns or raises")
