"""What decides the bytes of a partition, as one hash: configuration, format, library versions, preprocessor code."""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from typing import Any

import xxhash

from pack.config import PackConfig
from schemas.registry import PREPROCESSOR_REGISTRY
from schemas.sample import SHARD_VERSION

# Where a job runs, how long it waits and how it reports changes no byte of a shard.
_NO_BYTES: dict[str, Any] = {
    "manifest": True,  # the rows themselves are hashed
    "output": True,
    "executor": True,
    "preview": True,
    "rows": {"max_bad_ratio", "timeout_s", "max_memory_gb"},
}


def fingerprint(config: PackConfig, versions: dict[str, str], code: str = "") -> str:
    """32 hex digits; equal exactly when the same rows give the same bytes. code: of `preprocessor_code`."""
    # validated again, so that a default (128) and the same value given (128.0) are one
    resolved = PackConfig.model_validate(config.model_dump()).model_dump(exclude=_NO_BYTES)
    content = {"shards": SHARD_VERSION, "versions": versions, "config": resolved, "code": code}
    return xxhash.xxh3_128_hexdigest(json.dumps(content, sort_keys=True).encode())


def preprocessor_code(source_name: str) -> str:
    """Hash of the source file that defines the preprocessor; empty for one that has no file."""
    function = inspect.unwrap(PREPROCESSOR_REGISTRY[source_name])
    try:
        file = inspect.getsourcefile(function)
    except TypeError:  # a callable object: its class is what was written
        file = inspect.getsourcefile(type(function))
    return "" if file is None or not Path(file).is_file() else xxhash.xxh3_64_hexdigest(Path(file).read_bytes())
