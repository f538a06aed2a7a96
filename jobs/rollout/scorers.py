"""Scorers: the text of an answer and what packing kept of its row -> a reward.

A scorer is `fn(text, facts) -> float`, registered by name; facts: the row's metadata (`choices`, `answer`,
`answer_value`, `scoring`, ..., as `avqa` and `video_r1` keep them). The scoring kinds of packing are names of scorers.
The answer is what stands inside the last <answer> tags, or the whole text where there are none.
"""

from __future__ import annotations

import importlib
import math
import re
import string
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from pack.preprocessors.choices import untag
from pack.preprocessors.video_r1 import parse_number
from schemas.errors import ConfigError, RowError
from schemas.wording import known_names, one_line

Scorer = Callable[[str, Mapping[str, Any]], float]
AUTO = "auto"
_LABELLED = re.compile(r"\(?([A-Za-z])(?:[.:)]+\s*|\s*$)")
_ACCURACIES = [0.5 + 0.05 * i for i in range(10)]


class ScorerRegistry:
    """Names -> scorers."""

    def __init__(self) -> None:
        self._scorers: dict[str, Scorer] = {}

    def register(self, name: str) -> Callable[[Scorer], Scorer]:
        """Decorator. ConfigError for a name that is taken."""

        def add(scorer: Scorer) -> Scorer:
            if name in self._scorers or name == AUTO:
                raise ConfigError(f"scorer {name!r} is registered already; known: {', '.join(self.names())}")
            self._scorers[name] = scorer
            return scorer

        return add

    def names(self) -> list[str]:
        return sorted(self._scorers)

    def __iter__(self) -> Iterator[str]:
        return iter(self.names())

    def __getitem__(self, name: str) -> Scorer:
        """ConfigError for an unknown name, with the nearest one and all."""
        if name not in self._scorers:
            raise ConfigError(f"unknown scorer {name!r}{known_names(name, [AUTO, *self.names()])}")
        return self._scorers[name]


SCORERS = ScorerRegistry()


def find_scorer(name: str, imports: Iterable[str] = ()) -> Scorer:
    """The scorer of a configuration. ConfigError: an unknown name, or a module of `imports` that cannot be
    imported."""
    for module in imports:
        try:
            importlib.import_module(module)
        except ImportError as error:
            raise ConfigError(f"rollouts.imports: module {module!r} cannot be imported: {one_line(error)}") from error
    return by_kind if name == AUTO else SCORERS[name]


def by_kind(text: str, facts: Mapping[str, Any]) -> float:
    """By the scoring kind that packing kept with the row. RowError for a row without, or with an unknown one."""
    kind = _fact(facts, "scoring", str)
    if kind not in (known := SCORERS.names()):
        raise RowError("bad_row", f"its scoring is {kind!r}, which is no scorer{known_names(kind, known)}")
    return SCORERS[kind](text, facts)


@SCORERS.register("multiple_choice")
def multiple_choice(text: str, facts: Mapping[str, Any]) -> float:
    """1 for the label of the right choice ('B', '(b)', 'B.'), for its text, or for both ('B. yacht'); else 0.

    A label with the text of another choice is wrong. What is the label of a choice is never taken for the text of
    another one; texts that differ in upper and lower case alone are told apart where the answer is exactly one of them.
    """
    choices, right = _right_choice(facts)
    said = untag(text)
    match = _LABELLED.match(said)
    named = string.ascii_uppercase.find(match[1].upper()) if match else -1
    if match is not None and 0 <= named < len(choices):
        rest = said[match.end() :].strip()
        if not rest or _same(rest, choices[named]):
            return float(named == right)
    exact = [i for i, choice in enumerate(choices) if _composed(said) == _composed(choice)]
    return float(right in exact if exact else _same(said, choices[right]))


@SCORERS.register("numerical")
def numerical(text: str, facts: Mapping[str, Any]) -> float:
    """1 for the same number (in any form: 0.5, 50%, 1/2), within 1e-6 of its size; where the answer is no number, for
    the same text."""
    wanted = _number(facts)
    if wanted is None:
        return exact_text(text, facts)
    value = parse_number(untag(text))
    return float(value is not None and math.isclose(value, wanted, rel_tol=1e-6, abs_tol=1e-6))


