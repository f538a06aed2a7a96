"""Every conversation form that users bring -> the same turns; wrong forms name message and key."""

import base64

import pytest

from schemas.errors import RowError
from schemas.messages import media_in_parts, to_turns, turns_from_messages, turns_from_sharegpt

TURNS = [["user", ("video", None), ("text", "\nWho?")], ["assistant", ("text", "A cat.")]]
SYSTEM = ["system", ("text", "Be brief.")]


@pytest.mark.parametrize(
    "conversations",
    [
        [{"from": "human", "value": "<video>\nWho?"}, {"from": "gpt", "value": "A cat."}],
        [{"from": "user", "value": "<video>\nWho?"}, {"from": "assistant", "value": "A cat."}],
        [{"from": " Human", "value": "<video>\nWho?"}, {"from": "ChatGPT", "value": "A cat."}],
        [{"role": "user", "content": "<video>\nWho?"}, {"role": "assistant", "content": "A cat."}],
        [
            {"role": "user", "content": [{"type": "video"}, {"type": "text", "text": "\nWho?"}]},
            {"role": "assistant", "content": [{"type": "text", "text": "A cat."}]},
        ],
        [
            {"role": "user", "content": [{"type": "video", "video": "a.mp4", "text": None}, "\nWho?"]},
            {"role": "assistant", "content": {"type": "output_text", "text": "A cat."}},
        ],
        [
            {"role": "user", "content": [{"type": "video_url", "video_url": {"url": "a"}}, {"text": "\nWho?"}]},
            {"role": "assistant", "content": "A cat."},
        ],
        [["user", ["video", None], ["text", "\nWho?"]], ["assistant", ["text", "A cat."]]],
        {"conversations": [{"from": "human", "value": "<video>\nWho?"}, {"from": "gpt", "value": "A cat."}]},
        {"messages": [{"role": "user", "content": "<video>\nWho?"}, {"role": "assistant", "content": "A cat."}]},
        {"from": ["human", "gpt"], "value": ["<video>\nWho?", "A cat."]},
        {"query": "<video>\nWho?", "response": "A cat."},
        {"prompt": "<video>\nWho?", "completion": "A cat.", "system": ""},
        {"question": "<video>\nWho?", "answer": "A cat.", "history": []},
        {"instruction": "<video>", "input": "Who?", "output": "A cat."},
        {"instruction": "<video>\nWho?", "input": "", "output": "A cat.", "history": None},
    ],
)
def test_every_form_gives_the_same_turns(conversations):
    assert to_turns(conversations) == TURNS


def test_history_and_system_come_first():
    row = {"query": "And now?", "response": "A dog.", "history": [["<video>\nWho?", "A cat."]], "system": "Be brief."}
    assert to_turns(row) == [SYSTEM, *TURNS, ["user", ("text", "And now?")], ["assistant", ("text", "A dog.")]]


def test_system_beside_a_conversation():
    messages = [{"from": "human", "value": "<video>\nWho?"}, {"from": "gpt", "value": "A cat."}]
    assert to_turns({"conversations": messages, "system": "Be brief."}) == [SYSTEM, *TURNS]
    with_system = [{"from": "system", "value": "Be brief."}, *messages]
    assert to_turns(with_system, "Be brief.") == [SYSTEM, *TURNS]
    with pytest.raises(RowError, match="system prompt beside a conversation that begins with a system message"):
        to_turns(with_system, "Be long.")


def test_text_parts_are_text_even_with_markers_in_them():
    content = [{"type": "image"}, {"type": "text", "text": "the <image> tag"}]
    assert to_turns([{"role": "user", "content": content}]) == [["user", ("image", None), ("text", "the <image> tag")]]


def test_markers_off_keeps_every_text():
    row = {"instruction": "Explain <image> and <\\image>", "input": "", "output": "<video> plays"}
    expected = [["user", ("text", "Explain <image> and <\\image>")], ["assistant", ("text", "<video> plays")]]
    assert to_turns(row, markers=False) == expected


def test_empty_turns_stay_without_parts():
    assert to_turns([{"from": "human", "value": "Hi"}, {"from": "gpt", "value": ""}])[1] == ["assistant"]


