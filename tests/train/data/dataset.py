"""A merged dataset on disk, written with MosaicML's own writer and the rows table of packing."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from streaming import MDSWriter

from pack.rows_table import RowsTable
from schemas.sample import COLUMNS, PackedSample, to_columns


def write_dataset(
    folder: Path, samples: Sequence[PackedSample], per_partition: int = 4, shard_bytes: int = 1 << 20
) -> Path:
    """Shards in parts/<number>/, a rows table per partition, index.json over all."""
    entries: list[dict[str, Any]] = []
    for number, group in enumerate(_groups(samples, per_partition)):
        part = folder / "parts" / f"{number:05d}"
        writer = MDSWriter(columns=COLUMNS, out=str(part), hashes=["xxh3_64"], size_limit=shard_bytes)
        for sample in group:
            writer.write(to_columns(sample))
        writer.finish()
        shards = json.loads((part / "index.json").read_text())["shards"]
        places = [(s["raw_data"]["basename"], i) for s in shards for i in range(s["samples"])]
        table = RowsTable()
        for sample, (shard, index) in zip(group, places, strict=True):
            table.add(sample.meta, shard, index)
        (part / "rows.parquet").write_bytes(table.to_parquet())
        for shard in shards:
            shard["raw_data"]["basename"] = f"parts/{part.name}/{shard['raw_data']['basename']}"
        entries += shards
    (folder / "index.json").write_text(json.dumps({"version": 2, "shards": entries}))
    return folder


def _groups(samples: Sequence[PackedSample], size: int) -> Iterator[list[PackedSample]]:
    rest = iter(samples)
    while group := list(islice(rest, size)):
        yield group
