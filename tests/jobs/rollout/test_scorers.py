"""Scorers against answers scored by hand, and against what the preprocessors keep."""

from __future__ import annotations

import pytest

from jobs.rollout.scorers import SCORERS, ScorerRegistry, by_kind, find_scorer
from schemas.errors import ConfigError, RowError
from tests.pack.preprocessors.run import preprocess

CHOICES = {"choices": ["motorboat", "a yacht", "Big Ben"], "answer": "B", "answer_text": "a yacht"}


@pytest.mark.parametrize(
    ("text", "reward"),
    [
        ("B", 1),
        ("b", 1),
        (" B. ", 1),
        ("(B)", 1),
        ("(b) A yacht", 1),
        ("B. a yacht.", 1),
        ("A yacht", 1),
        ("<think>It is A.</think>\n<answer>B</answer>", 1),
        ("<answer>A</answer> no, <answer>B</answer>", 1),
        ("I will use <answer> tags. <answer>B</answer>", 1),
        ("<answer><answer>B</answer></answer>", 1),
        ("<ANSWER>B</ANSWER> so I said in <answer>", 1),
        ("<answer>B</answer> no, <answer> or rather <answer>A</answer>", 0),
        ("A", 0),
        ("B. motorboat", 0),
        ("C. a yacht", 0),
        ("Big Ben", 0),
        ("B or C", 0),
        ("It is B", 0),
        ("", 0),
        ("<answer></answer>", 0),
        ("BB", 0),
    ],
)
def test_multiple_choice(text, reward):
    assert SCORERS["multiple_choice"](text, CHOICES) == reward


@pytest.mark.parametrize(
    ("choices", "answer", "rewards"),
    [
        (["B", "A", "C"], "A", {"A": 1, "B": 0, "C": 0, "(a)": 1, "A. B": 1, "B. A": 0}),  # labels before texts
        (["B", "A", "C"], "B", {"A": 0, "B": 1}),
        (["red", "Red"], "A", {"red": 1, "Red": 0, "A. Red": 1, "B": 0}),
        (["red", "red"], "B", {"red": 1, "A": 0, "B": 1}),
        (["E. coli", "B. subtilis"], "A", {"E. coli": 1, "e. Coli": 1, "B. subtilis": 0, "A. E. coli": 1}),
        (["caf\u00e9", "cafe"], "A", {"cafe\u0301": 1, "CAFE\u0301": 1, "cafe": 0}),
        (["5\u00b2", "52"], "A", {"5\u00b2": 1, "52": 0}),
    ],
)
def test_labels_before_texts_and_exact_texts_first(choices, answer, rewards):
    facts = {"choices": choices, "answer": answer}
    assert {text: SCORERS["multiple_choice"](text, facts) for text in rewards} == rewards


@pytest.mark.parametrize(
    ("text", "wanted", "reward"),
    [
        ("0.5", 0.5, 1),
        ("50%", 0.5, 1),
        ("1/2", 0.5, 1),
        ("1/2%", 0.005, 1),
        ("1,200", 1200.0, 1),
        ("1201", 1200.0, 0),
        ("many", 3.0, 0),
        ("\u22125", -5.0, 1),
        ("\uff0d5", -5.0, 1),
        ("5", -5.0, 0),
        ("10\u00b2", 102.0, 0),
    ],
)
def test_numerical(text, wanted, reward):
    assert SCORERS["numerical"](f"<answer>{text}</answer>", {"answer": "?", "answer_value": wanted}) == reward


def test_a_number_that_is_none_is_compared_as_text():
    facts = {"answer": "about ten", "answer_value": None}
    assert SCORERS["numerical"]("About  ten.", facts) == 1
    assert SCORERS["regression"]("ten", facts) == 0


@pytest.mark.parametrize(
    ("text", "reward"), [("100", 1.0), ("96", 1.0), ("88", 0.8), ("131", 0.4), ("10", 0.0), ("x", 0)]
)
def test_regression(text, reward):
    """|x - 100| / 100 under 0.5, 0.45, ..., 0.05: 0.04 passes all ten, 0.12 eight of them, 0.31 four."""
    assert SCORERS["regression"](text, {"answer": "100", "answer_value": 100.0}) == pytest.approx(reward)


@pytest.mark.parametrize(
    ("text", "reward"),
    [("STOP here now", 1), ("stop, here now!", 1), ("stop now", 2 / 3), ("stop here right now", 2 / 3), ("go", 0)],
)
def test_ocr(text, reward):
    assert SCORERS["ocr"](text, {"answer": "STOP here now"}) == pytest.approx(reward)


