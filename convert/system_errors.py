"""What the operating system refuses, as a sentence with the file and what to do."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from schemas.errors import OmniloomError, ResumableError


def as_error(error: OSError, where: Path | None = None) -> OmniloomError:
    """ResumableError for a full disk, else OmniloomError. where: the file, if the error itself does not know it."""
    what = error.filename if error.filename is not None else where
    text = (error.strerror or str(error) or type(error).__name__).lower()
    said = text if what is None else f"{what}: {text}"
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return ResumableError(f"{said}; make room and run the same command again")
    if error.errno == errno.EFBIG:
        return OmniloomError(
            f"{said}: neither the file system nor the limit of the shell (ulimit -f) may be exceeded by one file; "
            "raise the limit, or give a smaller --shard-size"
        )
    return OmniloomError(said)


@contextmanager
def stated() -> Iterator[None]:
    """Errors of the system that come out of the block become `as_error`."""
    try:
        yield
    except OSError as error:
        raise as_error(error) from error
