"""The known name that a mistyped one most likely means."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def nearest_key(name: str, known: Iterable[str]) -> str | None:
    """The best match of `name` by letters, whatever its case; None when nothing is near."""
    names = {candidate.lower(): candidate for candidate in known}
    near = difflib.get_close_matches(name.lower(), names, n=1)
    return names[near[0]] if near else None


def is_typo(name: str, of: str) -> bool:
    """True when one slip of the hand makes `of` into `name`: a letter more, less, other or swapped, its case, or the
    same letters in another order after the first. A digit or underscore more (image_2, video1) is no slip."""
    a, b = name.lower(), of.lower()
    if a == b:
        return name != of
    if not all(letter.isalpha() for letter in set(a) - set(b)):
        return False
    if sorted(a) == sorted(b):
        return a[0] == b[0]
    if len(a) == len(b):
        return sum(x != y for x, y in zip(a, b, strict=True)) == 1
    long, short = (a, b) if len(a) > len(b) else (b, a)
    return len(long) - len(short) == 1 and any(long[:i] + long[i + 1 :] == short for i in range(len(long)))
