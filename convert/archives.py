"""Members of the zip archives that torch.save writes, read with a bound on what they may hold."""

from __future__ import annotations

import lzma
import struct
import threading
import zipfile
import zlib
from collections.abc import Hashable, Iterable

from convert.printing import printable
from schemas.errors import UnsafeInputError

# what zipfile raises for an archive that is none
DAMAGED_ARCHIVE = (
    *(zipfile.BadZipFile, zlib.error, lzma.LZMAError, struct.error, OSError, EOFError),
    *(NotImplementedError, RuntimeError, KeyError, ValueError, OverflowError),
)


def read_members(archive: zipfile.ZipFile, members: Iterable[zipfile.ZipInfo], limit: int, what: str) -> list[bytes]:
    """The contents of members. UnsafeInputError when they have more than `limit` bytes together, before one is read.

    A compressed member cannot give more bytes than its entry says. torch.save can be told to leave out checksums; then
    they are 0, which is not taken for one.
    """
    check_members(archive, what)
    listed = list(members)
    size = sum(info.file_size for info in listed)
    if size > limit:
        raise UnsafeInputError(
            f"{what} would have {size} bytes of Python objects; {limit} are the most that is expected"
        )
    for info in listed:
        if not info.CRC:
            del info.CRC  # what zipfile itself has for an archive without checksums
    return [archive.read(info) for info in listed]


def check_members(archive: zipfile.ZipFile, what: str) -> None:
    """UnsafeInputError for an archive of which two readers could read different things: a name twice, several roots."""
    names = [info.filename for info in archive.infolist()]
    if len(set(names)) != len(names):
        raise UnsafeInputError(
            f"{what} has {len(names) - len(set(names))} members under a name that stands there twice"
        )
    roots = {name.partition("/")[0] for name in names}
    if len(roots) > 1:
        raise UnsafeInputError(f"{what} has {len(roots)} roots ({printable(', '.join(sorted(roots)))[:100]}), not one")


class Checksums:
    """CRC32 of stored bytes that are read from the first to the last, in any number of parts and by any threads; of
    those that are read in another order nothing is known."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._read: dict[Hashable, tuple[int, int]] = {}  # (bytes, their checksum)

    def matches(self, key: Hashable, offset: int, part: memoryview, total: int, wanted: int) -> bool:
        """Takes in the next part; False once all bytes are there and their checksum is another than `wanted`."""
        with self._lock:
            done, value = self._read.get(key, (0, 0)) if offset else (0, 0)
        if offset != done:
            return True
        value, done = zlib.crc32(part, value), done + len(part)
        with self._lock:
            if done < total:
                self._read[key] = done, value
            else:
                self._read.pop(key, None)
        return done < total or value == wanted
