"""The colour-naming task: tiny clips of one noisy colour each, and which letter names it, as AVQA rows; packed in this
process."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from pack.config import PackConfig
from pack.job import merge_job, plan_job
from pack.partition import write_partition
from pack.storage import open_storage
from pack.task import PartitionTask
from schemas.strict import check_config

COLOURS = {"red": (214, 40, 40), "green": (40, 180, 60), "blue": (40, 60, 210), "yellow": (235, 215, 50)}
NAMES = list(COLOURS)
CHANCE = 1 / len(NAMES)
QUESTION = "Which colour?"
SIDE, FRAMES = 64, 2  # pixels per side: two by two tokens per pair of frames
NOISE, BRIGHTNESS = 25, (0.7, 1.1)


def draw_clip(colour: str, rng: np.random.Generator) -> np.ndarray:
    """uint8 [FRAMES, SIDE, SIDE, 3]: the colour, darker or lighter, under noise."""
    tone = np.array(COLOURS[colour]) * rng.uniform(*BRIGHTNESS)
    noise = rng.normal(0, NOISE, (FRAMES, SIDE, SIDE, 3))
    return np.clip(tone + noise, 0, 255).astype(np.uint8)


def make_rows(folder: Path, count: int, seed: int, *, right: bool) -> Iterator[dict[str, Any]]:
    """Rows in the form of AVQA, all colours equally often. right: the answers are; else every colour has every letter
    equally often, in a random order, so that they say nothing about the clips."""
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(seed)
    letters = [rng.permutation([i % len(NAMES) for i in range(count // len(NAMES))]) for _ in NAMES]
    for number in range(count):
        turn, shown = divmod(number, len(NAMES))
        frames = []
        for k, picture in enumerate(draw_clip(NAMES[shown], rng)):
            frames.append(f"{number}_{k}.png")
            Image.fromarray(picture).save(folder / frames[-1])
        yield {
            "id": f"clip{number}",
            "question_text": QUESTION,
            "multi_choice": NAMES,
            "answer": shown if right else int(letters[shown][turn]),
            "question_relation": "View",
            "question_type": "Which",
            "videos": [{"frames": frames, "video_fps": 2.0}],
        }


def pack_clips(folder: Path, count: int, seed: int, *, right: bool) -> Path:
    """The packed dataset of so many rows, a multiple of 16."""
    return pack_rows(
        folder,
        make_rows(folder, count, seed, right=right),
        source_name="avqa",
        preprocessor_args={"instruction": "", "types": "Which", "require_media": "video"},
        video={"min_pixels": SIDE * SIDE, "max_pixels": SIDE * SIDE},
    )


def pack_rows(folder: Path, rows: Iterator[dict[str, Any]] | list[dict[str, Any]], **keys: Any) -> Path:
    """Packs rows by the functions that the job calls in its workers, without starting any. keys: of the
    configuration."""
    manifest, output = folder / "rows.jsonl", folder / "packed"
    manifest.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config: Mapping[str, Any] = {"manifest": str(manifest), "output": str(output), **keys}
    plan, _ = plan_job(check_config(dict(config), PackConfig))
    storage = open_storage(str(output))
    for partition in plan.partitions:
        files = tuple(plan.files[segment.file] for segment in partition.segments)
        write_partition(
            PartitionTask(
                partition, files, plan.config, plan.fingerprint, storage.location, "bench", False, plan.codes[0]
            )
        )
    merge_job(storage, plan)
    return output
