"""AVQA rows: prompt, label, metadata, and answers that name no choice."""

import random
import re

import pytest

from tests.pack.preprocessors.run import preprocess, rejected

AVQA = {
    "id": 183,
    "video_name": "-HG3Omg_89c_30",
    "video_id": 341,
    "question_text": "What happened in the video?",
    "multi_choice": ["motorboat", "Yacht consignment", "Sailboat set sail", "Consignment car"],
    "answer": 1,
    "question_relation": "View",
    "question_type": "Happening",
    "videos": ["videos/-HG3Omg_89c_30.mp4"],
}
AVQA_PROMPT = (
    "What happened in the video?\nA. motorboat\nB. Yacht consignment\nC. Sailboat set sail\nD. Consignment car"
)


def test_avqa():
    turns, metadata = preprocess("avqa", AVQA)
    assert turns == [
        ["user", ("video", None), ("text", AVQA_PROMPT + "\nAnswer with the letter of the right choice.")],
        ["assistant", ("text", "B")],
    ]
    assert metadata == {
        "choices": ["motorboat", "Yacht consignment", "Sailboat set sail", "Consignment car"],
        "answer": "B",
        "answer_text": "Yacht consignment",
        "scoring": "multiple_choice",
        "question": "What happened in the video?",
        "question_relation": "View",
        "question_type": "Happening",
        "video_name": "-HG3Omg_89c_30",
        "video_id": 341,
    }


@pytest.mark.parametrize(
    ("form", "answer"), [("label", "B"), ("text", "Yacht consignment"), ("label_text", "B. Yacht consignment")]
)
def test_avqa_forms_of_the_answer(form, answer):
    turns, _ = preprocess("avqa", AVQA, answer_form=form, instruction="")
    assert turns == [["user", ("video", None), ("text", AVQA_PROMPT)], ["assistant", ("text", answer)]]


@pytest.mark.parametrize(
    "answer", [1, "B", "b", "B.", "(B)", "B. Yacht consignment", "yacht Consignment", "<answer>B</answer>", "1"]
)
@pytest.mark.parametrize("labelled", [False, True])
def test_avqa_finds_the_choice_that_an_answer_names(answer, labelled):
    options = AVQA["multi_choice"]
    if labelled:
        options = [f"({label}) {text}" for label, text in zip("ABCD", options, strict=True)]
    raw = {"question": "Q?", "options": options, "answer": answer, "video": "a.mp4"}
    turns, metadata = preprocess("avqa", raw)
    assert turns[1] == ["assistant", ("text", "B")]
    assert metadata["choices"] == AVQA["multi_choice"]


def test_a_choice_that_looks_like_a_label_or_number_is_found_by_its_text():
    raw = {"question": "How many?", "options": ["3", "1", "0"], "answer": "1", "video": "a.mp4"}
    assert preprocess("avqa", raw)[0][1] == ["assistant", ("text", "B")]
    raw = {"question": "Which blood group?", "options": ["B", "A", "O"], "answer": "A", "video": "a.mp4"}
    assert preprocess("avqa", raw)[0][1] == ["assistant", ("text", "B")]


@pytest.mark.parametrize(
    ("options", "answer", "right"),
    [
        (["A. B", "B. A"], "A", ("A", "B")),  # labels before texts
        (["A. B", "B. A"], "B. A", ("B", "A")),
        (["B. red", "A. blue"], "A", ("A", "blue")),  # by the labels, whatever their order
        (["B. red", "A. blue"], 0, ("B", "red")),
        (["b) red", "a) blue"], "red", ("B", "red")),
        (["A. B. Smith", "B. A. Jones"], "B. Smith", ("A", "B. Smith")),
        (["red", "Red"], "Red", ("B", "Red")),  # the exact text first
        (["red", "Red"], "B", ("B", "Red")),
        (["C. cat", "D. dog"], "D", ("B", "D. dog")),
        (["E. coli", "B. subtilis"], "E. coli", ("A", "E. coli")),
        (["a.m.", "p.m."], "P.M.", ("B", "p.m.")),
    ],
)
def test_labels_and_texts_that_look_alike(options, answer, right):
    _, metadata = preprocess("avqa", {"question": "Q?", "options": options, "answer": answer, "video": "a.mp4"})
    assert (metadata["answer"], metadata["answer_text"]) == right


@pytest.mark.parametrize(
    ("options", "answer"),
    [
        (["red", "Red"], "RED"),
        (["red", "red"], "red"),
        (["A. red", "A. blue"], "A"),
        (["C. cat", "D. dog", "A. ant"], "A"),  # the first, or the one that says so
    ],
)
def test_an_answer_that_may_name_several_choices_is_refused(options, answer):
    error = rejected("avqa", {"question": "Q?", "options": options, "answer": answer, "video": "a.mp4"})
    assert error.reason == "bad_row"
    assert re.search(f"answer '{answer}' may name \\d and \\d of the {len(options)} choices", error.detail)


def test_a_digit_that_is_no_number_names_no_choice():
    error = rejected("avqa", {**AVQA, "answer": "\u00b2"})
    assert "names none of the 4 choices" in error.detail


def test_avqa_shuffles_by_the_row_alone():
    rows = [{**AVQA, "id": f"row{i}"} for i in range(40)]
    first = [preprocess("avqa", row, shuffle_choices=True) for row in rows]
    random.seed(99)
    assert first == [preprocess("avqa", row, shuffle_choices=True) for row in rows]
    labels = {metadata["answer"] for _, metadata in first}
    assert labels == set("ABCD")
    for turns, metadata in first:
        index = "ABCD".index(metadata["answer"])
        assert metadata["choices"][index] == metadata["answer_text"] == "Yacht consignment"
        assert f"{metadata['answer']}. Yacht consignment" in turns[0][2][1]


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"multi_choice": None}, "no choices under multi_choice or choices or options"),
        ({"multi_choice": ["one"]}, "has 1 choices; multiple choice has 2 to 26"),
        ({"multi_choice": ["a", ""]}, "it is a list of texts"),
        ({"answer": 4}, r"answer 4 is no index of the 4 choices \(from 0\)"),
        ({"answer": -1}, "answer -1 is no index"),
        ({"answer": "E"}, "answer 'E' names none of the 4 choices in multi_choice"),
        ({"answer": "A. something else"}, "names none of the 4 choices"),
        ({"answer": None}, "answer is None"),
        ({"answer": True}, "answer is True"),
        ({"question_text": " "}, "no text under question_text or question or problem"),
    ],
)
def test_avqa_rows_that_cannot_be_scored(changes, says):
    error = rejected("avqa", {**AVQA, **changes})
    assert error.reason == "bad_row"
    assert re.search(says, error.detail)


def test_a_wrong_argument_value_names_the_known_ones():
    error = rejected("avqa", AVQA, answer_form="letter")
    assert error.reason == "preprocessor_failed"
    assert "answer_form is 'letter'; it is one of label, text, label_text" in error.detail
