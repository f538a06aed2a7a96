"""`omniloom pack verify`: reads everything again and compares it with what was promised.

Every byte below `parts/` is hashed; every sample is decoded from its shard and compared with the rows table, its crc
and its own clock; counts are compared with the plan; the merged index, the card and README.md are built again and
compared.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

import xxhash

from pack.clock import check_sample
from pack.merge import README_FILE, build
from pack.plan import Plan
from pack.reader import CARD_FILE, INDEX_FILE, ShardInfo, ShardReader, parse_index
from pack.readme import readme_text
from pack.rejects import Commit, read_plan_commits, read_rejects
from pack.rows_table import ROWS_FILE, RowsTable, read_rows
from pack.storage import COMMIT_FILE, Storage, hash_file
from schemas.dataset import DatasetCard, FileEntry, rows_record, totals_of
from schemas.errors import IncompleteSourceError, OmniloomError, SchemaError
from schemas.sample import SampleMeta

Advance = Callable[[float], None]


class Progress(Protocol):
    def expect(self, total: float) -> None: ...

    def advance(self, amount: float) -> None: ...


Row = dict[str, Any]


@dataclass
class _Checked:
    """The samples of one partition that are whole."""

    metas: list[SampleMeta] = field(default_factory=list)
    table: RowsTable = field(default_factory=RowsTable)


@dataclass
class Verification:
    """What was read, and every fault found, each one line with file and sample."""

    partitions: int = 0
    samples: int = 0
    bytes: int = 0
    faults: list[str] = field(default_factory=list)


def bytes_to_read(commits: list[Commit]) -> int:
    """For the progress bar."""
    return sum(entry.bytes for commit in commits for entry in commit.record.files.values())


def verify(storage: Storage, plan: Plan, progress: Progress) -> Verification:
    """Reads the whole output. progress: told the bytes to read, then the bytes done since the last call.

    IncompleteSourceError when nothing is merged yet; faults are collected, not raised.
    """
    result = Verification()
    try:
        commits = read_plan_commits(storage, plan)
    except OmniloomError as error:
        result.faults.append(str(error))
        return result
    if not storage.exists(INDEX_FILE):
        raise IncompleteSourceError(f"{storage.location} has no {INDEX_FILE}; run `omniloom pack merge` first")
    progress.expect(bytes_to_read(commits))
    advance = progress.advance
    ids: dict[int, str] = {}  # hash of a sample's id -> folder
    for commit in commits:
        for fault in _partition(storage, plan, commit, ids, result, advance):
            result.faults.append(fault)
        result.partitions += 1
    result.faults += _merged(storage, plan, commits)
    return result


def _partition(
    storage: Storage, plan: Plan, commit: Commit, ids: dict[int, str], result: Verification, advance: Advance
) -> Iterator[str]:
    record = commit.record
    yield from _promises(storage, plan, commit)
    broken = set()
    for name, entry in record.files.items():
        fault = _file(storage, f"{commit.folder}/{name}", entry.bytes, entry.xxh3_64, advance)
        if fault is not None:
            broken.add(name)
            if not name.endswith(".mds"):  # a shard is looked into below, to name the sample
                yield fault
    if INDEX_FILE in broken:
        return
    where = storage.url(f"{commit.folder}/{INDEX_FILE}")
    checked = _Checked()
    try:
        rows = _rows_by_shard(storage, commit) if ROWS_FILE not in broken else None
        for shard in parse_index(storage.read(f"{commit.folder}/{INDEX_FILE}"), commit.folder, where):
            name = _base(shard.name)
            expected = None if rows is None else rows.pop(name, [])
            if name not in broken:
                yield from _index_entry(storage, shard, record.files.get(name))
            yield from _shard(storage, shard, name in broken, expected, checked)
        if rows:
            yield f"{storage.url(commit.folder)}/{ROWS_FILE} has shards that are not in the index: {sorted(rows)}"
        if not broken:
            yield from _sums(storage, commit, checked)
    except (OmniloomError, FileNotFoundError) as error:
        yield str(error)
        return
    result.samples += len(checked.metas)
    result.bytes += bytes_to_read([commit])
    for meta in checked.metas:
        key = xxhash.xxh3_64_intdigest(meta.id.encode())
        if key in ids:
            yield f"{storage.url(commit.folder)}: sample id {meta.id!r} is in {ids[key]}, too"
        ids[key] = commit.folder


def _base(name: str) -> str:
    return name.rpartition("/")[2]


def _promises(storage: Storage, plan: Plan, commit: Commit) -> Iterator[str]:
    """The commit against the plan and against the files that are there."""
    where = storage.url(f"{commit.folder}/{COMMIT_FILE}")
    record, totals = commit.record, commit.record.totals
    if (record.to_json() + "\n").encode() != commit.text:
        yield f"{where} is damaged: it reads well, but its bytes are not those that were written"
    if record.fingerprint != plan.fingerprint:
        yield f"{where}: fingerprint {record.fingerprint} is not that of the plan, {plan.fingerprint}"
    if record.versions != plan.versions:
        yield f"{where}: versions {record.versions} are not those of the plan, {plan.versions}"
    if totals.rows_in != commit.planned.rows:
        yield f"{where}: {totals.rows_in} rows; the plan has {commit.planned.rows}"
    found = {_base(entry.name) for entry in storage.files(commit.folder)} - {COMMIT_FILE}
    if extra := sorted(found - record.files.keys()):
        yield f"{storage.url(commit.folder)} has files that were not written with it: {', '.join(extra)}"


def _file(storage: Storage, name: str, size: int, digest: str, advance: Advance) -> str | None:
    """The fault of a file's size or hash, or None."""
    where = storage.url(name)
    try:
        there = storage.size(name)
    except FileNotFoundError:
        advance(size)
        return f"{where} is missing"
    if there != size:
        advance(size)
        return f"{where} has {there} bytes; {size} were written"
    found = hash_file(storage, name, "xxh3_64", advance)
    return None if found == digest else f"{where} is damaged: its xxh3_64 is {found}, written was {digest}"


