"""A dump of log-probabilities on disk: one Parquet file for each data-parallel rank, and a card that is written last.

DIR/logprobs-dp00000.parquet   a line for each token; the lines of a row group by (id, index)
DIR/features-dp00000-sp00000-00000.safetensors   what the towers made, where asked for (`train.logprob_features`)
DIR/dump.json                  what was run, and which files belong to it; without it the dump is not whole
"""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from convert.output import write_atomic
from schemas.errors import ConfigError, IncompleteSourceError, SchemaError, UnsafeInputError
from schemas.wording import short
from train.data.collate import MODALITIES

DUMP_VERSION = 1
CARD = "dump.json"
SCHEMA = pa.schema(
    [
        ("id", pa.string()),
        ("source", pa.string()),
        ("index", pa.int32()),
        ("token", pa.int32()),
        ("logprob", pa.float32()),
        ("modality", pa.string()),
        ("media", pa.string()),
    ]
)
GROUP_TOKENS = 1 << 19  # of a row group, at least


@dataclass(frozen=True)
class SampleLogprobs:
    """Of one sample. media: what it has, `text` or kinds joined by `+`; index: int32 [n], place of each token in the
    sample; token: int32 [n]; logprob: float32 [n], natural logarithm of its probability given all before it; modality:
    int8 [n], numbers in MODALITIES."""

    id: str
    source: str
    media: str
    index: np.ndarray
    token: np.ndarray
    logprob: np.ndarray
    modality: np.ndarray


@dataclass(frozen=True)
class DumpFile:
    """One file of a dump, as its card lists it."""

    name: str
    samples: int
    tokens: int


@dataclass
class DumpCard:
    """What a dump is of. model: paths, family, weights; sources: name -> path, fingerprint, rows, chosen, left out;
    degrees: of parallelism; dtype: that was computed in; operations: operation -> implementation; backend: native or
    transformers; tokens: labelled, text or all; files: by rank; dead: rows that could not be read; versions: of
    libraries."""

    model: dict[str, Any]
    sources: dict[str, dict[str, Any]]
    degrees: dict[str, int]
    dtype: str
    operations: dict[str, str | None]
    backend: str
    tokens: str
    samples: int
    token_count: int
    dead: int
    versions: dict[str, str]
    files: list[DumpFile] = field(default_factory=list)
    features: list[str] = field(default_factory=list)
    version: int = DUMP_VERSION


class DumpWriter:
    """Writes the file of one rank beside its name; `finish` renames it. A rank without a token leaves no file."""

    def __init__(self, folder: Path, dp_rank: int) -> None:
        self.path = folder / f"logprobs-dp{dp_rank:05d}.parquet"
        self.samples = self.tokens = 0
        self._beside = folder / f".{self.path.name}.{uuid.uuid4().hex[:8]}"
        self._writer: pq.ParquetWriter | None = None
        self._waiting: list[SampleLogprobs] = []
        self._waiting_tokens = 0

    def add(self, sample: SampleLogprobs) -> None:
        """Takes a sample; lines are written some hundred thousand at a time."""
        self._waiting.append(sample)
        self._waiting_tokens += len(sample.index)
        if self._waiting_tokens >= GROUP_TOKENS:
            self._write()

    def finish(self) -> DumpFile | None:
        """Of the file, which now has its name."""
        self._write()
        if self._writer is None:
            return None
        self._writer.close()
        self._writer = None
        with open(self._beside, "rb") as written:
            os.fsync(written.fileno())
        os.replace(self._beside, self.path)
        return DumpFile(self.path.name, self.samples, self.tokens)

    def discard(self) -> None:
        """Removes what was written and not finished."""
        if self._writer is not None:
            self._writer.close()
        self._beside.unlink(missing_ok=True)

    def _write(self) -> None:
        group = sorted((sample for sample in self._waiting if len(sample.index)), key=lambda sample: sample.id)
        self.samples += len(self._waiting)
        self._waiting, self._waiting_tokens = [], 0
        if not group:
            return
        counts = [len(sample.index) for sample in group]
        self.tokens += sum(counts)
        if self._writer is None:
            self._writer = pq.ParquetWriter(self._beside, SCHEMA, compression="zstd")
        self._writer.write_table(_table(group, counts), row_group_size=sum(counts))


