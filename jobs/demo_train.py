"""The second half of `omniloom demo`: train a tiny Qwen3-Omni of the real architecture on what was packed, stop it, go
on, and take its weights through every format and back.

OUT/train.yaml    the configuration; `omniloom train run OUT/train.yaml` trains again
OUT/training/     checkpoints, metrics.jsonl, metrics.html, and the export in hf/
OUT/hf, vl, back  the trained thinker, the same as a Qwen3-VL, and what comes back of that
"""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from schemas.errors import OmniloomError, VerificationError
from schemas.strict import dump_config, load_config

RANKS = 2
STOP_AFTER = 4  # steps; the signal that ends the first run is sent behind this one
MAX_STEPS = 12
PROMPT = "What does the rabbit do?"
_POLL_S = 0.1

Tell = Callable[[str], None]  # is given a line of what goes on


@dataclass(frozen=True)
class Stopped:
    """Where a training stood. losses: by step, from 1."""

    step: int
    losses: dict[int, float]


def write_train_config(out: Path) -> Path:
    """OUT/train.yaml from jobs/train/tiny_omni.yaml, with this demo's paths."""
    from train.config import OmniConfig  # noqa: PLC0415  # the first half of the demo does without

    package = Path(str(files("jobs")))
    places = {
        "model.config_path": package / "assets/tiny_qwen3_omni",
        "data.processor_path": package / "assets/tokenizer",
        "data.sources.0.path": (out / "packed").resolve(),
        "data.cache.dir": (out / "cache").resolve(),
        "train.checkpoint.output_dir": (out / "training").resolve(),
    }
    overrides = [f"{key}={path}" for key, path in places.items()] + [f"train.max_steps={MAX_STEPS}"]
    path = out / "train.yaml"
    path.write_text(dump_config(load_config(package / "train/tiny_omni.yaml", overrides, OmniConfig)))
    return path


def train_and_stop(out: Path, tell: Tell) -> Stopped:
    """Trains in two processes and sends SIGTERM to the launcher after a few steps, as a scheduler does."""
    code, said = _train(out, tell, lambda: len(read_losses(out)) >= STOP_AFTER)
    if code != 5:
        raise OmniloomError(f"training ended with {code}, not with 5 after SIGTERM:\n{_end(said)}")
    return where_it_stands(out)


def train_on(out: Path, tell: Tell) -> Stopped:
    """The same command again: it goes on from the checkpoint, to the end."""
    code, said = _train(out, tell)
    if code != 0:
        raise OmniloomError(f"training ended with {code}:\n{_end(said)}")
    return where_it_stands(out)


def is_trained(out: Path) -> bool:
    """An earlier demo in this folder trained to the end."""
    return where_it_stands(out).step >= MAX_STEPS


def read_losses(out: Path) -> dict[int, float]:
    """Loss of each step, from metrics.jsonl; {} before there is one."""
    losses: dict[int, float] = {}
    with contextlib.suppress(FileNotFoundError):
        for line in (out / "training/metrics.jsonl").read_text().splitlines():
            with contextlib.suppress(ValueError):  # the last line may be half written
                values = json.loads(line)
                if "loss" in values:
                    losses[int(values["step"])] = float(values["loss"])
    return losses


def convert_and_back(out: Path, tell: Tell) -> int:
    """Checkpoint -> Hugging Face -> pseudo Qwen3-VL -> back; how many tensors came back, all of them bit for bit.

    VerificationError when one differs.
    """
    hf, vl, back = out / "hf", out / "vl", out / "back"
    for arguments in (
        ("convert", "dcp-to-hf", str(out / "training"), str(hf)),
        ("convert", "omni-to-vl", str(hf), str(vl)),
        ("convert", "vl-to-omni", str(vl), str(back), "--base", str(hf)),
    ):
        tell(f"omniloom {' '.join(arguments)}")
        _omniloom(*arguments)
    tell(f"comparing all tensors of {hf} and {back}")
    before, after = _bytes_of(hf), _bytes_of(back)
    if different := [name for name in before.keys() | after.keys() if before.get(name) != after.get(name)]:
        raise VerificationError(f"{back}: {len(different)} tensors differ from {hf}, the first {min(different)}")
    return len(before)


