"""Rollouts on disk (`schemas.rollouts`): parts written whole or not at all, the card last, rows found by id.

A job that can be stopped writes part after part with `write_part`, and `commit_rollouts` at the end; `write_rollouts`
does both.
"""

from __future__ import annotations

import hashlib
import io
import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import xxhash

from schemas.dataset import FileEntry
from schemas.errors import IncompleteSourceError, SchemaError
from schemas.rollouts import (
    RESPONSE_COLUMNS,
    ROLLOUT_COLUMNS,
    ROLLOUTS_CARD,
    RolloutAbout,
    RolloutCard,
    RolloutPart,
    RolloutRow,
    part_name,
    row_from_record,
    row_record,
)
from train.data.durable import write_durably

PART_ROWS = 4096
GROUP_ROWS = 16  # rows that are read together when one of them is asked for

_TYPES = {"list<int32>": pa.list_(pa.int32()), "list<float32>": pa.list_(pa.float32())}


@cache
def rollout_schema() -> pa.Schema:
    response = pa.struct([(name, _type(kind)) for name, kind in RESPONSE_COLUMNS.items()])
    return pa.schema(
        [(name, pa.list_(response) if name == "responses" else _type(kind)) for name, kind in ROLLOUT_COLUMNS.items()]
    )


def write_part(folder: Path, number: int, rows: Sequence[RolloutRow]) -> None:
    """part-<number>.parquet. SchemaError for a row that is no rollout, and for an id that is there twice."""
    seen: set[str] = set()
    for row in rows:
        if row.id in seen:
            raise SchemaError(f"rollout {row.id} is twice in {part_name(number)}")
        seen.add(row.id)
    table = pa.Table.from_pylist([row_record(row) for row in rows], schema=rollout_schema())
    buffer = io.BytesIO()
    pq.write_table(table, buffer, row_group_size=GROUP_ROWS, compression="zstd")
    write_durably(folder / part_name(number), buffer.getvalue())


def read_part(path: Path) -> list[RolloutRow]:
    """All rows of one part, checked. SchemaError for a file with other columns or a wrong row."""
    reader = _open(path)
    return [row for group in range(reader.num_row_groups) for row in _read_group(reader, path, group)]


def commit_rollouts(folder: Path, about: RolloutAbout) -> RolloutCard:
    """Reads every part of the folder, and writes the card. SchemaError for wrong rows and for an id that is there
    twice; IncompleteSourceError when the folder has no part, or not all up to its last."""
    paths = sorted(folder.glob("part-*.parquet"))
    for number, path in enumerate(paths):
        if path.name != part_name(number):
            raise IncompleteSourceError(f"{folder}: {part_name(number)} is missing, but {path.name} is there")
    if not paths:
        raise IncompleteSourceError(f"{folder} has no part-00000.parquet")
    seen: dict[str, str] = {}
    parts: dict[str, RolloutPart] = {}
    references: list[bool] = []
    for path in paths:
        rows = read_part(path)
        for row in rows:
            if row.id in seen:
                raise SchemaError(f"rollout {row.id} is in {seen[row.id]} and in {path.name}; an id has one row")
            seen[row.id] = path.name
            references.append(row.responses[0].ref_logprobs is not None)
        parts[path.name] = _describe(path, rows)
    responses = sum(part.responses for part in parts.values())
    card = RolloutCard(
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        about=about,
        rows=len(seen),
        responses=responses,
        response_tokens=sum(part.response_tokens for part in parts.values()),
        mean_reward=sum(part.reward_sum for part in parts.values()) / max(responses, 1),
        references=bool(references) and all(references),
        parts=parts,
    )
    write_durably(folder / ROLLOUTS_CARD, card.to_json(indent=1).encode())
    return card


def write_rollouts(
    folder: Path, rows: Iterable[RolloutRow], about: RolloutAbout, part_rows: int = PART_ROWS
) -> RolloutCard:
    """A folder of rollouts, in parts of `part_rows`; SchemaError when it has parts or a card already."""
    if (folder / ROLLOUTS_CARD).exists() or any(folder.glob("part-*.parquet")):
        raise SchemaError(f"{folder} has rollouts already; choose another folder")
    left = iter(rows)
    for number in itertools.count():
        part = list(itertools.islice(left, part_rows))
        if not part and number:
            break
        write_part(folder, number, part)
    return commit_rollouts(folder, about)


@dataclass(frozen=True)
class Place:
    """Where a row is: part, row group of the part, row of the group."""

    part: int
    group: int
    row: int


