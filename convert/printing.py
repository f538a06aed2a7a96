"""Text that comes out of a file, on its way to a terminal."""

from __future__ import annotations


def printable(text: str) -> str:
    """The text on one line; what could steer a terminal is written as an escape."""
    return text if text.isprintable() else "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)
