"""What the page needs of a packed dataset on disk: the samples to show and the first rejected rows."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

from pack.plan_file import PLAN_FILE, load_plan
from pack.preview.choose import MOST, Kinds, choose, kinds_of
from pack.preview.facts import MOST_REJECTED
from pack.preview.timeline import spread
from pack.reader import PackedDataset
from pack.rejects import final_rejects, read_plan_commits
from pack.rows_table import ROWS_FILE, read_rows
from pack.storage import Storage
from schemas.dataset import DatasetCard, Reject
from schemas.errors import SchemaError
from schemas.sample import PackedSample

MOST_TABLES = 400  # rows tables that are read however many partitions there are; more only to find every kind
COLUMNS = ["source", "flags", "num_videos", "num_audios", "num_images", "audio_s"]


def load_samples(dataset: PackedDataset, card: DatasetCard, wanted: int) -> list[PackedSample]:
    """The samples that `choose` takes, in the order of the dataset."""
    return [dataset[position] for position in choose(_kinds(dataset, card), len(dataset), wanted)]


def load_rejects(storage: Storage) -> list[Reject]:
    """The first rejected rows; none for a dataset that was copied without its plan."""
    if not storage.exists(PLAN_FILE):
        return []
    plan = load_plan(storage)
    return list(islice(final_rejects(storage, plan, read_plan_commits(storage, plan)), MOST_REJECTED))


def _kinds(dataset: PackedDataset, card: DatasetCard) -> Iterator[tuple[int, Kinds]]:
    """(position, kinds) of samples, from the rows tables of partitions spread over the dataset, and of further ones
    until every flag and source of the card was met."""
    partitions = _partitions(dataset)
    missing = {("flag", name) for name in card.totals.flags} | {
        ("source", name) for name in sorted(card.sources)[:MOST]
    }
    first = spread(len(partitions), MOST_TABLES)
    rest = sorted(set(range(len(partitions))) - set(first))
    for done, number in enumerate([*first, *rest]):
        if done >= len(first) and not missing:
            return
        folder, start, count = partitions[number]
        name = f"{folder}/{ROWS_FILE}"
        rows = read_rows(dataset.storage.read(name), dataset.storage.url(name)).select(COLUMNS).to_pylist()
        if len(rows) != count:
            raise SchemaError(f"{dataset.storage.url(name)} has {len(rows)} rows; the index counts {count} samples")
        for offset, row in enumerate(rows):
            kinds = kinds_of(row)
            missing -= kinds
            yield start + offset, kinds


def _partitions(dataset: PackedDataset) -> list[tuple[str, int, int]]:
    """(folder, position of its first sample, number of samples) of each partition that has samples."""
    found: list[tuple[str, int, int]] = []
    position = 0
    for shard in dataset.shards:
        folder = shard.name.rpartition("/")[0]
        if found and found[-1][0] == folder:
            found[-1] = (folder, found[-1][1], found[-1][2] + shard.samples)
        else:
            found.append((folder, position, shard.samples))
        position += shard.samples
    return found
