"""The merged index and the dataset card: partition order, atomic, repeatable.

`index.json` lists every shard of every committed partition with its path below the output, so that any reader of MDS
takes the output as one dataset. The card and README.md say what is in it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

import xxhash

from pack.plan import Plan
from pack.reader import CARD_FILE, INDEX_FILE
from pack.readme import readme_text
from pack.rejects import Commit, final_rejects, read_plan_commits
from pack.rows_table import add_histograms
from pack.storage import Storage
from schemas.dataset import DatasetCard, Totals, add_totals
from schemas.errors import IncompleteSourceError, SchemaError
from schemas.sample import COLUMNS, SHARD_VERSION

README_FILE = "README.md"


@dataclass(frozen=True)
class Merged:
    """What merging makes: the bytes of index.json, and the card."""

    index: bytes
    card: DatasetCard


def dataset_fingerprint(plan: Plan, partitions: Iterable[str]) -> str:
    """Equal exactly when the merged datasets hold the same bytes."""
    return xxhash.xxh3_128_hexdigest("\n".join([plan.fingerprint, *partitions]).encode())


def merge(
    storage: Storage, plan: Plan, allow_partial: bool = False, advance: Callable[[int], None] | None = None
) -> DatasetCard:
    """Writes index.json, dataset.json and README.md. IncompleteSourceError when partitions are missing and not
    allowed to.

    advance: told the number of partitions merged since the last call.
    """
    commits = read_plan_commits(storage, plan)
    missing = len(plan.partitions) - len(commits)
    if missing and not allow_partial:
        there = {commit.planned.name for commit in commits}
        first = next(partition.name for partition in plan.partitions if partition.name not in there)
        raise IncompleteSourceError(
            f"{missing} of {len(plan.partitions)} partitions are not committed (the first is {first}); run "
            "`omniloom pack run` to the end, or merge what is there with --allow-partial"
        )
    if not commits:
        raise IncompleteSourceError(f"{storage.location} has no committed partition; there is nothing to merge")
    merged = build(storage, plan, commits, advance)
    storage.write(INDEX_FILE, merged.index)
    storage.write(README_FILE, readme_text(merged.card).encode())
    storage.write(CARD_FILE, (merged.card.to_json(indent=1) + "\n").encode())
    return merged.card


def build(
    storage: Storage, plan: Plan, commits: Sequence[Commit], advance: Callable[[int], None] | None = None
) -> Merged:
    """What merging these commits gives, without writing it."""
    names = [f"{commit.folder}/{INDEX_FILE}" for commit in commits]
    entries: list[str] = []
    size = 0
    for commit, data in zip(commits, storage.read_many(names), strict=True):
        try:
            shards = json.loads(data)["shards"]
            for shard in shards:
                shard["raw_data"]["basename"] = f"{commit.folder}/{shard['raw_data']['basename']}"
                size += shard["raw_data"]["bytes"]
                entries.append(json.dumps(shard, sort_keys=True))
        except (ValueError, KeyError, TypeError) as error:
            raise SchemaError(f"{storage.url(commit.folder)}/{INDEX_FILE} is damaged: {error!r}") from error
        if advance is not None:
            advance(1)
    index = '{"shards": [' + ", ".join(entries) + '], "version": 2}'
    return Merged(index.encode(), _card(storage, plan, commits, len(entries), size))


def _card(storage: Storage, plan: Plan, commits: Sequence[Commit], shards: int, size: int) -> DatasetCard:
    card = DatasetCard(
        shard_version=SHARD_VERSION,
        name=storage.location.rstrip("/").rpartition("/")[2],
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        fingerprint=dataset_fingerprint(plan, (commit.planned.name for commit in commits)),
        totals=total(storage, plan, commits),
        bytes=size,
        shards=shards,
        partitions=len(commits),
        partitions_planned=len(plan.partitions),
        sources=_sum(commit.record.sources for commit in commits),
        histograms=add_histograms(commit.record.histograms for commit in commits),
        versions=plan.versions,
        columns=dict(COLUMNS),
        config=plan.config.model_dump(mode="json"),
    )
    return _keep_date(storage, card)


def _keep_date(storage: Storage, card: DatasetCard) -> DatasetCard:
    """Merging the same again changes nothing, not even the date."""
    data = storage.try_read(CARD_FILE)
    if data is None:
        return card
    try:
        before = DatasetCard.from_json(data)
    except SchemaError:
        return card
    same = card.model_copy(update={"created": before.created})
    return same if same.fingerprint == before.fingerprint else card


def total(storage: Storage, plan: Plan, commits: Sequence[Commit]) -> Totals:
    """Totals over rows: a retried row counts once, with its last outcome."""
    if not any(commit.planned.generation for commit in commits):
        return add_totals(commit.record.totals for commit in commits)
    whole = add_totals(commit.record.totals for commit in commits).model_dump()
    whole["rows_in"] = sum(commit.record.totals.rows_in for commit in commits if not commit.planned.generation)
    rejected: dict[str, int] = {}
    for reject in final_rejects(storage, plan, commits):
        rejected[reject.reason] = rejected.get(reject.reason, 0) + 1
    return Totals.model_validate(whole | {"rejected": dict(sorted(rejected.items()))})


def _sum(parts: Iterable[dict[str, int]]) -> dict[str, int]:
    sums: dict[str, int] = {}
    for part in parts:
        for name, count in part.items():
            sums[name] = sums.get(name, 0) + count
    return dict(sorted(sums.items()))
