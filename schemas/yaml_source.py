"""YAML 1.2 as plain data, with the place of every key and value.

Only the core schema: null, true/false, integers, floats (`1e-5` is one), strings (`on`, `yes`, `1_000` and dates are
strings). No tags but those, no objects, no duplicate keys, one document. Anchors, aliases and `<<` merges work.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from schemas.errors import ConfigError
from schemas.wording import one_line

KeyPath = tuple[str | int, ...]
MAX_NODES = 100_000  # aliases of aliases can multiply without end

_CORE = "tag:yaml.org,2002:"
_FLOAT = r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)"
_RESOLVERS = [  # the first that matches
    (_CORE + "null", re.compile(r"^(?:~|null|Null|NULL|)$"), ["~", "n", "N", ""]),
    (_CORE + "bool", re.compile(r"^(?:true|True|TRUE|false|False|FALSE)$"), list("tTfF")),
    (_CORE + "int", re.compile(r"^(?:[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+)$"), list("-+0123456789")),
    (_CORE + "float", re.compile(rf"^(?:{_FLOAT})$"), list("-+0123456789.")),
    (_CORE + "merge", re.compile(r"^(?:<<)$"), ["<"]),
]


class _Loader(yaml.SafeLoader):
    """Resolves plain scalars by `_RESOLVERS` alone."""


class _Dumper(yaml.SafeDumper):
    """Quotes what YAML 1.1 or 1.2 would not read as a string."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


_Loader.yaml_implicit_resolvers = {}
for _tag, _pattern, _first in _RESOLVERS:
    _Loader.add_implicit_resolver(_tag, _pattern, _first)
    _Dumper.add_implicit_resolver(_tag, _pattern, _first)


def _represent_text(dumper: _Dumper, text: str) -> yaml.ScalarNode:
    odd = not text.replace("\n", "").isprintable()
    return dumper.represent_scalar(_CORE + "str", text, style='"' if odd else None)


_Dumper.add_representer(str, _represent_text)  # PyYAML folds U+0085 and its like into line breaks, unless quoted


@dataclass
class Located:
    """data: plain data; keys, values: key path -> "file:line:column" of the key and of the value; faults: lines."""

    data: Any
    keys: dict[KeyPath, str] = field(default_factory=dict)
    values: dict[KeyPath, str] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)


def read_yaml(path: str | Path) -> Located:
    """The one document of a file. ConfigError: no such file, not readable, not UTF-8, not YAML; duplicate keys, foreign
    tags and keys that are no strings are listed in `faults`."""
    path = Path(path)
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file") from None
    except IsADirectoryError:
        raise ConfigError(f"{path}: is a directory, not a YAML file") from None
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{path}: not a UTF-8 text: byte {error.start} is 0x{error.object[error.start]:02x}"
        ) from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror or error}") from None
    return parse_yaml(text, str(path))


def parse_yaml(text: str, name: str) -> Located:
    """As `read_yaml`; name: what stands before the line numbers."""
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        at = f"{name}:{mark.line + 1}:{mark.column + 1}" if mark else name
        said = [part for part in (error.context, error.problem) if part]
        raise ConfigError(f"{at}: not YAML: {one_line(', '.join(said) or 'syntax error')}") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{name}: not YAML: {one_line(str(error))}") from None
    built = _Builder(name, loader)
    return built.located if node is None else built.build(node)


def parse_value(text: str) -> Any:
    """A value of the command line, read as YAML; text that is no YAML is itself. ConfigError: duplicate keys, tags."""
    try:
        located = parse_yaml(text, "value")
    except ConfigError:
        return text
    if located.faults:
        raise ConfigError(located.faults[0].removeprefix("value:"))
    return located.data


def dump_yaml(data: Any) -> str:
    """Plain data as YAML that `read_yaml` gives back."""
    return yaml.dump(data, Dumper=_Dumper, sort_keys=False, allow_unicode=True, default_flow_style=False, width=120)


