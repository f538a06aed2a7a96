"""`write_partition`: the whole life of one partition, a plain function with plain arguments.

A partition is written below `_tmp/`, read back and checked, fsynced, and renamed into `parts/` with its `_COMMIT`
inside. The same rows give the same bytes, whatever was killed before and in whatever mode its rows ran.
"""

from __future__ import annotations

import socket
import time
from array import array
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import xxhash
from streaming import MDSWriter

from pack.fingerprint import fingerprint
from pack.guard import GIB, CrumbWriter, MemoryWatch, attempt_name, new_crumb, read_crumbs
from pack.isolate import DirectRunner, IsolatedRunner, RowTask, Runner
from pack.manifest_files import ManifestFile, RawRow, current_stamp, read_range
from pack.plan import MIB, Segment
from pack.reader import INDEX_FILE, ShardReader, parse_index
from pack.row import MediaLoader, check_preprocessor_args, default_media
from pack.rows_table import ROWS_FILE, RowsTable
from pack.spool import RowSpool
from pack.storage import COMMIT_FILE, REJECTS_FILE, LocalStorage, explain_io, hash_file, open_storage, remove_tree
from pack.task import PartitionTask, Receipt
from schemas.dataset import FileEntry, PartitionCommit, Reject, totals_of
from schemas.errors import ConfigError, ManifestError, RowError, VerificationError
from schemas.manifest import FileSource, parse_row
from schemas.registry import load_preprocessors
from schemas.sample import COLUMNS, SampleMeta, parse_meta

PART_FOLDER = "part"  # below an attempt's folder: what is renamed


@dataclass
class _Progress:
    """Running sums of one attempt."""

    metas: list[SampleMeta] = field(default_factory=list)
    rejects: list[Reject] = field(default_factory=list)
    packed: int = 0
    media_s: float = 0.0
    bytes: int = 0


def write_partition(task: PartitionTask, media: MediaLoader | None = None) -> Receipt:
    """Packs one partition and commits it, or returns the receipt of the attempt that was first.

    For worker processes: unless isolated, a row over its time or memory ends the process, and the next attempt is
    isolated.

    media: how media are loaded, None for real files. ManifestError: the rows are not those of the plan; ConfigError:
    this worker's libraries are not those of the plan; what the machine refuses (full disk) passes through.
    """
    began = time.monotonic()
    storage = open_storage(task.output)
    name = task.partition.name
    earlier = list(storage.read_commits([name]))
    if earlier:
        return _receipt(PartitionCommit.from_json(earlier[0].commit), name, began, isolated=False, won=False)
    loader = prepare_worker(task, media)
    suspects = _bury_dead(storage.staging_root, task)
    isolated = task.isolated or suspects is not None
    crumb = new_crumb(task.job, name, task.partition.rows, isolated)
    attempt = storage.new_staging(attempt_name(crumb))
    try:
        with explain_io("cannot write", str(attempt)):
            crumbs = CrumbWriter(attempt, crumb)
            _Attempt(task, attempt, loader, crumbs).write(isolated, media, suspects or frozenset())
            won = storage.publish(attempt / PART_FOLDER, name, attempt.name.rpartition(".")[2])
    finally:
        remove_tree(attempt)
    (commit,) = storage.read_commits([name])
    return _receipt(PartitionCommit.from_json(commit.commit), name, began, isolated, won)


def prepare_worker(task: PartitionTask, media: MediaLoader | None) -> MediaLoader:
    """Loads what rows need, once per process. ConfigError or RegistryError when this worker cannot pack this plan."""
    load_preprocessors(task.config.imports)
    check_preprocessor_args(task.config)
    loader = default_media() if media is None else media
    _check_versions(task, loader)
    return loader


def _receipt(commit: PartitionCommit, name: str, began: float, isolated: bool, won: bool) -> Receipt:
    totals = commit.totals
    return Receipt(
        partition=name,
        rows=totals.rows_in,
        packed=totals.rows_packed,
        rejected=totals.rows_in - totals.rows_packed,
        media_s=totals.video_s or totals.audio_s,
        bytes=totals.media_bytes,
        seconds=round(time.monotonic() - began, 3),
        isolated=isolated,
        won=won,
    )


