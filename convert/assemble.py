"""From matched rules to a conversion: into new files, or into the files of a base."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from convert.engine import Resolution, resolve
from convert.families import Model, expected, expert_form, model_of, read_config, text_section
from convert.geometry import Geometry
from convert.job import Conversion
from convert.ledger import Recipe, check_ledger, recipes
from convert.model_config import carried_files
from convert.patterns import Pattern
from convert.rules import Copy, Rule
from convert.safetensors_io import INDEX_FILE, SINGLE_FILE, SafetensorsReader
from convert.tensors import TensorReader, dtype_of
from schemas.errors import ConfigError


@dataclass(frozen=True)
class Origin:
    """Where a conversion begins: what it is called, the name of its source, the weights and their sizes."""

    direction: str
    source: str
    reader: TensorReader
    geometry: Geometry
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Base:
    """The model that a conversion is held against. reader: its weights, None for a directory with a configuration
    only. experts: the form in which the target's experts are to be written."""

    folder: Path
    model: Model
    reader: SafetensorsReader | None
    experts: str


def open_base(folder: Path) -> Base:
    """A model directory of any family that is handled, with or without weights."""
    if not folder.is_dir():
        raise ConfigError(f"{folder}: no such directory")
    config = read_config(folder)
    has_weights = (folder / SINGLE_FILE).exists() or (folder / INDEX_FILE).exists()
    reader = SafetensorsReader(folder) if has_weights else None
    model = model_of(config, str(folder / "config.json"), reader.tensors if reader else None)
    if reader is not None:
        return Base(folder, model, reader, expert_form(model, reader.tensors))
    if model.family.audio_at is not None:
        raise ConfigError(
            f"{folder}: has no weights; a {model.family.model_type} is written with the tensors of its base that the "
            "source does not have"
        )
    return Base(folder, model, None, model.family.experts if model.geometry.ranges["moe_layer"] else "none")


def into(origin: Origin, rules: Sequence[Rule], base: Base, override: torch.dtype | None = None) -> Conversion:
    """A conversion into the family of a base: into its files, or into new ones when it has no weights; these get the
    dtype that its config.json states."""
    if base.reader is not None:
        return into_base(origin, rules, base.reader, override)
    wanted = expected(base.model, base.experts)
    dtype = stated_dtype(base)
    config = (base.folder / "config.json").read_bytes()

    def files(made: Sequence[Recipe]) -> dict[str, bytes]:
        return {**carried_files(base.folder), "config.json": config}

    return into_new(origin, rules, wanted, files, dict.fromkeys(wanted, dtype) if dtype else None, override)


def stated_dtype(base: Base) -> torch.dtype | None:
    """`dtype` (or `torch_dtype`, its earlier name) of a config.json, at its top or in its text section."""
    places = [base.model.config, text_section(base.model, base.folder).values]
    for values in places:
        for key in ("dtype", "torch_dtype"):
            if values.get(key) is not None:
                return dtype_of(str(values[key]))
    return None


def into_new(
    origin: Origin,
    rules: Sequence[Rule],
    wanted: Mapping[str, tuple[int, ...]],
    files: Callable[[Sequence[Recipe]], Mapping[str, bytes]],
    dtypes: Mapping[str, torch.dtype] | None = None,
    override: torch.dtype | None = None,
) -> Conversion:
    """A conversion into new files. wanted: name -> shape of every tensor; files: the small files, once the recipes are
    known; dtypes: of the targets, by default those of their sources; override: of all floating point targets."""
    resolution = resolve(rules, origin.reader.tensors, origin.geometry)
    check_ledger(resolution, origin.reader.tensors, wanted)
    made = tuple(recipes(resolution, origin.reader.tensors, dtypes or {}, override))
    return _conversion(origin, resolution, made, files(made))


def into_base(
    origin: Origin, rules: Sequence[Rule], base: SafetensorsReader, override: torch.dtype | None = None
) -> Conversion:
    """A conversion into the files of a base: its names, its dtypes; what `Copy` rules name stays the base's."""
    resolution = resolve(rules, origin.reader.tensors, origin.geometry)
    copies = copied_names(rules, base, resolution)
    wanted = {name: info for name, info in base.tensors.items() if name not in copies}
    check_ledger(resolution, origin.reader.tensors, {name: info.shape for name, info in wanted.items()})
    dtypes = {name: info.dtype for name, info in wanted.items()}
    made = tuple(recipes(resolution, origin.reader.tensors, dtypes, override))
    files = {**carried_files(base.folder), "config.json": (base.folder / "config.json").read_bytes()}
    return _conversion(origin, resolution, made, files, base, copies)


def copied_names(rules: Sequence[Rule], base: SafetensorsReader, resolution: Resolution) -> dict[str, str]:
    """Base tensor -> reason, for those that a `Copy` rule names and no source makes."""
    patterns = [(Pattern.of(rule.target), rule.reason) for rule in rules if isinstance(rule, Copy)]
    copies: dict[str, str] = {}
    for name in base.tensors:
        reason = next((reason for pattern, reason in patterns if pattern.match(name) is not None), None)
        if reason is not None and name not in resolution.made:
            copies[name] = reason
    return copies


def embedding_dtype(made: Sequence[Recipe]) -> torch.dtype:
    """The dtype that config.json states: that of the token embedding."""
    return next(recipe.info.dtype for recipe in made if recipe.target.endswith("embed_tokens.weight"))


def _conversion(
    origin: Origin,
    resolution: Resolution,
    made: tuple[Recipe, ...],
    files: Mapping[str, bytes],
    base: SafetensorsReader | None = None,
    copies: Mapping[str, str] | None = None,
) -> Conversion:
    return Conversion(
        direction=origin.direction,
        source=origin.source,
        reader=origin.reader,
        recipes=made,
        files=files,
        base=base,
        copies=copies or {},
        dropped=resolution.dropped,
        sliced=resolution.sliced,
        notes=origin.notes,
    )
