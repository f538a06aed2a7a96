"""What decides the bytes of a partition, as one hash: configuration, format and library versions."""

from __future__ import annotations

import json
from typing import Any

import xxhash

from pack.config import PackConfig
from schemas.sample import SHARD_VERSION

# Where a job runs, how long it waits and how it reports changes no byte of a shard.
_NO_BYTES: dict[str, Any] = {
    "manifest": True,  # the rows themselves are hashed
    "output": True,
    "executor": True,
    "preview": True,
    "rows": {"max_bad_ratio", "timeout_s", "max_memory_gb"},
}


def fingerprint(config: PackConfig, versions: dict[str, str]) -> str:
    """32 hex digits; equal exactly when the same rows give the same bytes."""
    # validated again, so that a default (128) and the same value given (128.0) are one
    resolved = PackConfig.model_validate(config.model_dump()).model_dump(exclude=_NO_BYTES)
    content = {"shards": SHARD_VERSION, "versions": versions, "config": resolved}
    return xxhash.xxh3_128_hexdigest(json.dumps(content, sort_keys=True).encode())
