"""Small datasets with media and text, and everything a loader needs to read them."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

import jobs
from schemas.sample import PackedSample
from schemas.strict import check_config
from tests.train.data.dataset import write_dataset
from tests.train.data.packed import Clip, packed_sample
from train.config import BatchConfig, DataConfig
from train.data.loader import TrainLoader
from train.data.plan_store import PlanStore
from train.data.prepare import make_plans
from train.data.processor import ProcessorAssets, load_assets
from train.data.rank_plan import DataRank
from train.data.sources import OpenSource, open_sources

TOKENIZER = Path(jobs.__file__).parent / "assets" / "tokenizer"


@cache
def omni_assets() -> ProcessorAssets:
    return load_assets(TOKENIZER)


def clip_sample(number: int, rng: np.random.Generator) -> PackedSample:
    """A clip of 2 to 5 small frames, with sound in two of three; an image in every fourth."""
    frames = rng.integers(0, 255, (int(rng.integers(2, 6)), 64, 64, 3), np.uint8)
    sound = rng.integers(-9000, 9000, int(rng.integers(4000, 24000))).astype(np.int16) if number % 3 else None
    images = [rng.integers(0, 255, (64, 96, 3), np.uint8)] if number % 4 == 0 else []
    user = [("video", None), *[("image", None) for _ in images], ("text", f"What is clip {number}?")]
    answer = "It is " + "very " * int(rng.integers(1, 30)) + f"much {number}."
    turns: list[Any] = [["user", *user], ["assistant", ("text", answer)]]
    return packed_sample(turns, [Clip(frames, 2.0, sound)], images=images, key=f"clip{number}")


def write_clips(folder: Path, count: int, seed: int = 0, per_partition: int = 4) -> Path:
    """A packed dataset of `count` clips, one shard per partition."""
    rng = np.random.default_rng(seed)
    return write_dataset(folder, [clip_sample(i, rng) for i in range(count)], per_partition, 64 << 20)


def write_text(path: Path, count: int, first: int = 0) -> Path:
    """JSONL of plain chats, from number `first` on."""
    rows = (
        {
            "id": f"text{i}",
            "messages": [
                {"role": "user", "content": f"Count to {i}."},
                {"role": "assistant", "content": " ".join(map(str, range(i % 40 + 1)))},
            ],
        }
        for i in range(first, first + count)
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def write_even_mix(folder: Path) -> Path:
    """clips/ of 16 clips in 8 shards and text/ of 320 rows in 8 files: alike enough for four lanes."""
    write_clips(folder / "clips", 16, per_partition=2)
    for number in range(8):
        write_text(folder / "text" / f"{number}.jsonl", 40, first=number * 40)
    return folder


def data_config(sources: list[dict[str, Any]], cache_dir: Path, **keys: Any) -> DataConfig:
    defaults: dict[str, Any] = {
        "max_seq_len": 512,
        "lanes": 4,
        "window_rows": 8,
        "cache": {"dir": str(cache_dir)},
        "dataloader": {"num_workers": 0},
    }
    return check_config(defaults | keys | {"sources": sources}, DataConfig)


class Setup:
    """Sources and plans of one configuration; `loader` opens any rank of it."""

    def __init__(self, data: DataConfig, batch: BatchConfig) -> None:
        self.data, self.batch = data, batch
        self.assets = omni_assets()
        self.sources: list[OpenSource] = open_sources(data, self.assets, batch.seed)
        self.plans: PlanStore = make_plans(self.sources, data, batch)

    def loader(self, rank: DataRank | None = None, **data: Any) -> TrainLoader:
        config = self.data.model_copy(update=data)
        return TrainLoader(self.sources, self.plans, config, self.batch, self.assets, rank)


def keys_of(step: Any) -> list[str]:
    """Ids of the rows of a step, in order."""
    return [key for batch in step.micro_batches for key in batch.keys]
