"""The small files of a model directory: read with a bound on their size, and JSON that cannot harm who parses it."""

from __future__ import annotations

import json
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from schemas.errors import ConfigError, OmniloomError

JSON_LIMIT = 128 << 20  # bytes; the index of a model with a million tensors has about 100 MB
CARRIED_LIMIT = 64 << 20  # bytes of a file that goes along; the tokenizer.json of a large vocabulary has 20 MB

# what describes a model beside its weights and config.json, in lower case
CARRIED = (
    *("tokenizer.json", "tokenizer_config.json", "vocab.json", "vocab.txt", "merges.txt", "special_tokens_map.json"),
    *("added_tokens.json", "tokenizer.model", "*.tiktoken", "generation_config.json", "configuration.json"),
    *("chat_template.json", "chat_template*.jinja"),
    *("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json"),
    *("readme", "readme.md", "readme.txt", "license*", "licence*", "notice*", "copying*", "use_policy*"),
)


def is_carried(name: str) -> bool:
    """True for a file that goes along with a model's weights; no weights, state, index, nor what we write ourselves."""
    return name.isprintable() and any(fnmatch(name.lower(), pattern) for pattern in CARRIED)


def read_small(path: Path, limit: int) -> bytes:
    """The content of a file. ConfigError, unread, when it is larger; FileNotFoundError for what is no file."""
    if not path.is_file():  # a pipe or a device would never end
        raise FileNotFoundError(2, "no such file", str(path))
    size = path.stat().st_size
    if size > limit:
        raise ConfigError(f"{path}: has {size} bytes; at most {limit} are expected of such a file. Move it away")
    with path.open("rb") as file:
        return file.read(limit)


def read_carried(path: Path) -> bytes:
    """The content of a file that goes along."""
    return read_small(path, CARRIED_LIMIT)


def parse_json(content: bytes | str, where: object, kind: type[OmniloomError] = ConfigError) -> Any:
    """The value of a JSON text. An error of `kind` for what is no JSON, has a key twice, or is nested too deep."""
    try:
        return json.loads(content, object_pairs_hook=_once)
    except RecursionError:
        raise kind(f"{where}: is not valid JSON: it is nested too deep") from None
    except ValueError as error:
        raise kind(f"{where}: is not valid JSON: {error}") from error


def read_json(path: Path, kind: type[OmniloomError] = ConfigError) -> Any:
    """`parse_json` of a file; FileNotFoundError when there is none."""
    return parse_json(read_small(path, JSON_LIMIT), path, kind)


def read_object(path: Path, kind: type[OmniloomError] = ConfigError) -> dict[str, Any]:
    """The same, which must be a JSON object."""
    value = read_json(path, kind)
    if not isinstance(value, dict):
        raise kind(f"{path}: holds {type(value).__name__}; it must be an object")
    return value


def json_bytes(value: Any, indent: int = 2) -> bytes:
    """A JSON file as it is written; half of a surrogate pair, which UTF-8 has no bytes for, stays an escape."""
    try:
        return (json.dumps(value, indent=indent, ensure_ascii=False) + "\n").encode()
    except UnicodeEncodeError:
        return (json.dumps(value, indent=indent) + "\n").encode()


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object whose keys are all different: of two values of one key every reader takes another."""
    found = dict(pairs)
    if len(found) < len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise ValueError(f"the key {key!r} stands there twice")
            seen.add(key)
    return found
