"""A packing job from start to end: plan, run what is not committed, reconcile, merge, verify, preview. Resumes by
itself."""

from __future__ import annotations

import json
import os
import socket
import sys
import tempfile
import uuid
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from pack.config import PackConfig
from pack.executors import Failure, WorkerDied, run_tasks
from pack.fingerprint import fingerprint, preprocessor_code
from pack.guard import Crumb, read_crumbs
from pack.manifest_files import find_manifests
from pack.media.versions import VERSIONS
from pack.merge import dataset_fingerprint, merge
from pack.plan import Partition, Plan, PlanChange, make_plan, with_retries
from pack.plan_file import PLAN_FILE, load_plan, save_plan
from pack.reader import CARD_FILE, INDEX_FILE
from pack.rejects import read_plan_commits, rejected_offsets
from pack.report import Events, bad_ratio, bad_rows, bar, job_progress
from pack.row import MediaLoader, check_preprocessor_args
from pack.signals import Stoppable
from pack.standing import Standing
from pack.storage import Storage, open_storage, remove_tree
from pack.task import PartitionTask
from pack.verify import Verification, verify
from schemas.dataset import DatasetCard
from schemas.errors import ConfigError, DataThresholdError, IncompleteSourceError, OmniloomError, VerificationError
from schemas.registry import load_preprocessors

ROUNDS = 3
PREVIEW_FILE = "preview.html"
FINISHED_FILE = "plan/finished.json"
OWN_NAMES = {"plan", "parts", "commits", "_tmp", "events.jsonl", INDEX_FILE, CARD_FILE, "README.md", PREVIEW_FILE}


@dataclass(frozen=True)
class Done:
    """How a job ended. nothing_to_do: it had ended like this before."""

    card: DatasetCard
    nothing_to_do: bool = False


def plan_job(config: PackConfig, media: MediaLoader | None = None) -> tuple[Plan, PlanChange | None]:
    """The plan of a job: the one that is there when nothing changed (then no PlanChange), else a new or grown one,
    saved.

    ConfigError, ManifestError, RegistryError: nothing is written then.
    """
    versions = dict(VERSIONS if media is None else media.versions)
    _find_modules_here()
    load_preprocessors(config.imports)
    check_preprocessor_args(config)
    files = find_manifests(config.manifest)
    storage = open_storage(config.output)
    storage.check_writable()
    old = load_plan(storage) if storage.exists(PLAN_FILE) else None
    if old is None:
        _refuse_foreign(storage)
    code = preprocessor_code(config.source_name)
    codes = old.codes if old is not None and code in old.codes else (code,)
    mark = fingerprint(config, versions, codes[0])
    if old is not None and old.fits(files, mark):
        plan = replace(old, config=config)
        if plan != old:
            save_plan(storage, plan)
        return plan, None
    with bar("planning", sum(file.size for file in files)) as told:
        plan, change = make_plan(config, versions, mark, old, files, lambda size, _: told.advance(size), codes)
    save_plan(storage, plan)
    Events(storage).add("planned", rows=plan.rows, partitions=len(plan.partitions), **asdict(change))
    return plan, change


def _find_modules_here() -> None:
    """`pack.imports` may name modules of the current folder, also when a console script started us."""
    here = os.getcwd()
    if here not in sys.path:
        sys.path.append(here)


def _refuse_foreign(storage: Storage) -> None:
    """A folder with other things in it is not ours to write to."""
    root = storage.local_path("")
    names = {entry.name for entry in root.iterdir()} if root is not None and root.is_dir() else set()
    if foreign := sorted(names - (OWN_NAMES - {INDEX_FILE, CARD_FILE, "README.md"})):
        raise ConfigError(
            f"pack.output: {storage.location} is not empty and no output of `omniloom pack` (it has {foreign[0]}); "
            "choose another folder"
        )


def run_job(config: PackConfig, media: MediaLoader | None = None) -> tuple[Done, PlanChange | None]:
    """Plans, packs, merges, verifies and makes the preview; does only what is not done yet.

    media: how media are loaded, None for real files. ResumableError on SIGINT or SIGTERM; DataThresholdError is left to
    `check_threshold`.
    """
    with Stoppable() as stop:
        plan, change = plan_job(config, media)
        return _finish(open_storage(config.output), plan, media, stop), change


