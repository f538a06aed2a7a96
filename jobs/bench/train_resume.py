"""Part `resume`: stopped by a signal, gone on in a new process, compared with a run that was never stopped; the export
read by transformers."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import torch
from transformers import Qwen3OmniMoeThinkerForConditionalGeneration

from jobs.bench.claims import Claim, at_least, at_most
from jobs.bench.train_setup import Bench, read_losses, train_config, write_model
from schemas.errors import OmniloomError, ResumableError
from schemas.strict import dump_config
from train.callbacks.base import Callback
from train.config import OmniConfig
from train.step import StepResult
from train.trainer import BaseTrainer, make_trainer

PATIENCE_S = 150.0


class SignalBefore(Callback):
    """Sends SIGTERM to this process during the step before `step`, which is then the last."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, trainer: BaseTrainer, result: StepResult) -> None:
        if trainer.state.step == self.step - 1:
            os.kill(os.getpid(), signal.SIGTERM)


def measure_resume(bench: Bench, claims: list[Claim]) -> None:
    stop = 2 if bench.quick else min(100, bench.steps // 2)
    steps = stop + (2 if bench.quick else min(20, bench.steps - stop))
    write_model(bench.out / "resume/config", bench.size)
    whole, deterministic = _undisturbed(bench, steps, claims)
    config = _config(bench, "resume/parts", steps, deterministic, export=True)
    said = _stop(config, stop)
    claims.append(at_most("resume: steps between the signal's and the last one", abs(said - stop), 0, "steps", ""))
    first = read_losses(bench.out / "resume/parts")
    _go_on(bench, config)
    losses = read_losses(bench.out / "resume/parts")
    how = f"train.deterministic: {str(deterministic).lower()}; {bench.place}"
    before = _equal(whole, first, range(1, stop + 1))
    after = _equal(whole, losses, range(stop + 1, steps + 1))
    claims.append(_claim("resume: bit-equal losses of the same steps run again", before, stop, deterministic, how))
    title = f"resume: bit-equal losses after going on from step {stop} in a new process"
    claims.append(_claim(title, after, steps - stop, deterministic, how))
    differences = [abs(losses[step] - whole[step]) / whole[step] for step in range(stop + 1, steps + 1)]
    claims.append(Claim("resume: greatest relative difference of a loss after it", max(differences), "", "", None, how))
    claims.extend(_read_export(bench.out / f"resume/parts/hf/step_{steps}"))


def _config(bench: Bench, name: str, steps: int, deterministic: bool, export: bool = False) -> OmniConfig:
    return train_config(
        bench,
        bench.size,
        name,
        {"config_path": str(bench.out / "resume/config")},
        steps,
        deterministic=deterministic,
        checkpoint={"output_dir": str(bench.out / name), "save_steps": 0, "save_hf_weights": export},
    )


def _undisturbed(bench: Bench, steps: int, claims: list[Claim]) -> tuple[dict[int, float], bool]:
    """(losses, whether it was deterministic). An operation that cannot be is a claim that does not hold."""
    for deterministic in (True, False):
        name = f"resume/whole_{deterministic}"
        began = time.monotonic()
        try:
            make_trainer(_config(bench, name, steps, deterministic)).train()
        except RuntimeError as error:
            if not deterministic:
                raise
            traceback.print_exc()
            claims.append(Claim("resume: train.deterministic runs", 0, "", "runs", False, _short(error)))
            continue
        print(f"resume: {steps} steps without a stop in {time.monotonic() - began:.1f} s", flush=True)
        return read_losses(bench.out / name), deterministic
    raise OmniloomError("no undisturbed run")


def _stop(config: OmniConfig, stop: int) -> int:
    """The step after which it stopped."""
    trainer = make_trainer(config, callbacks=[SignalBefore(stop)])
    try:
        trainer.train()
    except ResumableError as error:
        print(f"resume: {error}", flush=True)
        return trainer.state.step
    raise OmniloomError("the training went on to its end after SIGTERM")


def _go_on(bench: Bench, config: OmniConfig) -> None:
    """`omniloom train run` to the end, in a process of its own."""
    file, log = bench.out / "resume/train.yaml", bench.out / "resume/log.txt"
    file.write_text(dump_config(config))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)}
    command = [sys.executable, "-m", "jobs.cli", "train", "run", str(file)]
    began = time.monotonic()
    with log.open("wb") as said:
        done = subprocess.run(
            command, env=environment, stdout=said, stderr=subprocess.STDOUT, timeout=PATIENCE_S, check=False
        )
    if done.returncode:
        raise OmniloomError(f"{' '.join(command)} ended with {done.returncode}: {log.read_text()[-2000:]}")
    print(f"resume: gone on to the end in a new process in {time.monotonic() - began:.1f} s", flush=True)


def _equal(whole: dict[int, float], found: dict[int, float], steps: range) -> list[int]:
    """Steps whose losses are the same bits."""
    return [step for step in steps if found.get(step) == whole[step]]


def _claim(title: str, equal: list[int], steps: int, deterministic: bool, how: str) -> Claim:
    if deterministic:
        return at_least(title, len(equal), steps, "steps", how)
    return Claim(title, len(equal), "steps", f"{steps} when deterministic", None, how)


def _read_export(folder: Path) -> list[Claim]:
    loaded: Any = Qwen3OmniMoeThinkerForConditionalGeneration.from_pretrained(
        folder, dtype=torch.float32, output_loading_info=True
    )
    info: dict[str, Any] = loaded[1]
    claims = []
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        names = sorted(map(str, info.get(kind) or ()))
        title = f"resume: {kind} of the export in transformers"
        claims.append(at_most(title, len(names), 0, "", ", ".join(names[:4])))
    return claims


def _short(error: BaseException) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]