@dataclass(frozen=True)
class Reloaded:
    """modules: how many agree between transformers and the trainer's own model, on text, image, video and audio;
    difference: greatest of the logits between the thinker and its pseudo Qwen3-VL; text: what it generates."""

    modules: int
    difference: float
    text: str


def reload(out: Path, tell: Tell) -> Reloaded:
    """Loads the exports with transformers. VerificationError when names are missing or modules differ."""
    tell("loading transformers")
    from transformers.utils.logging import disable_progress_bar  # noqa: PLC0415  # transformers: seconds

    from convert.verify_logits import compare_logits  # noqa: PLC0415
    from train.compare_run import run_comparison  # noqa: PLC0415

    disable_progress_bar()

    kinds = ("text", "image", "video", "audio")
    tell(f"running {out / 'hf'} in both on {', '.join(kinds)}")
    found = run_comparison(out / "hf", kinds, "cpu", "float32")
    if found.first is not None:
        raise VerificationError(f"{out / 'hf'}: transformers gives other values from {found.first.path} on")
    tell(f"comparing the logits of {out / 'vl'}")
    logits = compare_logits(out / "vl", out / "hf")
    tell(f"asking it: {PROMPT}")
    return Reloaded(len(found.rows), logits.difference, _generate(out / "hf"))


def _generate(folder: Path) -> str:
    """A greedy answer of transformers to a question, without special tokens."""
    from transformers import AutoTokenizer, Qwen3OmniMoeThinkerForConditionalGeneration  # noqa: PLC0415

    model: Any = Qwen3OmniMoeThinkerForConditionalGeneration.from_pretrained(folder).eval()
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    text = f"<|im_start|>user\n{PROMPT}<|im_end|>\n<|im_start|>assistant\n"
    given = tokenizer(text, return_tensors="pt")
    ids = model.generate(**given, max_new_tokens=8, do_sample=False)
    answer: str = tokenizer.decode(ids[0, given["input_ids"].shape[1] :], skip_special_tokens=True)
    return answer


def where_it_stands(out: Path) -> Stopped:
    """The newest checkpoint, and the losses up to it."""
    newest = 0
    with contextlib.suppress(FileNotFoundError):
        newest = int((out / "training/LATEST").read_text().strip().removeprefix("step_"))
    return Stopped(newest, read_losses(out))


def _train(out: Path, tell: Tell, stop: Callable[[], bool] | None = None) -> tuple[int, str]:
    """(exit code, all that it said). What it says is told as it comes; SIGTERM is sent once `stop` says so."""
    said = []
    with subprocess.Popen(_command(out), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        if stop is not None:
            threading.Thread(target=_terminate_when, args=(process, stop), daemon=True).start()
        assert process.stdout is not None
        for line in process.stdout:
            said.append(line)
            if line.strip() and "  " not in line.strip():  # of tables, as of the operations that run, a demo shows none
                tell(line.strip())
    return process.returncode, "".join(said)


def _terminate_when(process: subprocess.Popen[str], stop: Callable[[], bool]) -> None:
    """In a thread of its own, while another reads what the process says."""
    while process.poll() is None and not stop():
        time.sleep(_POLL_S)
    process.send_signal(signal.SIGTERM)


def _command(out: Path) -> list[str]:
    return [sys.executable, "-m", "jobs.cli", "train", "run", str(out / "train.yaml"), "--nproc", str(RANKS)]


def _omniloom(*arguments: str) -> None:
    """A command of its own process, as a user would give it."""
    command = [sys.executable, "-m", "jobs.cli", *arguments]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    if done.returncode != 0:
        raise OmniloomError(f"omniloom {' '.join(arguments)} ended with {done.returncode}:\n{_end(done.stdout)}")


def _end(said: str) -> str:
    return "\n".join(said.splitlines()[-12:])


def _bytes_of(folder: Path) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    """(dtype, shape, bytes) of every tensor of a model directory."""
    import torch  # noqa: PLC0415  # seconds
    from safetensors import safe_open  # noqa: PLC0415

    found = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118  # not a mapping
                tensor = file.get_tensor(name)
                flat = tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
                found[name] = (str(tensor.dtype), tuple(tensor.shape), flat)
    return found
