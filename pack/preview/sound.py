"""One stored sound for the page: what the player plays, and the outline of its waveform."""

from __future__ import annotations

import base64
import io
import math
from dataclasses import dataclass

import numpy as np
import soundfile

FLOOR_DBFS = -120.0


@dataclass(frozen=True)
class Waveform:
    """outline: [bins, 2], lowest and highest sample of each bin, full scale = 1; the levels are of the whole sound."""

    outline: np.ndarray
    peak_dbfs: float
    rms_dbfs: float


def measure(sound: bytes, bins: int = 900) -> Waveform:
    """The outline of a stored mono sound (WAV or FLAC) in at most `bins` bins; reads it block by block."""
    with soundfile.SoundFile(io.BytesIO(sound)) as file:
        size = max(1, math.ceil(file.frames / bins))
        pairs, power = [], 0.0
        for block in file.blocks(blocksize=size, dtype="float32"):
            pairs.append((block.min(), block.max()))
            power += float(np.square(block, dtype="float64").sum())
        outline = np.array(pairs, dtype="float32").reshape(-1, 2)
        peak = float(np.abs(outline).max(initial=0.0))
        return Waveform(outline, dbfs(peak), dbfs(math.sqrt(power / max(1, file.frames))))


def dbfs(amplitude: float) -> float:
    """20 log10 of an amplitude whose full scale is 1, not below FLOOR_DBFS."""
    return max(FLOOR_DBFS, 20 * math.log10(amplitude)) if amplitude > 0 else FLOOR_DBFS


def shorten(sound: bytes, max_bytes: int) -> tuple[bytes, float]:
    """(sound, seconds): the sound as it is when it has at most `max_bytes`, else its beginning in the same format."""
    with soundfile.SoundFile(io.BytesIO(sound)) as file:
        if len(sound) <= max_bytes:
            return sound, file.frames / file.samplerate
        frames = int(file.frames * max_bytes / len(sound))
        head, out = file.read(frames, dtype="int16"), io.BytesIO()
        soundfile.write(out, head, file.samplerate, format=file.format, subtype=file.subtype)
        return out.getvalue(), frames / file.samplerate


def data_url(sound: bytes, codec: str) -> str:
    return f"data:audio/{codec};base64,{base64.b64encode(sound).decode()}"


def outline_path(waveform: Waveform, left: float, width: float, height: float) -> str:
    """An SVG path of the outline between x = left and left + width, its peak filling `height` around the middle."""
    if not len(waveform.outline):
        return ""
    loudest = max(float(np.abs(waveform.outline).max()), 1e-6)
    y = height / 2 * (1 - waveform.outline / loudest * 0.96)
    x = left + width * (np.arange(len(y) + 1) / len(y))
    top = [f"{a:.1f},{b:.1f}" for a, b in zip(x, [*y[:, 1], y[-1, 1]], strict=True)]
    # half a unit more, so that silence is a thin line and not nothing
    bottom = [f"{a:.1f},{b + 0.5:.1f}" for a, b in zip(x, [*y[:, 0], y[-1, 0]], strict=True)]
    return "M" + "L".join(top) + "L" + "L".join(reversed(bottom)) + "Z"
