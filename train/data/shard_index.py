"""The entries of a packed dataset's index.json, one by one, and indexes of some of them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import xxhash

from schemas.errors import SchemaError
from schemas.sample import COLUMNS
from train.data.durable import write_durably
from train.data.packed_files import INDEX_FILE, no_index, read_file

_BLOCK = 16 << 20


class _Hash(Protocol):
    def update(self, data: bytes, /) -> object: ...
    def hexdigest(self) -> str: ...


HASHES: dict[str, Callable[[], _Hash]] = {
    "xxh3_64": xxhash.xxh3_64,
    "sha1": hashlib.sha1,
    "sha256": hashlib.sha256,
}


@dataclass(frozen=True)
class Shard:
    """One shard file. name: relative to the dataset; rows, bytes: in it; digest: of its bytes, under `algorithm`;
    entry: what index.json says of it."""

    name: str
    rows: int
    bytes: int
    algorithm: str
    digest: str
    entry: dict[str, Any]


def read_shards(dataset: str) -> list[Shard]:
    """The shards of a merged dataset in the order of its rows. IncompleteSourceError without an index, SchemaError for
    one that omniloom did not write."""
    where = f"{dataset.rstrip('/')}/{INDEX_FILE}"
    data = read_file(dataset, INDEX_FILE)
    if data is None:
        raise no_index(dataset)
    try:
        return [_shard(entry, where) for entry in json.loads(data)["shards"]]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise SchemaError(f"{where} is no index of MDS shards: {type(error).__name__}: {error}") from error


def _shard(entry: dict[str, Any], where: str) -> Shard:
    raw = entry["raw_data"]
    found = dict(zip(entry["column_names"], entry["column_encodings"], strict=True))
    if entry["format"] != "mds" or found != COLUMNS or entry["compression"] is not None:
        raise SchemaError(f"{where}: shard {raw['basename']} has columns {found}; a sample has {COLUMNS}")
    known = [name for name in HASHES if name in raw["hashes"]]
    if not known:
        raise SchemaError(f"{where}: shard {raw['basename']} has no hash of {', '.join(HASHES)}")
    name = str(raw["basename"])
    if name.startswith("/") or ".." in name.split("/"):
        raise SchemaError(f"{where}: shard {name} lies outside the dataset")
    return Shard(name, int(entry["samples"]), int(raw["bytes"]), known[0], raw["hashes"][known[0]], entry)


def file_digest(path: Path, shard: Shard) -> str:
    """Hex digits of the file's bytes, under the algorithm of the shard."""
    digest = HASHES[shard.algorithm]()
    with open(path, "rb") as file:
        while block := file.read(_BLOCK):
            digest.update(block)
    return digest.hexdigest()


def write_sub_index(folder: Path, shards: Iterable[Shard], locate: Callable[[str], Path]) -> Path:
    """A folder whose index.json lists these shards where they lie; the same shards give the same folder, so that ranks
    and runs share it."""
    entries = []
    for shard in shards:
        raw = shard.entry["raw_data"] | {"basename": str(locate(shard.name).absolute())}
        entries.append(shard.entry | {"raw_data": raw})
    data = json.dumps({"version": 2, "shards": entries}).encode()
    view = folder / xxhash.xxh3_128_hexdigest(data)
    target = view / INDEX_FILE
    if not (target.is_file() and target.read_bytes() == data):
        write_durably(target, data)
    return view
