"""Which directory a Megatron checkpoint is, and what its common.pt says about the weights."""

from __future__ import annotations

from pathlib import Path

from convert.dcp_index import METADATA_FILE
from convert.geometry import Geometry, Section
from convert.megatron_arguments import check_arguments
from convert.restricted_pickle import is_inert, load_common
from convert.small_files import read_object, read_small
from schemas.errors import ConfigError, IncompleteSourceError, UnsupportedError

LATEST_FILE = "latest_checkpointed_iteration.txt"


def find_checkpoint(source: Path) -> Path:
    """The directory that holds `.metadata`: `source`, or the iteration in it that Megatron names as the latest.

    ConfigError when there is none or more than one to choose from; UnsupportedError for other formats of Megatron.
    """
    if not source.is_dir():
        raise ConfigError(f"{source} does not exist")
    _check_backend(source)
    if (source / METADATA_FILE).is_file():
        return source
    if any(source.glob("*.distcp")):
        raise IncompleteSourceError(f"{source} has no {METADATA_FILE}: it was not saved to its end")
    latest = source / LATEST_FILE
    if latest.is_file():
        text = read_small(latest, 4096).decode("utf8", "replace").strip()
        if text != "release" and not (text.isascii() and text.isdigit() and len(text) < 20):
            raise ConfigError(f"{latest} says {text[:40]!r}, which is neither an iteration nor `release`")
        found = source / (text if text == "release" else f"iter_{int(text):07d}")
        if not found.is_dir():
            raise IncompleteSourceError(f"{latest} names {found.name}, which does not exist in {source}")
        candidates = [found]
    else:
        candidates = sorted(path for path in source.glob("iter_*") if path.is_dir())
        if len(candidates) > 1:
            raise ConfigError(f"{source} has {len(candidates)} iterations and no {LATEST_FILE}; name one of them")
    if not candidates:
        raise ConfigError(f"{source} holds neither {METADATA_FILE} nor an iteration (iter_*)")
    _check_backend(candidates[0])
    if not (candidates[0] / METADATA_FILE).is_file():
        raise IncompleteSourceError(f"{candidates[0]} has no {METADATA_FILE}: not saved to its end, or not torch_dist")
    return candidates[0]


def _check_backend(directory: Path) -> None:
    """Refuses the formats of Megatron that are not torch_dist."""
    if any(directory.glob("mp_rank_*")):
        raise UnsupportedError(f"{directory} has the format `torch` (mp_rank_*); save with --ckpt-format torch_dist")
    path = directory / "metadata.json"
    if not path.is_file():
        return
    backend = read_object(path, IncompleteSourceError).get("sharded_backend")
    if backend != "torch_dist":
        raise UnsupportedError(f"{path}: sharded_backend is {ascii(backend)[:60]}; only torch_dist is handled")


def check_common(directory: Path, geometry: Geometry, text: Section) -> int | None:
    """Reads common.pt without executing it and holds the arguments in it, if any, against config.json.

    Returns the training iteration, None when it is not stated. UnsafeInputError for a pickle that wants to run
    something; UnsupportedError when an argument contradicts config.json.
    """
    path = directory / "common.pt"
    iteration = None
    for root in load_common(path):
        if not isinstance(root, dict):
            continue
        stated = root.get("iteration")
        iteration = stated if type(stated) is int else iteration
        arguments = root.get("args")
        if not is_inert(arguments, "Namespace") or not isinstance(arguments.state, dict):
            continue
        check_arguments(str(path), arguments.state, geometry, text)
    return iteration
