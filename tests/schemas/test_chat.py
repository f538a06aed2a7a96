"""Chat layout with a toy encoder whose every token is one character, so that each id can be worked out by eye."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from schemas.chat import (
    ChatLayout,
    ChatStyle,
    MediaCounts,
    TokenCounts,
    VideoCount,
    build_layout,
    count_tokens,
)
from schemas.chat_sinks import sounds_before
from schemas.chat_tokens import ChatTokens
from schemas.errors import ConfigError, RowError, UnsupportedError

TOKENS = ChatTokens(
    im_start=-1,
    im_end=-2,
    pad=-3,
    image=-4,
    video=-5,
    vision_start=-6,
    vision_end=-7,
    audio=-8,
    audio_start=-9,
    audio_end=-10,
)
NAMES = {-1: "[", -2: "]", -4: "I", -5: "V", -6: "(", -7: ")", -8: "A", -9: "{", -10: "}"}
VL = ChatStyle(form="qwen3_vl")


def encode(text: str) -> list[int]:
    """One token per character, but two line breaks in a row are one token, as in Qwen's vocabulary."""
    return [ord(c) for c in text.replace("\n\n", "¶")]


def shown(ids: np.ndarray) -> str:
    return "".join(NAMES.get(int(i)) or chr(i) for i in ids)


def laid(turns: list[Any], counts: MediaCounts = MediaCounts(), style: ChatStyle = ChatStyle()) -> ChatLayout:  # noqa: B008
    layout = build_layout(turns, encode, TOKENS, counts, style)
    _check(layout, count_tokens(turns, encode, TOKENS, counts, style))
    return layout


def _check(layout: ChatLayout, counts: TokenCounts) -> None:
    """What holds for every layout: parts tile the ids, slots hold their own placeholders, counts agree."""
    assert [layout.parts[0].start, *(p.stop for p in layout.parts)] == [
        *(p.start for p in layout.parts),
        len(layout.ids),
    ]
    found = {"video": -5, "audio": -8, "image": -4}
    for kind, token in found.items():
        rows = [r for s in layout.slots for r in (s.rows.tolist() if s.kind == kind else [])]
        rows += [r for s in layout.slots for r in (s.sound_rows.tolist() if kind == "audio" else [])]
        assert sorted(rows) == np.flatnonzero(layout.ids == token).tolist()
        assert getattr(counts, kind) == len(rows)
    assert counts.total == len(layout.ids) == counts.text + counts.video + counts.audio + counts.image
    assert counts.labels == layout.label_mask.sum()
    for slot in layout.slots:
        assert slot.start < min(slot.rows, default=slot.stop) and max(slot.rows, default=0) < slot.stop


def trained(layout: ChatLayout) -> str:
    return shown(layout.ids[layout.label_mask])


def test_three_turns_train_every_reply_and_its_end_and_nothing_else() -> None:
    turns = [
        ["system", ("text", "S")],
        ["user", ("text", "a?")],
        ["assistant", ("text", "A.")],
        ["user", ("text", "b?")],
        ["assistant", ("text", "B.")],
        ["user", ("text", "c?")],
        ["assistant", ("text", "C.")],
    ]
    layout = laid(turns)
    assert shown(layout.ids) == "[system\nS]\n" + "".join(
        f"[user\n{q}]\n[assistant\n{a}]\n" for q, a in (("a?", "A."), ("b?", "B."), ("c?", "C."))
    )
    assert trained(layout) == "A.]B.]C.]"


def test_a_conversation_without_a_reply_trains_nothing() -> None:
    assert trained(laid([["user", ("text", "assistant\nno")]])) == ""


def test_media_in_an_assistant_turn_are_not_trained() -> None:
    turns = [["user", ("text", "q")], ["assistant", ("text", "see "), ("image", None), ("text", "!")]]
    layout = laid(turns, MediaCounts(images=[(1, 4, 2)]))
    assert shown(layout.ids) == "[user\nq]\n[assistant\nsee (II)!]\n"
    assert trained(layout) == "see !]"


def test_text_pieces_of_a_turn_are_encoded_as_one_string() -> None:
    layout = laid([["user", ("text", "a\n"), ("text", "\nb")], ["assistant", ("text", "c")]])
    assert shown(layout.ids) == "[user\na¶b]\n[assistant\nc]\n"


def test_a_reply_is_encoded_apart_from_its_header_but_a_question_is_not() -> None:
    layout = laid([["user", ("text", "\nq")], ["assistant", ("text", "\nr")]])
    assert shown(layout.ids) == "[user¶q]\n[assistant\n\nr]\n"
    assert trained(layout) == "\nr]"
    assert [(p.kind, p.start, p.stop) for p in layout.parts[:2]] == [("header", 0, 5), ("text", 5, 7)]


