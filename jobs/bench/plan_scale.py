"""Planning many manifest rows and merging many partitions: seconds and peak memory.

    python -m jobs.bench.plan_scale [--rows 1000000] [--partitions 100000] [--quick] [--json FILE]

Each measurement runs in a process of its own. Goals: 10 million rows in under 300 s and 4 GB; 100,000 partitions in
under 120 s. Planning is linear in the rows, so fewer rows are scaled up, and the table says so.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from jobs.bench.claims import Claim, at_most, report
from pack.config import PackConfig
from pack.merge import merge
from pack.plan import Partition, Plan, Segment, make_plan
from pack.plan_file import save_plan
from pack.rows_table import HISTOGRAMS, histogram
from pack.storage import LocalStorage
from schemas.dataset import FileEntry, PartitionCommit, Totals
from schemas.sample import COLUMNS

GOAL_ROWS, GOAL_PLAN_S, GOAL_PLAN_GB = 10_000_000, 300.0, 4.0
GOAL_PARTITIONS, GOAL_MERGE_S = 100_000, 120.0
SHARDS_PER_PARTITION = 4
MARK = "0" * 32


def _row(i: int, named: bool) -> dict[str, Any]:
    """A row as they are met: a clip with a duration, a conversation, some 300 bytes."""
    row = {
        "videos": [{"path": f"clips/{i % 977:03d}/clip_{i:09d}.mp4", "duration_s": 4.0 + i % 57}],
        "conversations": [
            {"from": "human", "value": "<video>\nWhat happens in this clip, and what is said?"},
            {"from": "gpt", "value": f"Somebody opens door number {i} and says that it is late."},
        ],
    }
    return {"id": f"clip_{i:09d}", **row} if named else row


def write_jsonl(path: Path, rows: int, named: bool) -> None:
    with open(path, "w", encoding="utf-8") as out:
        for i in range(rows):
            out.write(json.dumps(_row(i, named)) + "\n")


def write_parquet(path: Path, rows: int) -> None:
    schema = pa.Table.from_pylist([_row(0, True)]).schema
    with pq.ParquetWriter(path, schema) as out:
        for low in range(0, rows, 50_000):
            batch = [_row(i, True) for i in range(low, min(rows, low + 50_000))]
            out.write_table(pa.Table.from_pylist(batch, schema=schema))


def plan_once(manifest: str, output: str) -> int:
    """Plans and saves; the number of partitions."""
    config = PackConfig(manifest=manifest, output=output)
    plan, _ = make_plan(config, {"bench": "1"}, MARK)
    save_plan(LocalStorage(Path(output)), plan)
    return len(plan.partitions)


def simulate_partitions(output: str, count: int) -> Plan:
    """Commits of partitions whose shards are not there: merging reads indexes and commits only."""
    partitions = []
    for number in range(count):
        segment = Segment(0, number * 100, 100, number * 30_000, (number + 1) * 30_000, number)
        partitions.append(Partition(number, f"{number:016x}", 5e8, (segment,)))
    config = PackConfig(manifest="clips.jsonl", output=output)
    plan = Plan(MARK, config, {"bench": "1"}, (), 100 * count, tuple(partitions))
    histograms = {name: histogram(name, [1.0] * 100) for name in HISTOGRAMS}
    totals = Totals(rows_in=100, rows_packed=98, samples=98, rejected={"missing_file": 2}, video_s=3000.0, frames=6000)
    digest = FileEntry(bytes=125_000_000, xxh3_64="0" * 16)
    raw = {"bytes": 125_000_000, "hashes": {"xxh3_64": "0" * 16}}
    shard = {"format": "mds", "version": 2, "compression": None, "hashes": ["xxh3_64"], "samples": 25, "zip_data": None}
    shard |= {"column_names": sorted(COLUMNS), "column_encodings": [COLUMNS[n] for n in sorted(COLUMNS)]}
    shard |= {"column_sizes": [None] * len(COLUMNS), "size_limit": 2**27}
    names = [f"shard.{k:05d}.mds" for k in range(SHARDS_PER_PARTITION)]
    index = json.dumps({"shards": [shard | {"raw_data": raw | {"basename": n}} for n in names], "version": 2})
    files = {name: digest for name in [*names, "index.json", "rejects.jsonl", "rows.parquet"]}
    for partition in partitions:
        folder = Path(output, "parts", partition.name)
        folder.mkdir(parents=True)
        commit = PartitionCommit(
            partition=partition.number,
            key=partition.key,
            fingerprint=MARK,
            totals=totals,
            files=files,
            sources={"clips": 98},
            histograms=histograms,
            versions={"bench": "1"},
        )
        (folder / "_COMMIT").write_text(commit.to_json() + "\n")
        (folder / "index.json").write_text(index)
    return plan


def merge_once(plan: Plan, output: str) -> int:
    return merge(LocalStorage(Path(output)), plan).shards


def _child(pipe: Any, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    began = time.perf_counter()
    result = function(*arguments)
    seconds = time.perf_counter() - began
    pipe.send((seconds, peak_bytes(), result))


def peak_bytes() -> int:
    """Peak resident memory of this process (getrusage's is that of the parent, too, after a spawn)."""
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) * 1024