def _rows_by_shard(storage: Storage, commit: Commit) -> dict[str, list[Row]]:
    """The rows table of a partition: shard -> its rows, in order."""
    name = f"{commit.folder}/{ROWS_FILE}"
    found: dict[str, list[Row]] = {}
    for row in read_rows(storage.read(name), storage.url(name)).to_pylist():
        found.setdefault(row["shard"], []).append(row)
    return found


def _index_entry(storage: Storage, shard: ShardInfo, entry: FileEntry | None) -> Iterator[str]:
    """The size and hashes that the index promises; xxh3_64 was compared with the file already."""
    where = storage.url(shard.name)
    if entry is None:
        yield f"{where} is in the index, but was not committed"
        return
    if shard.bytes != entry.bytes:
        yield f"{where}: the index says {shard.bytes} bytes, the commit {entry.bytes}"
    for algorithm, digest in shard.hashes.items():
        found = entry.xxh3_64 if algorithm == "xxh3_64" else hash_file(storage, shard.name, algorithm)
        if found != digest:
            yield f"{where}: its {algorithm} is {found}, the index says {digest}"


def _shard(
    storage: Storage, shard: ShardInfo, broken: bool, rows: list[Row] | None, checked: _Checked
) -> Iterator[str]:
    """Every sample of a shard; in a broken one, names what is damaged. rows: of the table, None when that is broken."""
    where = storage.url(shard.name)
    try:
        reader = ShardReader(storage, shard)
    except FileNotFoundError:
        yield f"{where} is missing"
        return
    except SchemaError as error:
        yield f"{error}; the header is damaged" if broken else str(error)
        return
    if rows is not None and len(rows) != len(reader):
        yield f"{where}: {len(reader)} samples, but {len(rows)} rows in {ROWS_FILE}"
        rows = None
    located = False
    for index in range(len(reader)):
        row = rows[index] if rows is not None else None
        try:
            sample = reader.sample(index)
            check_sample(sample)
            if row is not None and not _same_row(row, rows_record(sample.meta, _base(shard.name), index)):
                raise SchemaError(f"{where}: sample {index} differs from its row in {ROWS_FILE}")
        except SchemaError as error:
            located = True
            said = str(error) if str(error).startswith(where) else f"{where}: sample {index}: {error}"
            yield said + (f" (id {row['id']!r}, row {row['row']} of {row['manifest']})" if row else "")
            continue
        checked.metas.append(sample.meta)
        checked.table.add(sample.meta, _base(shard.name), index)
    if broken and not located:
        yield f"{where} is damaged outside its samples: in its header of {reader.offsets[0]} bytes or behind its end"


def _same_row(stored: Row, made: Row) -> bool:
    return {**stored, "meta": json.loads(stored["meta"])} == {**made, "meta": json.loads(made["meta"])}


def _sums(storage: Storage, commit: Commit, checked: _Checked) -> Iterator[str]:
    """What the commit counts against what was read."""
    where = storage.url(f"{commit.folder}/{COMMIT_FILE}")
    record = commit.record
    rejects = read_rejects(storage, commit)
    packed = {(meta.provenance.manifest, meta.provenance.row) for meta in checked.metas}
    if both := packed & {(reject.manifest, reject.row) for reject in rejects}:
        yield f"{where}: rows are both packed and rejected: {sorted(both)[:5]}"
    totals = totals_of(checked.metas, len(packed), rejects)
    if totals != record.totals:
        yield f"{where}: its totals are not those of its samples: {record.totals} against {totals}"
    if record.sources != dict(sorted(checked.table.sources.items())) or record.histograms != checked.table.histograms():
        yield f"{where}: its sources or histograms are not those of its samples"


def _merged(storage: Storage, plan: Plan, commits: list[Commit]) -> Iterator[str]:
    """Index, card and README.md against what merging these commits gives."""
    try:
        card = DatasetCard.from_json(storage.read(CARD_FILE), storage.url(CARD_FILE))
        made = build(storage, plan, commits)
    except (OmniloomError, FileNotFoundError) as error:
        yield str(error)
        return
    if len(commits) < len(plan.partitions):
        there = {commit.planned.name for commit in commits}
        lost = next(partition.name for partition in plan.partitions if partition.name not in there)
        yield f"{storage.location}: {len(plan.partitions) - len(commits)} partitions of the plan are missing, as {lost}"
    expected = made.card.model_copy(update={"created": card.created, "name": card.name})
    for name, text in (
        (INDEX_FILE, made.index),
        (CARD_FILE, (expected.to_json(indent=1) + "\n").encode()),
        (README_FILE, readme_text(expected).encode()),
    ):
        if storage.try_read(name) != text:
            yield f"{storage.url(name)} is not what merging gives: damaged, or older than its partitions; merge again"
