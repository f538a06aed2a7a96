"""Packing against bare decoding, and reading packed samples against decoding the clips again: ratios of one run.

python -m jobs.bench.pack [--quick] [--json FILE] [--clip FILE]
"""

from __future__ import annotations

import argparse
import io
import multiprocessing
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import av
import numpy as np
import simplejpeg
import soundfile
import soxr
import torch
from qwen_omni_utils.v2_5.vision_process import fetch_video

from jobs.bench.claims import Claim, at_least, at_most, report
from jobs.bench.clips import loop_film, make_film
from pack.config import PackConfig, VideoConfig
from pack.media.load import load_video, split_spans
from pack.media.picture import resize, to_rgb
from schemas.sources import FileSource


def pack_config(**video: Any) -> PackConfig:
    return PackConfig(manifest="none", output="none", video=VideoConfig(**video))


SMALL = {"max_pixels": 672 * 384, "min_pixels": 64 * 64}


def decode_bare(path: Path) -> None:
    """Every picture and sound frame with PyAV, one thread, nothing done with them."""
    container: Any = av.open(str(path))
    with container:
        streams = [container.streams.video[0], container.streams.audio[0]]
        for stream in streams:
            stream.codec_context.thread_count = 1
        for packet in container.demux(streams):
            packet.decode()


def pack_clip(path: Path, **video: Any) -> None:
    load_video(FileSource(str(path)), pack_config(**video))


def cpu_seconds(run: Callable[[], Any]) -> float:
    start = time.process_time()
    run()
    return time.process_time() - start


def decoding_cost(path: Path, repeats: int) -> list[Claim]:
    """CPU seconds of packing over those of bare decoding, interleaved, medians."""
    runs = {
        "bare": lambda: decode_bare(path),
        "fast": lambda: pack_clip(path, resize="fast", **SMALL),
        "model": lambda: pack_clip(path, resize="model", **SMALL),
    }
    spent: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(repeats):
        for name, run in runs.items():
            spent[name].append(cpu_seconds(run))
    bare = statistics.median(spent["bare"])
    conditions = f"{path.name}, 2 fps, at most 672x384 pixels, JPEG q95; bare decoding {bare:.2f} s; {repeats} repeats"
    claims = []
    for how, bound in (("fast", 1.35), ("model", 1.5)):
        ratio = statistics.median(spent[how]) / bare
        claims.append(at_most(f"CPU of packing / bare decoding, resize: {how}", ratio, bound, "x", conditions))
    return claims


def _pack_many(path: str, count: int) -> float:
    torch.set_num_threads(1)
    pack_clip(Path(path), **SMALL)
    return statistics.fmean(cpu_seconds(lambda: pack_clip(Path(path), **SMALL)) for _ in range(count))


def worker_scaling(path: Path, count: int) -> Claim:
    """CPU seconds per clip with two processes at once over those with one."""
    context = multiprocessing.get_context("spawn")
    with context.Pool(2) as pool:
        alone = pool.apply(_pack_many, (str(path), count))
        both = pool.starmap(_pack_many, [(str(path), count)] * 2)
    return at_most("CPU per clip, two workers / one", max(both) / alone, 1.10, "x", f"{path.name}, {count} clips each")


def _peak_mb(kind: str, path: str, video: dict[str, Any]) -> float:
    """Peak resident memory above the idle worker (everything imported, nothing packed yet), in MB."""
    torch.set_num_threads(1)
    idle = _high_water_mb()
    config = pack_config(**video)
    if kind == "split":
        for span in split_spans(FileSource(path), config):
            load_video(span, config)
    else:
        load_video(FileSource(path), config)
    return _high_water_mb() - idle


def _high_water_mb() -> float:
    """The peak resident memory of this process. (ru_maxrss also knows that of the process it was forked from.)"""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) / 1024


def memory(kind: str, long: Path, bound_mb: float, what: str, **video: Any) -> Claim:
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        peak = pool.apply(_peak_mb, (kind, str(long), video))
    return at_most(f"peak memory above idle, {what}", peak, bound_mb, "MB", f"{long.name}, {video}")


