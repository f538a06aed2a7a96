"""Packed clips with sound, made without any film: pictures and sounds are drawn, encoded as JPEG and WAV, and written
by the writer of packing, partition by partition, in all cores."""

from __future__ import annotations

import json
import math
import os
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import cache
from importlib.metadata import version
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from jobs.bench.headline_setup import ASSETS, DOCUMENTS, FPS, QUICK_DOCUMENTS, SAMPLE_RATE, Document
from pack.config import PackConfig
from pack.cost import CostModel
from pack.fingerprint import fingerprint, preprocessor_code
from pack.media.encode import encode_picture, encode_sound
from pack.merge import merge
from pack.partition import write_partition
from pack.plan import make_plan
from pack.plan_file import save_plan
from pack.row import MediaLoader
from pack.storage import open_storage
from pack.task import PartitionTask
from schemas.registry import load_preprocessors
from schemas.sample import AudioMeta, Origin, PackedVideo, VideoMeta
from schemas.sources import FileSource
from schemas.strict import check_config
from train.data.lengths import load_lengths
from train.data.processor import load_assets

CODEC = "wav"
QUALITY = 95
QUESTION = "What happens in this clip, and what is heard?"
WORD = " and then"  # what answers are filled up with
PARTITIONS = 32
PROBED = 64  # words
NOISE = 6.0  # of the pictures, in levels: about the bytes of a real picture of this quality
VERSIONS = {name: version(name) for name in ("numpy", "simplejpeg", "soundfile")}


def make_data(folder: Path, name: str, *, quick: bool) -> dict[str, float]:
    """Packs the documents of a kind, unless they are there; figures of them, as JSON has them."""
    done, document = folder / name / "headline.json", (QUICK_DOCUMENTS if quick else DOCUMENTS)[name]
    if done.exists():
        found: dict[str, float] = json.loads(done.read_text())
        return found
    words = words_of(folder / "probe", document)
    pack(folder / name, document, words, alone=quick)
    lengths = load_lengths(str(folder / name), load_assets(ASSETS / "tokenizer"), cache=str(folder / "lengths"))
    size = sum(path.stat().st_size for path in (folder / name).rglob("*.mds"))
    mean = {part: float(getattr(lengths, part).mean()) for part in ("total", "video", "audio", "text", "labels")}
    found = {"documents": float(len(lengths.total)), "gigabytes": size / 1e9, **mean}
    done.write_text(json.dumps(found))
    return found


def words_of(folder: Path, document: Document) -> int:
    """How many of `WORD` bring a document to its tokens, from small ones without any and with some."""
    assets = load_assets(ASSETS / "tokenizer")
    small = replace(QUICK_DOCUMENTS["4k"], count=1)
    found = []
    for words in (0, PROBED):
        place = folder / str(words)
        if not (place / "index.json").exists():
            pack(place, small, words, alone=True)
        lengths = load_lengths(str(place), assets, cache=str(folder / "lengths"), workers=1)
        found.append(int(lengths.total[0]) - small.media_tokens)
    words = int((document.tokens - document.media_tokens - found[0]) * PROBED / (found[1] - found[0]))
    if words < 0:
        raise ValueError(f"{document} has more than its tokens without a word")
    return words


def pack(folder: Path, document: Document, words: int, *, alone: bool) -> None:
    """count documents, in partitions of a few. alone: in this process."""
    folder.mkdir(parents=True, exist_ok=True)
    chat = [
        {"from": "human", "value": f"<video>\n{QUESTION}"},
        {"from": "gpt", "value": "A clip begins" + WORD * words + "."},
    ]
    manifest = folder.parent / f"{folder.name}.jsonl"
    clip = f"{document.frames}x{document.height}x{document.width}"
    with manifest.open("w") as file:
        for number in range(document.count):
            videos = [{"path": f"/drawn/{clip}-{number}.mp4", "duration_s": document.seconds}]
            file.write(json.dumps({"id": f"{clip}-{number}", "videos": videos, "conversations": chat}) + "\n")
    values: dict[str, Any] = {
        "manifest": str(manifest),
        "output": str(folder),
        "video": {"fps": FPS, "quality": QUALITY},
        "audio": {"codec": CODEC},
        "shard": {"size_mb": 512},
        "rows": {"max_memory_gb": 24, "timeout_s": 300},
    }
    config = with_partitions(check_config(values, PackConfig), document.count)
    load_preprocessors(config.imports)
    code = preprocessor_code(config.source_name)
    mark = fingerprint(config, VERSIONS, code)
    plan, _ = make_plan(config, VERSIONS, mark, codes=(code,))
    storage = open_storage(config.output)
    save_plan(storage, plan)
    tasks = [
        PartitionTask(part, tuple(plan.files[s.file] for s in part.segments), plan.config, mark, str(folder), "bench",
                      code=code)
        for part in plan.partitions
    ]  # fmt: skip
    workers = min(len(tasks), len(os.sched_getaffinity(0)))
    if alone or workers == 1:
        receipts = [pack_one(task) for task in tasks]
    else:
        context = get_context("forkserver")
        context.set_forkserver_preload([__name__])  # imported once for all
        with ProcessPoolExecutor(workers, mp_context=context) as pool:
            receipts = list(pool.map(pack_one, tasks))
    if lost := sum(rejected for _, rejected in receipts):
        raise RuntimeError(f"{lost} of {document.count} drawn documents were rejected; see {folder}/parts/*/rejects*")
    merge(storage, plan)


