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
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from pack.preprocessors.video_r1 import parse_number
from schemas.errors import ConfigError, RowError
from schemas.wording import known_names, one_line

Scorer = Callable[[str, Mapping[str, Any]], float]
AUTO = "auto"
_TAG = re.compile(r"<answer>(.*?)</answer>", re.DOTALL | re.IGNORECASE)
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
    """By the scoring kind that packing kept with the row. RowError for a row without."""
    kind = _fact(facts, "scoring", str)
    return SCORERS[kind](text, facts)


def said_answer(text: str) -> str:
    """What stands inside the last pair of <answer> tags, or all of it."""
    found = _TAG.findall(text)
    return (found[-1] if found else text).strip()


@SCORERS.register("multiple_choice")
def multiple_choice(text: str, facts: Mapping[str, Any]) -> float:
    """1 for the label of the right choice ('B', '(b)', 'B.'), for its text, or for both ('B. yacht'); else 0.

    A label with the text of another choice is wrong.
    """
    choices, label = _fact(facts, "choices", list), _fact(facts, "answer", str)
    said = said_answer(text)
    right = choices[string.ascii_uppercase.index(label)]
    if _same(said, right):
        return 1.0
    match = _LABELLED.match(said)
    if match is None or match[1].upper() != label:
        return 0.0
    rest = said[match.end() :]
    return float(not rest.strip() or _same(rest, right))


@SCORERS.register("numerical")
def numerical(text: str, facts: Mapping[str, Any]) -> float:
    """1 for the same number (in any form: 0.5, 50%, 1/2), within 1e-6 of its size; where the answer is no number, for
    the same text."""
    wanted = facts.get("answer_value")
    if wanted is None:
        return exact_text(text, facts)
    value = parse_number(said_answer(text))
    return float(value is not None and math.isclose(value, wanted, rel_tol=1e-6, abs_tol=1e-6))


@SCORERS.register("regression")
def regression(text: str, facts: Mapping[str, Any]) -> float:
    """Mean relative accuracy (Yang et al. 2024, arXiv 2412.14171): the share of the thresholds t = 0.5, 0.55, ..., 0.95
    for which |value - answer| / |answer| < 1 - t."""
    wanted = facts.get("answer_value")
    if wanted is None:
        return exact_text(text, facts)
    value = parse_number(said_answer(text))
    if value is None:
        return 0.0
    error = abs(value - wanted) / max(abs(wanted), 1e-12)
    return sum(error < 1 - accuracy for accuracy in _ACCURACIES) / len(_ACCURACIES)


@SCORERS.register("exact_text")
def exact_text(text: str, facts: Mapping[str, Any]) -> float:
    """1 for the same text, but for case, runs of white space, and a full stop at the end."""
    return float(_same(said_answer(text), _fact(facts, "answer", str)))


@SCORERS.register("ocr")
def ocr(text: str, facts: Mapping[str, Any]) -> float:
    """1 - word error rate, not under 0: insertions, deletions and substitutions of words per word of the answer."""
    wanted, said = _words(_fact(facts, "answer", str)), _words(said_answer(text))
    if not wanted:
        return float(not said)
    return max(0.0, 1 - _edits(said, wanted) / len(wanted))


@SCORERS.register("free_form")
def free_form(text: str, facts: Mapping[str, Any]) -> float:
    """ROUGE-L (Lin 2004): the F1 of the longest common subsequence of words."""
    wanted, said = _words(_fact(facts, "answer", str)), _words(said_answer(text))
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


def _same(one: str, other: str) -> bool:
    return _plain(one) == _plain(other)


def _plain(text: str) -> str:
    return one_line(text).casefold().removesuffix(".")


def _words(text: str) -> list[str]:
    return [word.strip(string.punctuation) or word for word in text.casefold().split()]


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
