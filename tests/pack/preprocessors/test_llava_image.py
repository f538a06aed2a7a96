"""ShareGPT4V and LLaVA rows, pretraining and instruction forms."""

import pytest

from tests.pack.preprocessors.run import preprocess, rejected

SHAREGPT4V_PT = {
    "id": "000000000009",
    "image": "coco/train2017/000000000009.jpg",
    "conversations": [
        {"from": "human", "value": "Create a compact narrative representing the image.\n<image>"},
        {"from": "gpt", "value": "In the center of the image, a blue tray holds food."},
    ],
}
SHAREGPT4V_CAP = {
    "id": "000000000009",
    "image": "coco/train2017/000000000009.jpg",
    "conversations": [
        {"from": "system", "value": "sharegpt4v"},
        {"from": "human", "value": "<image>\nWhat do you see happening in this image?"},
        {"from": "gpt", "value": "In the center of the image, a blue tray holds food."},
    ],
}
CAPTION = ["assistant", ("text", "In the center of the image, a blue tray holds food.")]


@pytest.mark.parametrize("name", ["sharegpt4v_pretrain", "sharegpt4v_captioner", "llava_pretrain"])
@pytest.mark.parametrize("raw", [SHAREGPT4V_PT, SHAREGPT4V_CAP])
def test_captions_for_pretraining(name, raw):
    assert preprocess(name, raw)[0] == [["user", ("image", None)], CAPTION]


@pytest.mark.parametrize("name", ["sharegpt4v_sft", "sharegpt4v_captioner_sft", "llava_instruct"])
def test_captions_for_instruction(name):
    assert preprocess(name, SHAREGPT4V_CAP)[0] == [
        ["user", ("image", None), ("text", "\nWhat do you see happening in this image?")],
        CAPTION,
    ]
    assert preprocess(name, SHAREGPT4V_PT)[0] == [
        ["user", ("image", None), ("text", "Create a compact narrative representing the image.\n")],
        CAPTION,
    ]


def test_llava_instruct_keeps_later_turns_and_text_only_rows():
    raw = {
        "id": "x",
        "image": "gqa/images/2354786.jpg",
        "conversations": [
            {"from": "human", "value": "<image>\nIs the sky dark?"},
            {"from": "gpt", "value": "Yes"},
            {"from": "human", "value": "Why?"},
            {"from": "gpt", "value": "Night."},
        ],
    }
    turns = preprocess("llava_instruct", raw)[0]
    assert turns[2:] == [["user", ("text", "Why?")], ["assistant", ("text", "Night.")]]
    text_only = {"id": "y", "conversations": raw["conversations"][2:]}
    assert preprocess("llava_instruct", text_only)[0] == turns[2:]


def test_several_images_of_a_turn_stay_in_place():
    raw = {
        "images": ["a.jpg", "b.jpg"],
        "conversations": [
            {"from": "human", "value": "First <image> and then <image>: what changed?"},
            {"from": "gpt", "value": "The light."},
        ],
    }
    assert preprocess("llava_instruct", raw)[0][0] == [
        "user",
        ("text", "First "),
        ("image", None),
        ("text", " and then "),
        ("image", None),
        ("text", ": what changed?"),
    ]


@pytest.mark.parametrize("name", ["sharegpt4v_pretrain", "sharegpt4v_sft"])
def test_image_rows_without_user_or_answer(name):
    assert rejected(name, {"conversations": [{"from": "gpt", "value": "x"}]}).reason == "bad_row"
    raw = {"image": "a.jpg", "conversations": [{"from": "human", "value": "<image>x"}, {"from": "gpt", "value": ""}]}
    assert rejected(name, raw).reason == "empty_conversation"
