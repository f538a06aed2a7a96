"""The steps of `omniloom demo`: each says what it begins, what it does and what came of it.

What this module imports takes seconds; `jobs.demo` says something before.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from jobs import demo_train
from jobs.typed import typed_command
from pack.config import PackConfig, PackFile
from pack.job import Done, check_threshold, check_verified, plan_job, preview_job, run_job, verify_job
from pack.plan import Plan
from pack.plan_file import load_plan
from pack.reader import PackedDataset
from pack.rejects import final_rejects, read_plan_commits
from pack.storage import explain_io, open_storage, write_atomic
from schemas.dataset import Reject
from schemas.sample import SampleMeta
from schemas.strict import dump_config, load_config

STEPS = 9
MANIFEST = "clips.jsonl"


def run_demo(console: Console, out: Path, workers: int, *, pack_only: bool) -> None:
    """All steps, then what became of each row and where everything is."""
    config, done = _pack(console, out, workers)
    if not pack_only:
        _train(console, out)
    console.print()
    console.print(_outcomes(config))
    console.print()
    for name, text in _places(out, pack_only):
        # a line that is broken is no command that can be copied
        console.print(Text.assemble((f"{name:<9} ", "bold"), text), soft_wrap=True)
    check_threshold(done.card, config)


@dataclass
class Step:
    """A step that goes on: what it says of itself."""

    console: Console
    result: str = ""

    def tell(self, line: str) -> None:
        """A line of what it does, at once."""
        self.console.print(Text(f"    {line}", "dim"), soft_wrap=True)

    def say(self, result: str) -> None:
        """What came of it, for the line that ends it."""
        self.result = result


def _pack(console: Console, out: Path, workers: int) -> tuple[PackConfig, Done]:
    with _step(console, 1, "clips") as step:
        count, size = copy_clips(out / "clips")
        step.say(f"{count} files, {size / 1e6:.1f} MB, in {out / 'clips'}")
    with _step(console, 2, "plan") as step:
        config = write_config(out, workers)
        plan, change = plan_job(config)
        news = "" if change else ", the same as before"
        step.say(f"{plan.rows} rows in {len(plan.partitions)} partitions{news}")
    with _step(console, 3, "pack", f"in {workers} processes") as step:
        done, _ = run_job(config)
        totals = done.card.totals
        again = " (nothing to do: all partitions were committed)" if done.nothing_to_do else ""
        rejected = sum(totals.rejected.values())
        step.say(f"{totals.rows_in} rows -> {totals.samples} samples, {rejected} rejected; {workers} processes{again}")
    with _step(console, 4, "verify") as step:
        storage = open_storage(config.output)
        found = verify_job(storage, plan)
        check_verified(storage, found)
        step.say(f"{found.samples} samples, {found.bytes / 1e6:.1f} MB read again: every byte as written")
    with _step(console, 5, "preview", "writing the page") as step:
        page = preview_job(storage, config, out / "preview.html", Path(str(files("jobs"))) / "assets/tokenizer")
        step.say(page)
    return config, done


def _train(console: Console, out: Path) -> None:
    demo_train.write_train_config(out)
    trained = demo_train.is_trained(out)
    begins = f"a tiny Qwen3-Omni in {demo_train.RANKS} processes, until SIGTERM after step {demo_train.STOP_AFTER}"
    with _step(console, 6, "train", "" if trained else begins) as step:
        if trained:
            step.say("(nothing to do: an earlier demo trained to the end)")
        else:
            stopped = demo_train.train_and_stop(out, step.tell)
            step.say(f"{demo_train.RANKS} processes, stopped by SIGTERM after step {stopped.step}, saved, exit code 5")
    with _step(console, 7, "resume", "" if trained else "the same command again, from its checkpoint") as step:
        ended = demo_train.where_it_stands(out) if trained else demo_train.train_on(out, step.tell)
        first, last = min(ended.losses), max(ended.losses)
        step.say(f"to step {ended.step}; loss {ended.losses[first]:.2f} -> {ended.losses[last]:.2f}")
    with _step(console, 8, "convert", "to other formats and back") as step:
        count = demo_train.convert_and_back(out, step.tell)
        step.say(f"checkpoint -> Hugging Face -> Qwen3-VL -> back: {count} tensors, every one bit for bit the same")
    with _step(console, 9, "reload", "in transformers, beside the model of the trainer") as step:
        found = demo_train.reload(out, step.tell)
        step.say(
            f"transformers agrees in {found.modules} modules on text, image, video and audio; Qwen3-VL's logits differ "
            f"by {found.difference:.1g}; it says {found.text!r}"
        )


def copy_clips(folder: Path) -> tuple[int, int]:
    """Copies the clips of the package and their manifest; (files, bytes). A file that is there already is left alone,
    so that a second run finds the manifest unchanged."""
    count = size = 0
    with explain_io("cannot write", str(folder)):
        folder.mkdir(parents=True, exist_ok=True)
        for asset in sorted(files("jobs").joinpath("assets").iterdir(), key=lambda a: a.name):
            if not asset.is_file() or asset.name == "make_assets.sh":
                continue
            target = folder / (MANIFEST if asset.name == "demo.jsonl" else asset.name)
            data = asset.read_bytes()
            if not target.exists() or target.read_bytes() != data:
                write_atomic(target, data)
            count, size = count + 1, size + len(data)
    return count, size


def write_config(out: Path, workers: int) -> PackConfig:
    """OUT/pack.yaml from jobs/pack/demo.yaml, with this demo's paths."""
    recipe = Path(str(files("jobs").joinpath("pack/demo.yaml")))
    places = {"manifest": (out / "clips" / MANIFEST).resolve(), "output": (out / "packed").resolve()}
    overrides = [f"pack.{key}={path}" for key, path in places.items()]
    config = load_config(recipe, [*overrides, f"pack.executor.workers={workers}"], PackFile)
    with explain_io("cannot write", str(out)):
        write_atomic(out / "pack.yaml", dump_config(config).encode())
    return config.pack


