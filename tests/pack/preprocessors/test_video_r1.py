"""Video-R1 rows of every problem type."""

import pytest

from tests.pack.preprocessors.run import preprocess, rejected

VIDEO_R1 = {
    "problem_id": 2,
    "problem": "What appears on the screen during the ascent?",
    "data_type": "video",
    "problem_type": "multiple choice",
    "options": ["A. A notification", "B. A military command", "C. A warning", "D. A weather update"],
    "process": "<think>It is a pop-up.</think>",
    "solution": "<answer>A</answer>",
    "path": "./LLaVA-Video-178K/a.mp4",
    "data_source": "LLaVA-Video-178K/30_60_s_youtube_v0_1",
}


def test_video_r1_multiple_choice_with_reasoning():
    turns, metadata = preprocess("video_r1", VIDEO_R1)
    assert turns == [
        [
            "user",
            ("video", None),
            (
                "text",
                "What appears on the screen during the ascent?\n"
                "A. A notification\nB. A military command\nC. A warning\nD. A weather update\n"
                "Think first, inside <think> </think>.\n"
                "Give the letter of the right choice inside <answer> </answer>.",
            ),
        ],
        ["assistant", ("text", "<think>It is a pop-up.</think>\n<answer>A</answer>")],
    ]
    assert metadata == {
        "choices": ["A notification", "A military command", "A warning", "A weather update"],
        "answer": "A",
        "answer_text": "A notification",
        "scoring": "multiple_choice",
        "question": "What appears on the screen during the ascent?",
        "problem_id": 2,
        "problem_type": "multiple choice",
        "data_type": "video",
        "data_source": "LLaVA-Video-178K/30_60_s_youtube_v0_1",
    }


def test_video_r1_without_reasoning():
    for raw, arguments in (({**VIDEO_R1, "process": None}, {}), (VIDEO_R1, {"reasoning": False})):
        turns, _ = preprocess("video_r1", raw, **arguments)
        assert turns[1] == ["assistant", ("text", "<answer>A</answer>")]
        assert "<think>" not in turns[0][2][1]


@pytest.mark.parametrize(
    ("kind", "solution", "scoring", "value"),
    [
        ("numerical", "12", "numerical", 12.0),
        ("numerical", "1,200.5", "numerical", 1200.5),
        ("numerical", "35%", "numerical", 0.35),
        ("numerical", "3/4", "numerical", 0.75),
        ("numerical", "1/0", "numerical", None),
        ("regression", "-3.5", "regression", -3.5),
        ("numerical", "about ten", "numerical", None),
        ("OCR", "STOP\nHERE", "ocr", "absent"),
        ("free-form", "The cat jumps.", "free_form", "absent"),
    ],
)
def test_video_r1_other_kinds(kind, solution, scoring, value):
    raw = {
        "problem_id": 9,
        "problem": "Which?",
        "data_type": "image",
        "problem_type": kind,
        "options": [],
        "solution": f"<answer>{solution}</answer>",
        "path": "./Math/a.png",
    }
    turns, metadata = preprocess("video_r1", raw)
    assert turns[0][1] == ("image", None)
    assert turns[1] == ["assistant", ("text", f"<answer>{solution}</answer>")]
    assert (metadata["scoring"], metadata["answer"]) == (scoring, solution)
    assert metadata.get("answer_value", "absent") == (pytest.approx(value) if isinstance(value, float) else value)
    assert "choices" not in metadata


def test_video_r1_does_not_repeat_choices_of_the_problem():
    lines = "A. A notification\nB. A military command\nC. A warning\nD. A weather update"
    turns, _ = preprocess("video_r1", {**VIDEO_R1, "problem": f"What appears?\n{lines}"})
    assert turns[0][2][1].count(lines) == 1


def test_video_r1_wrong_rows():
    assert (
        "unknown problem_type 'essay'; known: multiple choice"
        in rejected("video_r1", {**VIDEO_R1, "problem_type": "essay"}).detail
    )
    assert "names none of the 4 choices" in rejected("video_r1", {**VIDEO_R1, "solution": "<answer>Z</answer>"}).detail
    assert "solution is empty" in rejected("video_r1", {**VIDEO_R1, "solution": "<answer> </answer>"}).detail
    assert "no text under solution" in rejected("video_r1", {**VIDEO_R1, "solution": ""}).detail


@pytest.mark.parametrize(
    ("solution", "answer"),
    [
        ("In <answer> tags: <answer>B</answer>", "B"),
        ("<answer><answer>B</answer></answer>", "B"),
        ("<answer>A</answer>, I mean <answer>B</answer>", "B"),
        ("no tags", "no tags"),
        ("<answer>left open", "<answer>left open"),
        ("</answer> <answer> b </answer>", "b"),
    ],
)
def test_video_r1_takes_the_last_pair_of_tags(solution, answer):
    """As the scorer does."""
    assert preprocess("video_r1", {**VIDEO_R1, "problem_type": "OCR", "solution": solution})[1]["answer"] == answer
