"""Weights of a hub directory, read under the names and in the layouts of the native models, slice by slice.

What the files hold is checked by their headers against the model before a byte is read: every parameter is there once,
in its shape, and nothing is left over. Then `load` hands each parameter to a callback together with a function that
reads any box of it and only the bytes of that box, so that a rank of a sharded model takes its own slice.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial, reduce
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from convert.engine import Resolution, resolve
from convert.families import expected, expert_form, model_of, read_config
from convert.fill import slabs
from convert.geometry import Geometry
from convert.ledger import Recipe, recipes
from convert.patterns import SHOWN, some
from convert.pieces import Assembly, cut, usage
from convert.rules import rename
from convert.safetensors_io import SafetensorsReader
from convert.tables.trainer import STYLES
from convert.tensors import Box, TensorInfo, TensorReader, box_shape, check_box, full_box
from convert.trainer import from_hub
from schemas.errors import IncompleteSourceError, UnsupportedError
from schemas.nearest import nearest_key

SLAB_BYTES = 16 << 20  # of a parameter that are read at once; more and less were slower
SUGGESTED = 2000  # names among which the one that was probably meant is looked for
FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
HEAD, EMBEDDING = "lm_head.weight", "embed_tokens.weight"
# names that a thinker has in the memory of transformers 5, and files that were written from there: (there, hub)
MEMORY_NAMES = (
    ("model.language_model.", "model."),
    ("model.visual.", "visual."),
    ("model.audio_tower.", "audio_tower."),
)


class ReadSlice(Protocol):
    """Reads a box (one (start, stop) per dimension; all by default) of one parameter, and no bytes beside it: a
    contiguous CPU tensor in the dtype of the files."""

    def __call__(self, box: Box | None = None) -> Tensor: ...


Assign = Callable[[str, ReadSlice], None]


class HubWeights:
    """The weights of a directory by native names. tensors: their shapes and the dtypes of the files; dropped: what is
    in the files and not in the model -> why."""

    def __init__(self, reader: TensorReader, made: Iterable[Recipe], dropped: Mapping[str, str]) -> None:
        self._reader = reader
        self._recipes = {recipe.target: recipe for recipe in made}
        self.tensors: dict[str, TensorInfo] = {name: recipe.info for name, recipe in self._recipes.items()}
        self.dropped = dict(dropped)

    def drop_tied_head(self, folder: Path) -> None:
        """Leaves out the head that a tied model's files hold once more; UnsupportedError when it is another one."""
        embedding = next((name for name in self.tensors if name.endswith(EMBEDDING)), None)
        same = embedding is not None and self.tensors[embedding].shape == self.tensors[HEAD].shape
        if not same or not self._equal(HEAD, str(embedding)):
            raise UnsupportedError(
                f"{folder}: config.json ties the head to the embedding, but the files hold another {HEAD}; set "
                "tie_word_embeddings to false in config.json"
            )
        del self._recipes[HEAD], self.tensors[HEAD]
        self.dropped[HEAD] = "equals the embedding, which it is tied to"

    def _equal(self, name: str, other: str) -> bool:
        info = self.tensors[name]
        boxes = row_boxes(info.shape, info.dtype.itemsize)
        return all(torch.equal(self.read(name, box), self.read(other, box)) for box in boxes)

    @property
    def bytes_read(self) -> int:
        """Bytes taken from the files so far."""
        return self._reader.bytes_read

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors in the dtypes of the files."""
        return sum(info.nbytes for info in self.tensors.values())

    def names(self) -> list[str]:
        """In the order of the files, so that reading is sequential."""
        first = {name: min(usage(recipe.pieces), key=self._reader.location) for name, recipe in self._recipes.items()}
        return sorted(first, key=lambda name: self._reader.location(first[name]))

    def read(self, name: str, box: Box | None = None) -> Tensor:
        """See `ReadSlice`. KeyError for an unknown name, ValueError for a box that leaves the tensor."""
        recipe = self._recipes[name]
        if box is None:
            box = full_box(recipe.info.shape)
        check_box(name, box, recipe.info.shape)
        part = Assembly(recipe.info.shape, recipe.pieces)
        for dim, (start, stop) in enumerate(box):
            if (start, stop) != (0, recipe.info.shape[dim]):
                part = cut(part, dim, start, stop)
        info = TensorInfo(box_shape(box), recipe.info.dtype)
        if not info.numel:
            return torch.empty(info.shape, dtype=info.dtype)
        pieces = tuple(sorted(part.pieces, key=lambda piece: piece.at))
        return next(slabs(Recipe(name, info, pieces), self._reader, info.nbytes))


def open_weights(
    folder: Path | str,
    shapes: Mapping[str, tuple[int, ...]],
    *,
    config: Mapping[str, Any] | None = None,
    native: bool = True,
) -> HubWeights:
    """The weights in a directory for a model with these parameters.

    shapes: of every parameter by its name; config: the content of config.json, by default the directory's own; native:
    the families of `convert`, in every layout of their experts and with or without `thinker.`; else the names of the
    files are those of the parameters.
    IncompleteSourceError: parameters that the files lack; UnsupportedError: tensors that the model has no place for,
    other shapes, quantised weights, a second head beside a tied one.
    """
    folder = Path(folder)
    files = SafetensorsReader(folder)
    values = read_config(folder) if config is None else config
    _check_plain(folder, values, files.tensors)
    reader: TensorReader = files
    if native:
        reader = _Renamed(files, _memory_names(values, files.tensors))
        resolution = _native(folder, values, reader.tensors)
    else:
        resolution = resolve([rename("{name}", "{name}")], reader.tensors, Geometry({}, {}))
    dtypes = {name: _common_dtype(made, reader.tensors) for name, made in resolution.made.items()}
    weights = HubWeights(reader, recipes(resolution, reader.tensors, dtypes), resolution.dropped)
    if HEAD in weights.tensors and HEAD not in shapes:
        weights.drop_tied_head(folder)
    _check_names(folder, {name: info.shape for name, info in weights.tensors.items()}, shapes)
    return weights


def open_part(folder: Path | str, prefix: str, shapes: Mapping[str, tuple[int, ...]]) -> HubWeights:
    """The weights of one tower in a directory of a native family, by the names behind its prefix; as `open_weights`,
    but what the files hold besides is not looked at."""
    folder = Path(folder)
    files, values = SafetensorsReader(folder), read_config(folder)
    found = {name.removeprefix("thinker."): there for name, there in _memory_names(values, files.tensors).items()}
    names = {name.removeprefix(prefix): there for name, there in found.items() if name.startswith(prefix)}
    reader = _Renamed(files, names)
    _check_plain(folder, values, reader.tensors)
    _check_names(folder, {prefix + name: info.shape for name, info in reader.tensors.items()}, _behind(prefix, shapes))
    resolution = resolve([rename("{name}", "{name}")], reader.tensors, Geometry({}, {}))
    return HubWeights(reader, recipes(resolution, reader.tensors, {}), resolution.dropped)


def _behind(prefix: str, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    return {prefix + name: shape for name, shape in shapes.items()}


def load(weights: HubWeights, assign: Assign) -> None:
    """Gives every parameter, in the order of the files, to `assign(name, read)`, which reads what it needs of it."""
    for name in weights.names():
        assign(name, partial(weights.read, name))


def assign_whole(model: nn.Module, advance: Callable[[int], None] | None = None) -> Assign:
    """Fills the parameters of a model in one process, whatever their dtype and device, a slab of rows at a time, so
    that little besides the model is in memory. advance: is told the bytes that were read."""
    parameters = dict(model.named_parameters())

    @torch.no_grad()
    def assign(name: str, read: ReadSlice) -> None:
        parameter = parameters[name]
        for box in row_boxes(tuple(parameter.shape), parameter.element_size()):
            values = read(box)
            parameter[tuple(slice(*bounds) for bounds in box)] = values
            if advance is not None:
                advance(values.nbytes)

    return assign


def row_boxes(shape: tuple[int, ...], itemsize: int, limit: int = SLAB_BYTES) -> Iterator[Box]:
    """Consecutive row ranges of a tensor of about `limit` bytes each, one row at least."""
    if not shape:
        yield ()
        return
    step = max(1, limit // max(1, math.prod(shape[1:]) * itemsize))
    for start in range(0, shape[0], step):
        yield ((start, min(start + step, shape[0])), *full_box(shape[1:]))


class _Renamed:
    """A reader whose tensors go by other names. names: name here -> name in the files."""

    def __init__(self, reader: TensorReader, names: Mapping[str, str]) -> None:
        self._reader, self._names = reader, names
        self.tensors: dict[str, TensorInfo] = {name: reader.tensors[there] for name, there in names.items()}
        self.skipped = reader.skipped
        self.fingerprint = reader.fingerprint

    @property
    def bytes_read(self) -> int:
        return self._reader.bytes_read

    def changed(self) -> Iterable[Path]:
        """The files that were written to since this was made."""
        return self._reader.changed()

    def read(self, name: str, box: Box | None = None) -> Tensor:
        return self._reader.read(self._names[name], box)

    def location(self, name: str) -> tuple[str, int]:
        return self._reader.location(self._names[name])


def _memory_names(config: Mapping[str, Any], tensors: Mapping[str, TensorInfo]) -> dict[str, str]:
    """Hub name -> name in the files, which differ when a thinker was saved under transformers 5's own names."""
    prefix = next((p for p in ("thinker.", "") if f"{p}{MEMORY_NAMES[0][0]}embed_tokens.weight" in tensors), None)
    if prefix is None or not str(config.get("model_type")).startswith("qwen3_omni_moe"):
        return {name: name for name in tensors}
    names: dict[str, str] = {}
    for name in tensors:
        hub = name
        for there, here in MEMORY_NAMES:
            if name.startswith(prefix + there):
                hub = prefix + here + name.removeprefix(prefix + there)
        if hub in names:
            raise UnsupportedError(f"{names[hub]} and {name} are the same tensor under two names")
        names[hub] = name
    return names


