"""The loader against what it replaces: an epoch from packed shards, from the mp4 files, and from packed frames through
the Hugging Face processor. CPU seconds of one core, in one run, interleaved.

    python -m jobs.bench.loader [--quick] [--json FILE]

The clips are one fixed set: the demo's film at 1280x720, looped to several lengths, each with sound and a short chat;
2 frames a second of at most 672x384 pixels. Ours is read, checked, laid out, decoded and packed to sequences; patches
and log-mel run on the device in training, so they are reported apart (here the device is the same core).
"""

from __future__ import annotations

import argparse
import io
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import av
import numpy as np
import simplejpeg
import soundfile
import soxr
import torch
from qwen_omni_utils.v2_5.vision_process import fetch_video
from transformers import AutoProcessor

import jobs
from jobs.bench.claims import Claim, at_least, report
from jobs.bench.clips import loop_film, make_film
from pack.config import PackConfig
from pack.job import run_job
from pack.reader import PackedDataset
from schemas.sample import PackedSample
from schemas.strict import check_config
from train.config import BatchConfig, DataConfig
from train.data.device import make_features
from train.data.loader import TrainLoader
from train.data.prepare import make_plans
from train.data.processor import ProcessorAssets, load_assets
from train.data.rank_plan import Position
from train.data.reader import BatchRequest
from train.data.sources import open_sources

TOKENIZER = Path(jobs.__file__).parent / "assets" / "tokenizer"
MAX_PIXELS, MIN_PIXELS, FPS = 672 * 384, 64 * 64, 2.0
LENGTHS_S, QUICK_LENGTHS_S = (6, 10, 15, 20, 30, 45), (6, 10)
QUESTION = "What happens in this clip, and what is heard?"
ANSWER = "A large rabbit comes out of its burrow in the morning, stretches itself and looks at a butterfly."
GOAL_ONLINE, GOAL_PROCESSOR, GOAL_TOKENS = 40.0, 3.0, 10_000.0


@dataclass(frozen=True)
class Setup:
    """clips: the mp4 files; samples: packed, in the same order; requests: of one epoch of ours."""

    clips: list[Path]
    samples: list[PackedSample]
    loader: TrainLoader
    requests: list[BatchRequest]
    assets: ProcessorAssets
    processor: Any


def set_up(folder: Path, lengths_s: tuple[int, ...]) -> Setup:
    """Makes and packs the clips."""
    film = make_film(folder / "film.mp4", 1280, 720, 3_500_000)
    clips = [loop_film(film, folder / f"clip{seconds:03d}.mp4", seconds) for seconds in lengths_s]
    chat = [{"from": "human", "value": f"<video>\n{QUESTION}"}, {"from": "gpt", "value": ANSWER}]
    manifest = folder / "clips.jsonl"
    rows = ({"id": clip.stem, "videos": [str(clip)], "conversations": chat} for clip in clips)
    manifest.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    video = {"fps": FPS, "min_pixels": MIN_PIXELS, "max_pixels": MAX_PIXELS}
    packed = folder / "packed"
    job = {
        "manifest": str(manifest),
        "output": str(packed),
        "executor": {"kind": "local", "workers": 1},
        "video": video,
    }
    run_job(check_config(job, PackConfig))
    assets = load_assets(TOKENIZER)
    data = check_config(
        {
            "sources": [{"path": str(packed)}],
            "max_seq_len": 32768,
            "cache": {"dir": str(folder / "cache")},
            "dataloader": {"num_workers": 0},
        },
        DataConfig,
    )
    batch = BatchConfig(global_batch_size=1)
    sources = open_sources(data, assets, batch.seed)
    plans = make_plans(sources, data, batch)
    loader = TrainLoader(sources, plans, data, batch, assets)
    requests = list(loader.mine.requests(Position(), plans.steps(0)))
    samples = list(PackedDataset(str(packed)))
    return Setup(clips, samples, loader, requests, assets, AutoProcessor.from_pretrained(str(TOKENIZER)))


def ours(setup: Setup) -> tuple[float, float]:
    """(CPU s of the loader's worker processes, CPU s of the device) for an epoch. Each batch is let go before the next
    is made, as in training."""
    made = on_device = 0.0
    for request in setup.requests:
        start = time.process_time()
        batch = setup.loader.maker.make(request)
        middle = time.process_time()
        make_features(batch, setup.assets)
        made += middle - start
        on_device += time.process_time() - middle
    return made, on_device


def count_tokens(setup: Setup) -> int:
    """Video and audio tokens of an epoch."""
    batches = (setup.loader.maker.make(request) for request in setup.requests)
    return sum(batch.modality_tokens["video"] + batch.modality_tokens["audio"] for batch in batches)