def _table(group: list[SampleLogprobs], counts: list[int]) -> pa.Table:
    def repeated(values: list[str]) -> pa.Array:
        codes = pa.array(np.repeat(np.arange(len(values), dtype=np.int32), counts))
        return pa.DictionaryArray.from_arrays(codes, pa.array(values, pa.string())).dictionary_decode()

    kinds = np.concatenate([sample.modality for sample in group])
    columns = [
        repeated([sample.id for sample in group]),
        repeated([sample.source for sample in group]),
        *(
            pa.array(np.concatenate([getattr(sample, name) for sample in group]), SCHEMA.field(name).type)
            for name in ("index", "token", "logprob")
        ),
        pa.DictionaryArray.from_arrays(pa.array(kinds), pa.array(MODALITIES)).dictionary_decode(),
        repeated([sample.media for sample in group]),
    ]
    return pa.table(columns, schema=SCHEMA)


@contextmanager
def dump_writer(folder: Path, dp_rank: int) -> Iterator[DumpWriter]:
    """A writer whose unfinished file does not stay."""
    writer = DumpWriter(folder, dp_rank)
    try:
        yield writer
    finally:
        writer.discard()


def begin_dump(folder: Path) -> None:
    """Makes the folder and removes what a killed run left. ConfigError: a whole dump, or other files, are there."""
    if (folder / CARD).exists():
        raise ConfigError(f"{folder}: holds a whole dump already; give --out another folder, or remove it")
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"{folder}: is no folder; --out names the folder of the dump")
    folder.mkdir(parents=True, exist_ok=True)
    for pattern in ("logprobs-dp*.parquet", ".logprobs-dp*", "features-dp*.safetensors", ".features-dp*"):
        for path in folder.glob(pattern):
            path.unlink()


def finish_dump(folder: Path, card: DumpCard) -> None:
    """Writes the card. IncompleteSourceError: a file of another rank is not to be seen from here."""
    names = [*(file.name for file in card.files), *card.features]
    if missing := [name for name in names if not (folder / name).is_file()]:
        raise IncompleteSourceError(
            f"{folder}: {missing[0]} is not visible here; --out must be a folder that all nodes share"
        )
    write_atomic(folder / CARD, (json.dumps(asdict(card), indent=1) + "\n").encode())


def read_card(folder: Path) -> Mapping[str, Any]:
    """IncompleteSourceError: no card, or a file is gone; SchemaError: damaged, or of another version;
    UnsafeInputError: it names files outside of the folder."""
    try:
        card = json.loads((folder / CARD).read_bytes())
    except FileNotFoundError as error:
        raise IncompleteSourceError(f"{folder}: has no {CARD}; the dump was not finished, make it again") from error
    except (ValueError, RecursionError) as error:
        raise SchemaError(f"{folder / CARD}: is no JSON: {error}") from error
    if not isinstance(card, dict) or card.get("version") != DUMP_VERSION:
        found = card.get("version") if isinstance(card, dict) else card
        raise SchemaError(f"{folder / CARD}: version {found!r}; this omniloom reads {DUMP_VERSION}")
    if missing := [name for name in _names(card, folder / CARD) if not (folder / name).is_file()]:
        raise IncompleteSourceError(f"{folder}: {missing[0]} is gone, which {CARD} lists")
    return card


def _names(card: Mapping[str, Any], where: Path) -> list[str]:
    """Of all files of a dump."""
    files, features = card.get("files"), card.get("features")
    if not isinstance(files, list) or not isinstance(features, list):
        raise SchemaError(f"{where}: files and features are lists, not {short(files)} and {short(features)}")
    names = [*(file.get("name") if isinstance(file, dict) else file for file in files), *features]
    for name in names:
        if not isinstance(name, str) or not name:
            raise SchemaError(f"{where}: lists {short(name)}; a file has a name, which is text")
        if name in (".", "..") or any(mark in name for mark in "/\\\0"):
            raise UnsafeInputError(f"{where}: lists {short(name)}; the files of a dump lie beside {CARD}")
    return names
