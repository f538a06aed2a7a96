"""What an implementation of an operation is and needs, and what is known of the device that one is chosen for.

No module of another package is imported before a backend is loaded.
"""

from __future__ import annotations

import importlib
import importlib.util
import pkgutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from typing import Any

from schemas.errors import ConfigError


@dataclass(frozen=True)
class Device:
    """What backends are chosen for. type: cpu or cuda; capability: of the GPU, (9, 0) = Hopper; modules: what counts
    as installed, with all below it; None = look; repeatable: results must be the same bits at every run; here: this
    process computes on it, so that `auto` takes a backend only once it is loaded."""

    type: str
    capability: tuple[int, int] | None = None
    modules: frozenset[str] | None = None
    repeatable: bool = False
    here: bool = True

    @property
    def loads(self) -> bool:
        """Whether `auto` loads what it takes: not for a device, or modules, that are described and not there."""
        return self.here and self.modules is None

    def has(self, module: str) -> bool:
        """True when the module is there. It is not imported, and neither are its parents: it may not load."""
        if self.modules is not None:
            parts = module.split(".")
            return any(".".join(parts[:n]) in self.modules for n in range(1, len(parts) + 1))
        return _is_installed(module)

    def __str__(self) -> str:
        return self.type + ("" if self.capability is None else f" of capability {dotted(self.capability)}")


@dataclass(frozen=True)
class Needs:
    """device: cuda, None = any; capability of the GPU, both ends included; packages: modules that can be imported;
    dtypes: torch's names, empty = any floating one."""

    device: str | None = None
    min_capability: tuple[int, int] | None = None
    max_capability: tuple[int, int] | None = None
    packages: tuple[str, ...] = ()
    dtypes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Backend:
    """One implementation. target: "module:function"; rank: `auto` takes the lowest that is available; repeatable: gives
    the same bits at every run; recorded: of attention and experts, blocks that are computed again can keep results;
    asked: of experts, takes an `ExpertBackward` (`train.ops.expert_backward`); check: name of a function of the
    target's module that is called as (package, repeatable=, capability=) for each needed package once it is imported,
    and returns why the installed release cannot be used, or None."""

    name: str
    target: str
    rank: int
    needs: Needs = Needs()
    repeatable: bool = True
    recorded: bool = False
    asked: bool = False
    check: str | None = None

    @property
    def module(self) -> str:
        """The module of the target."""
        return self.target.partition(":")[0]

    def load(self, *, repeatable: bool = False, capability: tuple[int, int] | None = None) -> Callable[..., Any]:
        """Imports the function and what it needs. repeatable, capability: as of `Device`. ConfigError: a package that
        is there and does not load, or whose release cannot be used."""
        for name in self.needs.packages:
            try:
                importlib.import_module(name)
            except Exception as error:  # whatever a package raises that was built for another torch, CUDA or Python
                said = " ".join(f"{error or type(error).__name__}".split())
                raise ConfigError(f"{self.name}: the package {name} is there but does not load: {said}") from error
        _, _, function = self.target.partition(":")
        try:
            module = importlib.import_module(self.module)
        except (ImportError, OSError) as error:
            raise ConfigError(f"{self.name}: its module {self.module} does not load: {error}") from error
        if self.check is not None:
            check: Callable[..., str | None] = getattr(module, self.check)
            for name in self.needs.packages:
                if (why := check(name, repeatable=repeatable, capability=capability)) is not None:
                    raise ConfigError(f"{self.name}: {why}")
        loaded: Callable[..., Any] = getattr(module, function)
        return loaded


def dotted(capability: tuple[int, int] | None) -> str:
    """9.0 of (9, 0)."""
    return "none" if capability is None else ".".join(map(str, capability))


def _is_installed(module: str) -> bool:
    """As `importlib.util.find_spec` finds it, which would import the parents."""
    if module in sys.modules:
        return sys.modules[module] is not None
    parent, _, _ = module.rpartition(".")
    if not parent:
        return _find(module, None) is not None
    folders = _folders(parent)
    return folders is not None and _find(module, folders) is not None


def _folders(package: str) -> list[str] | None:
    """Where the modules of a package are; None: it is no package, or not there."""
    if package in sys.modules:
        found = getattr(sys.modules[package], "__path__", None)
        return None if found is None else list(found)
    parent, _, _ = package.rpartition(".")
    around = _folders(parent) if parent else None
    if parent and around is None:
        return None
    spec = _find(package, around)
    if spec is None or spec.submodule_search_locations is None:
        return None
    # flash_attn adds the folders of that name behind the first one when it is imported: version 4 may be in another
    return pkgutil.extend_path(list(spec.submodule_search_locations), package)


def _find(module: str, folders: list[str] | None) -> ModuleSpec | None:
    """By the finders of this process, which know editable installations."""
    found = (finder.find_spec(module, folders) for finder in sys.meta_path if hasattr(finder, "find_spec"))
    return next((spec for spec in found if spec is not None), None)
