"""Where lengths are kept between runs: one npz file per (rows, processor), without pickle, written atomically."""

from __future__ import annotations

import io
import logging
import os
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import xxhash

from train.data.packed_files import is_remote, local_path

CACHE_FOLDER = "lengths"
log = logging.getLogger("omniloom.train")


@dataclass(frozen=True)
class LengthsCache:
    """files: where the lengths may lie, the preferred place first; rows: how many they must be of."""

    files: tuple[Path, ...]
    rows: int

    def read(self) -> dict[str, np.ndarray] | None:
        """The arrays that `write` was given; None when there are none. A damaged file counts as none, which is said."""
        for path in self.files:
            try:
                with np.load(path, allow_pickle=False) as stored:
                    arrays = {name: stored[name] for name in stored.files}
            except (FileNotFoundError, NotADirectoryError):
                continue
            except (OSError, ValueError, zipfile.BadZipFile, EOFError) as error:
                log.warning("%s is damaged and is made again: %s", path, error)
                continue
            if len(arrays.get("total", ())) == self.rows:
                return arrays
            log.warning("%s has other rows than the data and is made again", path)
        return None

    def write(self, arrays: Mapping[str, np.ndarray]) -> Path | None:
        """Where it was written; None, and it is said, when no place could be written: the next run counts again."""
        buffer = io.BytesIO()
        np.savez_compressed(buffer, allow_pickle=False, **arrays)
        failed = []
        for path in self.files:
            try:
                _write_atomic(path, buffer.getvalue())
            except OSError as error:
                failed.append(f"{path.parent}: {error.strerror}")
            else:
                return path
        log.warning("lengths are not kept (%s)", "; ".join(failed))
        return None


def _write_atomic(path: Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with beside.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)


def packed_cache(dataset: str, rows: int, fingerprint: str, folder: str | None) -> LengthsCache:
    """Of a packed dataset: in `folder`; by default beside its shards, or in the user's cache where those cannot be
    written."""
    name = f"{fingerprint}.npz"
    if folder is not None:
        return LengthsCache((Path(folder) / name,), rows)
    beside = () if is_remote(dataset) else (local_path(dataset) / CACHE_FOLDER / name,)
    return LengthsCache((*beside, _user_folder() / name), rows)


def text_cache(rows: int, fingerprint: str, folder: str | None) -> LengthsCache:
    """Of text files: in `folder`, by default in the user's cache."""
    return LengthsCache(((Path(folder) if folder is not None else _user_folder()) / f"{fingerprint}.npz",), rows)


def joint_fingerprint(*parts: str) -> str:
    """Changes when any of them does."""
    return str(xxhash.xxh3_64_hexdigest("\n".join(parts).encode()))


def _user_folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "omniloom" / CACHE_FOLDER
