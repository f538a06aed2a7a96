"""Whether the meta of a sample in its shard is the one of the rows table, from which its length was made."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import xxhash


def meta_hash(meta: Mapping[str, Any]) -> int:
    """63 bits (an int64, never negative) of a meta as parsed JSON, whatever the order and spacing of its keys."""
    text = json.dumps(meta, sort_keys=True, ensure_ascii=True, separators=(",", ":"))
    return int(xxhash.xxh3_64_intdigest(text.encode()) >> 1)