def retry_job(config: PackConfig, reasons: Sequence[str] = (), media: MediaLoader | None = None) -> tuple[Done, int]:
    """Packs the rejected rows again, as partitions of their own; how many there were."""
    with Stoppable() as stop:
        storage = open_storage(config.output)
        plan = load_plan(storage)
        _find_modules_here()
        load_preprocessors(config.imports)
        check_preprocessor_args(config)
        versions = dict(VERSIONS if media is None else media.versions)
        if fingerprint(config, versions, plan.codes[0]) != plan.fingerprint:
            raise ConfigError(
                "this configuration or these library versions would pack other bytes than the ones that are there; "
                "`omniloom pack run` makes a new plan with it"
            )
        rejected = rejected_offsets(storage, plan, read_plan_commits(storage, plan), reasons)
        count = sum(map(len, rejected.values()))
        plan = replace(with_retries(plan, rejected) if count else plan, config=config)
        # a preprocessor that was mended for just these rows is the reason to try them again
        plan = replace(plan, codes=tuple(dict.fromkeys([*plan.codes, preprocessor_code(config.source_name)])))
        save_plan(storage, plan)
        Events(storage).add("retrying", rows=count)
        return _finish(storage, plan, media, stop), count


def _finish(storage: Storage, plan: Plan, media: MediaLoader | None, stop: Stoppable) -> Done:
    committed = storage.committed_names()
    todo = [partition for partition in plan.partitions if partition.name not in committed]
    if not todo and (card := _finished(storage, plan)) is not None:
        return Done(card, nothing_to_do=True)
    events = Events(storage)
    try:
        if todo:
            _run(storage, plan, todo, media, stop, events)
        committed = storage.committed_names()
        _remove_attempts(storage, lambda crumb: crumb.partition in committed and crumb.owner_is_dead)
        card = merge_job(storage, plan)
        events.add("merged", samples=card.totals.samples, rejected=sum(card.totals.rejected.values()))
        found = verify_job(storage, plan)
        events.add("verified", samples=found.samples, bytes=found.bytes, faults=len(found.faults))
        check_verified(storage, found)
        if card.totals.samples:
            preview_job(storage, plan.config)
        storage.write(FINISHED_FILE, (json.dumps({"fingerprint": card.fingerprint}) + "\n").encode())
        events.add("finished", rows=card.totals.rows_in)
    except OmniloomError as error:
        with suppress(OmniloomError):  # on a full disk, too, the first error is the one to show
            events.add("stopped", error=type(error).__name__, message=str(error))
            events.flush()
        raise
    events.flush()
    return Done(card)


def _finished(storage: Storage, plan: Plan) -> DatasetCard | None:
    """The card when exactly this plan was merged, verified and shown before."""
    marker, card = storage.try_read(FINISHED_FILE), storage.try_read(CARD_FILE)
    mark = dataset_fingerprint(plan, (partition.name for partition in plan.partitions))
    if (
        marker is None
        or card is None
        or json.loads(marker).get("fingerprint") != mark
        or not storage.exists(INDEX_FILE)
    ):
        return None
    found = DatasetCard.from_json(card, storage.url(CARD_FILE))
    return found if found.fingerprint == mark else None


def _run(
    storage: Storage,
    plan: Plan,
    todo: list[Partition],
    media: MediaLoader | None,
    stop: Stoppable,
    events: Events,
) -> None:
    """Rounds over what is missing. OmniloomError names a partition that is still missing after the last one."""
    job = uuid.uuid4().hex[:12]
    standing = Standing(storage, plan, job)
    me = {"host": socket.gethostname(), "pid": os.getpid()}
    events.add("started", job=job, partitions=len(todo), **asdict(standing.before), **me)
    failures: dict[str, Failure] = {}
    try:
        with job_progress(plan.rows, standing.now, standing.before, lambda: standing.at_work):
            for number in range(ROUNDS):
                tasks = [_task(plan, partition, storage, job, isolated=number > 0) for partition in todo]
                _round(tasks, plan, media, stop, events, standing, failures)
                committed = storage.committed_names()
                todo = [partition for partition in todo if partition.name not in committed]
                if not todo:
                    return
    finally:
        _remove_attempts(storage, lambda crumb: crumb.job == job)
    failure = failures.get(todo[0].name)
    why = failure.message if failure else "its worker ended without a word; the executor's own logs may say why"
    raise OmniloomError(
        f"{len(todo)} of {len(plan.partitions)} partitions could not be packed in {ROUNDS} rounds; "
        f"{todo[0].name}: {why}"
    )


