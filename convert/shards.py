"""Which tensor goes to which output file, and where in it: decided before anything is read.

With a base every file keeps the base's name and order, so that the two compare shard by shard, and a file whose tensors
keep their dtypes gets the base's very header. Without one, files are filled in the order of the model and named as on
the hub.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from convert.ledger import Recipe
from convert.safetensors_io import SINGLE_FILE, Layout, SafetensorsReader, lay_out
from convert.tensors import TensorInfo
from schemas.errors import ConfigError

METADATA = {"format": "pt"}
SHARD_BYTES = 5_000_000_000


@dataclass(frozen=True)
class OutputFile:
    """recipes: the tensors that are made; copies: tensor -> (base file, its bytes [start, stop) there)."""

    name: str
    layout: Layout
    recipes: Mapping[str, Recipe]
    copies: Mapping[str, tuple[Path, tuple[int, int]]] = field(default_factory=dict)


def natural(name: str) -> list[tuple[int, int, str]]:
    """Sorts `layers.2` before `layers.10`."""
    return [(0, int(part), "") if part.isdecimal() else (1, 0, part) for part in re.split(r"(\d+)", name)]


def new_files(recipes: Iterable[Recipe], shard_bytes: int = SHARD_BYTES) -> list[OutputFile]:
    """Files of about `shard_bytes` at most, a larger tensor alone in its own."""
    if shard_bytes <= 0:
        raise ConfigError(f"the size of a shard is {shard_bytes} bytes; it must be positive")
    shards: list[dict[str, Recipe]] = [{}]
    size = 0
    for recipe in sorted(recipes, key=lambda recipe: natural(recipe.target)):
        if shards[-1] and size + recipe.info.nbytes > shard_bytes:
            shards.append({})
            size = 0
        shards[-1][recipe.target] = recipe
        size += recipe.info.nbytes
    count = len(shards)
    return [
        OutputFile(
            SINGLE_FILE if count == 1 else f"model-{number:05d}-of-{count:05d}.safetensors",
            lay_out({name: recipe.info for name, recipe in shard.items()}, METADATA),
            shard,
        )
        for number, shard in enumerate(shards, start=1)
    ]


def files_like(base: SafetensorsReader, recipes: Sequence[Recipe]) -> list[OutputFile]:
    """The base's files, with the recipes' tensors in the place of the base's; all others are copied."""
    made = {recipe.target: recipe for recipe in recipes}
    files = []
    for name, layout in base.layouts.items():
        order = sorted(layout.tensors, key=lambda tensor: layout.spans[tensor])
        infos = {tensor: made[tensor].info if tensor in made else layout.tensors[tensor] for tensor in order}
        files.append(
            OutputFile(
                name,
                layout if infos == layout.tensors else lay_out(infos, layout.metadata or METADATA),
                {tensor: made[tensor] for tensor in order if tensor in made},
                {tensor: (base.folder / name, layout.spans[tensor]) for tensor in order if tensor not in made},
            )
        )
    return files


def index_bytes(files: Sequence[OutputFile], base: SafetensorsReader | None = None) -> bytes | None:
    """The index of a model in several files; None for a model in the one file that needs none. base: the model whose
    files these are like; its index stays as it is, but for the size of tensors that changed their dtype."""
    if [file.name for file in files] == [SINGLE_FILE]:
        return None
    infos: dict[str, TensorInfo] = {name: info for file in files for name, info in file.layout.tensors.items()}
    weight_map = {tensor: file.name for file in files for tensor in file.layout.tensors}
    size = sum(info.nbytes for info in infos.values())
    if base is not None and base.index is not None:
        if size == sum(info.nbytes for info in base.tensors.values()):
            return base.index
        index = json.loads(base.index)
        stated = index.get("metadata")
        index = {**index, "metadata": {**(stated if isinstance(stated, dict) else {}), "total_size": size}}
    else:
        ordered = {name: weight_map[name] for name in sorted(weight_map, key=natural)}
        index = {"metadata": {"total_size": size}, "weight_map": ordered}
    return (json.dumps(index, indent=2) + "\n").encode()
