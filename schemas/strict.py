"""A YAML file and dotted overrides -> a strict pydantic model, or every fault at once, one line each.

A line says where (file:line:column or the override), the full key, what is wrong, what is allowed, and the key that was
probably meant; a root model may have `foreign_keys`: keys of another program, with what takes their place. Values are
taken as they are: no "yes" for true, no "3" for 3. On the command line, where everything is text, a value is read as
YAML unless the key takes a string.
"""

from __future__ import annotations

import math
import re
import types
from collections.abc import Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, TypeAdapter, ValidationError
from pydantic_core import ErrorDetails

from schemas.config_keys import allowed_values, child_type, describe_keys, describe_type, section_of, type_at
from schemas.errors import ConfigError
from schemas.nearest import nearest_key
from schemas.wording import one_line
from schemas.yaml_source import KeyPath, Located, dump_yaml, parse_value, read_yaml

T = TypeVar("T", bound=BaseModel)


def load_config(path: str | Path, overrides: Sequence[str], model: type[T]) -> T:
    """The model of a file. overrides: `a.b=c`, `--a.b=c` or `--a.b`, `c`; a number as part of a key is a list index.
    ConfigError: every fault, one line each."""
    source = read_yaml(path)
    if source.data is None and not source.faults:
        raise ConfigError(f"{path}: is empty; it needs the keys {', '.join(model.model_fields)}")
    if not isinstance(source.data, dict):
        at = source.values.get((), str(path))
        raise _error(source.faults or [f"{at}: is {_said(source.data)}; a configuration is a mapping"])
    faults = list(source.faults)
    for key, text in split_overrides(overrides):
        _override(source, key, text, model, faults)
    checked = _validate(source, model, faults, str(path))
    if faults or checked is None:
        raise _error(faults)
    return checked


def check_config(data: dict[str, Any], model: type[T], name: str = "configuration") -> T:
    """The model of plain data, with the messages of `load_config`; name: what stands where a file's name would."""
    faults: list[str] = []
    checked = _validate(Located(data), model, faults, name)
    if checked is None:
        raise _error(faults)
    return checked


def dump_config(config: BaseModel) -> str:
    """The resolved configuration as YAML, every key with its value; `load_config` of it gives an equal model."""
    return dump_yaml(config.model_dump(mode="json"))


def split_overrides(words: Sequence[str]) -> list[tuple[str, str]]:
    """[(dotted key, text)] of `a.b=c`, `--a.b=c` and `--a.b c`. ConfigError for anything else."""
    pairs: list[tuple[str, str]] = []
    rest = list(words)
    while rest:
        word = rest.pop(0)
        key, equals, text = word.removeprefix("--").partition("=")
        if not equals and word.startswith("--") and rest and not rest[0].startswith("--"):
            text, equals = rest.pop(0), "="
        if not equals or not key:
            raise ConfigError(f"override {word!r} has no value; write key.of.it=value or --key.of.it value")
        pairs.append((key, text))
    return pairs


def _error(faults: list[str]) -> ConfigError:
    """The faults in the order of the file, those of overrides last; each once."""

    def place(line: str) -> tuple[float, float]:
        numbers = re.search(r":(\d+):(\d+): ", line)
        return (int(numbers[1]), int(numbers[2])) if numbers else (math.inf, 0)

    return ConfigError("\n".join(sorted(dict.fromkeys(faults), key=place)))


def _override(source: Located, key: str, text: str, model: type[BaseModel], faults: list[str]) -> None:
    """Sets one dotted key in the data of the file; a fault is noted."""
    at, holder, annotation = f"override {key}={text}", source.data, model
    path: KeyPath = ()
    names = key.split(".")
    for i, name in enumerate(names):
        full = ".".join(names[:i])
        if not name:
            faults.append(f"{at}: {key!r} has an empty part; a key is like train.optimizer.lr")
            return
        if not i and (whole := _whole_key(key, model)):
            faults.append(f"{at}: {key}: unknown key; did you mean {whole!r}?")
            return
        if isinstance(holder, list):
            if not name.isdigit() or int(name) >= len(holder):
                faults.append(f"{at}: {full} is a list of {len(holder)}; {name!r} is no index of it (from 0)")
                return
        elif not isinstance(holder, dict):
            faults.append(f"{at}: {full} is {_said(holder)} and has no key {name!r}")
            return
        part: str | int = int(name) if isinstance(holder, list) else name
        path, annotation = (*path, part), child_type(annotation, part)
        source.keys[path] = source.values[path] = at
        if i + 1 == len(names):
            try:
                holder[part] = _override_value(text, annotation)
            except ConfigError as error:
                faults.append(f"{at}: {error}")
        elif isinstance(holder, dict) and (part not in holder or holder[part] is None):
            holder[part] = {}  # a section that the file leaves out has its defaults
        holder = holder[part] if i + 1 < len(names) else None


