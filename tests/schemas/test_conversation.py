"""Canonical turns: form, marker splitting, counts, and the way back to from/value."""

import json
import pickle
import re

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from schemas.conversation import (
    canonical_turns,
    check_media_counts,
    check_turns,
    count_media,
    join_markers,
    split_markers,
    to_sharegpt,
)
from schemas.errors import RowError
from schemas.messages import turns_from_sharegpt

GOOD = [
    ["system", ("text", "Be brief.")],
    ["user", ("video", None), ("text", "\nWho?")],
    ["assistant", ("text", "A cat.")],
]

pieces = st.lists(
    st.sampled_from(
        ["<video>", "<audio>", "<image>", "<\\video>", "<\\\\image>", "<", ">", "\\", "video", "\n", " ", "é", "x"]
    )
)
texts = st.one_of(st.text(st.characters(exclude_categories=["Cs"])), pieces.map("".join))


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("", []),
        ("plain", [("text", "plain")]),
        ("<video>\nWho?", [("video", None), ("text", "\nWho?")]),
        (
            " a<image> <image>b<audio>",
            [("text", " a"), ("image", None), ("text", " "), ("image", None), ("text", "b"), ("audio", None)],
        ),
        ("<video><video>", [("video", None), ("video", None)]),
        ("<Video> <videos> < video>", [("text", "<Video> <videos> < video>")]),
        ("the <\\video> tag <video>", [("text", "the <video> tag "), ("video", None)]),
        ("<\\\\image>", [("text", "<\\image>")]),
    ],
)
def test_split_markers(text, parts):
    assert split_markers(text) == parts


@given(texts)
def test_split_agrees_with_re_split(text):
    """Where no backslash is involved, the pieces are those of re.split, and nothing is lost."""
    text = text.replace("\\", "")
    expected = [
        (piece[1:-1], None) if re.fullmatch("<(video|audio|image)>", piece) else ("text", piece)
        for piece in re.split("(<(?:video|audio|image)>)", text)
        if piece
    ]
    assert split_markers(text) == expected
    assert "".join(p[1] if p[0] == "text" else f"<{p[0]}>" for p in split_markers(text)) == text


@given(
    st.lists(
        st.one_of(
            texts.filter(bool).map(lambda t: ("text", t)),
            st.sampled_from(["video", "audio", "image"]).map(lambda k: (k, None)),
        )
    )
)
@example([("text", "<"), ("text", "video>"), ("video", None), ("text", "<"), ("audio", None), ("text", ">")])
def test_join_is_the_inverse_for_every_text(parts):
    merged = []
    for part in parts:  # two neighbouring texts cannot be told from one
        if merged and part[0] == merged[-1][0] == "text":
            merged[-1] = ("text", merged[-1][1] + part[1])
        else:
            merged.append(part)
    assert split_markers(join_markers(parts)) == merged


def test_to_sharegpt_and_back():
    assert to_sharegpt(GOOD) == [
        {"from": "system", "value": "Be brief."},
        {"from": "human", "value": "<video>\nWho?"},
        {"from": "gpt", "value": "A cat."},
    ]
    assert turns_from_sharegpt(to_sharegpt(GOOD)) == GOOD


def test_check_turns_accepts_the_form_with_tuples_and_lists():
    check_turns(GOOD, 1, 0, 0)
    check_turns(json.loads(json.dumps(GOOD)), 1, 0, 0)


def test_canonical_turns_restores_what_json_loses():
    assert canonical_turns(json.loads(json.dumps(GOOD))) == GOOD


@pytest.mark.parametrize(
    ("turns", "says"),
    [
        ("text", "turns are a list, not str"),
        (None, "turns are a list, not null"),
        ([], "no turn with content"),
        ([["user"], ["assistant"]], "no turn with content"),
        ([["human", ("text", "a")]], "turn 0 is .*role: system, user, assistant"),
        ([["user", ("text", "a")], []], r"turn 1 is \[\]"),
        ([["user", "text"]], "turn 0 part 0 is 'text'"),
        ([["user", ("text", "a", 1)]], "turn 0 part 0"),
        ([["user", ("picture", None)]], "turn 0 part 0.*type: text, video, audio, image"),
        ([["user", ("text", "")]], "string that is not empty"),
        ([["user", ("text", None)]], "string that is not empty"),
        ([["user", ("text", "a"), ("video", "a.mp4")]], "turn 0 part 1: the payload of video is None"),
        ([["user", ("text", "a\ud800")]], "turn 0 part 0 has half a surrogate pair"),
    ],
)
def test_check_turns_names_the_fault(turns, says):
    with pytest.raises(ValueError, match=says):
        check_turns(turns, 0, 0, 0)


def test_check_turns_refuses_other_counts():
    with pytest.raises(ValueError, match="has 1 <video> and the row has 2 videos"):
        check_turns(GOOD, 2, 0, 0)


@given(st.lists(st.sampled_from(["video", "audio", "image"])), st.tuples(*[st.integers(0, 3)] * 3))
def test_media_counts_compare_all_three_kinds(kinds, given_counts):
    turns = [["user", ("text", "x"), *((kind, None) for kind in kinds)]]
    found = tuple(kinds.count(kind) for kind in ("video", "audio", "image"))
    assert tuple(count_media(turns)[kind] for kind in ("video", "audio", "image")) == found
    if found == given_counts:
        check_media_counts(turns, *given_counts)
        return
    with pytest.raises(RowError) as error:
        check_media_counts(turns, *given_counts)
    assert error.value.reason == "marker_mismatch"
    for name, have, want in zip(("video", "audio", "image"), found, given_counts, strict=True):
        said = f"has {have} <{name}> and the row has {want} {name}"
        assert (said in error.value.detail) == (have != want)


def test_mismatch_hints_at_markers_inside_text_parts():
    with pytest.raises(RowError, match=r"<video> inside a text part is text, not a marker"):
        check_media_counts([["user", ("text", "<video> Who?")]], 1, 0, 0)


def test_row_error_survives_a_process_boundary():
    with pytest.raises(RowError) as error:
        check_media_counts(GOOD, 0, 0, 0)
    copy = pickle.loads(pickle.dumps(error.value))
    assert (copy.reason, copy.detail, copy.stage) == ("marker_mismatch", error.value.detail, "preprocess")
