"""What becomes of the tokens of a conversation as `schemas.chat` walks over it: counted, or laid out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Protocol

import numpy as np

from schemas.chat_tokens import ChatTokens, Encode
from schemas.chat_types import ChatLayout, ChatPart, ChatStyle, Grid, MediaKind, MediaSlot, TokenCounts, VideoCount


@dataclass(frozen=True)
class Owner:
    """What a token belongs to; tokens in a row with one owner make one `ChatPart`."""

    turn: int
    role: str
    kind: str
    slot: int = -1


class Sink(Protocol):
    """Takes the tokens of a conversation from left to right."""

    def text(self, piece: str, owner: Owner, trained: bool = False) -> None:
        """Text; pieces in a row are encoded as one string."""

    def cut(self) -> None:
        """The next piece is encoded apart from those before it."""

    def special(self, token: int, owner: Owner, trained: bool = False) -> None:
        """One special token."""

    def media(self, token: int, number: int, owner: Owner) -> None:
        """`number` placeholders of a medium."""

    def interleaved(self, video: VideoCount, style: ChatStyle, tokens: ChatTokens, owner: Owner) -> None:
        """The placeholders of a clip and its own sound, in the order of time."""


def grid_tokens(grid: Grid, style: ChatStyle) -> int:
    """Tokens of a video or image of `grid` patches."""
    return grid[0] * grid[1] * grid[2] // style.merge_size**2


def sounds_before(video: VideoCount, position_id_per_seconds: float) -> np.ndarray:
    """int64 [t]: how many of a clip's sound tokens stand before each of its grids.

    Sound token i has time i and grid k the time k * second_per_grid * position_id_per_seconds; a grid goes before the
    sound token of the same time.
    """
    times = np.arange(video.grid[0]) * video.second_per_grid * position_id_per_seconds
    return np.minimum(np.ceil(times), video.audio_tokens).astype(np.int64)


class CountSink:
    """Counts tokens by modality."""

    def __init__(self, encode: Encode) -> None:
        self.encode = encode
        self.run: list[tuple[str, bool]] = []
        self.sums = {"text": 0, "video": 0, "audio": 0, "image": 0}
        self.labels = 0

    def text(self, piece: str, owner: Owner, trained: bool = False) -> None:
        self.run.append((piece, trained))

    def cut(self) -> None:
        if not self.run:
            return
        if len({trained for _, trained in self.run}) == 1:
            sizes = [len(self.encode("".join(piece for piece, _ in self.run)))]
        else:
            sizes = piece_sizes([piece for piece, _ in self.run], self.encode)[1]
        self.sums["text"] += sum(sizes)
        self.labels += sum(size for size, (_, trained) in zip(sizes, self.run, strict=False) if trained)
        self.run = []

    def special(self, token: int, owner: Owner, trained: bool = False) -> None:
        self.cut()
        self.sums["text"] += 1
        self.labels += trained

    def media(self, token: int, number: int, owner: Owner) -> None:
        self.cut()
        self.sums[owner.kind] += number

    def interleaved(self, video: VideoCount, style: ChatStyle, tokens: ChatTokens, owner: Owner) -> None:
        self.sums["video"] += grid_tokens(video.grid, style)
        self.sums["audio"] += video.audio_tokens

    def finish(self) -> TokenCounts:
        self.cut()
        return TokenCounts(total=sum(self.sums.values()), labels=self.labels, **self.sums)


@dataclass
class _Rows:
    """Rows of one medium while they are collected."""

    kind: MediaKind
    rows: list[np.ndarray] = field(default_factory=list)
    sound_rows: list[np.ndarray] = field(default_factory=list)


class LayoutSink:
    """Makes the ids, and notes who owns each stretch of them."""

    def __init__(self, encode: Encode) -> None:
        self.encode = encode
        self.run: list[tuple[str, Owner, bool]] = []
        self.ids: list[np.ndarray | list[int]] = []
        self.spans: list[tuple[Owner, bool, int]] = []  # owner, trained, number of tokens
        self.slots: dict[int, _Rows] = {}
        self.length = 0

    def text(self, piece: str, owner: Owner, trained: bool = False) -> None:
        self.run.append((piece, owner, trained))

    def cut(self) -> None:
        if not self.run:
            return
        ids, sizes = piece_sizes([piece for piece, _, _ in self.run], self.encode)
        self.ids.append(ids)
        for size, (_, owner, trained) in zip(sizes, self.run, strict=True):
            self._note(owner, size, trained)
        self.run = []

    def special(self, token: int, owner: Owner, trained: bool = False) -> None:
        self.cut()
        self.ids.append([token])
        self._note(owner, 1, trained)

    def media(self, token: int, number: int, owner: Owner) -> None:
        self.cut()
        self._slot(owner).rows.append(np.arange(self.length, self.length + number))
        self.ids.append(np.full(number, token))
        self._note(owner, number)

    def interleaved(self, video: VideoCount, style: ChatStyle, tokens: ChatTokens, owner: Owner) -> None:
        per_grid = grid_tokens(video.grid, style) // video.grid[0]
        before = sounds_before(video, style.position_id_per_seconds)
        rows = (before + per_grid * np.arange(video.grid[0]))[:, None] + np.arange(per_grid)
        ids = np.full(rows.size + video.audio_tokens, tokens.audio_ids()[0])
        ids[rows] = tokens.video
        slot = self._slot(owner)
        slot.rows.append(self.length + rows.ravel())
        slot.sound_rows.append(self.length + np.flatnonzero(ids != tokens.video))
        self.ids.append(ids)
        self._note(owner, len(ids))

    def _slot(self, owner: Owner) -> _Rows:
        return self.slots.setdefault(owner.slot, _Rows(owner.kind))  # type: ignore[arg-type]  # media owners only

    def _note(self, owner: Owner, number: int, trained: bool = False) -> None:
        self.spans.append((owner, trained, number))
        self.length += number

    def finish(self) -> ChatLayout:
        self.cut()
        ids = np.concatenate([np.asarray(piece, np.int64) for piece in self.ids])
        mask = np.repeat([trained for _, trained, _ in self.spans], [number for _, _, number in self.spans])
        owned: list[tuple[Owner, int, int]] = []
        end = 0
        for owner, _, number in self.spans:
            start = owned.pop()[1] if owned and owned[-1][0] == owner else end
            end += number
            owned.append((owner, start, end))
        spans = {owner.slot: (start, stop) for owner, start, stop in owned if owner.slot >= 0}
        parts = [ChatPart(o.turn, o.role, o.kind, start, stop) for o, start, stop in owned if stop > start]
        return ChatLayout(ids, mask.astype(bool), self._media_slots(spans), parts)

    def _media_slots(self, spans: dict[int, tuple[int, int]]) -> list[MediaSlot]:
        slots = []
        numbers = {"video": 0, "audio": 0, "image": 0}
        for number, found in sorted(self.slots.items()):
            rows, sound_rows = (
                np.concatenate(pieces) if pieces else np.zeros(0, np.int64) for pieces in (found.rows, found.sound_rows)
            )
            slots.append(MediaSlot(found.kind, numbers[found.kind], *spans[number], rows, sound_rows))
            numbers[found.kind] += 1
        return slots


def piece_sizes(pieces: Sequence[str], encode: Encode) -> tuple[list[int], list[int]]:
    """(ids of the joined pieces, how many of them each piece owns). A token that reaches over the end of a piece
    belongs to the next one."""
    ids = list(encode("".join(pieces)))
    ends: list[int] = []
    for i in range(1, len(pieces)):
        alone = encode("".join(pieces[:i]))
        same = next((k for k, (a, b) in enumerate(zip(alone, ids, strict=False)) if a != b), min(len(alone), len(ids)))
        ends.append(max(same, ends[-1] if ends else 0))
    bounds = [0, *ends, len(ids)]
    return ids, [stop - start for start, stop in pairwise(bounds)]
