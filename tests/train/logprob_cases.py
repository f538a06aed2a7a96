"""Rows of every kind that a Qwen3-Omni takes, a tiny model, and dumps of its log-probabilities."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from schemas.sample import PackedSample
from schemas.strict import check_config
from tests.train.data.dataset import write_dataset
from tests.train.data.loading import write_text
from tests.train.data.packed import Clip, packed_sample
from train.config import OmniConfig
from train.logprob_compare import LogprobAgreement, compare_tables
from train.logprob_features import compare_features
from train.logprob_read import read_dump
from train.logprobs import DumpOptions, LogprobRun
from train.logprobs_hub import HubLogprobRun

FP32: dict[str, Any] = {"mixed_precision": {"enable": False}}
BF16: dict[str, Any] = {"mixed_precision": {"enable": True}}
MEDIA = ("text", "image", "video", "audio", "audio+video", "audio+image+video")


def media_rows(count: int, seed: int = 0) -> list[PackedSample]:
    """`count` rows of each kind in MEDIA but text. Sounds last 0.3 to 5 s, shorter than a second and longer than the
    2 s that the tiny tower attends within."""
    rng = np.random.default_rng(seed)
    return [make(rng, number) for number in range(count) for make in (_image, _video, _sound, _spoken, _everything)]


def _pictures(rng: np.random.Generator, count: int, height: int = 64, width: int = 64) -> np.ndarray:
    return rng.integers(0, 255, (count, height, width, 3), np.uint8)


def _noise(rng: np.random.Generator) -> np.ndarray:
    return rng.integers(-9000, 9000, int(rng.integers(4800, 80000))).astype(np.int16)


def _turns(rng: np.random.Generator, what: list[Any], number: int) -> list[Any]:
    answer = "It is " + "very " * int(rng.integers(1, 12)) + f"much {number}."
    return [["user", *what, ("text", f"What is {number}?")], ["assistant", ("text", answer)]]


def _image(rng: np.random.Generator, number: int) -> PackedSample:
    images = [_pictures(rng, 1, 64, 96)[0], _pictures(rng, 1, 128, 64)[0]][: 1 + number % 2]
    turns = _turns(rng, [("image", None) for _ in images], number)
    return packed_sample(turns, images=images, key=f"image{number}")


def _video(rng: np.random.Generator, number: int) -> PackedSample:
    clip = Clip(_pictures(rng, int(rng.integers(2, 9))), 2.0)
    return packed_sample(_turns(rng, [("video", None)], number), [clip], key=f"video{number}")


def _sound(rng: np.random.Generator, number: int) -> PackedSample:
    return packed_sample(_turns(rng, [("audio", None)], number), sounds=[_noise(rng)], key=f"sound{number}")


def _spoken(rng: np.random.Generator, number: int) -> PackedSample:
    clip = Clip(_pictures(rng, int(rng.integers(2, 7))), 1.5, _noise(rng))
    return packed_sample(_turns(rng, [("video", None)], number), [clip], key=f"spoken{number}")


def _everything(rng: np.random.Generator, number: int) -> PackedSample:
    clips = [Clip(_pictures(rng, 4), 2.0, _noise(rng)), Clip(_pictures(rng, 3), 1.0)]
    what = [("text", "See"), ("video", None), ("image", None), ("audio", None), ("video", None)]
    images, sounds = [_pictures(rng, 1)[0]], [_noise(rng)]
    return packed_sample(_turns(rng, what, number), clips, sounds, images, key=f"all{number}")


def write_rows(folder: Path, count: int = 2) -> list[dict[str, Any]]:
    """`count` rows of each kind with media and as many texts, as sources."""
    write_dataset(folder / "media", media_rows(count), 3, 64 << 20)
    write_text(folder / "text.jsonl", 2 * count)
    return [
        {"path": str(folder / "media"), "name": "media"},
        {"path": str(folder / "text.jsonl"), "name": "text", "source_name": "openai_messages"},
    ]


def dump_config(
    model: Path, sources: list[dict[str, Any]], scratch: Path, *, data: dict[str, Any] | None = None, **train: Any
) -> OmniConfig:
    """In float32 unless told. scratch: folder of caches and of what training writes."""
    defaults: dict[str, Any] = {
        "global_batch_size": 4,
        "max_steps": 3,
        "optimizer": {"lr": 1e-3, "lr_decay_style": "constant"},
        "accelerator": {"fsdp_config": FP32},
        "checkpoint": {"output_dir": str(scratch / "output"), "save_steps": 0, "save_hf_weights": False},
    }
    shared = {
        "sources": sources,
        "max_seq_len": 512,
        "lanes": 4,
        "cache": {"dir": str(scratch / "cache")},
        "dataloader": {"num_workers": 0},
    }
    values = {"model": {"model_path": str(model)}, "data": shared | (data or {}), "train": defaults | train}
    return check_config(values, OmniConfig)


def dumped(config: OmniConfig, out: Path, *, hub: bool = False, **options: Any) -> Path:
    """Makes a dump, of all tokens unless told."""
    made = DumpOptions(out, **{"tokens": "all", **options})
    (HubLogprobRun if hub else LogprobRun)(config, made).run()
    return out


def agreement(first: Path, second: Path) -> LogprobAgreement:
    """Of two dumps, features included where both have them."""
    one, other = read_dump(first), read_dump(second)
    return compare_tables(one, other, compare_features(one.features, other.features))
