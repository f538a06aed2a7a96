"""Part `loss`: our trainer and plain loops of transformers, from the same weights, on the same batches."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from jobs.bench.claims import Claim, at_most
from jobs.bench.train_reference import rows_of, write_weights
from jobs.bench.train_setup import Bench, read_losses, train_config, write_model
from schemas.errors import OmniloomError
from schemas.strict import dump_config
from train.config import OmniConfig
from train.data.loader import StepBatches
from train.step import StepResult
from train.trainer import VLMTrainer

DEVIATIONS = 2.0
PATIENCE_S = 400.0
Rows = list[list[list[str]]]  # keys of the samples, by step and micro-batch


class RowsTrainer(VLMTrainer):
    """Notes which samples each step was made of."""

    def __init__(self, config: OmniConfig) -> None:
        super().__init__(config)
        self.rows: Rows = []

    def take_step(self, batches: StepBatches) -> StepResult:
        self.rows.append(rows_of(batches.micro_batches))
        return super().take_step(batches)


class References:
    """The plain loops of all seeds, side by side, each in a process of its own, as each keeps a GPU waiting."""

    def __init__(self, bench: Bench) -> None:
        self.bench, self.folder = bench, bench.out / "loss"
        self.seeds = (1, 2) if bench.quick else (1, 2, 3)
        self._processes: dict[int, subprocess.Popen[bytes]] = {}

    def weights(self, seed: int) -> Path:
        return self.folder / f"weights_{seed}"

    def config(self, seed: int, name: str) -> OmniConfig:
        model = {"model_path": str(self.weights(seed))}
        return train_config(self.bench, self.bench.size, f"loss/{name}", model, self.bench.steps)

    def start(self) -> None:
        """Makes the weights of each seed by transformers' own initialisation."""
        config_folder = write_model(self.folder / "config", self.bench.size)
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)}
        for seed in self.seeds:
            write_weights(config_folder, self.weights(seed), seed)
            file = self.folder / f"seed_{seed}.yaml"
            file.write_text(dump_config(self.config(seed, f"reference_{seed}")))
            command = [sys.executable, "-m", "jobs.bench.train_reference", str(file), str(self._output(seed))]
            self._processes[seed] = subprocess.Popen(command, env=environment)

    def collect(self) -> dict[int, dict[str, Any]]:
        """{"losses": by step, "rows"} of each seed, when all have ended."""
        for seed, process in self._processes.items():
            if code := process.wait(PATIENCE_S):
                raise OmniloomError(f"the plain loop of seed {seed} ended with {code}; its own output says why")
        return {seed: json.loads(self._output(seed).read_text()) for seed in self.seeds}

    def stop(self) -> None:
        """Ends those that still run."""
        for process in self._processes.values():
            if process.poll() is None:
                process.kill()
                process.wait()

    def _output(self, seed: int) -> Path:
        return self.folder / f"seed_{seed}.json"


def measure_loss(references: References, claims: list[Claim]) -> None:
    bench = references.bench
    last = max(2, bench.steps // 4)
    seeds = references.seeds[: bench.seeds]
    ours = {seed: _train(references, seed) for seed in seeds}
    theirs = references.collect()
    different = sum(one != two for _, rows in ours.values() for one, two in zip(rows, theirs[1]["rows"], strict=True))
    claims.append(at_most("loss: steps with other samples than the reference's", different, 0, "steps", bench.place))
    means = {seed: statistics.fmean(found["losses"][-last:]) for seed, found in theirs.items()}
    centre, deviation = statistics.fmean(means.values()), statistics.stdev(means.values())
    among = f"transformers {centre:.4f}, deviation {deviation:.4f} of {len(means)} seeds; {bench.steps} steps"
    for seed, (losses, _) in ours.items():
        mean = statistics.fmean(losses[-last:])
        said = f"{mean:.4f}, transformers from the same weights {means[seed]:.4f}; {among}, {bench.size}; {bench.place}"
        title = f"loss: mean of the last {last} steps, weights of seed {seed}"
        claims.append(at_most(title, abs(mean - centre) / deviation, DEVIATIONS, "deviations", said))
        claims.append(_apart(seed, losses, theirs[seed]["losses"]))


def _apart(seed: int, ours: list[float], theirs: list[float]) -> Claim:
    differences = [abs(a - b) / b for a, b in zip(ours, theirs, strict=True)]
    points = sorted({0, 9, 24, 49, 99, 149, len(ours) - 1} & set(range(len(ours))))
    curve = ", ".join(f"{n + 1}: {ours[n]:.4f} / {theirs[n]:.4f}" for n in points)
    said = f"by step, ours / transformers: {curve}; greatest of all steps {max(differences):.2e}"
    return Claim(f"loss: relative difference at step 1, seed {seed}", differences[0], "", "", None, said)


def _train(references: References, seed: int) -> tuple[list[float], Rows]:
    name, steps = f"run_{seed}", references.bench.steps
    trainer = RowsTrainer(references.config(seed, name))
    began = time.monotonic()
    trainer.train()
    chosen = ", ".join(" ".join(line.split()) for line in trainer.ops.describe().splitlines())
    print(f"loss: seed {seed}, {steps} steps in {time.monotonic() - began:.1f} s, {chosen}", flush=True)
    losses = read_losses(references.folder / name)
    return [losses[step] for step in range(1, steps + 1)], trainer.rows
