"""Text rows in every form, in which a marker is text."""

import pytest

from tests.pack.preprocessors.run import preprocess, rejected


@pytest.mark.parametrize("name", ["plain_sft", "tulu-3-sft-mixture"])
@pytest.mark.parametrize(
    "raw",
    [
        {
            "id": "flan_v2_converted_26714",
            "messages": [{"role": "user", "content": "Explain <image>."}, {"role": "assistant", "content": "A tag."}],
            "source": "ai2-adapt-dev/flan_v2_converted",
        },
        {"conversations": [{"from": "human", "value": "Explain <image>."}, {"from": "gpt", "value": "A tag."}]},
        {"query": "Explain <image>.", "response": "A tag."},
        {"instruction": "Explain <image>.", "input": "", "output": "A tag."},
    ],
)
def test_plain_sft(name, raw):
    assert preprocess(name, raw)[0] == [["user", ("text", "Explain <image>.")], ["assistant", ("text", "A tag.")]]


def test_plain_sft_has_no_media():
    error = rejected("plain_sft", {"image": "a.png", "query": "x", "response": "y"})
    assert error.reason == "marker_mismatch"
    assert error.detail == "plain_sft takes rows without media; this one has 0 videos, 0 audios, 1 images"
    parts = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "x"}]}]
    assert rejected("plain_sft", {"messages": parts}).reason == "marker_mismatch"