def decode_online(path: Path, width: int, height: int) -> None:
    """What a loader without packing does at least: all pictures decoded, those of the grid resized, sound at 16 kHz."""
    shown: list[Any] = []
    sound: list[Any] = []
    next_s = 0.0
    container: Any = av.open(str(path))
    with container:
        streams = [container.streams.video[0], container.streams.audio[0]]
        for stream in streams:
            stream.codec_context.thread_count = 1
        for frame in container.decode(streams):
            if isinstance(frame, av.AudioFrame):
                sound.append(frame.to_ndarray().mean(0))
            elif frame.time >= next_s:
                shown.append(resize(to_rgb(frame, frame.width, frame.height), width, height))
                next_s += 0.5
        soxr.resample(np.concatenate(sound), streams[1].rate, 16000)


def decode_with_qwen_utils(path: Path) -> None:
    """The online path of the model's own utilities; its sound needs the ffmpeg program and is left out."""
    pixels = SMALL["max_pixels"]
    fetch_video({"video": str(path), "fps": 2.0, "max_pixels": pixels, "min_pixels": 4096}, image_patch_size=16)


def reading(path: Path, repeats: int) -> list[Claim]:
    """CPU seconds from a clip to arrays of its frames and sound, over those from its packed sample."""
    packed, meta = load_video(FileSource(str(path)), pack_config(**SMALL))

    def read() -> None:
        for blob in packed.frames:
            simplejpeg.decode_jpeg(blob)
        assert packed.audio is not None
        soundfile.read(io.BytesIO(packed.audio), dtype="float32")

    def median(run: Callable[[], Any]) -> float:
        return statistics.median(cpu_seconds(run) for _ in range(repeats))

    offline = median(read)
    conditions = f"{path.name}, {len(packed.frames)} frames of {meta.width}x{meta.height} and sound; {repeats} repeats"
    ours = median(lambda: decode_online(path, meta.width, meta.height)) / offline
    theirs = median(lambda: decode_with_qwen_utils(path)) / offline
    return [
        at_least("reading packed / qwen-omni-utils on the clip", theirs, 40, "x", conditions + ", its sound left out"),
        Claim("reading packed / PyAV, 1 thread, on the clip", round(ours, 2), "x", "", None, conditions),
    ]


GROUPS = ("cpu", "reading", "memory")


def measure(here: Path, groups: list[str], quick: bool, given: Path | None) -> list[Claim]:
    """All claims of these groups; clips are made in the folder `here`."""
    claims: list[Claim] = []
    if {"cpu", "reading"} & set(groups):
        film = make_film(here / "film720.mp4", 1280, 720, 3_500_000)
        clip = given or loop_film(film, here / "720p25.mp4", 10 if quick else 60)
        if "cpu" in groups:
            claims += decoding_cost(clip, 2 if quick else 5)
            claims.append(worker_scaling(clip, 1 if quick else 3))
        if "reading" in groups:
            claims += reading(clip, 2 if quick else 5)
    if "memory" in groups:
        full = make_film(here / "film1080.mp4", 1920, 1080, 6_000_000)
        minutes = 1 if quick else 10
        long = loop_film(full, here / f"1080p25_{minutes}min.mp4", 60 * minutes)
        claims.append(memory("whole", long, 600, f"{minutes}-minute 1080p clip"))
        if not quick:
            small = make_film(here / "film360.mp4", 640, 360, 700_000)
            hours = loop_film(small, here / "360p25_2h.mp4", 7200)
            claims.append(memory("whole", hours, 3072, "2-hour clip, max_tokens", max_tokens=128_000))
            claims.append(memory("split", hours, 3072, "2-hour clip, split_s", split_s=60.0))
    return claims


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="smaller sizes, under 45 s on 2 cores")
    parser.add_argument("--json", type=Path, help="write the claims there")
    parser.add_argument("--clip", type=Path, help="a 720p clip with sound to use instead of the looped demo film")
    parser.add_argument("--only", choices=GROUPS, action="append", help="some of the measurements")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        claims = measure(Path(folder), arguments.only or list(GROUPS), arguments.quick, arguments.clip)
        return 0 if report("pack", claims, arguments.json) else 1


if __name__ == "__main__":
    sys.exit(main())
