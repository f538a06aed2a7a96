"""Canonical turns and a tokenizer -> token ids, label mask, media slots. Pure functions: preview, lengths and the
training transform call the same ones.

The layout is made turn by turn, never by searching ids or text for marks:

    <|im_start|>ROLE\\n PART... <|im_end|>\\n        for each turn

    image                   <|vision_start|> image x n <|vision_end|>
    audio                   <|audio_start|> audio x n <|audio_end|>
    video, qwen3_omni       <|vision_start|> video x n <|vision_end|>
    video with its sound    <|vision_start|><|audio_start|> video and audio by time <|audio_end|><|vision_end|>
    video, qwen3_vl         <|vision_start|> per grid: "<1.2 seconds>" <|vision_start|> video x n <|vision_end|>
                            <|vision_end|>; the outer pair only with `ChatStyle.wrap_video`

These are the ids that the Hugging Face processors of both families give for the same turns, but for two intended
differences: text never makes a special token, so that nothing a user types can forge a turn or a media slot; and an
assistant's reply is encoded apart from its header, as the model meets it when it writes the reply (only a reply that
begins with a line break shows the difference).

Labels: every token of each assistant text and the <|im_end|> that ends the turn; nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence

from schemas.chat_sinks import CountSink, LayoutSink, Owner, Sink, grid_tokens
from schemas.chat_tokens import ChatTokens, Encode
from schemas.chat_types import (
    ChatLayout,
    ChatPart,
    ChatStyle,
    Form,
    Grid,
    MediaCounts,
    MediaKind,
    MediaSlot,
    PixelLimits,
    TokenCounts,
    VideoCount,
)
from schemas.conversation import Turn, check_media_counts, turn_parts
from schemas.errors import UnsupportedError

__all__ = [
    "ChatLayout",
    "ChatPart",
    "ChatStyle",
    "Form",
    "Grid",
    "MediaCounts",
    "MediaKind",
    "MediaSlot",
    "PixelLimits",
    "TokenCounts",
    "VideoCount",
    "build_layout",
    "count_tokens",
]


def build_layout(
    turns: Sequence[Turn], encode: Encode, tokens: ChatTokens, counts: MediaCounts, style: ChatStyle
) -> ChatLayout:
    """The ids of a conversation, with everything that training needs to know about them.

    encode: text -> ids, without special tokens (`schemas.chat_tokens.PlainEncoder`). Raises RowError `marker_mismatch`
    when the turns bind another number of media than `counts` has, UnsupportedError for sound in a model without.
    """
    sink = LayoutSink(encode)
    _walk(turns, sink, tokens, counts, style)
    return sink.finish()


def count_tokens(
    turns: Sequence[Turn], encode: Encode, tokens: ChatTokens, counts: MediaCounts, style: ChatStyle
) -> TokenCounts:
    """The numbers of `build_layout`, by the same walk, without making the ids. Raises the same errors."""
    sink = CountSink(encode)
    _walk(turns, sink, tokens, counts, style)
    return sink.finish()


def _walk(turns: Sequence[Turn], sink: Sink, tokens: ChatTokens, counts: MediaCounts, style: ChatStyle) -> None:
    check_media_counts(turns, len(counts.videos), len(counts.audios), len(counts.images))
    numbers = {"video": 0, "audio": 0, "image": 0}
    numbered = list(enumerate(turns))
    if style.system is not None and (not turns or turns[0][0] != "system"):
        numbered.insert(0, (-1, ["system", ("text", style.system)]))
    for number, turn in numbered:
        role = str(turn[0])
        trained = role == "assistant"
        header, end = Owner(number, role, "header"), Owner(number, role, "end")
        sink.special(tokens.im_start, header)
        sink.text(f"{role}\n", header)
        if trained:
            sink.cut()
        for kind, payload in turn_parts(turn):
            if kind == "text":
                sink.text(payload or "", Owner(number, role, "text"), trained)
                continue
            owner = Owner(number, role, kind, sum(numbers.values()))
            _medium(sink, kind, numbers[kind], owner, tokens, counts, style)
            numbers[kind] += 1
        sink.special(tokens.im_end, end, trained)
        sink.text("\n", end)


def _medium(
    sink: Sink, kind: MediaKind, index: int, owner: Owner, tokens: ChatTokens, counts: MediaCounts, style: ChatStyle
) -> None:
    if kind == "audio":
        audio, start, end = _audio_tokens(tokens, style, f"audio {index}")
        sink.special(start, owner)
        sink.media(audio, counts.audios[index], owner)
        sink.special(end, owner)
    elif kind == "video" and style.form == "qwen3_vl":
        _timed_video(sink, counts.videos[index], owner, tokens, style)
    elif kind == "video" and counts.videos[index].audio_tokens:
        _, start, end = _audio_tokens(tokens, style, f"the sound of video {index}")
        sink.special(tokens.vision_start, owner)
        sink.special(start, owner)
        sink.interleaved(counts.videos[index], style, tokens, owner)
        sink.special(end, owner)
        sink.special(tokens.vision_end, owner)
    else:
        grid = counts.videos[index].grid if kind == "video" else counts.images[index]
        sink.special(tokens.vision_start, owner)
        sink.media(tokens.video if kind == "video" else tokens.image, grid_tokens(grid, style), owner)
        sink.special(tokens.vision_end, owner)


def _timed_video(sink: Sink, video: VideoCount, owner: Owner, tokens: ChatTokens, style: ChatStyle) -> None:
    """Qwen3-VL: each temporal grid between its own markers, after its time in words."""
    grids = video.grid[0]
    if len(video.grid_times_s) != grids:
        raise ValueError(f"a video of {grids} grids has {len(video.grid_times_s)} grid times")
    if video.audio_tokens:
        raise UnsupportedError("Qwen3-VL has no sound; the video's audio_tokens must be 0")
    if style.wrap_video:
        sink.special(tokens.vision_start, owner)
    for time_s in video.grid_times_s:
        sink.text(f"<{time_s:.1f} seconds>", owner)
        sink.special(tokens.vision_start, owner)
        sink.media(tokens.video, grid_tokens(video.grid, style) // grids, owner)
        sink.special(tokens.vision_end, owner)
    if style.wrap_video:
        sink.special(tokens.vision_end, owner)


def _audio_tokens(tokens: ChatTokens, style: ChatStyle, what: str) -> tuple[int, int, int]:
    if style.form == "qwen3_vl":
        raise UnsupportedError(f"{what}: Qwen3-VL takes no sound")
    return tokens.audio_ids()
