"""What a chat layout is made from and what it is: plain records, no behaviour."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np

Form = Literal["qwen3_omni", "qwen3_vl"]
MediaKind = Literal["video", "audio", "image"]
ALL_MEDIA: tuple[MediaKind, ...] = ("video", "audio", "image")
Grid: TypeAlias = tuple[int, int, int]


@dataclass(frozen=True)
class PixelLimits:
    """Between which sizes the model's processor brings pictures, in pixels; the defaults are those of the released
    Qwen3-Omni.

    image: (min, max) of an image; video: (min, max) of each frame, or, `per_clip`, of all frames of a clip together
    (Qwen3-VL); video_floor: frames that were packed in whole tokens stay down to so many pixels, under video[0] where
    packing had a budget (video.max_tokens), never `per_clip`; capped: long clips get smaller frames, by a share of
    max_video_tokens, as `cap_pixels_per_frame` of the processors says.
    """

    image: tuple[int, int] = (3136, 12845056)
    video: tuple[int, int] = (131072, 786432)
    video_floor: int = 3136
    per_clip: bool = False
    capped: bool = False
    max_video_tokens: int = 128000


VL_PIXELS = PixelLimits((65536, 16777216), (4096, 25165824), per_clip=True, max_video_tokens=768)  # released Qwen3-VL


@dataclass(frozen=True)
class ChatStyle:
    """What the layout depends on beside the tokenizer.

    position_id_per_seconds: positions per second of the clip's clock (one per sound token); patch_size: pixels per side
    of a patch; merge_size: patches per side that one token covers; temporal_patch: frames per grid;
    use_audio_in_video: a clip with sound gives it beside its pictures (never for qwen3_vl); wrap_video: qwen3_vl only:
    keep the chat template's own <|vision_start|> and <|vision_end|> around all grids of a video, as transformers 5 does
    (4.57 and vLLM do not); system: system prompt for conversations that bring none; pixels: sizes of pictures, None =
    those of the released model of this form; media: what the model has towers for; rows with anything else are refused.
    """

    form: Form = "qwen3_omni"
    position_id_per_seconds: float = 13.0
    patch_size: int = 16
    merge_size: int = 2
    temporal_patch: int = 2
    use_audio_in_video: bool = True
    wrap_video: bool = True
    system: str | None = None
    pixels: PixelLimits | None = None
    media: tuple[MediaKind, ...] = ALL_MEDIA

    @property
    def pixel_limits(self) -> PixelLimits:
        return self.pixels or (VL_PIXELS if self.form == "qwen3_vl" else PixelLimits())


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
