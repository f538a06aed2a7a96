"""The rejected rows of an output, after retries: a row that a retry packed is no longer one."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from pack.plan import Partition, Plan
from pack.storage import REJECTS_FILE, Committed, Storage
from schemas.dataset import PartitionCommit, Reject
from schemas.errors import FILTER_REASONS, SchemaError

Place = tuple[str, int]  # manifest file, row number


@dataclass(frozen=True)
class Commit:
    """A committed partition of the plan. folder: of its files, relative to the output; text: of the commit file."""

    planned: Partition
    folder: str
    record: PartitionCommit
    text: bytes


def read_plan_commits(storage: Storage, plan: Plan) -> list[Commit]:
    """The commits of the plan's partitions, in plan order; those that are missing are left out."""
    planned = {partition.name: partition for partition in plan.partitions}
    return [_parsed(storage, planned[found.partition], found) for found in storage.read_commits(planned)]


def _parsed(storage: Storage, planned: Partition, found: Committed) -> Commit:
    where = storage.url(f"{found.folder}/_COMMIT")
    record = PartitionCommit.from_json(found.commit, where)
    if (record.partition, record.key) != (planned.number, planned.key):
        raise SchemaError(f"{where} is of partition {record.partition:06d}-{record.key}; this is {planned.name}")
    return Commit(planned, found.folder, record, found.commit)


def read_rejects(storage: Storage, commit: Commit) -> list[Reject]:
    """The rows that one partition rejected. SchemaError when the file does not hold as many as the commit says."""
    expected = sum(commit.record.totals.rejected.values())
    if not expected:
        return []
    name = f"{commit.folder}/{REJECTS_FILE}"
    where = storage.url(name)
    try:
        lines = storage.read(name).decode().splitlines()
    except (UnicodeDecodeError, FileNotFoundError) as error:
        raise SchemaError(f"{where} cannot be read: {error}") from error
    if len(lines) != expected:
        raise SchemaError(f"{where} has {len(lines)} lines; the commit counts {expected} rejected rows")
    return [Reject.from_json(line, f"{where}:{i + 1}") for i, line in enumerate(lines)]


def final_rejects(storage: Storage, plan: Plan, commits: Sequence[Commit]) -> Iterator[Reject]:
    """Every row that is rejected now, in manifest order of the first try; `attempts` counts the retries, too."""
    tries: dict[Place, int] = {}  # of the rows that were tried again
    last: dict[Place, Reject] = {}  # how the latest retry rejected them
    for commit in sorted((c for c in commits if c.planned.generation), key=lambda c: c.planned.generation):
        for segment in commit.planned.segments:
            path = plan.files[segment.file].path
            for offset in segment.only or ():
                place = (path, segment.row_start + offset)
                tries.setdefault(place, 0)
                last.pop(place, None)
        for reject in read_rejects(storage, commit):
            place = (reject.manifest, reject.row)
            tries[place] += reject.attempts
            last[place] = reject
    for commit in commits:
        if commit.planned.generation:
            continue
        for reject in read_rejects(storage, commit):
            place = (reject.manifest, reject.row)
            if place not in tries:
                yield reject
            elif place in last:
                yield last[place].model_copy(update={"attempts": reject.attempts + tries[place]})


def rejected_offsets(
    storage: Storage, plan: Plan, commits: Sequence[Commit], reasons: Sequence[str] = ()
) -> dict[int, list[int]]:
    """Number of a base partition -> offsets of its rows that are rejected now and may succeed: another reason than
    `duplicate_id`, which the plan itself decides, and than a filter, unless `reasons` name it."""
    base: dict[str, list[tuple[int, int]]] = {}  # path -> (first row, number), rising
    for partition in plan.partitions:
        if not partition.generation:
            segment = partition.segments[0]
            base.setdefault(plan.files[segment.file].path, []).append((segment.row_start, partition.number))
    for starts in base.values():
        starts.sort()
    found: dict[int, list[int]] = {}
    for reject in final_rejects(storage, plan, commits):
        wanted = reject.reason in reasons if reasons else reject.reason not in FILTER_REASONS
        if reject.reason == "duplicate_id" or not wanted:
            continue
        starts = base[reject.manifest]
        low, number = starts[bisect_right(starts, reject.row, key=lambda start: start[0]) - 1]
        found.setdefault(number, []).append(reject.row - low)
    return found
