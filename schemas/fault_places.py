"""Faults that only the work itself finds (a folder that is not there, ranks that do not divide) get the place of their
key in the configuration, as the faults of `schemas.strict` have."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from pydantic import BaseModel

from schemas.config_keys import type_at
from schemas.errors import ConfigError, OmniloomError
from schemas.strict import split_overrides
from schemas.yaml_source import KeyPath, Located, read_yaml

_KEY = re.compile(r"([a-z_]\w*(?:\.\w+)+)(?=[: ])")


@contextmanager
def placed(path: str | Path, overrides: Sequence[str], model: type[BaseModel]) -> Iterator[None]:
    """Lines of an error raised inside that begin with a key of the model get `file:line:column: ` or
    `override key=value: ` before it. A key that is not given has the place of the section around it, if that is."""
    try:
        yield
    except OmniloomError as error:
        error.args = (placed_text(str(error), path, overrides, model),)
        raise


def placed_text(message: str, path: str | Path, overrides: Sequence[str], model: type[BaseModel]) -> str:
    """The message with places."""
    try:
        source = read_yaml(path)
        given = split_overrides(overrides)
    except ConfigError:  # changed since it was read; the fault itself matters more
        return message
    for key, text in given:
        source.values[_path(key)] = f"override {key}={text}"
    return "\n".join(_placed_line(line, source, model) for line in message.split("\n"))


def _placed_line(line: str, source: Located, model: type[BaseModel]) -> str:
    found = _KEY.match(line)
    if found is None or type_at(model, key := _path(found[1])) is None:
        return line
    at = next((source.values[key[:n]] for n in range(len(key), 0, -1) if key[:n] in source.values), None)
    return line if at is None else f"{at}: {line}"


def _path(key: str) -> KeyPath:
    return tuple(int(part) if part.isdigit() else part for part in key.split("."))