@pytest.mark.parametrize(
    ("conversations", "says"),
    [
        ("text", "a conversation is a list of messages or a row, not str"),
        (7, "not int"),
        ([{"from": "human"}], "message 0 has no key 'value' or 'content'; it has 'from'"),
        ([{"value": "x"}], "message 0 has no key 'from' or 'role'"),
        (
            [{"from": "human", "value": "x"}, {"from": "tool", "value": "x"}],
            "message 1: unknown role 'tool'; known: user",
        ),
        ([{"from": "human", "value": None}], "message 0 value is missing or null"),
        ([{"role": "user", "content": 3}], "message 0 content is a text or a list of content parts, not int"),
        ([{"role": "user", "content": [{"type": "file"}]}], r"content\[0\]: unknown type 'file'.*known: text"),
        ([{"role": "user", "content": [{"type": "text"}]}], "the text of a text part is a string, not None"),
        ([{"role": "user", "content": [3]}], r"content\[0\] is a content part"),
        ([{"from": "human", "value": "x"}, "x"], "message 1 is a mapping"),
        ([["human", ["text", "x"]]], "turn 0 is"),
        ({"text": "x"}, "no conversation among the keys text; known forms: conversations"),
        ({"query": "x", "response": "y", "history": [["x"]]}, r"history\[0\] is a pair"),
        ({"query": "x", "response": None}, "response is missing or null"),
        ({"instruction": 3, "output": "x"}, "instruction is 3; it is a text"),
        ({"from": ["human"], "value": ["x", "y"]}, "lists of one length"),
        ([{"from": "human", "value": "a\ud800"}], "half a surrogate pair"),
    ],
)
def test_wrong_forms_name_the_place(conversations, says):
    with pytest.raises(RowError, match=says) as error:
        to_turns(conversations)
    assert (error.value.reason, error.value.stage) == ("bad_row", "preprocess")


def test_no_message_is_an_empty_conversation():
    with pytest.raises(RowError) as error:
        to_turns([])
    assert error.value.reason == "empty_conversation"


def test_one_form_alone():
    with pytest.raises(RowError, match="message 0 has no key 'from'"):
        turns_from_sharegpt([{"role": "user", "content": "x"}])
    with pytest.raises(RowError, match="message 0 has no key 'role'"):
        turns_from_messages([{"from": "human", "value": "x"}])


def test_media_in_parts_in_order():
    wav = base64.b64encode(b"RIFF").decode()
    content = [
        {"type": "text", "text": "a"},
        {"type": "image_url", "image_url": {"url": "a.png", "detail": "low"}},
        {"type": "video_url", "video_url": "s3://b/v.mp4"},
        {"type": "input_audio", "input_audio": {"data": wav, "format": "wav"}},
        {"type": "input_audio", "input_audio": {"data": wav, "format": "mp3"}},
        {"type": "input_audio", "input_audio": {"data": f"data:;base64,{wav}"}},
        {"type": "image", "base64": wav},
        {"type": "video", "video": "v.mp4", "video_start": 1.5, "video_end": 3, "fps": 2.0, "max_pixels": 9},
        {"type": "video", "video": ["0.jpg", "1.jpg"], "sample_fps": 4},
        {"type": "audio", "audio": b"RIFF"},
        {"type": "image"},
    ]
    found = [(kind, medium) for kind, medium, _ in media_in_parts([{"role": "user", "content": content}])]
    assert found == [
        ("image", "a.png"),
        ("video", "s3://b/v.mp4"),
        ("audio", f"data:audio/wav;base64,{wav}"),
        ("audio", f"data:audio/mpeg;base64,{wav}"),
        ("audio", f"data:;base64,{wav}"),
        ("image", f"data:;base64,{wav}"),
        ("video", {"path": "v.mp4", "video_start": 1.5, "video_end": 3}),
        ("video", {"frames": ["0.jpg", "1.jpg"], "video_fps": 4}),
        ("audio", b"RIFF"),
        ("image", None),
    ]
    assert list(media_in_parts([{"from": "human", "value": "<image>"}])) == []
