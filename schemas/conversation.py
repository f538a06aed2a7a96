"""The canonical conversation: [[role, (type, payload), ...], ...].

role: system | user | assistant; type: text | image | video | audio; payload: the text, or None for media, which are
bound by order: the n-th video part is the row's n-th video. One `<video>` marker binds pictures and sound.

Text with markers ("<video>\\nWhat is said?") is cut at `<video>`, `<audio>` and `<image>`; what stands between is kept
as it is. `<\\video>` (any number of backslashes, one is taken off) is the text "<video>" and no marker, so that
`to_sharegpt` and `split_markers` are inverse to each other for every text. `schemas.messages` reads the forms that
users bring.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from typing import Any, Literal

from schemas.errors import RowError
from schemas.wording import is_unicode, short

PartType = Literal["text", "image", "video", "audio"]
Part = tuple[PartType, str | None]
Turn = list[str | Part]
ROLES = ("system", "user", "assistant")
MEDIA_TYPES = ("video", "audio", "image")
PART_TYPES = ("text", *MEDIA_TYPES)

_MARKER = re.compile(r"<(\\*)(video|audio|image)>")


def turn_parts(turn: Turn) -> list[Part]:
    """The parts of a turn, without its role."""
    return turn[1:]  # type: ignore[return-value]  # `Turn` cannot say that only the first item is a string


def check_turns(turns: list[Turn], num_videos: int, num_audios: int, num_images: int) -> None:
    """ValueError unless the turns have the canonical form and exactly these numbers of media parts."""
    check_form(turns)
    wrong = _wrong_counts(turns, num_videos, num_audios, num_images)
    if wrong:
        raise ValueError("; ".join(wrong))


def check_form(turns: Any) -> None:
    """ValueError unless `turns` is [[role, (type, payload), ...], ...] with content; pairs may be lists, as in JSON."""
    if not isinstance(turns, list | tuple):
        raise ValueError(f"turns are a list, not {_kind(turns)}")
    for t, turn in enumerate(turns):
        if not isinstance(turn, list | tuple) or not turn or turn[0] not in ROLES:
            raise ValueError(f"turn {t} is {short(turn)}; it is [role, (type, payload), ...], role: {', '.join(ROLES)}")
        for p, part in enumerate(turn[1:]):
            _check_part(part, f"turn {t} part {p}")
    if not any(len(turn) > 1 for turn in turns):
        raise ValueError("the conversation has no turn with content")


def canonical_turns(turns: Any) -> list[Turn]:
    """The same turns as lists of tuples, which is what JSON loses; ValueError for another form."""
    check_form(turns)
    return [[turn[0], *((part[0], part[1]) for part in turn[1:])] for turn in turns]


def check_media_counts(turns: Sequence[Turn], num_videos: int, num_audios: int, num_images: int) -> None:
    """RowError `marker_mismatch`, with both numbers, unless the turns bind exactly the row's media."""
    wrong = _wrong_counts(turns, num_videos, num_audios, num_images)
    if not wrong:
        return
    texts = (part[1] or "" for turn in turns for part in turn_parts(turn) if part[0] == "text")
    literal = sorted({marker[0] for text in texts for marker in _MARKER.finditer(text) if not marker[1]})
    hint = f" ({', '.join(literal)} inside a text part is text, not a marker)" if literal else ""
    raise RowError("marker_mismatch", "; ".join(wrong) + hint, "preprocess")


def count_media(turns: Sequence[Turn]) -> Counter[str]:
    """Number of parts per media type."""
    return Counter(str(part[0]) for turn in turns for part in turn_parts(turn) if part[0] != "text")


def split_markers(text: str) -> list[Part]:
    """'<video>\\nWho?' -> [('video', None), ('text', '\\nWho?')]. Text is kept as it is; empty pieces are left out."""
    parts: list[Part] = []
    piece, end = "", 0
    for match in _MARKER.finditer(text):
        piece += text[end : match.start()]
        end = match.end()
        if match[1]:
            piece += f"<{match[1][1:]}{match[2]}>"
            continue
        if piece:
            parts.append(("text", piece))
        parts.append((match[2], None))  # type: ignore[arg-type]  # the pattern allows no other
        piece = ""
    piece += text[end:]
    return [*parts, ("text", piece)] if piece else parts


def join_markers(parts: Sequence[Part]) -> str:
    """The inverse of `split_markers` (neighbouring texts become one)."""
    joined, text = "", ""
    for kind, payload in parts:
        if kind == "text":
            text += payload or ""  # escaped as a whole: two texts may make up a marker
            continue
        joined += f"{_escaped(text)}<{kind}>"
        text = ""
    return joined + _escaped(text)


def _escaped(text: str) -> str:
    return _MARKER.sub(r"<\\\1\2>", text)


def to_sharegpt(turns: Sequence[Turn]) -> list[dict[str, str]]:
    """The from/value form: [{"from": "human" | "gpt" | "system", "value": text with markers}, ...]."""
    names = {"user": "human", "assistant": "gpt", "system": "system"}
    return [{"from": names[str(turn[0])], "value": join_markers(turn_parts(turn))} for turn in turns]


def _check_part(part: Any, where: str) -> None:
    if not isinstance(part, list | tuple) or len(part) != 2 or part[0] not in PART_TYPES:
        raise ValueError(f"{where} is {short(part)}; it is (type, payload), type: {', '.join(PART_TYPES)}")
    kind, payload = part
    if kind == "text" and not (isinstance(payload, str) and payload):
        raise ValueError(f"{where}: the payload of text is a string that is not empty, not {short(payload)}")
    if kind == "text" and not is_unicode(payload):
        raise ValueError(f"{where} has half a surrogate pair, which no file can hold")
    if kind != "text" and payload is not None:
        raise ValueError(f"{where}: the payload of {kind} is None (media are bound by order), not {short(payload)}")


def _wrong_counts(turns: Sequence[Turn], num_videos: int, num_audios: int, num_images: int) -> list[str]:
    found = count_media(turns)
    given = {"video": num_videos, "audio": num_audios, "image": num_images}
    return [
        f"the conversation has {found[kind]} <{kind}> and the row has {number} {kind}{'s' * (number != 1)}"
        for kind, number in given.items()
        if found[kind] != number
    ]


def _kind(value: Any) -> str:
    return "null" if value is None else type(value).__name__
