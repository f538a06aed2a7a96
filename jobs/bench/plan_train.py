"""The training plan: time and memory, how full sequences are, how equal steps are, and what each node downloads.

    python -m jobs.bench.plan_train [--rows 1000000] [--far-rows 100000000] [--quick] [--json FILE]

Lengths are drawn from lengths_histogram.json (a made-up mix of chats, pictures and clips; the file says how it was
made). Each measurement runs in a process of its own. With --far-rows 0, and with --quick, the large simulation is left
out; it takes some 4 GB of memory and some minutes.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from jobs.bench.claims import Claim, at_least, at_most, report
from train.data.lanes import PlanBudget
from train.data.plan import EpochPlan, Planner, rank_lanes, rank_slots
from train.data.rows import RowTable, SourceRows

HISTOGRAM = Path(__file__).with_name("lengths_histogram.json")
ROWS_PER_SHARD = 25  # of about 128 MB, at 5 MB a clip
MAX_SEQ_LEN = 16384
RANKS = 64
NODE_RANKS = 8
GOAL_ROWS, GOAL_S, GOAL_GB = 1_000_000, 60.0, 2.0
GOAL_PACKING, GOAL_IMBALANCE = 97.0, 3.0


def draw_lengths(rows: int, seed: int = 0) -> np.ndarray:
    """int32 [rows] after the histogram."""
    found = json.loads(HISTOGRAM.read_text(encoding="utf-8"))
    edges, counts = np.array(found["edges"]), np.array(found["counts"], float)
    rng = np.random.default_rng(seed)
    lengths = np.empty(rows, np.int32)
    for start in range(0, rows, 1 << 22):  # in parts, so that drawing takes no memory to speak of
        part = lengths[start : start + (1 << 22)]
        bins = rng.choice(len(counts), len(part), p=counts / counts.sum())
        part[:] = edges[bins] + rng.random(len(part)) * (edges[bins + 1] - edges[bins])
    return lengths


def first_fit_decreasing(lengths: np.ndarray, capacity: int) -> int:
    """Bins that the textbook algorithm takes: longest first, each into the first bin that has room for it."""
    leaves = 1 << max(1, (len(lengths) - 1).bit_length())
    room = [capacity] * (2 * leaves)  # a tree over the bins: each node has the most room below it
    used = 0
    for length in np.sort(lengths)[::-1].tolist():
        node = 1
        while node < leaves:
            node *= 2
            if room[node] < length:
                node += 1
        used = max(used, node - leaves + 1)
        left = room[node] - length
        room[node] = left
        while node > 1:
            node //= 2
            most = max(room[2 * node], room[2 * node + 1])
            if room[node] == most:
                break
            room[node] = most
    return used


def make_planner(lengths: np.ndarray, seed: int = 0) -> Planner:
    shards = np.full(-(-len(lengths) // ROWS_PER_SHARD), ROWS_PER_SHARD, np.int64)
    shards[-1] = len(lengths) - ROWS_PER_SHARD * (len(shards) - 1)
    budget = PlanBudget(max_seq_len=MAX_SEQ_LEN, global_batch_size=RANKS, lanes=RANKS, seed=seed)
    return Planner.make(RowTable((SourceRows("mix", lengths, shards),)), budget)


@dataclass(frozen=True)
class Measured:
    """seconds: of making the plan; peak_gb: of the whole process, the lengths included; downloads: shards per node;
    in_use: shards of one lane between their first and last step, at a time, mean and most."""

    seconds: float
    peak_gb: float
    steps: int
    fill: float
    imbalance: float
    worst_step: float
    shards: int
    downloads: list[int]
    in_use: tuple[float, int]
    fitting: int


def measure(rows: int) -> Measured:
    """One epoch, in this process."""
    lengths = draw_lengths(rows)
    began = time.perf_counter()
    planner = make_planner(lengths)
    planner.digest()
    plan = planner.epoch(0)
    seconds = time.perf_counter() - began
    peak = _high_water_gb()
    fits = lengths <= MAX_SEQ_LEN
    if len(plan.rows) != int(fits.sum()):
        raise AssertionError(f"{len(plan.rows)} rows planned of {int(fits.sum())} that fit")
    costs = plan.step_costs()  # one sequence per rank and step: the strictest case
    most, mean = costs.max(1), costs.mean(1)
    return Measured(
        seconds=seconds,
        peak_gb=peak,
        steps=plan.steps,
        fill=float(lengths[fits].sum(dtype=np.int64) / (plan.steps * RANKS * MAX_SEQ_LEN)),
        imbalance=float(most.sum() / mean.sum() - 1),
        worst_step=float(np.quantile(most / np.maximum(mean, 1) - 1, 0.99)),
        shards=planner.table.num_shards,
        downloads=_downloads(planner, plan),
        in_use=_in_use(planner, plan),
        fitting=int(fits.sum()),
    )


def _downloads(planner: Planner, plan: EpochPlan) -> list[int]:
    """Shards that each node of 8 ranks reads in the epoch, by the rows of its own steps; AssertionError when one is not
    of its lanes."""
    found = []
    bounds, slots = plan.bounds, plan.global_batch_size
    for first in range(0, RANKS, NODE_RANKS):
        ranks = range(first, first + NODE_RANKS)
        mine = np.concatenate([rank_slots(plan.lanes, slots, rank, RANKS) for rank in ranks])
        lanes = np.unique(np.concatenate([rank_lanes(plan.lanes, slots, rank, RANKS) for rank in ranks]))
        seen = np.zeros(planner.table.num_shards, bool)
        for step in range(plan.steps):
            start, stop = step * slots + int(mine.min()), step * slots + int(mine.max()) + 1
            seen[plan.rows[bounds[start] : bounds[stop]] // ROWS_PER_SHARD] = True
        owned = np.zeros_like(seen)
        owned[np.concatenate([planner.lanes.shards[lane] for lane in lanes])] = True
        if (seen & ~owned).any():
            raise AssertionError("a node reads shards that are not of its lanes")
        found.append(int(seen.sum()))
    return found


def _in_use(planner: Planner, plan: EpochPlan) -> tuple[float, int]:
    per_lane = plan.global_batch_size // plan.lanes
    sequences = np.arange(len(plan.bounds) - 1)
    mine = sequences[(sequences % plan.global_batch_size) // per_lane == 0]
    counts = plan.bounds[mine + 1] - plan.bounds[mine]
    rows = np.concatenate([plan.rows[plan.bounds[i] : plan.bounds[i + 1]] for i in mine])
    steps = np.repeat(mine // plan.global_batch_size, counts)
    shards = planner.table.place(rows).shard
    order = np.argsort(shards, kind="stable")
    starts = np.flatnonzero(np.r_[True, np.diff(shards[order]) != 0])
    first, last = np.minimum.reduceat(steps[order], starts), np.maximum.reduceat(steps[order], starts)
    change = (
        np.bincount(first, minlength=plan.steps + 1) - np.bincount(last + 1, minlength=plan.steps + 1)[: plan.steps + 1]
    )
    open_at = np.cumsum(change)[: plan.steps]
    return float(open_at.mean()), int(open_at.max())


def _high_water_gb() -> float:
    """Peak resident memory of this process. (ru_maxrss also knows that of the process it was forked from.)"""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) * 1024 / 1e9


def _alone(function: Any, *arguments: Any) -> Any:
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(function, arguments)


def _ffd_bins(rows: int) -> int:
    lengths = draw_lengths(rows)
    return first_fit_decreasing(lengths[lengths <= MAX_SEQ_LEN], MAX_SEQ_LEN)


def near_claims(rows: int) -> list[Claim]:
    """The bounds, on `rows` rows."""
    found: Measured = _alone(measure, rows)
    best = _alone(_ffd_bins, rows)
    scale = GOAL_ROWS / rows
    of = f"{rows:,} rows in {found.shards:,} shards, {RANKS} lanes, max_seq_len {MAX_SEQ_LEN}"
    scaled = of + ("" if scale == 1 else f"; scaled up from {found.seconds:.2f} s")
    packed = 100 * best / (found.steps * RANKS)
    strict = f"{of}; one sequence per rank and step, {found.steps} steps; 99% of the steps under "
    return [
        at_most("planning one epoch, 1,000,000 rows", found.seconds * scale, GOAL_S, "s", scaled),
        at_most("peak memory of planning", found.peak_gb, GOAL_GB, "GB", of),
        at_least(
            "packing / first-fit-decreasing of all rows", packed, GOAL_PACKING, "%", f"{of}; fill {found.fill:.2%}"
        ),
        at_most(
            "cost imbalance over 64 ranks (time lost to the slowest)",
            100 * found.imbalance,
            GOAL_IMBALANCE,
            "%",
            strict + f"{found.worst_step:.1%}",
        ),
        *_node_claims(found, of),
    ]


def _node_claims(found: Measured, of: str) -> list[Claim]:
    share = 100 * max(found.downloads) / found.shards
    nodes = len(found.downloads)
    mean, most = found.in_use
    return [
        at_most(
            f"shards that a node downloads in an epoch, {nodes} nodes of {NODE_RANKS} ranks",
            share,
            100 / nodes * 1.02,
            "% of all",
            f"{of}; {min(found.downloads):,} to {max(found.downloads):,} shards, of its own lanes only",
        ),
        Claim(
            "shards of a lane between first and last use", round(mean, 1), "shards", "", None, f"{of}; at most {most}"
        ),
    ]


def far_claims(rows: int) -> list[Claim]:
    """The same at a size that nobody here has, by simulation."""
    found: Measured = _alone(measure, rows)
    of = f"{rows:,} rows in {found.shards:,} shards, {RANKS} lanes, {found.steps:,} steps"
    return [
        Claim(f"planning one epoch, {rows:,} rows", round(found.seconds, 1), "s", "", None, of),
        Claim("peak memory of planning, lengths included", round(found.peak_gb, 2), "GB", "", None, of),
        Claim("fill of the sequences", round(100 * found.fill, 2), "%", "", None, of),
        at_most("cost imbalance over 64 ranks", 100 * found.imbalance, GOAL_IMBALANCE, "%", of),
        *_node_claims(found, of),
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="smaller sizes, under 45 s on 2 cores")
    parser.add_argument("--json", type=Path, help="write the claims there")
    parser.add_argument("--rows", type=int, default=GOAL_ROWS)
    parser.add_argument("--far-rows", type=int, default=100_000_000)
    arguments = parser.parse_args()
    claims = near_claims(min(arguments.rows, 400_000) if arguments.quick else arguments.rows)
    if arguments.far_rows and not arguments.quick:
        claims += far_claims(arguments.far_rows)
    return 0 if report("training plan", claims, arguments.json) else 1


if __name__ == "__main__":
    sys.exit(main())
