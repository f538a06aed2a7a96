"""Files that appear whole or not at all, also when the machine loses power."""

from __future__ import annotations

import os
import uuid
from pathlib import Path


def write_durably(path: Path, data: bytes) -> None:
    """Writes beside, syncs, renames. OSError when the folder cannot be written."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}")
    try:
        beside.write_bytes(data)
        sync_file(beside)
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)


def sync_file(path: Path) -> None:
    """What was written to a file, or to the list of names in a folder, is on the disk afterwards."""
    opened = os.open(path, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)