def _check_versions(task: PartitionTask, loader: MediaLoader) -> None:
    if fingerprint(task.config, dict(loader.versions), task.code) == task.fingerprint:
        return
    here = ", ".join(f"{name} {version}" for name, version in sorted(loader.versions.items()))
    raise ConfigError(
        f"worker on {socket.gethostname()}: its library versions ({here}) are not those the plan was made with, so its "
        "bytes would differ; install the same versions everywhere, or plan again"
    )


def _bury_dead(staging_root: Path, task: PartitionTask) -> frozenset[int] | None:
    """Removes what attempts at this partition left that died, and returns the rows they died at (offsets); None when
    there was no such attempt. An attempt of this same job died, too: a job runs a partition once at a time."""
    suspects: set[int] | None = None
    for folder, crumb, _ in read_crumbs(staging_root):
        if crumb.partition != task.partition.name or not (crumb.owner_is_dead or crumb.job == task.job):
            continue
        suspects = suspects or set()
        if crumb.offset >= 0:
            suspects.add(crumb.offset)
        if crumb.owner_is_dead:
            remove_tree(folder)
    return None if suspects is None else frozenset(suspects)


class _Attempt:
    """One attempt at a partition, below its own folder."""

    def __init__(self, task: PartitionTask, folder: Path, media: MediaLoader, crumbs: CrumbWriter) -> None:
        self.task, self.folder, self.media, self.crumbs = task, folder, media, crumbs
        self.part = folder / PART_FOLDER
        shard = task.config.shard
        self.writer = MDSWriter(
            columns=COLUMNS,
            out=str(self.part),
            compression=None,
            hashes=[shard.hash],
            size_limit=int(shard.size_mb * MIB),
        )
        # what one sample may take so that its shard stays within the limit
        limit = int(shard.size_mb * MIB) - self.writer.extra_bytes_per_shard - self.writer.extra_bytes_per_sample
        self.spool = RowSpool(folder / "row.spool", limit)
        self.sums = _Progress()

    def write(self, isolated: bool, media: MediaLoader | None, suspects: frozenset[int]) -> None:
        """Everything up to the commit file. media: as given by the caller, for child processes."""
        config = self.task.config
        # shards in the making are ours, not the row's
        allowed = config.rows.max_memory_gb * GIB + 3 * config.shard.size_mb * MIB
        if isolated:
            runner: Runner = IsolatedRunner(config, media, self.spool, suspects)
            self._run_rows(runner)
        else:
            with MemoryWatch(allowed):
                self._run_rows(DirectRunner(config, self.media, self.spool))
        self.writer.finish()
        table = self._read_back()
        (self.part / ROWS_FILE).write_bytes(table.to_parquet())
        lines = "".join(reject.to_json() + "\n" for reject in self.sums.rejects)
        (self.part / REJECTS_FILE).write_text(lines, encoding="utf-8")
        self._write_commit(table)

    def _run_rows(self, runner: Runner) -> None:
        try:
            for row in _rows_of(self.task):
                self._run_row(row.task, row.duplicate, runner)
        finally:
            runner.close()
            self.spool.close()

    def _run_row(self, row: RowTask, duplicate: bool, runner: Runner) -> None:
        name, source = row.names()
        sums = self.sums
        self.crumbs.update(
            row=row.location[1],
            offset=row.offset,
            id=name,
            rows_done=sums.packed + len(sums.rejects),
            rejects=len(sums.rejects),
            media_s=round(sums.media_s, 3),
            bytes=sums.bytes,
        )
        if duplicate:
            fault: RowError | None = RowError("duplicate_id", f"a row before it has the id {name!r}, too")
        else:
            fault = runner.run(row)
        if fault is not None:
            sums.rejects.append(_reject(row, name, source or self.task.config.source_name, fault))
            return
        for columns in self.spool.samples():
            meta = parse_meta(columns)
            self.writer.write(columns)
            sums.metas.append(meta)
            sums.media_s += sum(v.duration_s for v in meta.videos) or sum(a.duration_s for a in meta.audios)
            sums.bytes += meta.media_bytes
        sums.packed += 1
        self.spool.close()

    def _read_back(self) -> RowsTable:
        """Reads every sample from the files that were written; SchemaError or VerificationError when one differs."""
        here = LocalStorage(self.part)
        table = RowsTable()
        for shard in parse_index(here.read(INDEX_FILE), "", str(self.part / INDEX_FILE)):
            reader = ShardReader(here, shard)
            for index in range(len(reader)):
                meta = reader.sample(index).meta
                if len(table) >= len(self.sums.metas) or meta != self.sums.metas[len(table)]:
                    raise VerificationError(f"{reader.where}: sample {index} is not what was written")
                table.add(meta, shard.name, index)
        if len(table) != len(self.sums.metas):
            raise VerificationError(
                f"{self.part}: {len(table)} samples can be read, {len(self.sums.metas)} were written"
            )
        return table

    def _write_commit(self, table: RowsTable) -> None:
        files, here = {}, LocalStorage(self.part)
        for path in sorted(self.part.iterdir()):
            files[path.name] = FileEntry(bytes=path.stat().st_size, xxh3_64=hash_file(here, path.name, "xxh3_64"))
        commit = PartitionCommit(
            partition=self.task.partition.number,
            key=self.task.partition.key,
            fingerprint=self.task.fingerprint,
            totals=totals_of(self.sums.metas, self.sums.packed, self.sums.rejects),
            files=files,
            sources=dict(sorted(table.sources.items())),
            histograms=table.histograms(),
            versions=dict(self.media.versions),
        )
        (self.part / COMMIT_FILE).write_text(commit.to_json() + "\n", encoding="utf-8")


