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
# a pair with no opening tag inside: one that is only named, or left open, does not begin an answer
_TAG = re.compile(r"<answer>((?:(?!<answer>).)*?)</answer>", re.DOTALL | re.IGNORECASE)


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
    """options: texts, with or without labels "A. ..."; answer: an index from 0, a label, or the text of a choice.

    Options that bring the first letters as labels are put in the order of these, and a label means theirs before it
    means a text; without labels of their own a text comes first, as of ["B", "A", "O"]. RowError for an answer that
    names no choice, or more than one.
    """
    if not isinstance(options, list | tuple) or not all(isinstance(o, str) and o.strip() for o in options):
        raise bad(f"{where} is {options!r}; it is a list of texts")
    if not 2 <= len(options) <= len(string.ascii_uppercase):
        raise bad(f"{where} has {len(options)} choices; multiple choice has 2 to 26")
    plain = [option.strip() for option in options]
    labels = [_own_label(option) for option in plain]
    wanted = list(string.ascii_uppercase[: len(plain)])
    if sorted(labels) != wanted:
        return Choices(tuple(plain), _index(plain, labels, answer, where, labelled=False))
    texts = [_LABEL.sub("", option, count=1).strip() for option in plain]
    right = _index(texts, labels, answer, where, labelled=True)
    order = [labels.index(label) for label in wanted]
    return Choices(tuple(texts[i] for i in order), order.index(right))


def untag(solution: str) -> str:
    """What stands inside the last pair of <answer> tags, or all of it."""
    found = _TAG.findall(solution)
    return (found[-1] if found else solution).strip()


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


def _own_label(option: str) -> str:
    """The letter before the text of an option, "" for an option without."""
    match = _LABEL.match(option)
    return match[1].upper() if match and option[match.end() :].strip() else ""


def _index(texts: Sequence[str], labels: Sequence[str], answer: Any, where: str, *, labelled: bool) -> int:
    if isinstance(answer, int) and not isinstance(answer, bool):
        if not 0 <= answer < len(texts):
            raise bad(f"answer {answer} is no index of the {len(texts)} choices (from 0)")
        return answer
    if not isinstance(answer, str):
        raise bad(f"answer is {answer!r}; it is an index, a label or the text of a choice")
    said = untag(answer)
    by_text, by_label = _with_text(texts, said), _with_label(texts, labels, said, labelled=labelled)
    by_number = [int(said)] if said.isdecimal() and int(said) < len(texts) else []
    found = next(filter(None, (by_label, by_text, by_number) if labelled else (by_text, by_label, by_number)), [])
    if len(found) == 1:
        return found[0]
    names = "names none of" if not found else f"may name {' and '.join(str(i + 1) for i in found)} of"
    raise bad(f"answer {answer!r} {names} the {len(texts)} choices in {where}: {', '.join(texts)}")


def _with_text(texts: Sequence[str], said: str) -> list[int]:
    """Those with exactly this text, else those with it in upper or lower case."""
    exact = [i for i, text in enumerate(texts) if text == said]
    return exact or [i for i, text in enumerate(texts) if text.casefold() == said.casefold()]


def _with_label(texts: Sequence[str], labels: Sequence[str], said: str, *, labelled: bool) -> list[int]:
    """Those that "B" or "B. yacht" may name: by the labels that they bring, and by their place unless these are all."""
    match = _LABEL.match(said)
    if match is None:
        return []
    letter, rest = match[1].upper(), said[match.end() :].strip()
    places = labels if labelled else string.ascii_uppercase
    found = [i for i in range(len(texts)) if letter in (labels[i], places[i])]
    return [i for i in found if not rest or rest.casefold() == texts[i].casefold()]
