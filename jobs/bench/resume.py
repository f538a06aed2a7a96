"""Trainings that are killed at random moments against one that never was: are the losses the same, bit for bit?

    python -m jobs.bench.resume DATASET [--kills 5] [--quick] [--json FILE]

DATASET: packed shards, such as demo_out/packed. The tiny Qwen3-Omni of jobs/train/tiny_omni.yaml trains on one and on
two processes, with 0 and with 2 loader workers each, and saves asynchronously every third step; the launcher and all
its ranks are killed with SIGKILL at random steps and the same command goes on. Then a run is stopped on one process
and goes on on two, and the other way round: with micro_batch_size 2 on one process and 1 on two, so that the router's
auxiliary loss, which is one of a micro-step over all ranks, stays the same function.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from importlib.resources import files
from pathlib import Path

from jobs.bench.claims import Claim, at_most, report
from train.launch import kill_tree
from train.metric_writers import METRICS_FILE, read_metrics

SAVE_STEPS = 3
STEPS, QUICK_STEPS = 16, 8
# Adam makes a whole step of any gradient, so rounding in another order grows with the rate; the recipe's 1e-3 is high
OTHER_WORLD_LR = 1e-4
SEQUENCES = 2  # of a step
DELAY_S = 0.7  # a kill comes at most so long behind the step that it waited for


class Run:
    """One training in a folder of its own."""

    def __init__(self, folder: Path, dataset: Path, steps: int, nproc: int, workers: int) -> None:
        self.folder, self.nproc = folder, nproc
        assets = Path(str(files("jobs")))
        self._command = [
            *(sys.executable, "-m", "jobs.cli", "train", "run", str(assets / "train/tiny_omni.yaml")),
            f"model.config_path={assets / 'assets/tiny_qwen3_omni'}",
            f"data.processor_path={assets / 'assets/tokenizer'}",
            f"data.sources.0.path={dataset}",
            f"data.cache.dir={folder.parent / 'cache'}",
            f"data.dataloader.num_workers={workers}",
            f"train.max_steps={steps}",
            f"train.checkpoint.output_dir={folder}",
            f"train.checkpoint.save_steps={SAVE_STEPS}",
            "train.checkpoint.save_async=true",
            "train.checkpoint.save_hf_weights=false",
        ]

    def start(self, *overrides: str, nproc: int | None = None) -> subprocess.Popen[str]:
        ranks = ["--nproc", str(nproc or self.nproc)]
        log = open(self.folder.with_suffix(".log"), "a")  # noqa: SIM115  # handed to the child
        variables = os.environ | {"OMP_NUM_THREADS": "1"}
        command = [*self._command, *overrides, *ranks]
        return subprocess.Popen(command, stdout=log, stderr=log, text=True, env=variables)

    def finish(self, *overrides: str, nproc: int | None = None) -> None:
        code = self.start(*overrides, nproc=nproc).wait()
        if code != 0:
            raise SystemExit(f"training ended with {code}: {self.folder.with_suffix('.log')}")

    def losses(self) -> dict[int, float]:
        """By step."""
        return {line["step"]: line["loss"] for line in read_metrics(self.folder / METRICS_FILE) if "loss" in line}

    def kill_behind(self, step: int, delay_s: float) -> bool:
        """Starts, waits until a step is done and a little longer, and kills all; False when it was over before."""
        process = self.start()
        while process.poll() is None and max(self.losses(), default=0) < step:
            time.sleep(0.02)
        time.sleep(delay_s)
        if process.poll() is not None:
            return False
        kill_tree(process.pid)
        process.wait()
        return True


def killed_and_not(folder: Path, dataset: Path, kills: int, steps: int, nproc: int, workers: int) -> Claim:
    """How many steps of a training that was killed have another loss than one that was not."""
    chance = random.Random(nproc * 10 + workers)
    calm = Run(folder / f"calm_{nproc}_{workers}", dataset, steps, nproc, workers)
    calm.finish()
    shaken = Run(folder / f"shaken_{nproc}_{workers}", dataset, steps, nproc, workers)
    count = 0
    for _ in range(kills):
        reached = max(shaken.losses(), default=0)
        count += shaken.kill_behind(min(reached + chance.randint(1, 3), steps - 1), chance.uniform(0, DELAY_S))
    shaken.finish()
    expected, found = calm.losses(), shaken.losses()
    different = [step for step in range(1, steps + 1) if expected.get(step) != found.get(step)]
    said = f"of {steps}; {count} kills, {nproc} processes, {workers} loader workers, asynchronous saves"
    return at_most("steps whose loss is not bit-equal", len(different), 0, "steps", said)


def other_world(folder: Path, dataset: Path, steps: int, first: int, then: int) -> Claim:
    """Greatest relative difference of the losses of a run that changes its number of processes."""
    rate = f"train.optimizer.lr={OTHER_WORLD_LR}"
    at_first, at_then = (f"train.micro_batch_size={SEQUENCES // nproc}" for nproc in (first, then))
    calm = Run(folder / f"calm_world_{first}", dataset, steps, first, 0)
    calm.finish(rate, at_first)
    moved = Run(folder / f"moved_{first}_{then}", dataset, steps, first, 0)
    process = moved.start(rate, at_first)
    while process.poll() is None and max(moved.losses(), default=0) < steps // 2:
        time.sleep(0.02)
    process.send_signal(signal.SIGTERM)
    if process.wait() != 5:
        raise SystemExit(f"the run was not stopped: {moved.folder.with_suffix('.log')}")
    moved.finish(rate, at_then, nproc=then)
    expected, found = calm.losses(), moved.losses()
    worst = max(abs(found[step] - loss) / abs(loss) for step, loss in expected.items())
    said = f"stopped on {first} processes after {steps // 2} of {steps} steps, went on on {then}; lr {OTHER_WORLD_LR:g}"
    return at_most("loss, greatest relative difference", worst, 1e-6, "", said)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dataset", type=Path, help="packed shards")
    parser.add_argument("--kills", type=int, default=5, help="of each training")
    parser.add_argument("--quick", action="store_true", help="two processes with two workers, and fewer steps")
    parser.add_argument("--only", choices=("kills", "worlds"))
    parser.add_argument("--json", type=Path, help="also write the claims here")
    arguments = parser.parse_args()
    dataset, steps = arguments.dataset.resolve(), QUICK_STEPS if arguments.quick else STEPS
    cases = [(2, 2)] if arguments.quick else [(1, 0), (1, 2), (2, 0), (2, 2)]
    cases = [] if arguments.only == "worlds" else cases
    worlds = [] if arguments.quick or arguments.only == "kills" else [(2, 1), (1, 2)]
    claims = []
    with tempfile.TemporaryDirectory(prefix="omniloom-resume-") as name:
        for nproc, workers in cases:
            claims.append(killed_and_not(Path(name), dataset, arguments.kills, steps, nproc, workers))
            print(claims[-1], flush=True)
        for first, then in worlds:
            claims.append(other_world(Path(name), dataset, steps, first, then))
            print(claims[-1], flush=True)
    return 0 if report("resuming", claims, arguments.json) else 1


if __name__ == "__main__":
    sys.exit(main())