def measured(function: Callable[..., Any], *arguments: Any) -> tuple[float, int, Any]:
    """(seconds, peak resident bytes, result) of a call in a process of its own."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_child, args=(theirs, function, arguments))
    process.start()
    theirs.close()
    answer: tuple[float, int, Any] = ours.recv()
    process.join()
    return answer


def bench_plan(folder: Path, rows: int) -> list[Claim]:
    factor = GOAL_ROWS / rows
    base = measured(plan_rows, str(folder), max(rows // 10, 1000), "jsonl with ids")[1]
    claims = []
    for kind in ("jsonl with ids", "jsonl without ids", "parquet with ids"):
        _, peak, (partitions, seconds) = measured(plan_rows, str(folder), rows, kind)
        per_row = max(peak - base, 0) / (rows - max(rows // 10, 1000))
        gib = (peak + per_row * (GOAL_ROWS - rows)) / 2**30
        where = f"{rows:,} rows, {partitions:,} partitions: {seconds:.1f} s, peak {peak / 2**20:.0f} MiB"
        where += f"; scaled by {factor:g}" if factor != 1 else ""
        claims.append(at_most(f"plan 10 million rows, {kind}", seconds * factor, GOAL_PLAN_S, "s", where))
        claims.append(at_most(f"memory of planning them, {kind}", gib, GOAL_PLAN_GB, "GiB", where))
    return claims


def plan_rows(folder: str, rows: int, kind: str) -> tuple[int, float]:
    """Writes a manifest and plans it; (partitions, seconds of planning)."""
    path = Path(folder, "m.parquet" if kind.startswith("parquet") else "m.jsonl")
    writer = multiprocessing.get_context("spawn").Process(target=_write, args=(path, rows, kind))
    writer.start()
    writer.join()
    began = time.perf_counter()
    partitions = plan_once(str(path), str(Path(folder, f"{kind} {rows}")))
    seconds = time.perf_counter() - began
    path.unlink()
    return partitions, seconds


def _write(path: Path, rows: int, kind: str) -> None:
    if kind.startswith("parquet"):
        write_parquet(path, rows)
    else:
        write_jsonl(path, rows, named=kind == "jsonl with ids")


def bench_merge(folder: Path, partitions: int) -> list[Claim]:
    output = folder / "merge"
    plan = simulate_partitions(str(output), partitions)
    seconds, peak, shards = measured(merge_once, plan, str(output))
    shutil.rmtree(output)
    factor = GOAL_PARTITIONS / partitions
    where = f"{partitions:,} partitions, {shards:,} shards: {seconds:.1f} s, peak {peak / 2**20:.0f} MiB"
    where += f"; scaled by {factor:g}" if factor != 1 else ""
    return [at_most("merge 100,000 partitions", seconds * factor, GOAL_MERGE_S, "s", where)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--partitions", type=int, default=GOAL_PARTITIONS)
    parser.add_argument("--quick", action="store_true", help="small sizes; under 45 s on two cores")
    parser.add_argument("--json", type=Path, default=None, help="also write the claims here")
    asked = parser.parse_args()
    rows, partitions = (200_000, 5_000) if asked.quick else (asked.rows, asked.partitions)
    with tempfile.TemporaryDirectory() as folder:
        claims = bench_plan(Path(folder), rows) + bench_merge(Path(folder), partitions)
    sys.exit(0 if report("Planning and merging at scale", claims, asked.json) else 1)


if __name__ == "__main__":
    main()
