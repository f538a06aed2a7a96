"""What a chat layout is made from and what it is: plain records, no behaviour."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np

Form = Literal["qwen3_omni", "qwen3_vl"]
MediaKind = Literal["video", "audio", "image"]
Grid: TypeAlias = tuple[int, int, int]


@dataclass(frozen=True)
class ChatStyle:
    """What the layout depends on beside the tokenizer.

    position_id_per_seconds: positions per second of the clip's clock (one per sound token); patch_size: pixels per side
    of a patch; merge_size: patches per side that one token covers; temporal_patch: frames per grid;
    use_audio_in_video: a clip with sound gives it beside its pictures (never for qwen3_vl); wrap_video: qwen3_vl only:
    keep the chat template's own <|vision_start|> and <|vision_end|> around all grids of a video, as transformers 5 does
    (4.57 and vLLM do not); system: system prompt for conversations that bring none.
    """

    form: Form = "qwen3_omni"
    position_id_per_seconds: float = 13.0
    patch_size: int = 16
    merge_size: int = 2
    temporal_patch: int = 2
    use_audio_in_video: bool = True
    wrap_video: bool = True
    system: str | None = None


@dataclass(frozen=True)
class VideoCount:
    """What one clip takes. grid: (t, h, w) in patches; second_per_grid: temporal_patch / effective rate, in s;
    audio_tokens: of its own sound, 0 for none; grid_times_s [t]: mean time of the frames of each grid (qwen3_vl)."""

    grid: Grid
    second_per_grid: float
    audio_tokens: int = 0
    grid_times_s: tuple[float, ...] = ()


@dataclass(frozen=True)
class MediaCounts:
    """What the media of one sample take, in the order of its markers. audios: tokens of each standalone sound;
    images: grid (1, h, w) of each, in patches."""

    videos: Sequence[VideoCount] = ()
    audios: Sequence[int] = ()
    images: Sequence[Grid] = ()


@dataclass(frozen=True)
class MediaSlot:
    """Where one medium stands in the ids.

    index: n-th of its kind in the sample; start, stop: all of its tokens, markers and time marks included;
    rows: int64 [n], the ids that the encoder's output replaces, in the encoder's order; sound_rows: the same for a
    video's own sound.
    """

    kind: MediaKind
    index: int
    start: int
    stop: int
    rows: np.ndarray
    sound_rows: np.ndarray


@dataclass(frozen=True)
class ChatPart:
    """A labelled stretch of the ids, for people. turn: -1 for the system prompt that `ChatStyle.system` adds; kind:
    header, text, video, audio, image or end."""

    turn: int
    role: str
    kind: str
    start: int
    stop: int


@dataclass(frozen=True)
class ChatLayout:
    """ids: int64 [L]; label_mask: bool [L], True where the token itself is to be predicted; slots: in the order of the
    ids; parts: cover all ids without gap or overlap."""

    ids: np.ndarray
    label_mask: np.ndarray
    slots: list[MediaSlot]
    parts: list[ChatPart]


@dataclass(frozen=True)
class TokenCounts:
    """total = text + video + audio + image (media markers and time marks are text); labels: tokens with a label."""

    total: int
    text: int
    video: int
    audio: int
    image: int
    labels: int
