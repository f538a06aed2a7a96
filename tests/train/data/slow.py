"""A slow, independent reference for ids and positions: token by token in plain Python, straight from the formulas.

Only `encode` is shared with the code under test. Positions are float32 one addition at a time, as transformers' are.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from schemas.chat_tokens import ChatTokens
from tests.train.data.mixes import Mix

F = np.float32
Patch = tuple[Any, Any, Any]


def audio_token_count(samples: int) -> int:
    mel = samples // 160
    rest = mel % 100
    for _ in range(3):
        rest = (rest - 1) // 2 + 1
    return rest + 13 * (mel // 100)


class SlowOmni:
    """ids, positions and labels of one mix."""

    def __init__(self, mix: Mix, encode: Callable[[str], Any], tokens: ChatTokens) -> None:
        self.ids: list[int] = []
        self.positions: list[Patch] = []
        self.labels: list[int] = []
        self.next = F(0)
        self.tokens = tokens
        clips, sounds, images = iter(mix.clips), iter(mix.sounds), iter(mix.images)
        run: list[tuple[str, bool]] = []  # text since the last medium, across turns

        def flush() -> None:
            start = self.next
            for i, (token, trained) in enumerate(run):
                self._put(int(token), (F(start + F(i)),) * 3, trained)
            self.next = F(start + F(len(run)))
            run.clear()

        for turn in mix.turns:
            answer = turn[0] == "assistant"
            run.append((tokens.im_start, False))
            text = f"{turn[0]}\n"
            if answer:
                run.extend((token, False) for token in encode(text))
                text = ""
            for kind, payload in turn[1:]:
                if kind == "text":
                    text += payload
                    continue
                run.extend((token, answer) for token in encode(text))
                text = ""
                flush()
                if kind == "video":
                    self._clip(next(clips))
                elif kind == "audio":
                    self._sound(next(sounds))
                else:
                    self._image(next(images))
            run.extend((token, answer) for token in encode(text))
            run.append((tokens.im_end, answer))
            run.extend((token, False) for token in encode("\n"))
        flush()

    def _put(self, token: int, position: Patch, trained: bool = False) -> None:
        self.ids.append(token)
        self.positions.append(position)
        self.labels.append(token if trained else -100)

    def _line(self, token: int) -> None:
        self._put(token, (self.next,) * 3)
        self.next = F(self.next + F(1))

    def _marks(self, *marks: int) -> None:
        start = self.next
        for i, token in enumerate(marks):
            self._put(token, (F(start + F(i)),) * 3)
        self.next = F(start + F(len(marks)))

    def _image(self, image: np.ndarray) -> None:
        self._marks(self.tokens.vision_start)
        base = self.next
        patches = [
            (base, F(base + F(y)), F(base + F(x)))
            for y in range(image.shape[0] // 32)
            for x in range(image.shape[1] // 32)
        ]
        for patch in patches:
            self._put(self.tokens.image, patch)
        self.next = F(max(max(patch) for patch in patches) + F(1))
        self._marks(self.tokens.vision_end)

    def _sound(self, samples: np.ndarray) -> None:
        count = audio_token_count(len(samples))
        self._marks(self.tokens.audio_start)
        start = self.next
        for i in range(count):
            self._put(self.tokens.audio, (F(start + F(i)),) * 3)
        self.next = F(start + F(count))
        self._marks(self.tokens.audio_end)

    def _clip(self, clip: Any) -> None:
        frames, height, width, _ = clip.frames.shape
        grids, rows, columns = -(-frames // 2), height // 32, width // 32
        seconds = 2 / clip.fps
        sounds = 0 if clip.sound is None else audio_token_count(len(clip.sound))
        self._marks(self.tokens.vision_start, *([self.tokens.audio_start] if sounds else []))
        base = self.next
        pictures = [
            (F(F(F(k) * F(seconds)) * F(13) + base), F(F(y) + base), F(F(x) + base))
            for k in range(grids)
            for y in range(rows)
            for x in range(columns)
        ]
        heard = [(F(F(i) + base),) * 3 for i in range(sounds)]
        kinds = self._order(
            [k * seconds * 13.0 for k in range(grids) for _ in range(rows * columns)], list(range(sounds))
        )
        order, tail = self._merge(pictures, heard)
        for is_picture, position in zip(kinds, order, strict=True):
            self._put(self.tokens.video if is_picture else self.tokens.audio, position)
        self.next = F(max(max(position) for position in tail) + F(1))
        self._marks(*([self.tokens.audio_end] if sounds else []), self.tokens.vision_end)

    @staticmethod
    def _order(pictures: list[float], heard: list[int]) -> list[bool]:
        """True for a picture token, in the order of time; pictures first on ties."""
        v = a = 0
        kinds = []
        while v < len(pictures) or a < len(heard):
            take = a == len(heard) or (v < len(pictures) and pictures[v] <= heard[a])
            kinds.append(take)
            v, a = v + take, a + (not take)
        return kinds

    @staticmethod
    def _merge(pictures: list[Patch], heard: list[Patch]) -> tuple[list[Patch], list[Patch]]:
        """(all positions by time, the last stretch of one kind)."""
        v = a = 0
        order: list[Patch] = []
        while v < len(pictures) and a < len(heard):
            if pictures[v][0] <= heard[a][0]:
                order.append(pictures[v])
                v += 1
            else:
                order.append(heard[a])
                a += 1
        tail = pictures[v:] or heard[a:]
        return order + tail, tail
