"""The plan on disk: plan/plan.json, and the table of partitions that it names by hash."""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import xxhash
from pydantic import ValidationError

from pack.config import PackConfig
from pack.manifest_files import ManifestFile
from pack.parquet import read_parquet
from pack.plan import Partition, Plan, Segment
from pack.storage import Storage
from schemas.errors import IncompleteSourceError, UnsupportedError, VerificationError

PLAN_VERSION = 1
PLAN_FILE = "plan/plan.json"


def save_plan(storage: Storage, plan: Plan) -> None:
    """Writes the table of segments, then plan.json, which names it: a reader sees the old plan or the new one."""
    sink = io.BytesIO()
    pq.write_table(_to_table(plan.partitions), sink, compression="zstd")
    data = sink.getvalue()
    digest = xxhash.xxh3_64_hexdigest(data)
    table = f"plan/partitions-{digest}.parquet"
    former = storage.try_read(PLAN_FILE)
    storage.write(table, data)
    head = {
        "version": PLAN_VERSION,
        "fingerprint": plan.fingerprint,
        "rows": plan.rows,
        "partitions": len(plan.partitions),
        "table": {"file": table, "bytes": len(data), "xxh3_64": digest},
        "files": [asdict(file) for file in plan.files],
        "versions": plan.versions,
        "preprocessor_codes": list(plan.codes),
        "config": plan.config.model_dump(mode="json"),
    }
    storage.write(PLAN_FILE, (json.dumps(head, indent=1) + "\n").encode())
    if former is not None and (last := json.loads(former)["table"]["file"]) != table:
        storage.remove(last)


def read_head(storage: Storage) -> dict[str, Any]:
    """plan.json. IncompleteSourceError when there is no plan, UnsupportedError for another version."""
    data = storage.try_read(PLAN_FILE)
    if data is None:
        raise IncompleteSourceError(
            f"{storage.location} has no {PLAN_FILE}: it is no output of `omniloom pack`, or nothing was planned yet"
        )
    try:
        head: dict[str, Any] = json.loads(data)
        version = head["version"]
    except (ValueError, KeyError, TypeError) as error:
        raise VerificationError(f"{storage.url(PLAN_FILE)} is damaged: {error}") from error
    if version != PLAN_VERSION:
        raise UnsupportedError(f"{storage.url(PLAN_FILE)} has version {version}; this omniloom reads {PLAN_VERSION}")
    return head


def load_plan(storage: Storage) -> Plan:
    """The plan of an output. Errors as `read_head`; VerificationError when the table is not the one planned."""
    head = read_head(storage)
    table = head["table"]
    data = storage.try_read(table["file"])
    if data is None:  # another process has just planned again
        head = read_head(storage)
        table = head["table"]
        data = storage.read(table["file"])
    if (len(data), xxhash.xxh3_64_hexdigest(data)) != (table["bytes"], table["xxh3_64"]):
        raise VerificationError(f"{storage.url(table['file'])} is damaged: its size or hash is not that of plan.json")
    try:
        config = PackConfig.model_validate(head["config"])
        files = tuple(ManifestFile(**file) for file in head["files"])
        codes, versions = tuple(head["preprocessor_codes"]), dict(head["versions"])
    except (ValidationError, KeyError, TypeError, ValueError) as error:
        raise VerificationError(f"{storage.url(PLAN_FILE)} is damaged: {error}") from error
    partitions = _from_table(read_parquet(data))
    return Plan(head["fingerprint"], config, versions, files, head["rows"], partitions, codes)


_SCHEMA = pa.schema(
    {
        "number": pa.int64(),
        "key": pa.string(),
        "cost": pa.float64(),
        "generation": pa.int32(),
        "file": pa.int32(),
        "row_start": pa.int64(),
        "rows": pa.int64(),
        "byte_start": pa.int64(),
        "byte_end": pa.int64(),
        "content": pa.uint64(),
        "duplicates": pa.list_(pa.int32()),
        "occurrence_rows": pa.list_(pa.int32()),
        "occurrence_numbers": pa.list_(pa.int64()),
        "only": pa.list_(pa.int32()),
    }
)


def _to_table(partitions: Sequence[Partition]) -> pa.Table:
    columns: dict[str, list[Any]] = {name: [] for name in _SCHEMA.names}
    for partition in partitions:
        for s in partition.segments:
            values = [partition.number, partition.key, partition.cost, partition.generation, s.file, s.row_start]
            values += [s.rows, s.byte_start, s.byte_end, s.content, list(s.duplicates)]
            values += [[row for row, _ in s.occurrences], [number for _, number in s.occurrences]]
            for column, value in zip(columns.values(), [*values, s.only], strict=True):
                column.append(value)
    return pa.table(columns, schema=_SCHEMA)


def _from_table(table: pa.Table) -> tuple[Partition, ...]:
    found: dict[int, Partition] = {}
    columns = [table.column(name).to_pylist() for name in _SCHEMA.names]
    for number, key, cost, generation, file, start, rows, low, high, content, twice, where, times, only in zip(
        *columns, strict=True
    ):
        again = tuple(zip(where, times, strict=True))
        chosen = None if only is None else tuple(only)
        segment = Segment(file, start, rows, low, high, content, tuple(twice), again, chosen)
        before = found.get(number)
        segments = (*before.segments, segment) if before else (segment,)
        found[number] = Partition(number, key, cost, segments, generation)
    return tuple(found.values())
