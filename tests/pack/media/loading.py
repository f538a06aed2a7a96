"""Short hands for media tests: load a file, decode what came out, compare with plain decoding."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import av
import numpy as np
import soundfile
from PIL import Image

from pack.config import PackConfig
from pack.media.load import load_audio, load_video
from schemas.sample import AudioMeta, VideoMeta
from schemas.sources import FileSource
from tests.media_factory import time_shown


def config(rows: dict[str, Any] | None = None, audio: dict[str, Any] | None = None, **video: Any) -> PackConfig:
    """A configuration that keeps sizes and stores PNG, so that pixels can be compared."""
    video = {"resize": "none", "min_frames": 1, "codec": "png", **video}
    return PackConfig(manifest="m.jsonl", output="out", video=video, rows=rows or {}, audio=audio or {})


def pictures(blobs: list[bytes]) -> np.ndarray:
    """uint8 [n, h, w, 3]."""
    return np.stack([np.asarray(Image.open(io.BytesIO(b)).convert("RGB")) for b in blobs])


def samples(blob: bytes) -> np.ndarray:
    """int16 [n]."""
    data, _ = soundfile.read(io.BytesIO(blob), dtype="int16")
    return data


def clip(path: Path, span: tuple[float | None, float | None] = (None, None), **video: Any):  # type: ignore[no-untyped-def]
    """(frames uint8 [n, h, w, 3], sound int16 [n] or None, VideoMeta)."""
    packed, meta = load_video(FileSource(str(path), *span), config(**video))
    assert isinstance(meta, VideoMeta)
    return pictures(packed.frames), None if packed.audio is None else samples(packed.audio), meta


def sound(path: Path, span: tuple[float | None, float | None] = (None, None)) -> tuple[np.ndarray, AudioMeta]:
    """(int16 [n], AudioMeta)."""
    blob, meta = load_audio(FileSource(str(path), *span), config())
    return samples(blob), meta


def shown_by_a_player(path: Path, at: list[float]) -> tuple[np.ndarray, np.ndarray]:
    """Own times, in s from the first picture or sound, of the pictures on screen at `at`: plain decoding, no table."""
    with av.open(str(path)) as file:
        pictures = [(float(f.pts * f.time_base), f.to_ndarray(format="rgb24")) for f in file.decode(video=0)]
    zero = pictures[0][0]
    with av.open(str(path)) as file:
        if file.streams.audio:
            frame = next(file.decode(audio=0))
            zero = min(zero, float(frame.pts * frame.time_base))
    times = np.array([t for t, _ in pictures]) - zero
    index = np.maximum(np.searchsorted(times, np.asarray(at) + 0.001, side="right") - 1, 0)
    return times[index], np.array([time_shown(pictures[i][1]) for i in index])


def assert_as_a_player_shows(path: Path, **video: Any) -> VideoMeta:
    """Loads a clip; its frames are the pictures that a player would show at their times."""
    frames, _, meta = clip(path, **video)
    times, greys = shown_by_a_player(path, meta.frame_times_s)
    assert np.allclose(meta.shown_times_s, times, atol=0.0015), (meta.shown_times_s, times.round(3).tolist())
    assert np.allclose([time_shown(f) for f in frames], greys, atol=0.02)
    return meta


def later(source: Path, target: Path, shift_s: float, options: dict[str, str] | None = None) -> Path:
    """The same packets in another container, so much later."""
    with av.open(str(source)) as old, av.open(str(target), "w", options=options or {}) as new:
        streams = {s.index: new.add_stream_from_template(s) for s in old.streams}
        for packet in old.demux():
            if packet.dts is not None:
                packet.pts += round(shift_s / packet.time_base)
                packet.dts += round(shift_s / packet.time_base)
                packet.stream = streams[packet.stream.index]
                new.mux(packet)
    return target