@pytest.mark.parametrize(
    ("text", "reward"), [("the cat jumps high", 1), ("the cat", 4 / 6), ("high the cat", 4 / 7), ("dog", 0), ("", 0)]
)
def test_free_form(text, reward):
    """2 x common / (words said + words wanted); the order counts."""
    assert SCORERS["free_form"](text, {"answer": "The cat jumps high."}) == pytest.approx(reward)


@pytest.mark.parametrize("kind", ["exact_text", "ocr", "free_form", "numerical"])
@pytest.mark.parametrize(
    ("said", "wanted"),
    [
        ("cafe\u0301", "caf\u00e9"),
        ("CAF\u00c9", "cafe\u0301"),
        ("\uff23\uff21\uff26\u00c9", "caf\u00e9"),
        ("\ufb01sh", "fish"),
    ],
)
def test_the_same_text_in_other_forms_of_unicode(kind, said, wanted):
    """Decomposed accents, full-width letters and ligatures."""
    assert SCORERS[kind](said, {"answer": wanted}) == 1
    assert SCORERS[kind]("cafe", {"answer": "caf\u00e9"}) == 0


def test_what_packing_keeps_is_what_scorers_need():
    avqa = {"question": "Q?", "options": ["rain", "a horn"], "answer": 1, "videos": ["a.mp4"]}
    turns, facts = preprocess("avqa", avqa)
    assert by_kind(turns[-1][1][1], facts) == 1
    assert by_kind("A", facts) == 0
    for kind, solution, right, wrong in [
        ("multiple choice", "B", "B", "A"),
        ("numerical", "35%", "0.35", "35"),
        ("OCR", "STOP", "stop", "go"),
        ("free-form", "A cat", "a cat", "dogs"),
        ("regression", "12", "12", "90"),
    ]:
        raw = {"problem": "P?", "problem_type": kind, "solution": solution, "options": ["rain", "horn"], "video": "a"}
        turns, facts = preprocess("video_r1", raw)
        assert by_kind(turns[-1][1][1], facts) == 1  # the packed answer itself
        assert (by_kind(right, facts), by_kind(wrong, facts)) == (1, 0)


def test_rows_that_cannot_be_scored_say_what_is_missing():
    with pytest.raises(RowError, match="its metadata has no scoring to score by"):
        by_kind("A", {"answer": "A"})
    with pytest.raises(RowError, match=r"no choices .* \(it has answer\)"):
        SCORERS["multiple_choice"]("A", {"answer": "A"})


WRONG_FACTS = [
    ({"scoring": "multiple_choice", "choices": ["x", "y"], "answer": "b"}, "answer 'b' and 2 choices"),
    ({"scoring": "multiple_choice", "choices": ["x", "y"], "answer": "D"}, "answer 'D' and 2 choices"),
    ({"scoring": "multiple_choice", "choices": ["x", "y"], "answer": "AB"}, "answer 'AB'"),
    ({"scoring": "multiple_choice", "choices": ["x", "y"], "answer": ""}, "answer ''"),
    ({"scoring": "multiple_choice", "choices": ["x", 5], "answer": "A"}, "they are texts"),
    ({"scoring": "numerical", "answer_value": "5", "answer": "5"}, "answer_value '5'; it is a finite number"),
    ({"scoring": "regression", "answer_value": True, "answer": "5"}, "answer_value True"),
    ({"scoring": "regression", "answer_value": float("nan"), "answer": "5"}, "answer_value nan"),
    ({"scoring": "numericl"}, "scoring is 'numericl', which is no scorer; did you mean 'numerical'"),
    ({"scoring": "auto"}, "scoring is 'auto', which is no scorer"),
]


@pytest.mark.parametrize(("facts", "says"), WRONG_FACTS)
def test_facts_that_nothing_can_be_scored_by(facts, says):
    with pytest.raises(RowError, match=says):
        by_kind("A", facts)


def test_names():
    assert find_scorer("auto") is by_kind
    assert find_scorer("numerical") is SCORERS["numerical"]
    with pytest.raises(ConfigError, match="unknown scorer 'multiple_choise'; did you mean 'multiple_choice'"):
        find_scorer("multiple_choise")
    with pytest.raises(ConfigError, match="module 'no_such_module' cannot be imported"):
        find_scorer("auto", ["no_such_module"])
    own = ScorerRegistry()
    own.register("mine")(lambda text, facts: 0.5)
    with pytest.raises(ConfigError, match="'mine' is registered already"):
        own.register("mine")
        own.register("mine")(lambda text, facts: 0.5)