def test_image_audio_and_video_markers() -> None:
    counts = MediaCounts([VideoCount((2, 2, 4), 1.0)], [3], [(1, 2, 2)])
    layout = laid([["user", ("image", None), ("text", "x"), ("audio", None), ("video", None)]], counts)
    assert shown(layout.ids) == "[user\n(I)x{AAA}(VVVV)]\n"
    assert [(s.kind, s.index, shown(layout.ids[s.start : s.stop])) for s in layout.slots] == [
        ("image", 0, "(I)"),
        ("audio", 0, "{AAA}"),
        ("video", 0, "(VVVV)"),
    ]
    assert [p.kind for p in layout.parts] == ["header", "image", "text", "audio", "video", "end"]


def test_a_clip_and_its_sound_stand_in_the_order_of_time() -> None:
    # grids at 0, 6.5, 13 sound tokens; a grid goes before the sound token of its own time
    video = VideoCount((3, 2, 4), 0.5, audio_tokens=15)
    layout = laid([["user", ("video", None)]], MediaCounts([video]))
    assert shown(layout.ids) == "[user\n({VV" + "A" * 7 + "VV" + "A" * 6 + "VV" + "AA})]\n"
    assert layout.slots[0].rows.tolist() == [8, 9, 17, 18, 25, 26]


def test_sound_that_ends_before_the_picture_and_none_at_all() -> None:
    short = laid([["user", ("video", None)]], MediaCounts([VideoCount((3, 2, 2), 1.0, 4)]))
    assert shown(short.ids) == "[user\n({VAAAAVV})]\n"
    silent = laid([["user", ("video", None)]], MediaCounts([VideoCount((3, 2, 2), 1.0, 0)]))
    assert shown(silent.ids) == "[user\n(VVV)]\n"


def test_each_clip_decides_for_itself() -> None:
    counts = MediaCounts(
        [VideoCount((1, 2, 2), 1.0, 2), VideoCount((1, 2, 2), 1.0), VideoCount((1, 2, 2), 1.0, 1)], [2]
    )
    turns = [["user", ("video", None), ("video", None), ("audio", None), ("video", None)]]
    assert shown(laid(turns, counts).ids) == "[user\n({VAA})(V){AA}({VA})]\n"


def test_twenty_frames_at_4_hz_spread_65_sound_tokens_over_10_grids() -> None:
    before = sounds_before(VideoCount((10, 2, 2), 0.5, 65), 13.0)
    assert before[0] == 0
    assert set(np.diff([*before.tolist(), 65]).tolist()) == {6, 7}


def test_vl_times_stand_before_each_grid() -> None:
    counts = MediaCounts([VideoCount((2, 2, 4), 1.0, 0, (0.25, 1.25))])
    turns = [["user", ("text", "see"), ("video", None), ("text", "?")]]
    wrapped = laid(turns, counts, VL)
    assert shown(wrapped.ids) == "[user\nsee(<0.2 seconds>(VV)<1.2 seconds>(VV))?]\n"
    bare = laid(turns, counts, ChatStyle(form="qwen3_vl", wrap_video=False))
    assert shown(bare.ids) == "[user\nsee<0.2 seconds>(VV)<1.2 seconds>(VV)?]\n"
    slot = bare.slots[0]
    assert shown(bare.ids[slot.start : slot.stop]) == "<0.2 seconds>(VV)<1.2 seconds>(VV)"


def test_vl_takes_no_sound() -> None:
    with pytest.raises(UnsupportedError, match="audio 0"):
        laid([["user", ("audio", None)]], MediaCounts(audios=[3]), VL)


def test_sound_needs_a_tokenizer_that_has_it() -> None:
    silent = ChatTokens(**{**TOKENS.__dict__, "audio": None, "audio_start": None, "audio_end": None})
    with pytest.raises(ConfigError, match=r"<\|audio_pad\|>"):
        build_layout([["user", ("audio", None)]], encode, silent, MediaCounts(audios=[3]), ChatStyle())


def test_sound_under_one_frame_keeps_its_markers() -> None:
    layout = laid([["user", ("audio", None), ("text", "?")]], MediaCounts(audios=[0]))
    assert shown(layout.ids) == "[user\n{}?]\n"


def test_a_system_prompt_is_added_only_where_there_is_none() -> None:
    style = ChatStyle(system="Be brief.")
    assert shown(laid([["user", ("text", "q")]], style=style).ids) == "[system\nBe brief.]\n[user\nq]\n"
    assert laid([["user", ("text", "q")]], style=style).parts[0].turn == -1
    own = [["system", ("text", "S")], ["user", ("text", "q")]]
    assert shown(laid(own, style=style).ids) == "[system\nS]\n[user\nq]\n"


def test_media_that_the_turns_do_not_bind_are_refused() -> None:
    with pytest.raises(RowError, match="2 <image> and the row has 1 image"):
        laid([["user", ("image", None), ("image", None)]], MediaCounts(images=[(1, 2, 2)]))
