"""OpenAI messages with every kind of content part."""

from tests.pack.preprocessors.run import preprocess, rejected


def test_openai_messages_with_every_part():
    raw = {
        "messages": [
            {"role": "system", "content": "Be brief."},
            {
                "role": "user",
                "content": [
                    {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORw0KGgo="}},
                    {"type": "text", "text": "Compare <image> with "},
                    {"type": "video_url", "video_url": {"url": "s3://b/a.mp4"}},
                    {"type": "audio_url", "audio_url": {"url": "https://h/a.mp3"}},
                    {"type": "input_audio", "input_audio": {"data": "UklGRg==", "format": "wav"}},
                ],
            },
            {"role": "assistant", "content": [{"type": "text", "text": "They differ."}]},
        ]
    }
    assert preprocess("openai_messages", raw)[0] == [
        ["system", ("text", "Be brief.")],
        [
            "user",
            ("image", None),
            ("text", "Compare <image> with "),
            ("video", None),
            ("audio", None),
            ("audio", None),
        ],
        ["assistant", ("text", "They differ.")],
    ]


def test_openai_messages_that_a_sample_cannot_hold():
    tool = [{"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]}]
    assert (
        rejected("openai_messages", {"messages": tool}).detail == "message 0 has tool_calls, which a sample cannot hold"
    )
    assert "unknown role 'tool'" in rejected("openai_messages", {"messages": [{"role": "tool", "content": "x"}]}).detail
    assert "no list of messages" in rejected("openai_messages", {"question": "x"}).detail
    sharegpt = [{"from": "human", "value": "x"}]
    assert "message 0 has no key 'role'" in rejected("openai_messages", {"conversations": sharegpt}).detail
