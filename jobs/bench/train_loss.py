"""Part `loss`: our trainer and a plain loop of transformers, from the same weights, on the same batches."""

from __future__ import annotations

import statistics
import time
from pathlib import Path

from jobs.bench.claims import Claim, at_most
from jobs.bench.train_reference import PlainLoop, write_weights
from jobs.bench.train_setup import Bench, read_metrics, train_config, write_model
from train.config import OmniConfig
from train.data.batch import Batch
from train.data.loader import StepBatches
from train.step import StepResult
from train.trainer import VLMTrainer

DEVIATIONS = 2.0
Rows = list[tuple[str, ...]]  # keys of the samples of each micro-batch


class RowsTrainer(VLMTrainer):
    """Notes which samples each step was made of."""

    def __init__(self, config: OmniConfig) -> None:
        super().__init__(config)
        self.rows: list[Rows] = []

    def take_step(self, batches: StepBatches) -> StepResult:
        self.rows.append(_rows(batches.micro_batches))
        return super().take_step(batches)


def measure_loss(bench: Bench, claims: list[Claim]) -> None:
    seeds = (1, 2) if bench.quick else (1, 2, 3)
    steps, last = bench.steps, max(2, bench.steps // 4)
    config_folder = write_model(bench.out / "loss/config", bench.size)
    folders = {seed: write_weights(config_folder, bench.out / f"loss/weights_{seed}", seed) for seed in seeds}
    ours, taken = {}, {}
    for seed, folder in folders.items():
        ours[seed], taken[seed] = _train(bench, f"loss/run_{seed}", folder, steps, claims if seed == 1 else [])
    theirs, rows = _train_reference(bench, folders, steps, claims)
    different = sum(one != rows[n] for found in taken.values() for n, one in enumerate(found))
    claims.append(at_most("loss: steps with other samples than the reference's", different, 0, "steps", bench.place))
    means = {seed: statistics.fmean(losses[-last:]) for seed, losses in theirs.items()}
    centre, deviation = statistics.fmean(means.values()), statistics.stdev(means.values())
    among = f"transformers {centre:.4f}, deviation {deviation:.4f} of {len(seeds)} seeds; {steps} steps, {bench.size}"
    for seed, losses in ours.items():
        mean = statistics.fmean(losses[-last:])
        said = f"{mean:.4f}, transformers from the same weights {means[seed]:.4f}; {among}"
        title = f"loss: mean of the last {last} steps, weights of seed {seed}"
        claims.append(at_most(title, abs(mean - centre) / deviation, DEVIATIONS, "deviations", said))
        claims.append(_apart(seed, losses, theirs[seed]))


def _apart(seed: int, ours: list[float], theirs: list[float]) -> Claim:
    differences = [abs(a - b) / b for a, b in zip(ours, theirs, strict=True)]
    points = sorted({0, 9, 24, 49, 99, len(ours) - 1} & set(range(len(ours))))
    curve = ", ".join(f"{n + 1}: {ours[n]:.4f} / {theirs[n]:.4f}" for n in points)
    said = f"by step, ours / transformers: {curve}; greatest of all steps {max(differences):.2e}"
    return Claim(f"loss: relative difference at step 1, seed {seed}", differences[0], "", "", None, said)


def _train(bench: Bench, name: str, folder: Path, steps: int, claims: list[Claim]) -> tuple[list[float], list[Rows]]:
    trainer = RowsTrainer(train_config(bench, bench.size, name, {"model_path": str(folder)}, steps))
    began = time.monotonic()
    trainer.train()
    chosen = ", ".join(" ".join(line.split()) for line in trainer.ops.describe().splitlines())
    print(f"{name}: {steps} steps in {time.monotonic() - began:.1f} s, {chosen}", flush=True)
    lines = read_metrics(bench.out / name)
    later = [lines[step] for step in sorted(lines)][len(lines) // 4 :]
    step_ms = 1e3 * statistics.median(line["step_s"] for line in later)
    wait_ms = 1e3 * statistics.median(line["data_wait_s"] for line in later)
    said = f"{wait_ms:.1f} ms of it waiting for data, {bench.workers} workers, log_steps 1; {chosen}; {bench.place}"
    claims.append(Claim("loss: a step of the trainer with its loader, median", round(step_ms, 2), "ms", "", None, said))
    return [float(lines[step]["loss"]) for step in range(1, steps + 1)], trainer.rows


def _train_reference(
    bench: Bench, folders: dict[int, Path], steps: int, claims: list[Claim]
) -> tuple[dict[int, list[float]], list[Rows]]:
    """All seeds side by side, so that the data are read once."""
    first = next(iter(folders.values()))
    config = train_config(bench, bench.size, "loss/reference", {"model_path": str(first)}, steps)
    feeder = VLMTrainer(config)
    for build in (feeder.build_distributed, feeder.build_model, feeder.build_assets, feeder.build_dataset):
        build()
    feeder.build_collate()
    feeder.build_loader()
    loops = {seed: PlainLoop(folder, config.train.optimizer, steps, bench.device) for seed, folder in folders.items()}
    losses: dict[int, list[float]] = {seed: [] for seed in folders}
    rows: list[Rows] = []
    began = time.monotonic()
    for n, batches in enumerate(feeder.train_dataloader, 1):
        rows.append(_rows(batches.micro_batches))
        for seed, loop in loops.items():
            losses[seed].append(loop.step(batches.micro_batches).item())
        if n % 20 == 0 or n == steps:
            print(f"loss: transformers, step {n} of {steps}, {time.monotonic() - began:.1f} s", flush=True)
    step_ms = 1e3 * (time.monotonic() - began) / steps / len(folders)
    said = f"grouped_mm, sdpa, one process; {bench.place}"
    claims.append(Claim("loss: a step of the plain loop, mean", round(step_ms, 2), "ms", "", None, said))
    return losses, rows


def _rows(batches: list[Batch]) -> list[tuple[str, ...]]:
    return [tuple(batch.keys) for batch in batches]
