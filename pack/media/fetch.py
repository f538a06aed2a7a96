"""A medium of a row -> a local file that can be opened, checked before any decoder sees it."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import fsspec

from schemas.errors import RowError
from schemas.sources import BytesSource, FileSource

COPY_BLOCK = 8 << 20


@contextmanager
def local_file(source: FileSource | BytesSource, allowed_roots: list[str]) -> Iterator[tuple[str, str]]:
    """Yields (local path, name for messages); a copy of remote or in-row media is removed at the end.

    Raises RowError: missing_file, permission_denied, unsafe_path, empty_file, fetch_failed.
    """
    if isinstance(source, BytesSource):
        if not source.data:
            raise RowError("empty_file", f"{source.name}: 0 bytes", "fetch")
        with tempfile.NamedTemporaryFile(prefix="omniloom-", suffix=Path(source.name).suffix[:8]) as copy:
            copy.write(source.data)
            copy.flush()
            yield copy.name, source.name
    elif "://" in source.uri:
        check_allowed(source.uri, allowed_roots)
        with tempfile.NamedTemporaryFile(prefix="omniloom-", suffix=Path(source.uri).suffix[:8]) as copy:
            _download(source.uri, copy)
            yield copy.name, source.uri
    else:
        check_allowed(source.uri, allowed_roots)
        check_local(source.uri)
        yield source.uri, source.uri


def check_allowed(uri: str, allowed_roots: list[str]) -> None:
    """RowError unsafe_path unless the file, links followed, lies in one of the roots (no roots: anywhere)."""
    if not allowed_roots:
        return
    if "://" in uri:
        inside = ".." not in uri.split("/") and any(uri.startswith(root.rstrip("/") + "/") for root in allowed_roots)
    else:
        real = os.path.realpath(uri)
        roots = [os.path.realpath(root) for root in allowed_roots if "://" not in root]
        inside = any(os.path.commonpath([real, root]) == root for root in roots)
    if not inside:
        raise RowError("unsafe_path", f"{uri} is outside rows.allowed_roots {allowed_roots}", "fetch")


def check_local(path: str) -> None:
    """RowError unless `path` is a readable file of at least one byte."""
    try:
        stat = os.stat(path)
        if not os.path.isfile(path):
            raise RowError("missing_file", f"{path} is no regular file", "fetch")
        if stat.st_size == 0:
            raise RowError("empty_file", f"{path}: 0 bytes", "fetch")
        with open(path, "rb"):
            pass
    except PermissionError:
        raise RowError("permission_denied", f"{path} may not be read by this user", "fetch") from None
    except (FileNotFoundError, NotADirectoryError):
        raise RowError("missing_file", f"{path} does not exist", "fetch") from None
    except (OSError, ValueError) as error:  # a name too long, a NUL in it, a link that points to itself
        raise RowError("missing_file", f"{path!r}: {error}", "fetch") from None


def _download(uri: str, copy: tempfile._TemporaryFileWrapper) -> None:
    try:
        with fsspec.open(uri, "rb") as remote:
            shutil.copyfileobj(remote, copy, COPY_BLOCK)
    except FileNotFoundError:
        if uri.startswith(("http://", "https://")):  # what a server that cannot be reached gives, too
            raise RowError("fetch_failed", f"{uri} was not found, or its server cannot be reached", "fetch") from None
        raise RowError("missing_file", f"{uri} does not exist", "fetch") from None
    except PermissionError:
        raise RowError("permission_denied", f"{uri}: access denied", "fetch") from None
    except ImportError as error:
        raise RowError("fetch_failed", f"{uri}: {error}; install omniloom[cloud]", "fetch") from None
    except Exception as error:
        raise RowError("fetch_failed", f"{uri}: {type(error).__name__}: {error}", "fetch") from error
    copy.flush()
    if copy.tell() == 0:
        raise RowError("empty_file", f"{uri}: 0 bytes", "fetch")
