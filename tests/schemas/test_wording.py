"""Values in messages stay short and on one line."""

import numpy as np
import pytest

from schemas.wording import is_unicode, known_names, one_line, short


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("a", "'a'"),
        (None, "None"),
        (b"x" * 10**6, "bytes of 1000000 bytes"),
        (bytearray(3), "bytearray of 3 bytes"),
        (memoryview(b"abc"), "memoryview of 3 bytes"),
        (np.zeros((2, 3)), "ndarray of 48 bytes"),
        ("x" * 10**6, "'" + "x" * 56 + "..."),
    ],
)
def test_short(value, said):
    assert short(value) == said


def test_one_line():
    assert one_line(ValueError("a\n  b\tc ")) == "a b c"


def test_known_names():
    assert known_names("fsp", ["fps", "codec", "fps"]) == "; did you mean 'fps'? known: fps, codec"
    assert known_names("zzz", ["fps"]) == "; known: fps"
    assert known_names("zzz", []) == "; known: none"


@pytest.mark.parametrize(("text", "good"), [("abc", True), ("é😀", True), ("\ud83d\ude00", False), ("a\udfff", False)])
def test_is_unicode(text, good):
    assert is_unicode(text) == good