def with_partitions(config: PackConfig, rows: int) -> PackConfig:
    """So many that all cores have some, of at least a row."""
    line = Path(str(config.manifest)).read_text().splitlines()[0]
    target = CostModel(config)(json.loads(line)) * max(1, math.ceil(rows / PARTITIONS)) / 2**20
    return config.model_copy(update={"partition": config.partition.model_copy(update={"target_mb": target})})


def pack_one(task: PartitionTask) -> tuple[int, int]:
    """(rows, rejected ones) of a partition."""
    receipt = write_partition(task, MediaLoader(draw_video, nothing, nothing, one_span, VERSIONS))
    return receipt.rows, receipt.rejected


def draw_video(source: Any, config: PackConfig) -> tuple[PackedVideo, VideoMeta]:
    """Of a name `FRAMESxHEIGHTxWIDTH-NUMBER.mp4`: noisy shapes that drift, and a chord with noise."""
    assert isinstance(source, FileSource)
    size, number = Path(source.uri).stem.split("-")
    frames, height, width = (int(part) for part in size.split("x"))
    still = backdrop(height, width)
    pictures = []
    for k in range(frames):
        step = 7 * k + 13 * int(number)
        moved = np.roll(still, (step % height, (3 * step) % width), (0, 1))
        pictures.append(encode_picture(moved, config.video.codec, config.video.quality))
    seconds = frames / FPS
    sound = draw_sound(seconds, int(number))
    times = [round(k / FPS, 6) for k in range(frames)]
    origin = Origin(uri=source.uri, container="drawn", codec="drawn", width=width, height=height, fps=FPS)
    audio = AudioMeta(
        codec=config.audio.codec, sample_rate=SAMPLE_RATE, num_samples=len(sound), duration_s=len(sound) / SAMPLE_RATE,
        origin=origin,
    )  # fmt: skip
    meta = VideoMeta(
        num_frames=frames, width=width, height=height, codec=config.video.codec, video_fps=FPS, frame_times_s=times,
        shown_times_s=times, duration_s=seconds, sampling="time_grid", origin=origin, audio=audio,
    )  # fmt: skip
    return PackedVideo(pictures, encode_sound(sound, config.audio.codec, SAMPLE_RATE)), meta


@cache
def backdrop(height: int, width: int) -> NDArray[np.uint8]:
    """Shapes with noise, [height, width, 3]."""
    rng = np.random.default_rng(0)
    y, x = np.mgrid[0:height, 0:width].astype(np.float32)
    shape = np.zeros((height, width, 3), np.float32)
    for _ in range(12):  # whole waves, so that they may be rolled
        waves, colour = rng.integers(1, 9, 2), rng.uniform(-25, 25, 3)
        angle = 2 * np.pi * (waves[0] * y / height + waves[1] * x / width)
        shape += (np.sin(angle)[..., None] * colour).astype(np.float32)
    noisy: NDArray[np.uint8] = np.clip(shape + 128 + rng.normal(0, NOISE, shape.shape), 0, 255).astype(np.uint8)
    return noisy


def draw_sound(seconds: float, number: int) -> NDArray[np.int16]:
    rng = np.random.default_rng(number)
    t = np.arange(int(seconds * SAMPLE_RATE)) / SAMPLE_RATE
    tones = sum(np.sin(2 * np.pi * f * t) for f in rng.uniform(100, 1000, 3))
    sound: NDArray[np.int16] = (2000 * tones + rng.normal(0, 300, len(t))).astype(np.int16)
    return sound


def nothing(source: Any, config: PackConfig) -> Any:
    raise ValueError("drawn documents have clips alone")


def one_span(source: Any, config: PackConfig) -> list[Any]:
    return [source]