@contextmanager
def _step(console: Console, number: int, name: str, begins: str = "") -> Iterator[Step]:
    """begins: what a step of more than a moment says before it does it."""
    began = time.monotonic()
    head = Text.assemble((f"{number}/{STEPS} ", "dim"), (f"{name:<8}", "bold"))
    if begins:
        console.print(head + Text(f"{begins} ...", "dim"), soft_wrap=True)
    step = Step(console)
    yield step
    line = head + Text(step.result)
    line.append(f"  {time.monotonic() - began:.1f} s", "dim")
    console.print(line, soft_wrap=True)


def _outcomes(config: PackConfig) -> Table:
    """What became of every row, in manifest order."""
    storage = open_storage(config.output)
    plan = load_plan(storage)
    lines: list[tuple[int, str, Text, str]] = []
    for meta in PackedDataset(config.output).metas():
        lines.append((meta.provenance.row, meta.id, Text("packed", "green"), _packed(meta)))
    for reject in _rejects(config, plan):
        lines.append((reject.row, reject.id, Text("rejected", "red"), f"{reject.reason}: {reject.detail}"))
    table = Table(box=None, pad_edge=False)
    for column in ("row", "id", "outcome", "what"):
        table.add_column(column, overflow="fold")
    for row, name, outcome, what in sorted(lines, key=lambda line: line[:2]):
        table.add_row(str(row), Text(name), outcome, Text(what))
    return table


def _rejects(config: PackConfig, plan: Plan) -> list[Reject]:
    storage = open_storage(config.output)
    return list(final_rejects(storage, plan, read_plan_commits(storage, plan)))


def _packed(meta: SampleMeta) -> str:
    """What is in a sample, with what is special about it."""
    words, flags = [], set()
    for video in meta.videos:
        words.append(f"{video.num_frames} frames {video.width}x{video.height}")
        flags.update(video.flags)
        if video.audio is None:
            words.append("no sound")
        else:
            late = f" from {video.audio.start_s:.2f} s on" if video.audio.start_s > 0.01 else ""
            words.append(f"{video.audio.duration_s:.2f} s sound{late}")
            flags.update(video.audio.flags)
    for sound in meta.audios:
        words.append(f"{sound.duration_s:.2f} s sound")
        flags.update(sound.flags)
    for image in meta.images:
        words.append(f"image {image.width}x{image.height}")
        flags.update(image.flags)
    text = ", ".join(words) or "text only"
    return f"{text} [{', '.join(sorted(flags))}]" if flags else text


def _places(out: Path, pack_only: bool) -> list[tuple[str, str]]:
    """Where everything is and what to do next."""
    packed, omniloom = out / "packed", typed_command()
    places = [
        ("look", (out / "preview.html").resolve().as_uri()),
        ("dataset", str(packed)),
        ("read", f'StreamingDataset(local="{packed}", batch_size=1)'),
        ("as files", f"{omniloom} pack extract {packed} {out / 'files'}"),
        ("rejected", f"{omniloom} pack rejects {packed}"),
        ("again", f"{omniloom} pack run {out / 'pack.yaml'}"),
    ]
    if not pack_only:
        places += [
            ("curves", (out / "training/metrics.html").resolve().as_uri()),
            ("model", str(out / "hf")),
            ("train", f"{omniloom} train run {out / 'train.yaml'} train.max_steps=20"),
            ("compare", f"{omniloom} train compare {out / 'hf'}"),
        ]
    return places
