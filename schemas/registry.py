"""PREPROCESSOR_REGISTRY: source name -> function that turns the conversation of one row into canonical turns.

Built-in preprocessors arrive by the entry-point group `omniloom.preprocessors`, as those of third parties do, so that
nothing here imports them.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from importlib.metadata import EntryPoint, PackageNotFoundError, distribution, entry_points
from typing import Any

from schemas.conversation import Turn, canonical_turns
from schemas.errors import RegistryError, RowError
from schemas.wording import known_names, one_line

ENTRY_POINT_GROUP = "omniloom.preprocessors"
BUILT_IN_MODULE = "pack.preprocessors"  # what the distribution's own entry point names, for a source tree not installed

Preprocessor = Callable[..., list[Turn]]


@dataclass(frozen=True)
class Entry:
    """A registered function. arguments: names that `pack.preprocessor_args` may pass to it; None = any."""

    name: str
    function: Preprocessor
    arguments: tuple[str, ...] | None

    @property
    def where(self) -> str:
        """module.qualified_name"""
        return f"{getattr(self.function, '__module__', '?')}.{getattr(self.function, '__qualname__', self.function)}"

    @property
    def summary(self) -> str:
        """The first line of its docstring."""
        return (inspect.getdoc(self.function) or "").partition("\n")[0]


class Registry:
    """Names -> functions. kind: what the functions are, for messages."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._entries: dict[str, Entry] = {}

    def register(self, name: str, arguments: Iterable[str] | None = None) -> Callable[[Preprocessor], Preprocessor]:
        """Decorator; decorators stack to give one function several names. RegistryError for a name that is taken.

        arguments: the extra keyword arguments that the function knows, so that a mistyped one is found before the job;
        None accepts all.
        """
        if not isinstance(name, str) or not name:
            raise RegistryError(f"the name of a {self.kind} is a string that is not empty, not {name!r}")

        def add(function: Preprocessor) -> Preprocessor:
            entry = Entry(name, function, None if arguments is None else tuple(arguments))
            taken = self._entries.get(name)
            if taken is not None:
                raise RegistryError(
                    f"{self.kind} {name!r} of {entry.where} is registered already by {taken.where}; "
                    f"known: {', '.join(self.names())}"
                )
            self._entries[name] = entry
            return function

        return add

    def names(self) -> list[str]:
        return sorted(self._entries)

    def __iter__(self) -> Iterator[str]:
        return iter(self.names())

    def __contains__(self, name: object) -> bool:
        return name in self._entries

    def __getitem__(self, name: str) -> Preprocessor:
        """The function; RegistryError for an unknown name, with the nearest one and all."""
        return self.entry(name).function

    def entry(self, name: str) -> Entry:
        """As `[name]`, with what is known about the function."""
        if name in self._entries:
            return self._entries[name]
        raise RegistryError(f"unknown {self.kind} {name!r}{known_names(str(name), self.names())}")

    def check_arguments(self, name: str, arguments: Iterable[str]) -> None:
        """RegistryError for an argument that the function does not know."""
        known = self.entry(name).arguments
        wrong = [argument for argument in arguments if known is not None and argument not in known]
        if wrong:
            raise RegistryError(
                f"{self.kind} {name!r} has no argument {wrong[0]!r}{known_names(wrong[0], known or ())}"
            )


PREPROCESSOR_REGISTRY = Registry("preprocessor")


def conv_preprocess(source_name: str, conversations: Any, **kwargs: Any) -> list[Turn]:
    """The canonical turns of one row, by the preprocessor `source_name`.

    RegistryError: unknown name. RowError: the preprocessor raised (`preprocessor_failed`, chained) or returned
    something else than canonical turns; a RowError of the preprocessor itself passes as it is.
    """
    function = PREPROCESSOR_REGISTRY[source_name]
    try:
        turns = function(conversations, **kwargs)
    except RowError:
        raise
    except Exception as error:
        detail = f"preprocessor {source_name!r} raised {type(error).__name__}: {one_line(error)}"
        raise RowError("preprocessor_failed", detail, "preprocess") from error
    if isinstance(turns, list) and not any(isinstance(t, list | tuple) and len(t) > 1 for t in turns):
        raise RowError("empty_conversation", f"preprocessor {source_name!r} made no turn with content", "preprocess")
    try:
        return canonical_turns(turns)
    except ValueError as error:
        detail = f"preprocessor {source_name!r} did not return canonical turns: {error}"
        raise RowError("preprocessor_failed", detail, "preprocess") from error


def load_preprocessors(imports: Iterable[str] = ()) -> None:
    """Registers the built-ins, those of installed distributions, and those of the modules `imports`; may be repeated.

    A module of `imports` that is not on the import path is looked for in the current folder. RegistryError: a module
    that cannot be imported, or a name that is taken.
    """
    for entry in _entry_points():
        _import(entry.module, f"entry point {entry.name!r} of {_distribution(entry)}")
    for module in imports:
        folder = os.getcwd()
        if folder not in sys.path and _lies_in(module, folder):
            sys.path.append(folder)
            importlib.invalidate_caches()
        _import(module, "pack.imports")


def _lies_in(module: str, folder: str) -> bool:
    """True for a module that only the folder has."""
    top = module.partition(".")[0]
    return importlib.util.find_spec(top) is None and any(
        os.path.exists(os.path.join(folder, name)) for name in (f"{top}.py", top)
    )


def _entry_points() -> list[EntryPoint]:
    found = list(entry_points(group=ENTRY_POINT_GROUP))
    if not any(entry.module == BUILT_IN_MODULE for entry in found):
        try:
            distribution("omniloom")
        except PackageNotFoundError:  # run from the source tree
            found.insert(0, EntryPoint("omniloom", BUILT_IN_MODULE, ENTRY_POINT_GROUP))
    return sorted(set(found), key=lambda entry: (entry.module != BUILT_IN_MODULE, entry.name, entry.module))


def _import(module: str, asked_by: str) -> None:
    try:
        importlib.import_module(module)
    except RegistryError as error:
        raise RegistryError(f"{asked_by}: module {module!r}: {error}") from error
    except Exception as error:
        said = f"{type(error).__name__}: {one_line(error)}"
        raise RegistryError(f"{asked_by}: module {module!r} cannot be imported: {said}") from error


def _distribution(entry: EntryPoint) -> str:
    return entry.dist.name if entry.dist is not None else "the source tree"
