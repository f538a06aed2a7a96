"""merge-lora: a PEFT adapter added to its base, tensor by tensor, in float32 and rounded once.

The adapter knows the parameters of the model that was trained (experts fused, names of transformers or of the
trainer), the base its files'. The rules between the two carry the changes over box by box, so any target is made alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
import xxhash

from convert.adapter import Adapter, adapted_modules, adapter_reader
from convert.adapter_config import CONFIG_FILE, read_adapter_config
from convert.adapter_modules import check_complete
from convert.assemble import Base, check_whole, open_base
from convert.config_dtype import restated
from convert.engine import resolve
from convert.file_states import FileStates
from convert.fill import Rows
from convert.job import Conversion
from convert.ledger import Recipe
from convert.model_config import carried_files
from convert.patterns import some
from convert.pieces import whole
from convert.rules import Rule
from convert.safetensors_io import SafetensorsReader
from convert.tables.trainer import STYLES
from convert.tensors import Box, TensorInfo, full_box
from convert.trainer import from_hub, to_hub
from schemas.errors import ConfigError, UnsupportedError


def merge_lora_conversion(source: Path, base: Path, dtype: torch.dtype | None = None) -> Conversion:
    """source: a PEFT adapter directory; base: the model it was trained on. Tensors that the adapter does not touch are
    copied. UnsupportedError for targets that the base does not have."""
    read_adapter_config(source)
    target = open_base(base)
    if target.reader is None:
        raise ConfigError(f"{base}: has no weights to merge into")
    check_whole(target)
    parameters, rules, root = trained_names(adapted_modules(adapter_reader(source)), target, source)
    adapter = Adapter(source, parameters, root)
    check_complete(source, adapter, parameters, root)
    _refuse_tied(adapter, target)
    reader = MergedReader(target.reader, adapter, rules, parameters, target, dtype)
    made = tuple(
        Recipe(name, TensorInfo(info.shape, dtype or target.reader.tensors[name].dtype), whole(name, info.shape).pieces)
        for name, info in reader.tensors.items()
    )
    written = {**target.reader.tensors, **{recipe.target: recipe.info for recipe in made}}
    copies = {name: "not touched by the adapter" for name in target.reader.tensors if name not in reader.tensors}
    return Conversion(
        direction="merge-lora",
        source=source.resolve().name,
        reader=reader,
        recipes=made,
        files={**carried_files(base), "config.json": restated(base, target.model, written)},
        base=target.reader,
        copies=copies,
        notes=(f"{len(adapter.deltas)} parameters changed, {len(adapter.replaced)} replaced",),
    )


def _refuse_tied(adapter: Adapter, base: Base) -> None:
    """A tied head and embedding are one tensor of the base, but the adapter changed one of the two."""
    ends = ("embed_tokens.weight", "lm_head.weight")
    touched = [name for name in (*adapter.deltas, *adapter.replaced) if name.endswith(ends)]
    if base.model.tied and touched:
        raise UnsupportedError(
            f"the adapter changes {some(touched)}, which {base.folder.name} ties to its "
            f"{'embedding' if touched[0].endswith(ends[1]) else 'head'}: one tensor cannot be both the old and the new"
        )


def trained_names(modules: list[str], base: Base, source: Path) -> tuple[dict[str, TensorInfo], tuple[Rule, ...], str]:
    """(parameters of the trained model, rules from them to the base's files, root before their names in the adapter).

    Every style of names is tried with every root; the one under which all modules exist is it.
    """
    assert base.reader is not None
    separate = any(".mlp.experts." in name and name.split(".mlp.experts.")[1][:1].isdigit() for name in modules)
    form = base.experts if base.experts == "none" else "per-expert" if separate else "v5"
    best: list[str] | None = None
    for names in STYLES[base.model.family.model_type]:
        back = from_hub(names, base.model, form, base.experts, "")
        resolution = resolve(back, base.reader.tensors, base.model.geometry)
        dtypes = next(iter(base.reader.tensors.values())).dtype
        parameters = {name: TensorInfo(made.shape, dtypes) for name, made in resolution.made.items()}
        known = {name.removesuffix(".weight") for name in parameters} | set(parameters)
        known |= {name.rsplit(".", 1)[0] for name in parameters if name.endswith((".gate_up_proj", ".down_proj"))}
        for root in ("", "thinker."):
            unknown = [name for name in modules if not name.startswith(root) or name.removeprefix(root) not in known]
            if not unknown:
                return parameters, to_hub(names, base.model, form, base.experts), root
            if best is None or len(unknown) < len(best):
                best = unknown
    raise UnsupportedError(
        f"{source}: {len(best or ())} of the {len(modules)} adapted modules are not in {base.folder.name}: "
        f"{some(best or ())}"
    )


class MergedReader:
    """The tensors of the base's files that an adapter changes, with the change; a `TensorReader` in float32."""

    def __init__(
        self,
        base: SafetensorsReader,
        adapter: Adapter,
        rules: tuple[Rule, ...],
        parameters: Mapping[str, TensorInfo],
        target: Base,
        dtype: torch.dtype | None = None,
    ) -> None:
        """dtype: what the model is cast to; then tensors that the adapter does not touch are read as well."""
        self._base, self._adapter = base, adapter
        self._config = FileStates([adapter.reader.folder / CONFIG_FILE])
        self._changes = _Source(adapter, parameters, replaced=False)
        self._values = _Source(adapter, parameters, replaced=True)
        self._rows: dict[str, Rows] = {}
        self.tensors: dict[str, TensorInfo] = {}
        self.skipped: dict[str, str] = {}
        touched = adapter.deltas.keys() | adapter.replaced.keys()
        for name, assembly in resolve(rules, parameters, target.model.geometry).made.items():
            sources = {piece.source for piece in assembly.pieces}
            if sources & adapter.replaced.keys() and not sources <= adapter.replaced.keys():
                raise UnsupportedError(
                    f"the adapter replaces {some(sources & adapter.replaced.keys())}, which are only a part of {name}"
                )
            if sources & touched:
                if not base.tensors[name].dtype.is_floating_point:
                    raise UnsupportedError(f"{base.folder}: {name} is {base.tensors[name]}; nothing can be added to it")
                info = TensorInfo(assembly.shape, torch.float32)
                pieces = tuple(sorted(assembly.pieces, key=lambda piece: piece.at))
                self._rows[name] = Rows(Recipe(name, info, pieces))
                self.tensors[name] = info
        if dtype is not None:
            rest = tuple(target.model.family.rest)
            others = {name: info for name, info in base.tensors.items() if not (rest and name.startswith(rest))}
            self.tensors |= {
                name: info
                for name, info in others.items()
                if name not in self.tensors and info.dtype.is_floating_point and info.dtype != dtype
            }

    @property
    def fingerprint(self) -> str:
        config = (self._adapter.reader.folder / CONFIG_FILE).read_bytes()
        return f"{self._adapter.reader.fingerprint}.{xxhash.xxh3_64(config).hexdigest()}.{self._base.fingerprint}"

    def changed(self) -> Iterable[Path]:
        return (*self._adapter.reader.changed(), *self._base.changed(), *self._config.changed())

    @property
    def bytes_read(self) -> int:
        return self._adapter.reader.bytes_read + self._base.bytes_read

    def location(self, name: str) -> tuple[str, int]:
        return self._base.location(name)

    def read(self, name: str, box: Box | None = None) -> torch.Tensor:
        """Whole rows only, as slabs ask for them."""
        if name not in self._rows:
            return self._base.read(name, box)
        box = full_box(self.tensors[name].shape) if box is None else box
        if box[1:] != full_box(self.tensors[name].shape)[1:]:
            raise ValueError(f"{name}: merged tensors are read in whole rows, not {box}")
        rows, (start, stop) = self._rows[name], box[0]
        sources = {piece.source for piece in rows.recipe.pieces}
        if sources <= self._adapter.replaced.keys():
            merged = rows.read(self._values, start, stop)
        else:
            merged = self._base.read(name, box).float()
        if sources & self._adapter.deltas.keys():
            merged += rows.read(self._changes, start, stop)
        return merged


class _Source:
    """Parameters of the trained model as a reader: the changes to them, or the values that take their place."""

    def __init__(self, adapter: Adapter, parameters: Mapping[str, TensorInfo], replaced: bool) -> None:
        self._adapter, self._replaced = adapter, replaced
        self.tensors = parameters
        self.skipped: dict[str, str] = {}
        self.fingerprint = adapter.reader.fingerprint

    @property
    def bytes_read(self) -> int:
        return self._adapter.reader.bytes_read

    def changed(self) -> Iterable[Path]:
        return self._adapter.reader.changed()

    def location(self, name: str) -> tuple[str, int]:
        return name, 0

    def read(self, name: str, box: Box | None = None) -> torch.Tensor:
        box = full_box(self.tensors[name].shape) if box is None else box
        if self._replaced:
            return self._adapter.reader.read(self._adapter.replaced[name], box).float()
        if name not in self._adapter.deltas:
            return torch.zeros([stop - start for start, stop in box])
        return self._adapter.delta(name, box)
