"""Whether an adapter's file holds what its settings say was trained."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from convert.adapter import Adapter
from convert.adapter_config import CONFIG_FILE, ENDLESS
from convert.patterns import some
from convert.tensors import TensorInfo
from schemas.errors import ConfigError, IncompleteSourceError

_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")


def check_complete(folder: Path, adapter: Adapter, parameters: Mapping[str, TensorInfo], root: str) -> None:
    """Every entry of target_modules, target_parameters and modules_to_save that the base has must be in the file, and
    where one layer (or expert) has it, all must that the entry means. A name that the base lacks was left alone by
    PEFT, too. parameters: of the trained model; root: before their names in the adapter.

    IncompleteSourceError with what is missing.
    """
    where, config = folder / CONFIG_FILE, adapter.config
    modules = {n.removesuffix(".weight"): n for n, info in parameters.items() if len(info.shape) > 1}
    changed, replaced = set(adapter.deltas), set(adapter.replaced)
    missing: list[str] = []
    for key, there in (("target_modules", changed), ("modules_to_save", replaced)):
        for entry in _entries(where, config, key):
            meant = {name for module, name in modules.items() if _matches(entry, root + module, key, config, where)}
            missing += _lacking(meant, there | replaced, key, entry)
    for entry in _entries(where, config, "target_parameters"):
        meant = {name for name in parameters if _ends(root + name, entry)}
        missing += _lacking(meant, changed, "target_parameters", entry)
    if missing:
        raise IncompleteSourceError(
            f"{folder}: {where.name} says that more was trained than the file holds: {'; '.join(missing[:4])}"
        )


def _lacking(meant: Iterable[str], there: set[str], key: str, entry: str) -> list[str]:
    """What an entry asks for and the file does not have: all of it, or single layers."""
    meant = sorted(meant)
    kinds = {_NUMBER.sub("N", name) for name in meant if name in there}
    if meant and not kinds:
        return [f"{key} has {entry!r}, of which there is nothing"]
    absent = [name for name in meant if name not in there and _NUMBER.sub("N", name) in kinds]
    return [f"{key} has {entry!r}, of which {len(absent)} are missing: {some(absent)}"] if absent else []


def _entries(where: Path, config: Mapping[str, Any], key: str) -> list[str]:
    stated = config.get(key)
    if stated is None or stated == "all-linear":  # the latter: which were linear, only the trained model knew
        return []
    found = [stated] if isinstance(stated, str) else stated
    if not isinstance(found, list) or not all(isinstance(entry, str) for entry in found):
        raise ConfigError(f"{where}: {key}: is {ascii(stated)[:80]}; it must be a list of names")
    return found


def _matches(entry: str, module: str, key: str, config: Mapping[str, Any], where: Path) -> bool:
    """As PEFT decides it: a text is a regular expression of the whole name, a list has names or their ends."""
    if isinstance(config[key], str):
        hit = _fits(entry, module, where)
    else:
        hit = _ends(module, entry)
    if not hit or key != "target_modules":
        return hit
    excluded = config.get("exclude_modules")
    if isinstance(excluded, str) and _fits(excluded, module, where):
        return False
    if isinstance(excluded, list) and any(_ends(module, str(name)) for name in excluded):
        return False
    layers = config.get("layers_to_transform")
    if layers is None:
        return True
    found = re.search(r"\.(\d+)\.", module)  # layers_pattern only says where that number stands
    return found is not None and int(found[1]) in (layers if isinstance(layers, list) else [layers])


def _fits(pattern: str, module: str, where: Path) -> bool:
    if ENDLESS.search(pattern):
        raise ConfigError(f"{where}: {ascii(pattern)[:80]} repeats a repetition; write it another way")
    try:
        return re.fullmatch(pattern, module) is not None
    except (re.error, RecursionError, OverflowError) as error:
        raise ConfigError(f"{where}: {ascii(pattern)[:80]} is no regular expression: {error}") from error


def _ends(name: str, entry: str) -> bool:
    return name == entry or name.endswith("." + entry)
