"""From matched rules to a conversion: into new files, or into the files of a base."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from convert.config_dtype import main_dtype, restated
from convert.engine import Resolution, resolve
from convert.families import Model, expected, expert_form, model_of, read_config, text_section
from convert.fill import slabs
from convert.geometry import Geometry
from convert.job import Conversion
from convert.ledger import Recipe, check_ledger, recipes
from convert.model_config import carried_files
from convert.patterns import Pattern, some
from convert.pieces import Assembly, usage, whole
from convert.quantised import refuse_quantised
from convert.rules import Copy, Rule
from convert.safetensors_io import INDEX_FILE, SINGLE_FILE, SafetensorsReader
from convert.tensors import TensorInfo, TensorReader, dtype_of
from schemas.errors import ConfigError, IncompleteSourceError, UnsupportedError


@dataclass(frozen=True)
class Origin:
    """Where a conversion begins: what it is called, the name of its source, the weights and their sizes."""

    direction: str
    source: str
    reader: TensorReader
    geometry: Geometry
    notes: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()


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
    refuse_quantised(str(folder), config, reader.tensors if reader else {})
    model = model_of(config, str(folder / "config.json"), reader.tensors if reader else None)
    if reader is not None:
        return Base(folder, model, reader, expert_form(model, reader.tensors))
    if model.family.rest:
        raise ConfigError(
            f"{folder}: has no weights; a {model.family.model_type} is written with the tensors of its base that the "
            "source does not have"
        )
    return Base(folder, model, None, model.family.experts if model.geometry.ranges["moe_layer"] else "none")


def check_whole(base: Base) -> None:
    """Holds the files of a base against its config.json, by the ledger, but for parts that no conversion makes."""
    tensors = base.reader.tensors if base.reader is not None else {}
    rest = base.model.family.rest
    own = {name: info for name, info in tensors.items() if not (rest and name.startswith(rest))}
    resolution = Resolution(made={name: whole(name, info.shape) for name, info in own.items()})
    check_ledger(resolution, own, expected(base.model, base.experts))


def into(origin: Origin, rules: Sequence[Rule], base: Base, override: torch.dtype | None = None) -> Conversion:
    """A conversion into the family of a base: into its files, or into new ones when it has no weights; these get the
    dtype that its config.json states. A head that is tied to the embedding is written where the base stores it."""
    resolution = resolve(rules, origin.reader.tensors, origin.geometry)
    tie_head(origin, base.model, resolution)
    if base.reader is not None:
        return _into_base(origin, resolution, rules, base, base.reader, override)
    wanted = expected(base.model, base.experts)
    dtype = stated_dtype(base)
    check_ledger(resolution, origin.reader.tensors, wanted)
    made = tuple(recipes(resolution, origin.reader.tensors, dict.fromkeys(wanted, dtype) if dtype else {}, override))
    return _conversion(origin, resolution, made, base_files(base, {recipe.target: recipe.info for recipe in made}))


def tie_head(origin: Origin, model: Model, resolution: Resolution) -> None:
    """Of a model whose head is its embedding: a head that the files have and the source lacks is the embedding once
    more; one that the source has and the files lack is dropped, if it equals the embedding.

    UnsupportedError when it does not: then the model is not tied.
    """
    head, embedding = f"{model.family.head}lm_head.weight", f"{model.family.text}embed_tokens.weight"
    if not model.tied or embedding not in resolution.made:
        return
    if model.stored and head not in resolution.made:
        resolution.made[head] = resolution.made[embedding]
        resolution.repeated.add(head)
    elif not model.stored and head in resolution.made:
        _check_equal(origin, head, resolution.made[head], resolution.made[embedding])
        for source in usage(resolution.made.pop(head).pieces):
            resolution.dropped[source] = "tied to the embedding, which it equals"
            resolution.sliced.pop(source, None)


def _check_equal(origin: Origin, name: str, one: Assembly, other: Assembly) -> None:
    """Reads both, slab by slab."""
    recipe, twin = (Recipe(name, TensorInfo(it.shape, torch.float32), it.pieces) for it in (one, other))
    same = one.shape == other.shape and all(
        torch.equal(a, b) for a, b in zip(slabs(recipe, origin.reader), slabs(twin, origin.reader), strict=True)
    )
    if not same:
        raise UnsupportedError(
            f"config.json ties {name} to the embedding, but the source has another one of its own; "
            "set tie_word_embeddings to false in config.json and give a base that stores the head"
        )


def base_files(base: Base, written: Mapping[str, TensorInfo]) -> dict[str, bytes]:
    """The small files of an output in the family of a base. written: its tensors."""
    return {**carried_files(base.folder), "config.json": restated(base.folder, base.model, written)}


def stated_dtype(base: Base) -> torch.dtype | None:
    """`dtype` (or `torch_dtype`, its earlier name) of a config.json, at its top or in its text section."""
    where = base.folder / "config.json"
    places = [base.model.config, text_section(base.model, base.folder).values]
    for values in places:
        for key in ("dtype", "torch_dtype"):
            stated = values.get(key)
            if stated is not None and not isinstance(stated, str):
                raise ConfigError(f"{where}: {key} is {ascii(stated)[:60]}; it must be the name of a dtype")
            if stated is not None:
                return _dtype_of(stated, f"{where}: {key}")
    return None


def _dtype_of(name: str, where: str) -> torch.dtype:
    try:
        return dtype_of(name)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from error


def into_new(
    origin: Origin,
    rules: Sequence[Rule],
    wanted: Mapping[str, tuple[int, ...]],
    files: Callable[[Sequence[Recipe]], Mapping[str, bytes]],
    override: torch.dtype | None = None,
    whole_numbers: Collection[str] = (),
) -> Conversion:
    """A conversion into new files, in the dtypes of the sources. wanted: name -> shape of every tensor; files: the
    small files, once the recipes are known; override: the dtype of all floating point targets; whole_numbers: targets
    that may be integers."""
    resolution = resolve(rules, origin.reader.tensors, origin.geometry)
    check_ledger(resolution, origin.reader.tensors, wanted)
    made = tuple(recipes(resolution, origin.reader.tensors, {}, override, whole_numbers))
    return _conversion(origin, resolution, made, files(made))


def _into_base(
    origin: Origin,
    resolution: Resolution,
    rules: Sequence[Rule],
    base: Base,
    reader: SafetensorsReader,
    override: torch.dtype | None,
) -> Conversion:
    """A conversion into the files of a base: its names, its dtypes; what `Copy` rules name stays the base's."""
    asked = expected(base.model, base.experts).keys() & resolution.made.keys()
    if lacking := asked - reader.tensors.keys():
        raise IncompleteSourceError(
            f"{base.folder}: the base lacks {len(lacking)} tensors that its own config.json asks for: {some(lacking)}"
        )
    copies = copied_names(rules, reader, resolution)
    wanted = {name: info for name, info in reader.tensors.items() if name not in copies}
    check_ledger(resolution, origin.reader.tensors, {name: info.shape for name, info in wanted.items()})
    dtypes = {name: info.dtype for name, info in wanted.items()}
    made = tuple(recipes(resolution, origin.reader.tensors, dtypes, override))
    written = {**reader.tensors, **{recipe.target: recipe.info for recipe in made}}
    return _conversion(origin, resolution, made, base_files(base, written), reader, copies)


def copied_names(rules: Sequence[Rule], base: SafetensorsReader, resolution: Resolution) -> dict[str, str]:
    """Base tensor -> reason, for those that a `Copy` rule names and no source makes."""
    patterns = [(Pattern.of(rule.target), rule.reason) for rule in rules if isinstance(rule, Copy)]
    copies: dict[str, str] = {}
    for name in base.tensors:
        reason = next((reason for pattern, reason in patterns if pattern.match(name) is not None), None)
        if reason is not None and name not in resolution.made:
            copies[name] = reason
    return copies


def masters_missing(names: Sequence[str]) -> tuple[str, ...]:
    """A warning where fp32 masters were asked for and some parameters have none: they keep their own rounding."""
    return (f"{len(names)} parameters have no fp32 master and are taken as they are: {some(names)}",) if names else ()


def stated_by(made: Sequence[Recipe]) -> torch.dtype:
    """The dtype that config.json states: that of most of the weights."""
    return main_dtype({recipe.target: recipe.info for recipe in made}) or torch.float32


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
        warnings=origin.warnings,
    )
