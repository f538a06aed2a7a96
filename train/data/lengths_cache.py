"""Where lengths are kept between runs: one npz file per (rows, processor), without pickle, written atomically."""

from __future__ import annotations

import io
import logging
import os
import zipfile
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import xxhash

from train.data.durable import write_durably
from train.data.packed_files import is_remote, local_path

CACHE_FOLDER = "lengths"
log = logging.getLogger("omniloom.train")


@dataclass(frozen=True)
class LengthsCache:
    """files: where the lengths may lie, the preferred place first; rows: how many they must be of; columns: arrays that
    they must have."""

    files: tuple[Path, ...]
    rows: int
    columns: tuple[str, ...] = ()

    def read(self) -> dict[str, np.ndarray] | None:
        """The arrays that `write` was given; None when there are none. A damaged file counts as none, which is said."""
        for path in self.files:
            try:
                with np.load(path, allow_pickle=False) as stored:
                    arrays = {name: stored[name] for name in stored.files}
            except (FileNotFoundError, NotADirectoryError):
                continue
            except (OSError, ValueError, KeyError, zipfile.BadZipFile, zlib.error, EOFError) as error:
                log.warning("%s is damaged and is made again: %s", path, error)
                continue
            if all(len(arrays.get(name, ())) == self.rows for name in ("total", *self.columns)):
                return arrays
            log.warning("%s has other rows or columns than the data and is made again", path)
        return None

    def write(self, arrays: Mapping[str, np.ndarray]) -> Path | None:
        """Where it was written; None, and it is said, when no place could be written: the next run counts again."""
        buffer = io.BytesIO()
        np.savez_compressed(buffer, allow_pickle=False, **arrays)
        failed = []
        for path in self.files:
            try:
                write_durably(path, buffer.getvalue())
            except OSError as error:
                failed.append(f"{path.parent}: {error.strerror}")
            else:
                return path
        log.warning("lengths are not kept (%s)", "; ".join(failed))
        return None


def packed_cache(dataset: str, rows: int, fingerprint: str, folder: str | None, columns: Sequence[str]) -> LengthsCache:
    """Of a packed dataset: in `folder`, beside its shards, or in the user's cache; looked for in all of them, written
    to the first that can be written."""
    beside = [] if is_remote(dataset) else [local_path(dataset) / CACHE_FOLDER]
    return _in_any([*_given(folder), *beside, _user_folder()], rows, fingerprint, columns)


def text_cache(rows: int, fingerprint: str, folder: str | None, columns: Sequence[str]) -> LengthsCache:
    """Of text files: in `folder`, or in the user's cache; as `packed_cache`."""
    return _in_any([*_given(folder), _user_folder()], rows, fingerprint, columns)


def _given(folder: str | None) -> list[Path]:
    return [] if folder is None else [Path(folder)]


def _in_any(folders: Sequence[Path], rows: int, fingerprint: str, columns: Sequence[str]) -> LengthsCache:
    files = dict.fromkeys(folder / f"{fingerprint}.npz" for folder in folders)
    return LengthsCache(tuple(files), rows, tuple(columns))


def joint_fingerprint(*parts: str) -> str:
    """Changes when any of them does."""
    return str(xxhash.xxh3_64_hexdigest("\n".join(parts).encode()))


def _user_folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "omniloom" / CACHE_FOLDER