@dataclass(frozen=True)
class _PlannedRow:
    task: RowTask
    duplicate: bool


def _rows_of(task: PartitionTask) -> Iterator[_PlannedRow]:
    """The rows to pack, in order. ManifestError, at the latest behind the last, when they are not the planned ones."""
    place = 0  # of the segment's first row in the partition
    for segment, file in zip(task.partition.segments, task.files, strict=True):
        if file.stamp != current_stamp(file):  # the file was written since: look before any work
            deque(_checked(segment, file), maxlen=0)
        duplicates, occurrences = set(segment.duplicates), dict(segment.occurrences)
        only = None if segment.only is None else set(segment.only)
        for offset, row in _checked(segment, file):
            if only is None or offset in only:
                location = (file.path, row.number)
                job = RowTask(place + offset, row.value, file.base, location, occurrences.get(offset, 0))
                yield _PlannedRow(job, offset in duplicates)
        place += segment.rows


def _checked(segment: Segment, file: ManifestFile) -> Iterator[tuple[int, RawRow]]:
    """(offset, row) of a segment; ManifestError at the end unless these were the planned rows."""
    hashes = array("Q")
    for offset, row in enumerate(
        read_range(file, segment.row_start, segment.rows, segment.byte_start, segment.byte_end)
    ):
        hashes.append(row.hash)
        yield offset, row
    if len(hashes) != segment.rows or xxhash.xxh3_64_intdigest(hashes.tobytes()) != segment.content:
        last = segment.row_start + segment.rows - 1
        raise ManifestError(
            f"{file.path} was changed after it was planned: rows {segment.row_start} to {last} are others now; "
            "run `omniloom pack plan` (or `run`) again"
        )


def _writable(text: str) -> str:
    """The text with what UTF-8 cannot hold (half a surrogate pair) written as an escape."""
    return text.encode("utf-8", "backslashreplace").decode()


def _reject(row: RowTask, name: str, source: str, fault: RowError) -> Reject:
    try:
        parsed = parse_row(row.value, base=row.base, location=row.location, occurrence=row.occurrence)
        media = [m.uri for m in (*parsed.videos, *parsed.audios, *parsed.images) if isinstance(m, FileSource)]
    except RowError:
        media = []
    return Reject(
        id=_writable(name),
        source=_writable(source),
        manifest=row.location[0],
        row=row.location[1],
        stage=fault.stage,  # type: ignore[arg-type]  # the record refuses an unknown one
        reason=fault.reason,
        detail=_writable(fault.detail),
        media=[_writable(uri) for uri in media],
        attempts=2 if fault.stage == "isolate" else 1,
    )
