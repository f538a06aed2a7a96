"""Which rows of a reward set are wanted: by type, source and media.

A row that is not wanted is rejected under a reason of its own (`FILTER_REASONS`), so that the report counts it. It is
no bad row: `rows.max_bad_ratio` does not count it, and `retry-rejected` does not try it again unless asked by name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from schemas.errors import RowError
from schemas.wording import known_names, short

MEDIA = ("video", "audio", "image")
SOURCE_KEYS = ("data_source", "source")


def names_of(value: Any, argument: str, known: Sequence[str] = ()) -> tuple[str, ...]:
    """The names that an argument lists: None or [] for no filter, one text, or a list of texts.

    ValueError for anything else, and for a name that is not among `known` where those are given (case plays no part).
    """
    names = [value] if isinstance(value, str) else value if value is not None else []
    if not isinstance(names, list | tuple) or not all(isinstance(name, str) and name for name in names):
        raise ValueError(f"{argument} is {value!r}; it is a text or a list of texts")
    lower = {name.casefold() for name in known}
    unknown = [name for name in names if known and name.casefold() not in lower]
    if unknown:
        raise ValueError(f"{argument} has {unknown[0]!r}{known_names(unknown[0], known)}")
    return tuple(names)


def check_type(value: Any, wanted: Sequence[str], key: str) -> None:
    """RowError `filtered_type` when the row's `key` is none of the wanted ones (case plays no part)."""
    if wanted and not (isinstance(value, str) and value.casefold() in {name.casefold() for name in wanted}):
        raise _filtered("filtered_type", f"{key} is {short(value)}; wanted: {', '.join(wanted)}")


def check_source(fields: Mapping[str, Any], prefixes: Sequence[str]) -> None:
    """RowError `filtered_source` when the row's data_source (or source) begins with none of the prefixes."""
    if not prefixes:
        return
    source = next((fields[key] for key in SOURCE_KEYS if isinstance(fields.get(key), str) and fields[key]), None)
    if source is None:
        raise _filtered("filtered_source", f"the row has neither {' nor '.join(SOURCE_KEYS)}")
    if not source.startswith(tuple(prefixes)):
        raise _filtered("filtered_source", f"{short(source)} begins with none of {', '.join(prefixes)}")


def check_media(counts: Mapping[str, int], required: Sequence[str]) -> None:
    """RowError `filtered_media` when the row has no medium of a required kind. counts: of video, audio and image.

    A video's own sound is known only once the file is open; `rows.missing_audio: reject` is about that.
    """
    missing = [kind for kind in required if not counts[kind.casefold()]]
    if missing:
        has = ", ".join(f"{count} {kind}" for kind, count in counts.items() if count) or "no media"
        raise _filtered("filtered_media", f"the row has {has}; wanted: {', '.join(required)}")


def _filtered(reason: str, detail: str) -> RowError:
    return RowError(reason, detail, "preprocess")
