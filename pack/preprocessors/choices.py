"""Multiple choice: labels, prompt, and finding which choice an answer names."""

from __future__ import annotations

import random
import re
import string
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from schemas.conversation import Part, PartType
from schemas.errors import RowError

AnswerForm = Literal["label", "text", "label_text"]
ANSWER_FORMS: tuple[AnswerForm, ...] = ("label", "text", "label_text")
_LABEL = re.compile(r"^\(?([A-Za-z])(?:[.:)]\)?|\s*$)\s*")
_TAG = re.compile(r"<answer>(.*?)</answer>", re.DOTALL | re.IGNORECASE)


@dataclass(frozen=True)
class Choices:
    """texts: of the choices, without labels; right: index of the answer."""

    texts: tuple[str, ...]
    right: int

    @property
    def label(self) -> str:
        return string.ascii_uppercase[self.right]

    def lines(self) -> str:
        """'A. motorboat\\nB. yacht'"""
        return "\n".join(f"{string.ascii_uppercase[i]}. {text}" for i, text in enumerate(self.texts))

    def answer(self, form: AnswerForm) -> str:
        """What the assistant says: 'B', 'yacht' or 'B. yacht'."""
        text = self.texts[self.right]
        return {"label": self.label, "text": text, "label_text": f"{self.label}. {text}"}[form]

    def shuffled(self, rng: random.Random) -> Choices:
        """The same choices in another order."""
        order = list(range(len(self.texts)))
        rng.shuffle(order)
        return Choices(tuple(self.texts[i] for i in order), order.index(self.right))

    def metadata(self) -> dict[str, Any]:
        """What a scorer needs."""
        return {
            "choices": list(self.texts),
            "answer": self.label,
            "answer_text": self.texts[self.right],
            "scoring": "multiple_choice",
        }


def parse_choices(options: Any, answer: Any, where: str) -> Choices:
    """options: texts, with or without labels "A. ..."; answer: an index from 0, a label, or the text of a choice."""
    if not isinstance(options, list | tuple) or not all(isinstance(o, str) and o.strip() for o in options):
        raise bad(f"{where} is {options!r}; it is a list of texts")
    if not 2 <= len(options) <= len(string.ascii_uppercase):
        raise bad(f"{where} has {len(options)} choices; multiple choice has 2 to 26")
    labels = [_LABEL.match(option) for option in options]
    labelled = all(
        m and m[1].upper() == string.ascii_uppercase[i] and option[m.end() :].strip()
        for i, (m, option) in enumerate(zip(labels, options, strict=True))
    )
    texts = tuple(o[m.end() :].strip() if labelled and m else o.strip() for o, m in zip(options, labels, strict=True))
    return Choices(texts, _index(texts, answer, where))


def untag(solution: str) -> str:
    """The text inside <answer> tags, or all of it."""
    match = _TAG.search(solution)
    return (match[1] if match else solution).strip()


def check_answer_form(form: Any) -> AnswerForm:
    if form not in ANSWER_FORMS:
        raise ValueError(f"answer_form is {form!r}; it is one of {', '.join(ANSWER_FORMS)}")
    return form


def media_parts(num_videos: int, num_audios: int, num_images: int) -> list[Part]:
    """The row's media, which stand before the question: videos, images, sounds."""
    counts: dict[PartType, int] = {"video": num_videos, "image": num_images, "audio": num_audios}
    return [(kind, None) for kind, count in counts.items() for _ in range(count)]


def text_of(row: Any, *keys: str) -> str:
    """The first of the keys that has a text."""
    for key in keys:
        if isinstance(row.get(key), str) and row[key].strip():
            return str(row[key]).strip()
    raise bad(f"the row has no text under {' or '.join(keys)}")


def bad(detail: str) -> RowError:
    return RowError("bad_row", detail, "preprocess")


def _index(texts: Sequence[str], answer: Any, where: str) -> int:
    if isinstance(answer, int) and not isinstance(answer, bool):
        if not 0 <= answer < len(texts):
            raise bad(f"answer {answer} is no index of the {len(texts)} choices (from 0)")
        return answer
    if not isinstance(answer, str):
        raise bad(f"answer is {answer!r}; it is an index, a label or the text of a choice")
    said = untag(answer)
    same = [i for i, text in enumerate(texts) if text.casefold() == said.casefold()]
    if same:
        return same[0]
    match = _LABEL.match(said)
    index = string.ascii_uppercase.find(match[1].upper()) if match else -1
    if 0 <= index < len(texts):
        rest = said[match.end() :].strip() if match else ""
        if not rest or rest.casefold() == texts[index].casefold():
            return index
    if said.isdigit() and int(said) < len(texts):
        return int(said)
    raise bad(f"answer {answer!r} names none of the {len(texts)} choices in {where}: {', '.join(texts)}")
