"""Beep and flash of every handed clip with sound that is not damaged: within 20 ms; frame times right to the frame."""

import json
from pathlib import Path

import numpy as np
import pytest

from tests.pack.media.loading import clip

CASES = Path("tests/cases")
EXPECTED = json.loads((CASES / "expected.json").read_text())
# Damage, or nothing to compare: no sound, no beep, one picture, or sound that is longer or shorter is still compared.
LEFT_OUT = {"no_audio.mp4", "silent_audio.mp4", "single_frame.mp4", "single_frame_audio6.mp4"}
CLIPS = [
    name for name, want in EXPECTED.items()
    if want["outcome"] == "ok" and not want.get("audio_row") and "hole" not in name and name not in LEFT_OUT
]  # fmt: skip
SIDES = {"rot90.mp4": lambda f: f[:, f.shape[1] * 3 // 4 :]}  # [n, h, w, 3]: the half that flashes
TOLERANCE_S = 0.020


def onsets(sound: np.ndarray) -> np.ndarray:
    """Times in s, to 1 ms, at which a tone begins."""
    level = np.abs(sound[: len(sound) // 16 * 16].reshape(-1, 16).astype(int)).max(1) > 700
    starts = np.flatnonzero(level & ~np.r_[False, level[:-1]]) / 1000
    return starts[np.diff(starts, prepend=-9) > 0.3]


def flashes(frames: np.ndarray, shown: list[float], name: str) -> np.ndarray:
    """Times in s of the first picture of each flash."""
    side = SIDES.get(name, lambda f: f[:, :, : f.shape[2] // 4])(frames)
    lit = side.reshape(len(frames), -1).mean(1) > 128
    return np.array(shown)[lit & ~np.r_[False, lit[:-1]]]


@pytest.mark.parametrize("name", CLIPS)
def test_beep_and_flash(name):
    frames, sound, meta = clip(CASES / "media" / name, fps=1000.0)
    seen, heard = flashes(frames, meta.shown_times_s, name), onsets(sound)
    assert len(seen) >= 2
    pairs = [(b, seen[np.abs(seen - b).argmin()]) for b in heard if np.abs(seen - b).min() < 0.5]
    assert len(pairs) >= 2
    apart = [b - f for b, f in pairs]
    assert max(map(abs, apart)) <= TOLERANCE_S, [f"{1000 * a:.0f} ms" for a in apart]


@pytest.mark.parametrize(
    "name", [n for n in CLIPS if "grey" in EXPECTED[n] and n not in ("tiny_20x20.mp4", "rot90.mp4")]
)
def test_frame_times_are_right_to_the_frame(name):
    """The grey level of the right half is the picture's own time; against the time stored beside each frame."""
    frames, _, meta = clip(CASES / "media" / name, fps=2.0)
    height, width = frames.shape[1:3]
    grey = frames[:, height // 4 : 3 * height // 4, int(width * 0.7) : int(width * 0.95)].mean((1, 2, 3))
    off = np.array(meta.shown_times_s) - (grey - 30) / 25
    codec_noise_s = 0.14 if "av1" in name else 0.08
    assert np.abs(off - np.median(off)).max() < codec_noise_s
    assert abs(np.median(off)) < 0.1
