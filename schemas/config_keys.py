"""The keys of a configuration model: full name, type, default and meaning; types in the user's words."""

from __future__ import annotations

import inspect
import re
import types
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt, MaxLen, MinLen
from pydantic import BaseModel
from pydantic.fields import FieldInfo

REQUIRED = object()
INDEX = "N"  # in a key, for any index of a list
_PLAIN = {str: "a string", int: "an integer", float: "a number", bool: "true or false", type(None): "null"}
_PLURAL = {str: "strings", int: "integers", float: "numbers", bool: "true/false values"}


@dataclass(frozen=True)
class KeyInfo:
    """One key. key: dotted; kind: what it may hold, in words; default: `REQUIRED` or the value; doc: what it does;
    section: the model below it, if it is a mapping with keys of its own."""

    key: str
    kind: str
    default: Any
    doc: str
    section: type[BaseModel] | None = None


def describe_keys(model: type[BaseModel], prefix: str = "") -> list[KeyInfo]:
    """Every key of a model, sections before their keys; those of the entries of a list with `N` for the index."""
    keys: list[KeyInfo] = []
    docs = _docs(model)
    for name, info in model.model_fields.items():
        key, annotation = f"{prefix}{name}", field_type(info)
        section = section_of(annotation)
        default = REQUIRED if info.is_required() else info.get_default(call_default_factory=True)
        text = docs.get(name) or (_summary(section) if section else "")
        keys.append(KeyInfo(key, describe_type(annotation), default, text, section))
        if section is not None:
            keys += describe_keys(section, f"{key}.")
        entry = entry_of(annotation)
        if entry is not None:
            keys.append(KeyInfo(f"{key}.{INDEX}", describe_type(entry), REQUIRED, _summary(entry), entry))
            keys += describe_keys(entry, f"{key}.{INDEX}.")
    return keys


def field_type(info: FieldInfo) -> Any:
    """The annotation of a field with its constraints back on it."""
    annotation: Any = info.annotation
    for constraint in info.metadata:
        annotation = Annotated[annotation, constraint]
    return annotation


def section_of(annotation: Any) -> type[BaseModel] | None:
    """The model inside `Model`, `Model | None` or Annotated of them."""
    models = [t for t in branches(annotation) if isinstance(t, type) and issubclass(t, BaseModel)]
    return models[0] if len(models) == 1 else None


def entry_of(annotation: Any) -> type[BaseModel] | None:
    """The model inside `list[Model]`, `list[Model] | None` or Annotated of them."""
    models = (section_of(child_type(option, 0)) for option in branches(annotation) if get_origin(option) is list)
    return next((model for model in models if model is not None), None)


def branches(annotation: Any) -> list[Any]:
    """The alternatives of a union, without what Annotated adds; one for any other type."""
    if get_origin(annotation) is Annotated:
        return branches(get_args(annotation)[0])
    if get_origin(annotation) in (Union, types.UnionType):
        return [inner for arg in get_args(annotation) for inner in branches(arg)]
    return [annotation]


def child_type(annotation: Any, part: str | int) -> Any:
    """The type of the value under a key or index; None when nothing is declared for it."""
    for option in branches(annotation):
        if isinstance(option, type) and issubclass(option, BaseModel):
            if part in option.model_fields:
                return field_type(option.model_fields[str(part)])
        elif get_origin(option) is dict and isinstance(part, str):
            return get_args(option)[1]
        elif get_origin(option) in (list, tuple, set) and isinstance(part, int):
            args = [arg for arg in get_args(option) if arg is not Ellipsis]
            return args[part] if get_origin(option) is tuple and part < len(args) else args[0]
    return None


def allowed_values(annotation: Any) -> list[Any]:
    """All values of the Literals in a type."""
    return [value for option in branches(annotation) if get_origin(option) is Literal for value in get_args(option)]


def describe_type(annotation: Any) -> str:
    """'an integer > 0 or null', "'ray' or 'local'", 'a list of strings'."""
    if get_origin(annotation) is Annotated:
        inner, *metadata = get_args(annotation)
        bounds = " and ".join(_bounds(metadata, "characters" if branches(inner) == [str] else "entries"))
        return f"{describe_type(inner)} {bounds}" if bounds else describe_type(inner)
    if get_origin(annotation) in (Union, types.UnionType):
        return " or ".join(dict.fromkeys(describe_type(arg) for arg in get_args(annotation)))
    if get_origin(annotation) is Literal:
        return " or ".join(repr(value) for value in get_args(annotation))
    if get_origin(annotation) in (list, tuple, set):
        return f"a list of {_plural(get_args(annotation)[0])}" if get_args(annotation) else "a list"
    if annotation in (dict, list):
        return "a mapping" if annotation is dict else "a list"
    if get_origin(annotation) is dict:
        return f"a mapping of names to {_plural(get_args(annotation)[1])}"
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return "a mapping"
    return _PLAIN.get(annotation, getattr(annotation, "__name__", str(annotation)))


def _plural(annotation: Any) -> str:
    if get_origin(annotation) is Annotated and not _bounds(get_args(annotation)[1:]):
        return _plural(get_args(annotation)[0])
    if annotation in _PLURAL:
        return _PLURAL[annotation]
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return "mappings"
    return f"({describe_type(annotation)})"


def _bounds(metadata: Sequence[Any], counted: str = "entries") -> list[str]:
    words = []
    for item in _flatten(metadata):
        if isinstance(item, Gt | Ge | Lt | Le):
            name, sign = {Gt: ("gt", ">"), Ge: ("ge", ">="), Lt: ("lt", "<"), Le: ("le", "<=")}[type(item)]
            words.append(f"{sign} {getattr(item, name)}")
        elif isinstance(item, MinLen):
            words.append(f"with {item.min_length} or more {counted}")
        elif isinstance(item, MaxLen):
            words.append(f"with at most {item.max_length} {counted}")
    return words


def _flatten(metadata: Sequence[Any]) -> Iterator[Any]:
    for item in metadata:
        yield from item.metadata if isinstance(item, FieldInfo) else (item,)


def _docs(model: type[BaseModel]) -> dict[str, str]:
    """name -> text of the "name: text; other, more: text" of the model's docstring or of a base's, or the field's own
    description."""
    docs: dict[str, str] = {}
    names = "|".join(sorted(model.model_fields, key=len, reverse=True))
    for base in reversed(model.__mro__):
        text = " ".join(inspect.cleandoc(vars(base).get("__doc__") or "").split())
        if not names or not text or not issubclass(base, BaseModel):
            continue
        head = rf"(?:{names})(?:, (?:{names}))*: "
        for match in re.finditer(rf"(?:^|(?<=[.;] ))({head})(.*?)(?=[.;] {head}|[.;]?$)", text):
            for name in match[1].removesuffix(": ").split(", "):
                docs[name] = match[2]
    return docs | {name: info.description for name, info in model.model_fields.items() if info.description}


def _summary(model: type[BaseModel]) -> str:
    """The sentences of a docstring before its first "name: text"."""
    text = " ".join((inspect.getdoc(model) or "").split())
    names = "|".join(model.model_fields)
    return re.split(rf"(?:^|(?<=\s))(?:{names})(?:, (?:{names}))*: ", text)[0].strip() if names else text


def type_at(model: type[BaseModel], path: Iterable[str | int]) -> Any:
    """The annotation at a path of keys; None where the model has none."""
    annotation: Any = model
    for part in path:
        annotation = child_type(annotation, part)
        if annotation is None:
            return None
    return annotation
