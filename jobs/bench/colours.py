"""Reward data end to end: tiny clips -> packed by `avqa` -> a tiny Qwen3-Omni from random weights -> a warm-up that
teaches the form of an answer with random letters -> rounds of rollouts and GRPO. Mean reward per round, from chance up.

    python -m jobs.bench.colours [--quick] [--json FILE] [--plot FILE] [--seeds 0 1 2] [--rounds N] [--keep DIR]

All in one process, in float32 on the CPU: the same steps as `omniloom pack run`, `train run`, `rollouts run` and `train
run` again. Rewards are those of answers sampled at temperature 1, before each round's training and after the last; the
last column is of clips that were never trained on.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from jobs.bench.claims import Claim, at_least, report
from jobs.bench.colours_data import CHANCE, pack_clips
from jobs.rollout.config import RolloutsConfig
from jobs.rollout.job import run_job
from jobs.rollout.summary import summarise
from schemas.strict import check_config
from train.config import OmniConfig
from train.data.rollout_files import read_rollouts
from train.parallel.hub_export import export_tensors
from train.trainer import BaseTrainer, make_trainer

GOAL = 0.2  # mean reward above chance
FAMILY = "qwen3_omni_moe_thinker"
MAX_SEQ_LEN = 5120  # 16 clips with 8 answers each


@dataclass(frozen=True)
class Sizes:
    """clips: to train on; held_out: never trained on; warm_up: steps that teach the form; rounds: of rollouts and
    training; group: answers per clip; steps: of training per round; batch: packed sequences per step; lr, warm_lr:
    learning rates."""

    clips: int = 32
    held_out: int = 32
    warm_up: int = 32
    rounds: int = 6
    group: int = 8
    steps: int = 8
    batch: int = 1
    lr: float = 1e-3
    warm_lr: float = 3e-3


@dataclass
class Course:
    """One seed. rewards: mean reward on the training clips before each round and after the last; held_out: after the
    last, of other clips; seconds: of everything."""

    seed: int
    rewards: list[float] = field(default_factory=list)
    held_out: float = 0.0
    seconds: float = 0.0


def run_course(folder: Path, seed: int, sizes: Sizes) -> Course:
    """Everything of one seed, in a folder."""
    began, course = time.monotonic(), Course(seed)
    warm = pack_clips(folder / "warm", sizes.clips, 1000 + seed, right=False)
    clips = pack_clips(folder / "clips", sizes.clips, 2000 + seed, right=True)
    others = pack_clips(folder / "others", sizes.held_out, 3000 + seed, right=True)
    source = {"path": str(warm), "name": "warm"}
    model = train(folder, "warm_up", source, sizes.warm_up, sizes.warm_lr, seed, sizes)
    for number in range(sizes.rounds):
        rollouts = ask(folder, f"round{number}", clips, model, sizes, seed * 1000 + number)
        course.rewards.append(mean_reward(rollouts))
        source = {"path": str(clips), "name": "clips", "rollouts": str(rollouts)}
        model = train(folder, f"round{number}", source, sizes.steps, sizes.lr, seed + number, sizes, model)
    course.rewards.append(mean_reward(ask(folder, "last", clips, model, sizes, seed * 1000 + 998)))
    course.held_out = mean_reward(ask(folder, "others", others, model, sizes, seed * 1000 + 999))
    course.seconds = time.monotonic() - began
    return course


def train(
    folder: Path,
    name: str,
    source: dict[str, str],
    steps: int,
    lr: float,
    seed: int,
    sizes: Sizes,
    model: Path | None = None,
) -> Path:
    """Trains so many steps on the source, on its rollouts where it has some; the model afterwards. model: None = a tiny
    one from random weights."""
    assets = Path(str(files("jobs"))) / "assets"
    output = folder / "training" / name
    start = {"config_path": str(assets / "tiny_qwen3_omni")} if model is None else {"model_path": str(model)}
    values: dict[str, Any] = {
        "model": start,
        "data": {
            "sources": [source],
            "processor_path": str(assets / "tokenizer"),
            "max_seq_len": MAX_SEQ_LEN,
            "lanes": 1,
            "cache": {"dir": str(folder / "cache")},
            "dataloader": {"num_workers": 0},
        },
        "train": {
            "global_batch_size": sizes.batch,
            "max_steps": steps,
            "num_train_epochs": 1000,
            "seed": seed,
            "init_device": "cpu",
            "objective": {"type": "grpo" if "rollouts" in source else "cross_entropy"},
            "optimizer": {"lr": lr, "lr_decay_style": "constant", "lr_warmup_steps": 0, "weight_decay": 0.0},
            "accelerator": {"fsdp_config": {"mixed_precision": {"enable": False}}},
            "gradient_checkpointing": {"enable": False},
            "checkpoint": {
                "output_dir": str(output),
                "save_steps": 0,
                "save_async": False,
                "save_hf_weights": False,  # a process of its own, which pays its imports again
            },
        },
    }
    trainer = make_trainer(check_config(values, OmniConfig))
    trainer.train()
    return write_model(trainer, output / "model", assets / "tokenizer")


def write_model(trainer: BaseTrainer, folder: Path, processor: Path) -> Path:
    """The live weights under the hub's names, with what belongs to them, as a directory that transformers and the next
    training read."""
    folder.mkdir()
    save_file(dict(export_tensors(trainer.model, to=FAMILY)), folder / "model.safetensors", {"format": "pt"})
    for name, data in trainer.files.small_files(processor).items():
        (folder / name).write_bytes(data)
    return folder


def ask(folder: Path, name: str, dataset: Path, model: Path, sizes: Sizes, seed: int) -> Path:
    """Rollouts of every row of the dataset."""
    out = folder / "rollouts" / name
    values: dict[str, Any] = {
        "dataset": str(dataset),
        "model_path": str(model),
        "out": str(out),
        "sampling": {"group_size": sizes.group, "max_new_tokens": 4, "seed": seed},
        "local": {"device": "cpu", "dtype": "float32"},
        "max_bad_ratio": 0.0,
    }
    run_job(check_config(values, RolloutsConfig))
    return out


def mean_reward(rollouts: Path) -> float:
    return summarise(read_rollouts(rollouts)).mean_reward


def claims_of(courses: list[Course], sizes: Sizes) -> list[Claim]:
    where = (
        f"{sizes.clips} clips of four colours, {sizes.rounds} rounds of {sizes.group} answers each and {sizes.steps} "
        f"steps; chance is {CHANCE:g}; seconds: {', '.join(f'{course.seconds:.0f}' for course in courses)}"
    )
    claims = []
    for course in courses:
        path = " ".join(f"{reward:.2f}" for reward in course.rewards)
        gain = course.rewards[-1] - CHANCE
        claims.append(at_least(f"reward above chance, seed {course.seed}", gain, GOAL, "", f"by round: {path}"))
        gain = course.held_out - CHANCE
        claims.append(at_least(f"the same on other clips, seed {course.seed}", gain, GOAL, "", where))
    start = max(abs(course.rewards[0] - CHANCE) for course in courses)
    claims.append(Claim("distance from chance before the first round, largest", round(start, 4), "", "", None, where))
    mean = statistics.mean(course.rewards[-1] for course in courses)
    claims.append(Claim("mean reward after the last round, mean of seeds", round(mean, 4), "", "", None, where))
    return claims


def draw(path: Path, courses: list[Course]) -> None:
    """Mean reward by round, a line per seed."""
    from matplotlib.figure import Figure  # noqa: PLC0415  # seconds, and only for a picture

    figure = Figure((6, 3.6), layout="constrained")
    axes = figure.subplots()
    for course in courses:
        (line,) = axes.plot(range(len(course.rewards)), course.rewards, "o-", label=f"seed {course.seed}")
        axes.plot([len(course.rewards) - 1], [course.held_out], "x", color=line.get_color())
    axes.axhline(CHANCE, color="0.5", linestyle="--", label="chance")
    axes.axhline(CHANCE + GOAL, color="0.5", linestyle=":", label="goal")
    axes.set(xlabel="rounds of rollouts and training (x: other clips)", ylabel="mean reward", ylim=(0, 1))
    axes.legend()
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description="Colour naming by GRPO: mean reward per round.")
    parser.add_argument("--quick", action="store_true", help="one seed, fewer rounds, under 45 s")
    parser.add_argument("--json", type=Path, help="write the claims there")
    parser.add_argument("--plot", type=Path, help="draw the rewards there (png, svg)")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--rounds", type=int, default=Sizes.rounds)
    parser.add_argument("--keep", type=Path, help="an empty folder for everything that is made")
    given = parser.parse_args()
    torch.set_num_threads(1)
    seeds, sizes = given.seeds, Sizes(rounds=given.rounds)
    if given.quick:
        seeds, sizes = seeds[:1], Sizes(rounds=4)
    with tempfile.TemporaryDirectory() as scratch:
        folder = given.keep or Path(scratch)
        courses = [run_course(folder / f"seed{seed}", seed, sizes) for seed in seeds]
    if given.plot is not None:
        draw(given.plot, courses)
    sys.exit(0 if report("colour naming by GRPO", claims_of(courses, sizes), given.json) else 1)


if __name__ == "__main__":
    main()
