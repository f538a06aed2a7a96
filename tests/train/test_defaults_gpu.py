"""A training as a user starts it, with every default: snapshots of memory, gradient checkpointing, mixed precision,
saves in the background, worker processes, an evaluation and an export. On a CPU, too, with gloo for NCCL."""

from __future__ import annotations

import json
import math
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from schemas.errors import ResumableError
from tests.environment import environment
from tests.train.data.loading import TOKENIZER, write_text
from tests.train.tiny import write_data, write_omni_config
from train.metric_writers import read_metrics

STEPS, MORE = 4, 3
ENDS_S = 200.0  # the longest that a training takes here
UNWANTED = ("destroy_process_group() was not called", "Traceback")
GPUS = torch.cuda.device_count()


def on_gpus(count: int) -> Any:
    """A parameter (device, ranks)."""
    why = f"needs {count} CUDA devices, there are {GPUS}"
    return pytest.param("cuda", count, marks=[pytest.mark.gpu, pytest.mark.skipif(count > GPUS, reason=why)])


def on_cpu(count: int) -> Any:
    """See `on_gpus`; they take some 20 s on two cores."""
    return pytest.param("cpu", count, marks=pytest.mark.slow)


def aligned_config(folder: Path, coef: float = 0.05) -> Path:
    """config.json of a tiny model whose sizes the fastest kernels take. coef: of the auxiliary loss."""
    write_omni_config(folder, moe_intermediate_size=24, router_aux_loss_coef=coef)
    values = json.loads((folder / "config.json").read_text())
    values["audio_config"]["d_model"] = 48
    (folder / "config.json").write_text(json.dumps(values))
    return folder


def values_of(folder: Path, **train: Any) -> dict[str, Any]:
    """A configuration of nothing but a model, data and sizes. train: further keys of that section."""
    write_text(folder / "held_out.jsonl", 6, first=100)
    held_out = [{"path": str(folder / "held_out.jsonl"), "name": "held_out", "source_name": "openai_messages"}]
    return {
        "model": {"config_path": str(aligned_config(folder / "model"))},
        "data": {
            "sources": write_data(folder),
            "processor_path": str(TOKENIZER),
            "max_seq_len": 512,
            "lanes": 4,
            "window_rows": 8,
            "cache": {"dir": str(folder / "cache")},
        },
        "train": {
            "global_batch_size": 4,
            "max_steps": STEPS,
            "checkpoint": {"output_dir": str(folder / "output"), "save_steps": 2},
            "evaluation": {"sources": held_out},
        }
        | train,
    }


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("defaults")
    path = folder / "train.yaml"
    path.write_text(yaml.safe_dump(values_of(folder)))
    return path


class Run:
    """`omniloom train run` in a process of its own, whose files are below output."""

    def __init__(self, recipe: Path, output: Path, device: str, ranks: int, *overrides: str) -> None:
        command = [sys.executable, "-m", "jobs.cli", "train", "run", str(recipe), "--nproc", str(ranks)]
        self.output, self.said = output, ""
        self._log = output.with_suffix(f".{time.monotonic_ns()}.log")
        variables = environment(**({"CUDA_VISIBLE_DEVICES": ""} if device == "cpu" else {}))
        with self._log.open("w") as log:  # a pipe that nobody reads would fill up
            self.process = subprocess.Popen(
                [*command, f"train.checkpoint.output_dir={output}", *overrides],
                cwd=output.parent,
                env=variables,
                stdout=subprocess.DEVNULL,
                stderr=log,
            )

    def lines(self) -> list[dict[str, Any]]:
        """Of metrics.jsonl, with those of evaluations."""
        file = self.output / "metrics.jsonl"
        return read_metrics(file) if file.exists() else []

    def steps(self) -> list[tuple[int, float, float]]:
        """(step, loss, norm of the gradients)."""
        return [(line["step"], line["loss"], line["grad_norm"]) for line in self.lines() if "loss" in line]

    def wait_for_steps(self, count: int) -> None:
        """Until the lines of so many are written."""
        end = time.monotonic() + ENDS_S
        while len(self.steps()) < count:
            assert self.process.poll() is None, self._log.read_text()
            assert time.monotonic() < end, self._log.read_text()
            time.sleep(0.02)

    def end(self, code: int = 0) -> None:
        """It ends by itself, with this exit code and nothing unwanted on stderr."""
        try:
            found = self.process.wait(ENDS_S)
        finally:
            self.process.kill()
            self.process.wait()
            self.said = self._log.read_text()
        assert found == code, self.said
        assert not [what for what in UNWANTED if what in self.said], self.said