@SCORERS.register("regression")
def regression(text: str, facts: Mapping[str, Any]) -> float:
    """Mean relative accuracy (Yang et al. 2024, arXiv 2412.14171): the share of the thresholds t = 0.5, 0.55, ..., 0.95
    for which |value - answer| / |answer| < 1 - t."""
    wanted = _number(facts)
    if wanted is None:
        return exact_text(text, facts)
    value = parse_number(untag(text))
    if value is None:
        return 0.0
    error = abs(value - wanted) / max(abs(wanted), 1e-12)
    return sum(error < 1 - accuracy for accuracy in _ACCURACIES) / len(_ACCURACIES)


@SCORERS.register("exact_text")
def exact_text(text: str, facts: Mapping[str, Any]) -> float:
    """1 for the same text, but for case, runs of white space, and a full stop at the end."""
    return float(_same(untag(text), _fact(facts, "answer", str)))


@SCORERS.register("ocr")
def ocr(text: str, facts: Mapping[str, Any]) -> float:
    """1 - word error rate, not under 0: insertions, deletions and substitutions of words per word of the answer."""
    wanted, said = _words(_fact(facts, "answer", str)), _words(untag(text))
    if not wanted:
        return float(not said)
    return max(0.0, 1 - _edits(said, wanted) / len(wanted))


@SCORERS.register("free_form")
def free_form(text: str, facts: Mapping[str, Any]) -> float:
    """ROUGE-L (Lin 2004): the F1 of the longest common subsequence of words."""
    wanted, said = _words(_fact(facts, "answer", str)), _words(untag(text))
    common = _common(said, wanted)
    return 2 * common / (len(said) + len(wanted)) if common else 0.0


def _fact(facts: Mapping[str, Any], key: str, kind: type) -> Any:
    """RowError for a row that cannot be scored."""
    value = facts.get(key)
    if not isinstance(value, kind):
        has = ", ".join(facts) or "nothing"
        text = f"its metadata has no {key} to score by (it has {has}); pack it with a preprocessor that keeps it"
        raise RowError("bad_row", text)
    return value


def _right_choice(facts: Mapping[str, Any]) -> tuple[list[str], int]:
    """(texts of the choices, index of the right one). RowError for facts that give none."""
    choices, label = _fact(facts, "choices", list), _fact(facts, "answer", str)
    right = string.ascii_uppercase.find(label) if len(label) == 1 else -1
    if not 0 <= right < len(choices) or not all(isinstance(choice, str) for choice in choices):
        text = f"its metadata has answer {label!r} and {len(choices)} choices"
        raise RowError("bad_row", f"{text}; the answer is the capital letter of a choice, and they are texts")
    return choices, right


def _number(facts: Mapping[str, Any]) -> float | None:
    """None where packing found no number in the answer. RowError for what is no number now."""
    value = facts.get("answer_value")
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise RowError("bad_row", f"its metadata has answer_value {value!r}; it is a finite number, or null")
    return float(value)


def _same(one: str, other: str) -> bool:
    return _plain(one) == _plain(other)


def _plain(text: str) -> str:
    return one_line(_folded(text)).removesuffix(".")


def _words(text: str) -> list[str]:
    return [word.strip(string.punctuation) or word for word in _folded(text).split()]


def _folded(text: str) -> str:
    """Without case, and with one form of what Unicode can write in several, such as accents (Unicode 3.13, D147)."""
    return unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", text).casefold())


def _composed(text: str) -> str:
    """With accents in one form, and runs of white space as one."""
    return one_line(unicodedata.normalize("NFC", text))


def _edits(one: Sequence[str], other: Sequence[str]) -> int:
    """Levenshtein distance of words."""
    row = list(range(len(other) + 1))
    for i, word in enumerate(one, start=1):
        above, row[0] = row[0], i
        for j, wanted in enumerate(other, start=1):
            above, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, above + (word != wanted))
    return row[-1]


def _common(one: Sequence[str], other: Sequence[str]) -> int:
    """Length of the longest common subsequence."""
    row = [0] * (len(other) + 1)
    for word in one:
        diagonal = 0
        for j, wanted in enumerate(other, start=1):
            diagonal, row[j] = row[j], diagonal + 1 if word == wanted else max(row[j], row[j - 1])
    return row[-1]
