"""LLaVA-Video-178K rows."""

import pytest

from tests.pack.preprocessors.run import preprocess


@pytest.mark.parametrize("name", ["llava_video", "LLaVA-Video-178K"])
@pytest.mark.parametrize("marker", ["<image>", "<video>"])
def test_llava_video(name, marker):
    raw = {
        "id": "HFa4L7Z1zK4",
        "data_source": "0_30_s_youtube_v0_1",
        "video": "liwei_youtube_videos/videos/youtube_video_2024/ytb_HFa4L7Z1zK4.mp4",
        "conversations": [
            {"from": "human", "value": f"{marker}\nWhat is in the bowl?\nA. Rice.\nB. Soup.\nAnswer with the letter."},
            {"from": "gpt", "value": "B."},
            {"from": "human", "value": "Describe the room."},
            {"from": "gpt", "value": "It is a kitchen."},
        ],
    }
    turns, metadata = preprocess(name, raw)
    assert turns == [
        ["user", ("video", None), ("text", "What is in the bowl?\nA. Rice.\nB. Soup.\nAnswer with the letter.")],
        ["assistant", ("text", "B.")],
        ["user", ("text", "Describe the room.")],
        ["assistant", ("text", "It is a kitchen.")],
    ]
    assert metadata == {"data_source": "0_30_s_youtube_v0_1"}


def test_llava_video_with_a_real_image_beside_it():
    raw = {
        "video": "a.mp4",
        "image": "b.png",
        "conversations": [{"from": "human", "value": "<video>\n<image>\nSame?"}, {"from": "gpt", "value": "Yes."}],
    }
    parts = preprocess("llava_video", raw)[0][0][1:]
    assert parts == [("video", None), ("image", None), ("text", "\nSame?")]
