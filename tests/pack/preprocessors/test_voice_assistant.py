"""VoiceAssistant-400K rows, and spoken conversations."""

import pytest

from tests.pack.preprocessors.run import preprocess, rejected

VOICE = {
    "split_name": "identity",
    "index": "2397",
    "round": "None",
    "question": "What's your name?",
    "question_audio": {"bytes": b"RIFF....WAVE", "path": "identity_2397.wav"},
    "answer": "I'm omni, a voice assistant.",
    "answer_snac": "# 3968 # 1 2 3",
}


@pytest.mark.parametrize("name", ["voice_assistant", "VoiceAssistant"])
def test_voice_assistant(name):
    turns, metadata = preprocess(name, VOICE)
    assert turns == [["user", ("audio", None)], ["assistant", ("text", "I'm omni, a voice assistant.")]]
    assert metadata == {"split_name": "identity", "index": "2397", "round": "None", "question": "What's your name?"}


def test_voice_assistant_as_a_conversation():
    talk = [
        {"from": "human", "value": "Hello?"},
        {"from": "gpt", "value": "Hi."},
        {"from": "human", "value": "And now?"},
        {"from": "gpt", "value": "Bye."},
    ]
    turns, metadata = preprocess("voice_assistant", {"audios": ["a.wav"], "conversations": talk, "split_name": "qa"})
    assert turns == [
        ["user", ("audio", None)],
        ["assistant", ("text", "Hi.")],
        ["user", ("text", "And now?")],
        ["assistant", ("text", "Bye.")],
    ]
    assert metadata == {"split_name": "qa", "transcripts": ["Hello?"]}
    turns, _ = preprocess("voice_assistant", {"audios": ["a.wav", "b.wav"], "conversations": talk})
    assert [turn[1] for turn in turns if turn[0] == "user"] == [("audio", None)] * 2
    marked = [{"from": "human", "value": "<audio>\nAnswer."}, {"from": "gpt", "value": "Hi."}]
    turns, _ = preprocess("voice_assistant", {"audios": ["a.wav"], "conversations": marked})
    assert turns[0] == ["user", ("audio", None), ("text", "\nAnswer.")]


def test_voice_assistant_without_answer_or_sound():
    assert rejected("voice_assistant", {**VOICE, "answer": " "}).detail == "answer is missing or empty"
    assert rejected("voice_assistant", {**VOICE, "question_audio": None}).reason == "marker_mismatch"