class Rollouts:
    """The rows of a folder by id. The ids are kept in memory, the rows are read in groups of `GROUP_ROWS`, of which the
    last one stays. Can be pickled: files are opened when they are first read."""

    def __init__(self, folder: Path, card: RolloutCard, places: dict[str, Place]) -> None:
        self.folder, self.card, self._places = folder, card, places
        self._parts = sorted(card.parts)
        self._readers: dict[int, pq.ParquetFile] = {}
        self._last: tuple[int, int] | None = None
        self._group: pa.Table | None = None

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_readers": {}, "_last": None, "_group": None}

    @property
    def fingerprint(self) -> str:
        """Changes with any byte of the parts."""
        digests = [f"{name} {part.file.xxh3_64}" for name, part in sorted(self.card.parts.items())]
        return str(xxhash.xxh3_64_hexdigest("\n".join(digests).encode()))

    def __len__(self) -> int:
        return len(self._places)

    def __contains__(self, sample_id: object) -> bool:
        return sample_id in self._places

    def __iter__(self) -> Iterator[RolloutRow]:
        """Rows in the order of the files."""
        for sample_id in self._places:
            yield self[sample_id]

    def equal_rewards(self) -> int:
        """Rows whose responses all have the same reward, exactly; reads the rewards of all rows."""
        count = 0
        for name in self._parts:
            reader = _open(self.folder / name)
            for group in range(reader.num_row_groups):
                column = reader.read_row_group(group, columns=["responses.list.element.reward"])["responses"]
                count += sum(len({each["reward"] for each in row}) == 1 for row in column.to_pylist())
        return count

    def __getitem__(self, sample_id: str) -> RolloutRow:
        """SchemaError for an id without rollout."""
        place = self._places.get(sample_id)
        if place is None:
            raise SchemaError(f"{self.folder} has no rollout of sample {sample_id}")
        path = self.folder / self._parts[place.part]
        if self._group is None or self._last != (place.part, place.group):
            if place.part not in self._readers:
                self._readers[place.part] = _open(path)
            self._group = self._readers[place.part].read_row_group(place.group)
            self._last = place.part, place.group
        (record,) = self._group.slice(place.row, 1).to_pylist()
        return row_from_record(record, str(path))


def read_card(folder: Path) -> RolloutCard:
    """IncompleteSourceError when there is none: the folder is no rollouts, or the job that makes them did not end."""
    path = folder / ROLLOUTS_CARD
    if not folder.is_dir():
        raise IncompleteSourceError(
            f"there is no folder {folder}; rollouts are what `omniloom rollouts run` wrote (rollouts.out)"
        )
    if not path.is_file():
        raise IncompleteSourceError(
            f"{folder} has no {ROLLOUTS_CARD}, which is written last; let the job that makes the rollouts end"
        )
    return RolloutCard.from_json(path.read_bytes(), str(path))


def read_rollouts(folder: Path) -> Rollouts:
    """IncompleteSourceError without a card or a part; SchemaError for a part of other bytes than the card says. Every
    byte of the parts is read once."""
    card = read_card(folder)
    places: dict[str, Place] = {}
    for part, name in enumerate(sorted(card.parts)):
        path, described = folder / name, card.parts[name]
        if not path.is_file():
            raise IncompleteSourceError(f"{path} is missing; {ROLLOUTS_CARD} lists it")
        if path.stat().st_size != described.file.bytes:
            raise SchemaError(f"{path} has {path.stat().st_size} bytes; {ROLLOUTS_CARD} says {described.file.bytes}")
        if (digest := _digest(path)) != described.file.xxh3_64:
            raise SchemaError(
                f"{path} has other bytes than when the rollouts ended, as {ROLLOUTS_CARD} says: xxh3_64 {digest}, not "
                f"{described.file.xxh3_64}; copy the folder again, or make the rollouts again"
            )
        reader = _open(path)
        for group in range(reader.num_row_groups):
            ids = reader.read_row_group(group, columns=["id"])["id"].to_pylist()
            places |= {sample_id: Place(part, group, row) for row, sample_id in enumerate(ids)}
    if len(places) != card.rows:
        raise SchemaError(f"{folder}: {len(places)} ids in its parts; {ROLLOUTS_CARD} says {card.rows}")
    return Rollouts(folder, card, places)


def _describe(path: Path, rows: Sequence[RolloutRow]) -> RolloutPart:
    return RolloutPart(
        rows=len(rows),
        responses=sum(len(row.responses) for row in rows),
        response_tokens=sum(row.response_tokens for row in rows),
        reward_sum=float(sum(sum(row.rewards) for row in rows)),
        file=FileEntry(bytes=path.stat().st_size, xxh3_64=_digest(path)),
    )


def _digest(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, xxhash.xxh3_64).hexdigest()


def _open(path: Path) -> pq.ParquetFile:
    """SchemaError for a file that is no Parquet or has other columns."""
    try:
        reader = pq.ParquetFile(path)
    except pa.ArrowInvalid as error:
        raise SchemaError(f"{path} is not a Parquet file: {error}") from None
    if not reader.schema_arrow.equals(rollout_schema()):
        found, wanted = _columns(reader.schema_arrow), _columns(rollout_schema())
        raise SchemaError(f"{path} has the columns {found}; rollouts have {wanted}")
    return reader


def _read_group(reader: pq.ParquetFile, path: Path, group: int) -> list[RolloutRow]:
    return [row_from_record(record, str(path)) for record in reader.read_row_group(group).to_pylist()]


def _columns(schema: pa.Schema) -> str:
    return ", ".join(f"{field.name}: {field.type}" for field in schema)


def _type(name: str) -> pa.DataType:
    return _TYPES[name] if name in _TYPES else pa.type_for_alias(name)