def _whole_key(key: str, model: type[BaseModel]) -> str | None:
    """The key that ends with this one, where its section was left out."""
    if key.partition(".")[0] in model.model_fields or _instead(key, model) is not None:
        return None
    return next((info.key for info in describe_keys(model) if info.key.endswith(f".{key}")), None)


def _override_value(text: str, annotation: Any) -> Any:
    value = parse_value(text)
    if isinstance(value, str) and text[:1] not in ("'", '"'):
        value = text  # YAML would drop " # ..." and outer spaces
    if annotation is None or isinstance(value, str) or _fits(value, annotation) or not _fits(text, annotation):
        return value
    return text


def _fits(value: Any, annotation: Any) -> bool:
    try:
        TypeAdapter(annotation).validate_python(value, strict=True)
    except ValidationError:
        return False
    return True


def _validate(source: Located, model: type[T], faults: list[str], name: str) -> T | None:
    try:
        return model.model_validate(deepcopy(source.data), strict=True)
    except ValidationError as error:
        details = error.errors(include_url=False)
    found = [(_data_path(detail["loc"], source.data), detail) for detail in details]
    deepest = {path[:n] for path, detail in found for n in range(len(path)) if detail["type"] != "missing"}
    for path, detail in found:
        at_branch = len(detail["loc"]) > len(path)  # a branch of a union; a fault further inside says more
        if at_branch and path in deepest:
            continue
        faults.append(_fault(path, detail, source, model, name))
    return None


def _data_path(loc: tuple[str | int, ...], data: Any) -> KeyPath:
    """The part of a location that names keys of the data; the rest names branches of unions."""
    path: list[str | int] = []
    for i, part in enumerate(loc):
        in_list = isinstance(data, list) and isinstance(part, int) and part < len(data)
        if in_list or (isinstance(data, dict) and part in data):
            path.append(part)
            data = data[part]
        elif isinstance(data, dict) and i + 1 == len(loc) and isinstance(part, str):
            path.append(part)  # a missing key
    return tuple(path)


def _fault(path: KeyPath, detail: ErrorDetails, source: Located, model: type[BaseModel], name: str) -> str:
    key = ".".join(map(str, path))
    kind, annotation = detail["type"], type_at(model, path)
    if kind == "extra_forbidden":
        at = source.keys.get(path) or _nearest_place(source, path, name)
        instead = _instead(key, model)
        return f"{at}: {key}: " + (instead if instead is not None else f"unknown key{_meant(path, model)}")
    at = source.values.get(path) or _nearest_place(source, path, name)
    if kind == "missing":
        needed = describe_type(annotation) if annotation is not None else "a value"
        return f"{at}: {key}: missing; it is {needed}"
    if kind in ("value_error", "assertion_error") and "error" in detail.get("ctx", {}):
        return f"{at}: {key + ': ' if key else ''}{one_line(str(detail['ctx']['error']))}"
    if annotation is None:
        return f"{at}: {key}: {one_line(detail['msg'])}"
    value = detail["input"]
    near = nearest_key(value, [str(v) for v in allowed_values(annotation)]) if isinstance(value, str) else None
    hint = f"; did you mean {near!r}?" if near else ""
    return f"{at}: {key}: is {_said(value)}; it must be {describe_type(annotation)}{hint}"


def _nearest_place(source: Located, path: KeyPath, name: str) -> str:
    return next((source.values[path[:n]] for n in range(len(path), -1, -1) if path[:n] in source.values), name)


def _instead(key: str, model: type[BaseModel]) -> str | None:
    """What the model says of a key of another program, or of a section around it."""
    foreign: Mapping[str, object] = getattr(model, "foreign_keys", {})
    names = key.split(".")
    found = next((name for n in range(len(names), 0, -1) if (name := ".".join(names[:n])) in foreign), None)
    return None if found is None else f"is not a key here; {foreign[found]}"


def _meant(path: KeyPath, model: type[BaseModel]) -> str:
    """The nearest key of the same section, else the same (or nearly the same) name in another section."""
    section = section_of(type_at(model, path[:-1]))
    siblings = list(section.model_fields) if section else []
    wrong = str(path[-1])
    near = nearest_key(wrong, siblings)
    if near is None:
        everywhere = {info.key.rsplit(".", 1)[-1]: info.key for info in reversed(describe_keys(model))}
        other = nearest_key(wrong, everywhere)
        near = everywhere[other] if other else None
    known = f" known: {', '.join(siblings)}" if siblings else ""
    return f"; did you mean {near!r}?{known}" if near else f";{known}"


def _said(value: Any) -> str:
    """A value with its type, short."""
    if value is None:
        return "null"
    if isinstance(value, dict | list):
        return f"a {'mapping' if isinstance(value, dict) else 'list'} of {len(value)}"
    if isinstance(value, bool):
        return f"{str(value).lower()} (boolean)"
    if isinstance(value, str):
        return f"{value[:60]!r} (string)" + ("..." if len(value) > 60 else "")
    names: dict[type, str] = {int: "integer", float: "number", types.NoneType: "null"}
    return f"{value!r} ({names.get(type(value), type(value).__name__)})"
