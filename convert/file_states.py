"""Files that a conversion reads, as they were when it was planned, so that a change while it runs is found."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Protocol

from schemas.errors import IncompleteSourceError


class FileStates:
    """Size, time of change and identity of files."""

    def __init__(self, paths: Iterable[Path]) -> None:
        self._states = {path: _state(path) for path in paths}

    def changed(self) -> Iterator[Path]:
        """The files that are not what they were."""
        return (path for path, state in self._states.items() if _state(path) != state)


class Changing(Protocol):
    """A reader of files."""

    def changed(self) -> Iterable[Path]:
        """The files that were written to or replaced since the reader was made."""


def check_unchanged(*readers: Changing) -> None:
    """IncompleteSourceError when a file was written to or replaced: what was read may be of both."""
    changed = sorted({str(path) for reader in readers for path in reader.changed()})
    if changed:
        raise IncompleteSourceError(
            f"{', '.join(changed[:4])}{' and more' if len(changed) > 4 else ''}: changed while it was read, so the "
            "output could be partly the old and partly the new; run again when nothing writes there"
        )


def _state(path: Path) -> tuple[int, int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None  # gone, or no longer to be reached
    return found.st_size, found.st_mtime_ns, found.st_ino