def _remove_attempts(storage: Storage, is_garbage: Callable[[Crumb], bool]) -> None:
    for folder, crumb, _ in read_crumbs(storage.staging_root):
        if is_garbage(crumb):
            remove_tree(folder)


def _task(plan: Plan, partition: Partition, storage: Storage, job: str, isolated: bool) -> PartitionTask:
    files = tuple(plan.files[segment.file] for segment in partition.segments)
    return PartitionTask(
        partition, files, plan.config, plan.fingerprint, storage.location, job, isolated, plan.codes[0]
    )


def _round(
    tasks: list[PartitionTask],
    plan: Plan,
    media: MediaLoader | None,
    stop: Stoppable,
    events: Events,
    standing: Standing,
    failures: dict[str, Failure],
) -> None:
    with closing(run_tasks(tasks, plan.config.executor, media, stop)) as outcomes:
        for outcome in outcomes:
            standing.take(outcome)
            if isinstance(outcome, WorkerDied):
                events.add("worker_died", **asdict(outcome))
            elif isinstance(outcome, Failure):
                events.add("partition_failed", **asdict(outcome))
                failures[outcome.partition] = outcome
                if outcome.fatal:
                    raise outcome.to_error()
            else:
                events.add("partition_done", **asdict(outcome))


def merge_job(storage: Storage, plan: Plan, allow_partial: bool = False) -> DatasetCard:
    with bar("merging", len(plan.partitions), "partitions") as told:
        return merge(storage, plan, allow_partial, told.advance)


def verify_job(storage: Storage, plan: Plan) -> Verification:
    with bar("verifying") as told:
        return verify(storage, plan, told)


def check_verified(storage: Storage, found: Verification) -> None:
    """VerificationError with the first fault and what to do; the job no longer counts as finished then."""
    if found.faults:
        storage.remove(FINISHED_FILE)
        more = f" (and {len(found.faults) - 1} more)" if len(found.faults) > 1 else ""
        mend = "remove the damaged folder below parts/ and run `omniloom pack run` again: it is packed anew"
        raise VerificationError(f"{found.faults[0]}{more}; {mend}")


def preview_job(storage: Storage, config: PackConfig, out: Path | None = None, tokenizer: Path | None = None) -> str:
    """Makes the preview page; where it is. tokenizer: a checkpoint directory, to show the tokens of each sample."""
    from pack.preview.page import write_preview  # noqa: PLC0415  # plots take seconds to import
    from pack.preview.tokens import TokenPainter  # noqa: PLC0415  # with the page

    if storage.try_read(INDEX_FILE) is None:
        raise IncompleteSourceError(f"{storage.location} has no {INDEX_FILE}; run `omniloom pack merge` first")
    painter = TokenPainter.open(tokenizer) if tokenizer is not None else None
    if out is not None:
        write_preview(storage.location, out, config.preview, painter)
        return str(out)
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder, PREVIEW_FILE)
        write_preview(storage.location, page, config.preview, painter)
        storage.write(PREVIEW_FILE, page.read_bytes())
    return storage.url(PREVIEW_FILE)


def check_threshold(card: DatasetCard, config: PackConfig) -> None:
    """DataThresholdError when more rows were rejected than `rows.max_bad_ratio` allows."""
    ratio, limit = bad_ratio(card), config.rows.max_bad_ratio
    if ratio > limit:
        count, rows = bad_rows(card)
        raise DataThresholdError(
            f"{count:,} of {rows:,} rows were rejected ({ratio:.1%}); rows.max_bad_ratio allows "
            f"{limit:.1%}. Everything else is packed; `omniloom pack rejects {config.output}` lists them"
        )
