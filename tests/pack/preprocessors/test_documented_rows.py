"""The rows that docs/rewards.md shows go through the preprocessors that it names."""

import json
import re
from pathlib import Path

from pack.preprocessors.video_r1 import PROBLEM_TYPES
from tests.pack.preprocessors.run import preprocess

TEXT = (Path(__file__).parents[3] / "docs/rewards.md").read_text()


def rows_of(name):
    """The rows in the first JSON block behind the words "for `name`:"."""
    block = TEXT.split(f"or `{name}`:\n\n```json\n")[1].split("```")[0]
    return [json.loads(text) for text in re.split(r"\n(?=\{)", block.strip())]


def test_avqa():
    (row,) = rows_of("avqa")
    turns, metadata = preprocess("avqa", row)
    assert turns[1] == ["assistant", ("text", "A")]
    assert (metadata["answer_text"], metadata["question_relation"]) == ("a motorboat", "Sound")
    for answer in ("A", "a motorboat"):
        assert preprocess("avqa", row | {"answer": answer})[0] == turns
    bare = {"videos": row["videos"], "question": row["question_text"], "options": row["multi_choice"], "solution": "A"}
    assert preprocess("avqa", bare)[0] == turns


def test_video_r1():
    number, choice = rows_of("video_r1")
    turns, metadata = preprocess("video_r1", number)
    assert turns[1] == ["assistant", ("text", "<think>One, then two more.</think>\n<answer>3</answer>")]
    assert (metadata["scoring"], metadata["answer_value"]) == ("numerical", 3.0)
    turns, metadata = preprocess("video_r1", choice)
    assert [part[0] for part in turns[0][1:]] == ["image", "text"]
    assert (metadata["scoring"], metadata["answer"], metadata["answer_text"]) == ("multiple_choice", "A", "a boat")
    listed = re.search(r"`problem_type` is (.*?);", TEXT, re.S)[1]
    assert {name.lower() for name in re.findall(r"`(.*?)`", listed)} == set(PROBLEM_TYPES)
