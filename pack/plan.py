"""The plan: which rows form which partition, frozen by hashes so that the manifest need not be copied.

A partition is a run of rows of one manifest file, cut greedily by estimated cost, whatever the number of workers. Its
key is a hash of the configuration's fingerprint and of its rows, and a commit counts for exactly that key. Planning
again keeps, file by file, the leading partitions whose rows are unchanged and cuts only the rest, so a manifest that
grew repacks nothing. Retry partitions hold only rows that were rejected before.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import xxhash

from pack.config import PackConfig
from pack.cost import CostModel
from pack.manifest_files import ManifestFile, find_manifests
from pack.scan import FileScan, repeats, scan
from schemas.errors import ManifestError

PLAN_VERSION = 1
PLAN_FILE = "plan/plan.json"
MAX_PARTITION_ROWS = 10_000  # rows without media are cheap in bytes, but not in time
MIB = 2**20


@dataclass(frozen=True, slots=True)
class Segment:
    """A run of rows of one file. duplicates: offsets of the rows that repeat an earlier id; occurrences: (offset,
    number) of the rows that equal `number` earlier rows; only: offsets of the rows to pack (None = all)."""

    file: int
    row_start: int
    rows: int
    byte_start: int
    byte_end: int
    content: int
    duplicates: tuple[int, ...] = ()
    occurrences: tuple[tuple[int, int], ...] = ()
    only: tuple[int, ...] | None = None

    @property
    def wanted(self) -> int:
        return self.rows if self.only is None else len(self.only)


@dataclass(frozen=True, slots=True)
class Partition:
    """The unit of work, retry and commit. cost: estimated bytes; generation: 0, or the how-manieth retry it belongs
    to."""

    number: int
    key: str
    cost: float
    segments: tuple[Segment, ...]
    generation: int = 0

    @property
    def name(self) -> str:
        return f"{self.number:06d}-{self.key}"

    @property
    def rows(self) -> int:
        return sum(segment.wanted for segment in self.segments)


@dataclass(frozen=True)
class Plan:
    """A frozen manifest. rows: rows of the manifest (a retried row counts once); codes: of the preprocessor, the first
    is part of the fingerprint, the others packed retried rows."""

    fingerprint: str
    config: PackConfig
    versions: dict[str, str]
    files: tuple[ManifestFile, ...]
    rows: int
    partitions: tuple[Partition, ...] = field(repr=False)
    codes: tuple[str, ...] = ("",)

    def fits(self, files: Sequence[ManifestFile], fingerprint: str) -> bool:
        """True when planning these files again would give this plan."""
        return self.fingerprint == fingerprint and self.files == tuple(files)


@dataclass(frozen=True)
class PlanChange:
    """What planning did with the plan before it: numbers of partitions."""

    kept: int
    new: int
    dropped: int


Watch = Callable[[int, int], None]


def _ignore(_bytes: int, _rows: int) -> None:
    return


def make_plan(
    config: PackConfig,
    versions: dict[str, str],
    mark: str,
    old: Plan | None = None,
    files: list[ManifestFile] | None = None,
    watch: Watch = _ignore,
    codes: tuple[str, ...] = ("",),
) -> tuple[Plan, PlanChange]:
    """Plans the manifest of `config`. mark: its fingerprint; old: the plan to grow, if there is one; files: the
    manifest's files when they were looked up already; codes: as in the plan.

    ManifestError: no manifest, or one without a row.
    """
    files = find_manifests(config.manifest) if files is None else files
    cost = CostModel(config)
    scans = [scan(file, cost, watch) for file in files]
    if sum(s.rows for s in scans) == 0:
        raise ManifestError(f"pack.manifest: not one row in {', '.join(f.path for f in files) or config.manifest}")
    before = old if old is not None and old.fingerprint == mark else None
    kept, kept_rows = _kept(before, scans)
    pieces = [(p.segments[0], p.cost) for p in kept]
    for index, found in enumerate(scans):
        pieces += _cut(index, found, kept_rows[index], config.partition.target_mb * MIB)
    segments = _with_repeats([segment for segment, _ in pieces], scans)
    base = []
    number = 1 + max((p.number for p in before.partitions), default=-1) if before else 0
    for i, (segment, (_, size)) in enumerate(zip(segments, pieces, strict=True)):
        place = kept[i].number if i < len(kept) else number + i - len(kept)
        base.append(Partition(place, _key(mark, files, (segment,), 0), size, (segment,)))
    retries = _kept_retries(before, base, files, mark)
    plan = Plan(mark, config, versions, tuple(files), sum(s.rows for s in scans), tuple(base + retries), codes)
    return replace(plan, partitions=tuple(sorted(plan.partitions, key=lambda p: p.number))), _change(old, plan)


def _change(old: Plan | None, new: Plan) -> PlanChange:
    names, before = {p.name for p in new.partitions}, {p.name for p in old.partitions} if old else set()
    return PlanChange(len(names & before), len(names - before), len(before - names))


def _kept(old: Plan | None, scans: list[FileScan]) -> tuple[list[Partition], list[int]]:
    """The leading partitions of every file whose rows are unchanged, and how many rows of each file they cover."""
    covered = [0] * len(scans)
    if old is None:
        return [], covered
    index = {found.file.path: i for i, found in enumerate(scans)}
    kept = []
    closed: set[int] = set()
    for partition in old.partitions:
        if partition.generation:
            continue
        segment = partition.segments[0]
        place = index.get(old.files[segment.file].path)
        if place is None or place in closed:
            continue
        moved = replace(segment, file=place, duplicates=(), occurrences=())
        if segment.row_start != covered[place] or not _unchanged(moved, scans[place]):
            closed.add(place)
            continue
        covered[place] += segment.rows
        kept.append(replace(partition, segments=(moved,)))
    return kept, covered


def _unchanged(segment: Segment, found: FileScan) -> bool:
    """True when the segment's rows stand at the same place with the same content. Its last line may have got a line
    break since."""
    end = segment.row_start + segment.rows
    if end > found.rows:
        return False
    now = _segment(segment.file, found, segment.row_start, end)
    return replace(now, byte_end=segment.byte_end) == segment and segment.byte_end <= now.byte_end


def _segment(index: int, found: FileScan, start: int, end: int) -> Segment:
    """Rows [start, end) of a file."""
    content = xxhash.xxh3_64_intdigest(found.content[start:end].tobytes())
    return Segment(index, start, end - start, found.byte_at(start), found.byte_at(end), content)


def _cut(index: int, found: FileScan, start: int, target: float) -> list[tuple[Segment, float]]:
    """(segment, cost) of the rows from `start` on: as many rows as fit `target` bytes, at least one."""
    total = np.cumsum(found.cost, dtype=np.float64)
    pieces = []
    while start < found.rows:
        before = total[start - 1] if start else 0.0
        end = int(np.searchsorted(total, before + target, side="right"))
        end = min(max(end, start + 1), start + MAX_PARTITION_ROWS, found.rows)
        segment = _segment(index, found, start, end)
        pieces.append((segment, float(total[end - 1] - before)))
        start = end
    return pieces


def _with_repeats(segments: list[Segment], scans: list[FileScan]) -> list[Segment]:
    """The segments, in plan order, with the rows that repeat an id or equal an earlier row."""

    def gather(name: str) -> np.ndarray:
        return np.concatenate([getattr(scans[s.file], name)[s.row_start : s.row_start + s.rows] for s in segments])

    duplicate, occurrence = repeats(gather("named"), gather("key_high"), gather("key_low"))
    ends = np.cumsum([s.rows for s in segments])
    done = []
    for segment, end in zip(segments, ends, strict=True):
        here = slice(int(end) - segment.rows, int(end))
        if duplicate[here].any() or occurrence[here].any():
            again = np.flatnonzero(occurrence[here])
            numbers = zip(again.tolist(), occurrence[here][again].tolist(), strict=True)
            twice = tuple(np.flatnonzero(duplicate[here]).tolist())
            segment = replace(segment, duplicates=twice, occurrences=tuple(numbers))
        done.append(segment)
    return done


def _key(mark: str, files: Sequence[ManifestFile], segments: Iterable[Segment], generation: int) -> str:
    rows = [(files[s.file].path, s.row_start, s.rows, s.content, s.duplicates, s.occurrences, s.only) for s in segments]
    content = [mark, generation, rows]
    return xxhash.xxh3_64_hexdigest(json.dumps(content).encode())


def _kept_retries(old: Plan | None, base: list[Partition], files: list[ManifestFile], mark: str) -> list[Partition]:
    """Retry partitions of the old plan all of whose rows are still those of a base partition."""
    if old is None:
        return []
    index = {file.path: i for i, file in enumerate(files)}
    there = {p.segments[0] for p in base}
    kept = []
    for partition in old.partitions:
        if not partition.generation:
            continue
        places = [index.get(old.files[s.file].path) for s in partition.segments]
        moved = tuple(replace(s, file=-1 if i is None else i) for s, i in zip(partition.segments, places, strict=True))
        if all(replace(s, only=None) in there for s in moved):
            key = _key(mark, files, moved, partition.generation)
            kept.append(replace(partition, segments=moved, key=key))
    return kept


def with_retries(plan: Plan, rejected: dict[int, list[int]]) -> Plan:
    """The plan with further partitions that pack rejected rows again. rejected: number of a base partition -> offsets
    of its rows."""
    base = {p.number: p for p in plan.partitions if not p.generation}
    generation = 1 + max(p.generation for p in plan.partitions)
    number = 1 + max(p.number for p in plan.partitions)
    target = plan.config.partition.target_mb * MIB
    added: list[Partition] = []
    segments: list[Segment] = []
    size = 0.0
    for place in sorted(rejected):
        source = base[place]
        segments.append(replace(source.segments[0], only=tuple(sorted(rejected[place]))))
        size += source.cost * len(rejected[place]) / source.rows
        if size >= target or sum(s.wanted for s in segments) >= MAX_PARTITION_ROWS or place == max(rejected):
            key = _key(plan.fingerprint, plan.files, segments, generation)
            added.append(Partition(number + len(added), key, size, tuple(segments), generation))
            segments, size = [], 0.0
    return replace(plan, partitions=plan.partitions + tuple(added))