class Started:
    """Trainings with every default. Those on GPUs run at the same time, as most of it is waiting for the host."""

    def __init__(self, recipe: Path, folder: Path) -> None:
        self.recipe, self.folder = recipe, folder
        self.runs: dict[tuple[str, int], Run] = {}

    def run(self, device: str, ranks: int) -> Run:
        counts = range(1, min(GPUS, 2) + 1) if device == "cuda" else [ranks]
        for count in counts:
            if (device, count) not in self.runs:
                output = self.folder / f"{device}_{count}"
                self.runs[device, count] = Run(self.recipe, output, device, count)
        return self.runs[device, ranks]


@pytest.fixture(scope="module")
def started(recipe: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Started]:
    found = Started(recipe, tmp_path_factory.mktemp("started"))
    yield found
    for run in found.runs.values():
        run.process.kill()
        run.process.wait()


@pytest.mark.parametrize(("device", "ranks"), [on_cpu(1), on_cpu(2), on_gpus(1), on_gpus(2)])
def test_a_training_with_every_default(started: Started, device: str, ranks: int) -> None:
    run = started.run(device, ranks)
    run.end()
    assert (f"1 rank on {device}\n" if ranks == 1 else f"{ranks} ranks on {device}: {ranks} shards\n") in run.said
    output = run.output
    assert (output / "LATEST").read_text().strip() == f"step_{STEPS}"
    assert sorted(path.parent.name for path in output.glob("step_*/COMPLETE")) == ["step_2", "step_4"]
    assert [path.name for path in (output / "hf").glob("step_*") if path.is_dir()] == [f"step_{STEPS}"]
    assert (output / f"hf/step_{STEPS}/config.json").is_file()
    assert list((output / f"hf/step_{STEPS}").glob("*.safetensors"))
    taken = run.steps()
    assert [step for step, _, _ in taken] == list(range(1, STEPS + 1))
    assert all(math.isfinite(loss) and 0 < norm < math.inf for _, loss, norm in taken)
    assert len({loss for _, loss, _ in taken}) == STEPS
    evaluated = [(line["step"], line["eval/loss"]) for line in run.lines() if "eval/loss" in line]
    assert len(evaluated) == 1 and evaluated[0][0] == STEPS and math.isfinite(evaluated[0][1])
    assert not (output / "memory").exists()


@pytest.mark.parametrize(("device", "ranks"), [on_cpu(1), on_gpus(1 if GPUS < 2 else 2)])
def test_a_training_that_was_stopped_goes_on_bit_by_bit(recipe: Path, tmp_path: Path, device: str, ranks: int) -> None:
    """The rate is constant, so that a training may be given its length afterwards."""
    how = ["train.deterministic=true", "data.dataloader.num_workers=1", "train.checkpoint.save_hf_weights=false"]
    how += ["train.optimizer.lr=0.001", "train.optimizer.lr_decay_style=constant"]
    stopped = Run(recipe, tmp_path / "parts", device, ranks, *how, "train.max_steps=400")
    stopped.wait_for_steps(2)
    stopped.process.send_signal(signal.SIGTERM)
    stopped.end(ResumableError.exit_code)
    step = int((stopped.output / "LATEST").read_text().strip().removeprefix("step_"))
    before = stopped.steps()
    assert [number for number, _, _ in before] == list(range(1, step + 1)) and 2 <= step < 400
    length = f"train.max_steps={step + MORE}"
    whole, again = (Run(recipe, tmp_path / name, device, ranks, *how, length) for name in ("whole", "parts"))
    again.end()
    whole.end()
    assert f"going on after step {step} from {stopped.output}/step_{step}" in again.said
    expected, found = whole.steps(), again.steps()
    assert found[:step] == before
    assert [number for number, _, _ in expected] == list(range(1, step + MORE + 1))
    assert found == expected
    assert expected[-1][1] < expected[0][1]
    evaluated = [line["eval/loss"] for run in (whole, again) for line in run.lines() if "eval/loss" in line]
    assert len(evaluated) == 2 and evaluated[0] == evaluated[1]
