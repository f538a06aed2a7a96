"""Where a job stands: what is committed and what its workers have done so far. Each row of the manifest counts once."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict

from pack.executors import Outcome
from pack.guard import read_crumbs
from pack.plan import Plan
from pack.rejects import Commit, read_plan_commits
from pack.report import Counts
from pack.storage import Storage


def committed_counts(commits: Iterable[Commit]) -> dict[str, Counts]:
    """Name of a partition -> what it holds."""
    found = {}
    for commit in commits:
        totals = commit.record.totals
        rejected, media_s = sum(totals.rejected.values()), totals.video_s or totals.audio_s
        found[commit.planned.name] = Counts(totals.rows_in, rejected, media_s, totals.media_bytes)
    return found


def standing(plan: Plan, finished: Mapping[str, Counts], running: Iterable[Counts]) -> Counts:
    """Of rows of the manifest. A row that is to be tried again was counted as rejected by the partition that it is
    from: it is neither done nor rejected until its retry has come to it."""
    again = sum(partition.rows for partition in plan.partitions if partition.generation)
    return Counts(-again, -again).plus([*finished.values(), *running])


class Standing:
    """Of one run of a job, as its outcomes come in and by the breadcrumbs of its workers. before: when it began;
    at_work: whether a worker has begun with a row."""

    def __init__(self, storage: Storage, plan: Plan, job: str) -> None:
        self._storage, self._plan, self._job = storage, plan, job
        self._finished = committed_counts(read_plan_commits(storage, plan))
        self.at_work = False
        self.before = self.now()

    def now(self) -> Counts:
        finished = dict(self._finished)
        running = [
            Counts(crumb.rows_done, crumb.rejects, crumb.media_s, crumb.bytes)
            for _, crumb, _ in read_crumbs(self._storage.staging_root)
            if crumb.job == self._job and crumb.partition not in finished and not crumb.owner_is_dead
        ]
        self.at_work = self.at_work or bool(running)
        return standing(self._plan, finished, running)

    def take(self, outcome: Outcome) -> None:
        self.at_work = True
        fields = asdict(outcome)
        if "rows" in fields:
            counts = Counts(fields["rows"], fields["rejected"], fields["media_s"], fields["bytes"])
            self._finished[outcome.partition] = counts