def online(setup: Setup) -> None:
    """An epoch from the mp4 files, as the model's own utilities and processor read them. (Their sound goes through the
    ffmpeg program; here PyAV and soxr decode it, which is cheaper.)"""
    for clip in setup.clips:
        limits = {"fps": FPS, "min_pixels": MIN_PIXELS, "max_pixels": MAX_PIXELS}
        frames, fps = fetch_video({"video": str(clip), **limits}, image_patch_size=16, return_video_sample_fps=True)
        process(setup.processor, frames, float(fps), decode_sound(clip))


def through_processor(setup: Setup) -> None:
    """An epoch from the packed samples, decoded as ours are, then through the Hugging Face processor."""
    for sample in setup.samples:
        video = sample.videos[0]
        frames = np.stack([simplejpeg.decode_jpeg(blob) for blob in video.frames])
        sound, _ = soundfile.read(io.BytesIO(video.audio or b""), dtype="float32")
        pictures = torch.from_numpy(frames).permute(0, 3, 1, 2)
        process(setup.processor, pictures, sample.meta.videos[0].video_fps, sound)


def process(processor: Any, frames: torch.Tensor, fps: float, sound: np.ndarray) -> Any:
    """Ids, patches and log-mel of one clip; frames: [n, 3, height, width], already of the model's size."""
    content = [{"type": "video", "video": "clip"}, {"type": "text", "text": QUESTION}]
    turns = [
        {"role": "user", "content": content},
        {"role": "assistant", "content": [{"type": "text", "text": ANSWER}]},
    ]
    text = processor.apply_chat_template(turns, tokenize=False)
    return processor(
        text=[text],
        videos=[frames],
        audio=[sound],
        videos_kwargs={"do_resize": False, "do_sample_frames": False, "fps": fps},
        audio_kwargs={"sampling_rate": 16000},
        load_audio_from_video=True,
        audio_from_video_indices=[0],
        return_tensors="pt",
    )


def decode_sound(clip: Path) -> np.ndarray:
    """float32 [n] at 16 kHz, one channel."""
    container: Any = av.open(str(clip))
    with container:
        stream = container.streams.audio[0]
        parts = [frame.to_ndarray().mean(0) for frame in container.decode(stream)]
        sound: np.ndarray = soxr.resample(np.concatenate(parts), stream.rate, 16000)
    return sound.astype(np.float32)


def cpu_seconds(run: Callable[[], Any]) -> float:
    start = time.process_time()
    run()
    return time.process_time() - start


def measure(setup: Setup, repeats: int) -> list[Claim]:
    """All claims, medians of `repeats` rounds."""
    tokens = count_tokens(setup)
    spent: dict[str, list[float]] = {"ours": [], "device": [], "processor": [], "online": []}
    for number in range(repeats + 1):
        made, on_device = ours(setup)
        round_ = {
            "ours": made,
            "device": on_device,
            "processor": cpu_seconds(partial(through_processor, setup)),
            "online": cpu_seconds(partial(online, setup)),
        }
        for name, value in round_.items() if number else ():  # the first round warms up
            spent[name].append(value)
    cost = {name: statistics.median(values) for name, values in spent.items()}
    seconds = sum(sample.meta.videos[0].duration_s for sample in setup.samples)
    with_device = cost["ours"] + cost["device"]
    of = (
        f"{len(setup.clips)} clips, {seconds:.0f} s of 720p25 with sound, {tokens:,} A/V tokens, 1 core; CPU s: ours "
        f"{cost['ours']:.3f}, its device work {cost['device']:.3f}, packed + HF processor {cost['processor']:.3f}, "
        f"mp4 + HF processor {cost['online']:.3f}; median of {repeats}"
    )
    return [
        at_least(
            "epoch from mp4 with the HF processor / packed, CPU work",
            cost["online"] / cost["ours"],
            GOAL_ONLINE,
            "x",
            of,
        ),
        Claim("the same, with the device work on the CPU", round(cost["online"] / with_device, 2), "x", "", None, of),
        at_least(
            "epoch packed with the HF processor / ours, CPU work",
            cost["processor"] / cost["ours"],
            GOAL_PROCESSOR,
            "x",
            of,
        ),
        Claim(
            "the same, with the device work on the CPU", round(cost["processor"] / with_device, 2), "x", "", None, of
        ),
        at_least("A/V tokens per second and core, CPU work", tokens / cost["ours"], GOAL_TOKENS, "tokens/s", of),
        Claim("the same, with the device work on the CPU", round(tokens / with_device), "tokens/s", "", None, of),
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="smaller sizes, under 45 s on 2 cores")
    parser.add_argument("--json", type=Path, help="write the claims there")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    with tempfile.TemporaryDirectory() as folder:
        setup = set_up(Path(folder), QUICK_LENGTHS_S if arguments.quick else LENGTHS_S)
        claims = measure(setup, 1 if arguments.quick else 5)
        return 0 if report("loader", claims, arguments.json) else 1


if __name__ == "__main__":
    sys.exit(main())
