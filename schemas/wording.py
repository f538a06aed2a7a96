"""How values of the user appear in messages: short, on one line, with the name that was probably meant."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from schemas.nearest import nearest_key


def short(value: Any) -> str:
    """At most 60 characters of a value, and no megabytes of it on the way."""
    size = getattr(value, "nbytes", len(value) if isinstance(value, bytes | bytearray) else None)
    if size is not None:
        return f"{type(value).__name__} of {size} bytes"
    text = repr(value[:60] if isinstance(value, str | list | tuple) else value)
    return text if len(text) <= 60 else text[:57] + "..."


def one_line(text: object) -> str:
    """The text with every run of white space as one space."""
    return " ".join(str(text).split())


def known_names(name: str, known: Iterable[str]) -> str:
    """What follows an unknown name: '; did you mean 'fps'? known: fps, codec', or '; known: none'."""
    names = list(dict.fromkeys(known))
    near = nearest_key(name, names)
    hint = f"; did you mean {near!r}?" if near else ";"
    return f"{hint} known: {', '.join(names) or 'none'}"


def is_unicode(text: str) -> bool:
    """False for text with half a surrogate pair, which neither a shard nor a table can hold."""
    return text.isascii() or not any("\ud800" <= character <= "\udfff" for character in text)
