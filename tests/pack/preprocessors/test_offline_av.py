"""qwen_omni_offline_av: markers, extracted frames, counts."""

from tests.pack.preprocessors.run import preprocess, rejected


def test_offline_av_with_a_path():
    raw = {
        "videos": ["clip.mp4"],
        "conversations": [
            {"from": "human", "value": "<video>\nWhat happens?"},
            {"from": "gpt", "value": "A flash and a beep."},
        ],
    }
    turns, metadata = preprocess("qwen_omni_offline_av", raw)
    assert turns == [
        ["user", ("video", None), ("text", "\nWhat happens?")],
        ["assistant", ("text", "A flash and a beep.")],
    ]
    assert metadata == {}


def test_offline_av_with_extracted_frames_and_all_markers():
    raw = {
        "videos": [{"frames": [b"jpg", b"jpg"], "audio": b"wav", "video_fps": 2.0, "audio_fps": 16000}],
        "audios": ["a.wav"],
        "images": ["i.png"],
        "system": "Be brief.",
        "conversations": [
            {"from": "human", "value": "Look: <video>, hear: <audio>\nand <image> too.\n"},
            {"from": "gpt", "value": "Yes."},
        ],
    }
    assert preprocess("qwen_omni_offline_av", raw)[0] == [
        ["system", ("text", "Be brief.")],
        [
            "user",
            ("text", "Look: "),
            ("video", None),
            ("text", ", hear: "),
            ("audio", None),
            ("text", "\nand "),
            ("image", None),
            ("text", " too.\n"),
        ],
        ["assistant", ("text", "Yes.")],
    ]


def test_offline_av_counts_both_numbers():
    raw = {"videos": ["a.mp4"], "conversations": [{"from": "human", "value": "<video><video>x"}]}
    error = rejected("qwen_omni_offline_av", raw)
    assert (error.reason, error.detail) == ("marker_mismatch", "the conversation has 2 <video> and the row has 1 video")
    raw = {"videos": ["a.mp4"], "conversations": [{"from": "human", "value": "<video><audio>x"}]}
    assert rejected("qwen_omni_offline_av", raw).detail == "the conversation has 1 <audio> and the row has 0 audios"


def test_offline_av_without_turns():
    for raw in ({"videos": ["a.mp4"], "conversations": []}, {"messages": []}):
        assert rejected("qwen_omni_offline_av", raw).reason == "empty_conversation"
    assert rejected("qwen_omni_offline_av", {"videos": ["a.mp4"]}).reason == "bad_row"
    empty = {"conversations": [{"from": "human", "value": ""}, {"from": "gpt", "value": ""}]}
    assert rejected("qwen_omni_offline_av", empty).reason == "empty_conversation"