class _Builder:
    def __init__(self, name: str, loader: _Loader) -> None:
        self.name, self.loader, self.count = name, loader, 0
        self.located = Located(None)
        self.open: set[int] = set()  # nodes that are being built, to find an alias inside its own anchor

    def build(self, node: yaml.Node) -> Located:
        self.located.data = self._value(node, ())
        return self.located

    def _at(self, node: yaml.Node) -> str:
        return f"{self.name}:{node.start_mark.line + 1}:{node.start_mark.column + 1}"

    def _fault(self, node: yaml.Node, text: str) -> None:
        self.located.faults.append(f"{self._at(node)}: {text}")

    def _value(self, node: yaml.Node, path: KeyPath) -> Any:
        self.count += 1
        if self.count > MAX_NODES:
            raise ConfigError(f"{self._at(node)}: more than {MAX_NODES} values; are aliases nested?")
        if id(node) in self.open:
            raise ConfigError(f"{self._at(node)}: an alias inside its own anchor")
        self.located.values[path] = self._at(node)
        if isinstance(node, yaml.ScalarNode):
            return self._scalar(node)
        if node.tag != _CORE + ("seq" if isinstance(node, yaml.SequenceNode) else "map"):
            self._fault(node, f"the tag {_short_tag(node.tag)} is not allowed; only plain YAML is")
            return None
        self.open.add(id(node))
        if isinstance(node, yaml.MappingNode):
            value: Any = self._mapping(node, path)
        else:
            value = [self._value(child, (*path, i)) for i, child in enumerate(node.value)]
        self.open.discard(id(node))
        return value

    def _scalar(self, node: yaml.ScalarNode) -> Any:
        kind, text = node.tag.removeprefix(_CORE), node.value
        if kind in ("str", "merge"):
            return text
        if kind in ("null", "bool", "int", "float"):
            if not any(tag == node.tag and pattern.match(text) for tag, pattern, _ in _RESOLVERS):
                self._fault(node, f"{text!r} is no {kind}")
                return None
            return _PARSE[kind](text)
        self._fault(node, f"the tag {_short_tag(node.tag)} is not allowed; only plain YAML is")
        return None

    def _mapping(self, node: yaml.MappingNode, path: KeyPath) -> dict[str, Any]:
        merged: dict[str, Any] = {}
        own: dict[str, Any] = {}
        first: dict[str, str] = {}
        for key_node, value_node in node.value:
            if key_node.tag == _CORE + "merge":
                for source in value_node.value if isinstance(value_node, yaml.SequenceNode) else [value_node]:
                    value = self._value(source, path)
                    if not isinstance(value, dict):
                        self._fault(value_node, "a merge (<<) takes a mapping or a list of mappings")
                        continue
                    merged = {**value, **merged}
                continue
            if not isinstance(key_node, yaml.ScalarNode) or key_node.tag != _CORE + "str":
                said = repr(key_node.value) if isinstance(key_node, yaml.ScalarNode) else "a collection"
                self._fault(key_node, f"a key is a string, not {said}; quote it if it is meant")
                continue
            key = key_node.value
            if key in first:
                full = ".".join(map(str, (*path, key)))
                self._fault(key_node, f"{full}: duplicate key; it stands at {first[key]} already")
                continue
            first[key] = self._at(key_node)
            own[key] = self._value(value_node, (*path, key))
            self.located.keys[(*path, key)] = self._at(key_node)
        self.located.values[path] = self._at(node)
        return {**merged, **own}


def _parse_int(text: str) -> int:
    return int(text, 8 if text.startswith("0o") else 16 if text.startswith("0x") else 10)


_PARSE: dict[str, Any] = {
    "null": lambda text: None,
    "bool": lambda text: text.lower() == "true",
    "int": _parse_int,
    "float": lambda text: float(text.lower().replace(".inf", "inf").replace(".nan", "nan")),
}


def _short_tag(tag: str) -> str:
    return "!!" + tag.removeprefix(_CORE) if tag.startswith(_CORE) else tag
