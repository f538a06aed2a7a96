"""Random conversations that mix media, as canonical turns and as messages for a Hugging Face chat template."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from schemas.conversation import Turn
from schemas.sample import PackedSample
from tests.train.data.packed import Clip, packed_sample

WORDS = [
    "What",
    " happens",
    " here",
    "?",
    "\n",
    " 世界",
    "naïve",
    " 12",
    "3.5",
    " the",
    " dog",
    "!!",
    "  ",
    "🙂",
    "\n\n",
    "x=1;",
]
RATES = [2.0, 1.0, 0.5, 4.0, 1.894, 14.3, 3.996, 29.97 / 12, 7.0, 24 / 7, 1.7, 0.9, 3.0]


@dataclass
class Mix:
    """turns bind the media by order; every clip has fps Hz; with_sound: every clip has its own sound."""

    fps: float = 2.0
    with_sound: bool = False
    turns: list[Turn] = field(default_factory=list)
    clips: list[Clip] = field(default_factory=list)
    sounds: list[np.ndarray] = field(default_factory=list)
    images: list[np.ndarray] = field(default_factory=list)

    def messages(self) -> list[dict[str, Any]]:
        return [
            {
                "role": turn[0],
                "content": [{"type": kind, **({"text": text} if kind == "text" else {})} for kind, text in turn[1:]],
            }
            for turn in self.turns
        ]

    def sample(self, key: str = "row") -> PackedSample:
        return packed_sample(self.turns, self.clips, self.sounds, self.images, key)

    def all_sounds(self) -> tuple[list[np.ndarray], list[int | None]]:
        """(sounds in the order of the text, for each the number of its clip or None), as one call of the processor
        takes them."""
        sounds, owners = [], []
        numbers = {"video": 0, "audio": 0}
        for kind, _ in (part for turn in self.turns for part in turn[1:]):
            if kind == "video" and self.clips[numbers["video"]].sound is not None:
                sounds.append(self.clips[numbers["video"]].sound)
                owners.append(numbers["video"])
            elif kind == "audio":
                sounds.append(self.sounds[numbers["audio"]])
                owners.append(None)
            if kind in numbers:
                numbers[kind] += 1
        return sounds, owners


def random_mix(seed: int, sound: bool = True, one_rate: bool = True) -> Mix:
    """sound: sounds may occur; one_rate: within what one call of the processor takes: all clips of one rate and all of
    them with sound or none, and sounds of several lengths in whole log-mel frames."""
    rng = random.Random(seed)
    mix = Mix(fps=rng.choice([*RATES, rng.uniform(0.3, 12)]), with_sound=sound and rng.random() < 0.6)
    if rng.random() < 0.3:
        mix.turns.append(["system", ("text", _text(rng))])
    budget = rng.randrange(1, 5)
    for _ in range(rng.randrange(1, 4)):
        parts: list[Any] = []
        for _ in range(rng.randrange(1, 5)):
            kind = rng.choice(["text", "text", "video", "image", "audio" if sound else "image"])
            if kind == "text":
                parts.append(("text", _text(rng)))
            elif budget:
                budget -= 1
                parts.append((kind, None))
                _add_medium(mix, kind, rng, one_rate)
        mix.turns.append(["user", *(parts or [("text", _text(rng))])])
        mix.turns.append(["assistant", ("text", _text(rng).lstrip() or "Yes.")])
    _settle_sounds(mix, rng, one_rate)
    return mix


def _text(rng: random.Random) -> str:
    return "".join(rng.choice(WORDS) for _ in range(rng.randrange(1, 8)))


def _picture(rng: random.Random) -> tuple[int, int]:
    return 32 * rng.randrange(1, 5), 32 * rng.randrange(1, 5)


def _pixels(rng: random.Random, shape: tuple[int, ...]) -> np.ndarray:
    return np.random.default_rng(rng.getrandbits(32)).integers(0, 256, shape, dtype=np.uint8)


def _add_medium(mix: Mix, kind: str, rng: random.Random, one_rate: bool) -> None:
    if kind == "image":
        mix.images.append(_pixels(rng, (*_picture(rng), 3)))
    elif kind == "audio":
        mix.sounds.append(np.zeros(0, np.int16))
    else:
        long = rng.random() < 0.3  # long enough for grids that meet a sound token exactly, at some rates
        shape = (rng.randrange(14, 60), 32, 32, 3) if long else (rng.randrange(1, 13), *_picture(rng), 3)
        frames = _pixels(rng, shape)
        own = mix.with_sound if one_rate else rng.random() < 0.5
        fps = mix.fps if one_rate else rng.choice([*RATES, rng.uniform(0.3, 12)])
        mix.clips.append(Clip(frames, fps, np.zeros(0, np.int16) if own else None))


def _settle_sounds(mix: Mix, rng: random.Random, one_rate: bool) -> None:
    """Gives every sound its samples. Several sounds of one call are padded to the longest, which changes how many
    frames those have that do not end with a frame; so there they do."""
    several = len(mix.sounds) + sum(clip.sound is not None for clip in mix.clips) > 1

    def samples() -> np.ndarray:
        count = rng.randrange(8, 800) * 160 + (0 if several and one_rate else rng.randrange(160))
        noise = np.random.default_rng(rng.getrandbits(32)).standard_normal(count) * 3000
        return noise.clip(-32768, 32767).astype(np.int16)

    mix.sounds = [samples() for _ in mix.sounds]
    mix.clips = [Clip(c.frames, c.fps, None if c.sound is None else samples()) for c in mix.clips]
