"""A media loader without codecs, and preprocessors that misbehave, for the tests of the job."""

from __future__ import annotations

import hashlib
import io
import json
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import soundfile
from PIL import Image

from pack.config import PackConfig
from pack.fingerprint import fingerprint
from pack.plan import make_plan
from pack.plan_file import save_plan
from pack.row import MediaLoader
from pack.storage import open_storage
from schemas.conversation import Turn
from schemas.errors import RowError
from schemas.registry import PREPROCESSOR_REGISTRY
from schemas.sample import AudioMeta, ImageMeta, Origin, PackedVideo, VideoMeta
from schemas.sources import FileSource, Source

RATE = 16000
VERSIONS = {"omniloom": "test", "fake": "1"}


def _seconds(uri: str) -> float:
    """The fake file's duration is its content."""
    path = Path(uri)
    if not path.exists():
        raise RowError("missing_file", f"{uri} does not exist", "fetch")
    return float(path.read_text())


def load_video(source: Source, config: PackConfig) -> tuple[PackedVideo, VideoMeta]:
    assert isinstance(source, FileSource)
    start = source.start_s or 0.0
    seconds = (source.end_s if source.end_s is not None else _seconds(source.uri)) - start
    if seconds <= 0:
        raise RowError("empty_span", f"{source.uri}: nothing at {start} s", "video")
    seed = int.from_bytes(hashlib.sha256(f"{source.uri} {start}".encode()).digest()[:4])
    rng = np.random.default_rng(seed)
    count = max(1, int(seconds * config.video.fps))
    frames = [_jpeg(rng.integers(0, 255, (16, 24, 3), np.uint8)) for _ in range(count)]
    origin = Origin(uri=source.uri)
    sound, audio = _sound(rng, seconds, origin)
    times = [k / config.video.fps for k in range(count)]
    meta = VideoMeta(
        num_frames=count,
        width=24,
        height=16,
        codec="jpeg",
        video_fps=config.video.fps,
        frame_times_s=times,
        shown_times_s=times,
        duration_s=seconds,
        sampling="time_grid",
        origin=origin,
        audio=audio,
    )
    return PackedVideo(frames, sound), meta


def _sound(rng: np.random.Generator, seconds: float, origin: Origin) -> tuple[bytes, AudioMeta]:
    samples = rng.uniform(-0.5, 0.5, int(seconds * RATE)).astype(np.float32)
    file = io.BytesIO()
    soundfile.write(file, samples, RATE, format="WAV", subtype="PCM_16")
    duration = len(samples) / RATE
    return file.getvalue(), AudioMeta(
        codec="wav", sample_rate=RATE, num_samples=len(samples), duration_s=duration, origin=origin
    )


def _jpeg(pixels: np.ndarray) -> bytes:
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "JPEG", quality=95)
    return file.getvalue()


def load_audio(source: Any, _config: PackConfig) -> tuple[bytes, AudioMeta]:
    return _sound(np.random.default_rng(0), _seconds(source.uri), Origin(uri=source.uri))


def load_image(source: Any, _config: PackConfig) -> tuple[bytes, ImageMeta]:
    data = _jpeg(np.full((16, 24, 3), 7, np.uint8))
    return data, ImageMeta(width=24, height=16, codec="jpeg", origin=Origin(uri=source.uri))


def split_spans(source: Source, config: PackConfig) -> list[Source]:
    assert isinstance(source, FileSource)
    step = config.video.split_s
    seconds = _seconds(source.uri)
    if step is None or seconds <= step:
        return [source]
    cuts = np.arange(0, seconds, step).tolist()
    return [FileSource(source.uri, a, min(a + step, seconds)) for a in cuts]


MEDIA = MediaLoader(load_video, load_audio, load_image, split_spans, VERSIONS)


def _markers(conversations: Any, num_videos: int) -> list[Turn]:
    text = conversations if isinstance(conversations, str) else conversations[0]["value"]
    media = [("video", None) for _ in range(num_videos)]
    return [["user", *media, ("text", text)], ["assistant", ("text", "yes")]]


@PREPROCESSOR_REGISTRY.register("test_plain")
def plain(conversations: Any, *, num_videos: int, metadata: dict, rng: Any, **_: Any) -> list[Turn]:
    """A question with all videos before it; keeps a draw of the row's generator."""
    metadata["draw"] = rng.random()
    return _markers(conversations, num_videos)


def _meet(place: Path, who: str, whom: str) -> None:
    """Waits until the other row is being packed, too."""
    (place / who).touch()
    end = time.monotonic() + 60
    while not (place / whom).exists():
        if time.monotonic() > end:
            raise TimeoutError(f"{whom} did not come")
        time.sleep(0.02)


@PREPROCESSOR_REGISTRY.register("test_poison")
def poison(conversations: Any, *, num_videos: int, row: dict, **_: Any) -> list[Turn]:
    """Does what the row's `do` says."""
    match row.get("do"):
        case "exit":
            os._exit(7)
        case "segv":
            os.kill(os.getpid(), 11)
        case "sleep":
            time.sleep(3600)
        case "spin":
            sum(range(10**12))  # never gives the interpreter lock up
        case "eat":
            hoard = []
            while True:
                hoard.append(np.ones(4 << 20))
        case "raise":
            raise ZeroDivisionError("one over nothing")
        case "quit":
            raise SystemExit(3)
        case "slow":
            time.sleep(0.02)
        case "meet":
            _meet(Path(row["at"]), row["who"], row["whom"])
    return _markers(conversations, num_videos)


def write_clips(folder: Path, count: int, seconds: float = 1.0) -> None:
    """Fake clips 0.txt, 1.txt, ..."""
    folder.mkdir(parents=True, exist_ok=True)
    for i in range(count):
        (folder / f"{i}.txt").write_text(str(seconds))


def row(i: int, **fields: Any) -> dict[str, Any]:
    """A row with one fake clip, which the cost model takes for 100 kB a second."""
    return {"id": f"r{i}", "videos": [{"path": f"{i}.txt", "duration_s": 1.0}], "conversations": f"q{i}", **fields}


def write_manifest(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(r) + "\n" for r in rows))
    return path


def job_config(manifest: Path, output: Path | str, **changes: Any) -> PackConfig:
    """A local job of small partitions over fake media."""
    values: dict[str, Any] = {
        "manifest": str(manifest),
        "output": str(output),
        "source_name": "test_poison",
        "imports": ["tests.pack.job_fakes"],
        "executor": {"kind": "local", "workers": 2},
        "partition": {"target_mb": 2},
        "rows": {"max_bad_ratio": 1.0},
    }
    return PackConfig.model_validate(values | changes)


def tasks_of(config: PackConfig, job: str = "job", isolated: bool = False) -> list[Any]:
    """The tasks of a freshly planned and saved job."""
    from pack.partition import PartitionTask  # noqa: PLC0415  # imports torch: seconds, which spawned rows need not wait

    mark = fingerprint(config, VERSIONS)
    plan, _ = make_plan(config, VERSIONS, mark)
    save_plan(open_storage(config.output), plan)
    return [
        PartitionTask(p, tuple(plan.files[s.file] for s in p.segments), config, mark, config.output, job, isolated)
        for p in plan.partitions
    ]


def tree_bytes(folder: Path, suffixes: tuple[str, ...] = (".mds", ".parquet")) -> dict[str, bytes]:
    """Relative name -> content of the files that must not depend on how a job ran."""
    return {
        str(p.relative_to(folder)): p.read_bytes()
        for p in sorted(folder.rglob("*"))
        if p.is_file() and p.name.endswith(suffixes)
    }