def _native(folder: Path, config: Mapping[str, Any], tensors: Mapping[str, TensorInfo]) -> Resolution:
    """The rules of the family, after the files are found to hold what its config.json says and nothing else."""
    where = str(folder / "config.json")
    model = model_of(config, where, tensors)
    form = expert_form(model, tensors)
    rest = model.family.rest
    held = {name: info.shape for name, info in tensors.items() if not (rest and name.startswith(rest))}
    _check_names(folder, held, expected(model, form))
    names = next(names for names in STYLES[model.family.model_type] if names.style == "native")
    rules = from_hub(names, model, "none" if form == "none" else "v5", form, "")
    return resolve(rules, tensors, model.geometry)


def _check_names(folder: Path, held: Mapping[str, tuple[int, ...]], wanted: Mapping[str, tuple[int, ...]]) -> None:
    """The same names with the same shapes, or an error that names what is missing, unexpected and wrong."""
    missing, surplus = wanted.keys() - held.keys(), held.keys() - wanted.keys()
    wrong = sorted(name for name in wanted.keys() & held.keys() if tuple(held[name]) != tuple(wanted[name]))
    faults = []
    if missing:
        faults.append(f"{len(missing)} of {len(wanted)} tensors of the model are missing: {some(missing)}")
    if surplus:
        faults.append(f"{len(surplus)} tensors have no place in the model: {some(surplus)}{_meant(surplus, missing)}")
    if wrong:
        shown = (f"{name} is {list(held[name])} and should be {list(wanted[name])}" for name in wrong[:SHOWN])
        faults.append(f"{len(wrong)} tensors have another shape than config.json says: {'; '.join(shown)}")
    if faults:
        kind = UnsupportedError if surplus or wrong else IncompleteSourceError
        raise kind(f"{folder}: " + "; ".join(faults))


def _meant(surplus: Iterable[str], missing: Iterable[str]) -> str:
    """' (is x meant to be y?)' for the first unexpected tensor that is near to a missing one."""
    lacking = sorted(missing)[:SUGGESTED]
    for name in sorted(surplus)[:SHOWN]:
        near = nearest_key(name, lacking)
        if near is not None:
            return f" (is {name} meant to be {near}?)"
    return ""


def _check_plain(folder: Path, config: Mapping[str, Any], tensors: Mapping[str, TensorInfo]) -> None:
    """UnsupportedError for quantised weights."""
    strange = [name for name, info in tensors.items() if info.dtype not in FLOATS]
    if config.get("quantization_config") or strange:
        said = "quantization_config in config.json" if not strange else f"{strange[0]} is {tensors[strange[0]]}"
        raise UnsupportedError(f"{folder}: the weights are quantised ({said}); training starts from plain ones")


def _common_dtype(made: Assembly, tensors: Mapping[str, TensorInfo]) -> torch.dtype:
    """The dtype that holds the values of all sources of a tensor."""
    return reduce(torch.promote_types, (tensors[source].dtype for source in usage(made.pieces)))
