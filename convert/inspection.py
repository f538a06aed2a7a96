"""`omniloom convert inspect`: what a checkpoint is, in which form it is written, and what a conversion would leave out.

Reads names, shapes and configuration only; no tensor is read and no pickle is executed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from convert.adapter import adapter_reader
from convert.adapter_config import CONFIG_FILE as ADAPTER_CONFIG
from convert.adapter_config import read_adapter_config
from convert.dcp import DcpReader
from convert.dcp_index import METADATA_FILE
from convert.families import Model, expert_form, model_of, read_config
from convert.megatron import MegatronLayout, find_layout, is_megatron
from convert.megatron_source import LATEST_FILE, find_checkpoint
from convert.megatron_to_hf import describe
from convert.printing import printable
from convert.progress import gigabytes
from convert.restricted_pickle import load_common
from convert.safetensors_io import INDEX_FILE, SINGLE_FILE, SafetensorsReader
from convert.tensors import TensorInfo, TensorReader, dtype_name
from convert.trainer import find_step
from schemas.errors import ConfigError, IncompleteSourceError, UnsupportedError


@dataclass(frozen=True)
class Inspection:
    """kind: "Hugging Face model" | "Megatron torch_dist" | "torch distributed checkpoint" | "PEFT LoRA adapter".

    family: a model type of config.json where the directory has one, else what the names suggest. facts: label -> text.
    skipped: name -> why no conversion reads it. refused: why no conversion takes this checkpoint, None when one does.
    """

    directory: Path
    kind: str
    family: str
    facts: Mapping[str, str]
    tensors: Mapping[str, TensorInfo]
    skipped: Mapping[str, str] = field(default_factory=dict)
    refused: str | None = None

    def as_json(self) -> dict[str, Any]:
        return {
            "directory": str(self.directory),
            "kind": self.kind,
            "family": self.family,
            "facts": dict(self.facts),
            "refused": self.refused,
            "tensors": {
                name: {"shape": list(info.shape), "dtype": dtype_name(info.dtype)}
                for name, info in self.tensors.items()
            },
            "skipped": dict(self.skipped),
        }

    def lines(self) -> list[str]:
        """The head of what a user sees; the table of tensors comes after it."""
        entries = {"source": str(self.directory), "kind": self.kind, "family": self.family, **self.facts}
        if self.refused is not None:
            entries["refused"] = self.refused
        for reason, count in sorted(Counter(self.skipped.values()).items()):
            entries[f"skipped: {reason}"] = f"{count} entries"
        width = max(map(len, entries))
        return [printable(f"{label:<{width}}  {text}") for label, text in entries.items()]


def inspect_source(source: Path) -> Inspection:
    """Errors are those of the readers; ConfigError for a directory that is no checkpoint of a known kind."""
    if not source.is_dir():
        raise ConfigError(f"{source}: no such directory")
    if (source / ADAPTER_CONFIG).is_file():
        return _adapter(source)
    if (source / SINGLE_FILE).is_file() or (source / INDEX_FILE).is_file():
        return _hugging_face(source)
    if (source / LATEST_FILE).is_file() or any(source.glob("iter_*")):
        return _distributed(find_checkpoint(source))
    if (source / METADATA_FILE).is_file():
        return _distributed(source)
    try:
        return _distributed(find_step(source)[1])
    except ConfigError as error:
        raise ConfigError(
            f"{source} is no checkpoint that is known here: neither safetensors ({SINGLE_FILE}, {INDEX_FILE}), nor a "
            f"LoRA adapter ({ADAPTER_CONFIG}), nor a distributed checkpoint ({METADATA_FILE}, {LATEST_FILE})"
        ) from error


def _sizes(tensors: Mapping[str, TensorInfo]) -> dict[str, str]:
    dtypes = Counter(dtype_name(info.dtype) for info in tensors.values())
    count = sum(info.numel for info in tensors.values())
    size = sum(info.nbytes for info in tensors.values())
    return {
        "tensors": f"{len(tensors)} with {count:,} elements, {gigabytes(size)} GB",
        "dtypes": ", ".join(f"{number} {name}" for name, number in dtypes.most_common()),
    }


def _hugging_face(source: Path) -> Inspection:
    reader = SafetensorsReader(source)
    facts = {"files": f"{len(reader.layouts)} of safetensors", **_sizes(reader.tensors)}
    config = read_config(source)
    family, refused = str(config.get("model_type")), None
    try:
        model = model_of(config, str(source / "config.json"), reader.tensors)
        facts |= _model_facts(model, reader)
    except (UnsupportedError, ConfigError) as error:
        refused = str(error)
    if "omni_sideband" in config:
        facts["made from"] = "a Qwen3-Omni thinker (omni_sideband)"
    return Inspection(source, "Hugging Face model", family, facts, reader.tensors, refused=refused)


def _model_facts(model: Model, reader: TensorReader) -> dict[str, str]:
    size, ranges = model.geometry.size, model.geometry.ranges
    facts = {
        "experts": expert_form(model, reader.tensors),
        "head": "tied to the embedding" if model.tied else "of its own",
        "sizes": f"{len(ranges['layer'])} layers, hidden {size('hidden')}, {size('heads')} heads, "
        f"{size('kv_heads')} key/value heads of {size('head_dim')}, vocabulary {size('vocab')}",
    }
    if ranges["moe_layer"]:
        facts["sizes"] += f", {size('experts')} experts of {size('moe_intermediate')}"
    return facts


def _adapter(source: Path) -> Inspection:
    config, reader = read_adapter_config(source), adapter_reader(source)
    facts = {
        "rank": str(config.get("r")),
        "alpha": str(config.get("lora_alpha")),
        "targets": ", ".join(_texts(config.get("target_modules")) + _texts(config.get("target_parameters"))) or "none",
        "base": str(config.get("base_model_name_or_path")),
        **_sizes(reader.tensors),
    }
    return Inspection(source, "PEFT LoRA adapter", "that of its base", facts, reader.tensors)


def _texts(value: object) -> list[str]:
    """Of a list, or of one text, which is a pattern."""
    if isinstance(value, list):
        return [str(item) for item in value]
    return [] if value is None else [str(value)]


def _distributed(directory: Path) -> Inspection:
    with DcpReader(directory) as reader:
        chunks = sum(len(stored.chunks) for stored in reader.index.tensors.values())
        facts = {
            "files": f"{len(reader.index.files)} of {gigabytes(sum(reader.index.files.values()))} GB, {chunks} chunks",
            **_sizes(reader.tensors),
        }
        masters = sum(".fp32_param." in name for name in reader.skipped)
        facts["fp32 masters"] = f"{masters} (--from-master)" if masters else "none"
        if not is_megatron(reader.tensors):
            family = _family_of_names(reader.tensors)
            return Inspection(directory, "torch distributed checkpoint", family, facts, reader.tensors, reader.skipped)
        family, refused = "unknown", None
        load_common(directory / "common.pt")  # refuses what wants to run something
        try:
            layout = find_layout(reader.tensors)
            facts["layout"] = describe(layout)
            family = _family_of_layout(layout)
        except (UnsupportedError, IncompleteSourceError) as error:
            refused = str(error)
        return Inspection(directory, "Megatron torch_dist", family, facts, reader.tensors, reader.skipped, refused)


def _family_of_layout(layout: MegatronLayout) -> str:
    moe = "" if layout.experts == "none" else "_moe"
    if layout.audio != "none" or layout.root.endswith("thinker."):
        return "qwen3_omni_moe, by its names"
    return f"qwen3_vl{moe}, by its names" if layout.vision != "none" else f"qwen3{moe}, by its names"


def _family_of_names(names: Mapping[str, TensorInfo]) -> str:
    moe = "_moe" if any(".experts." in name for name in names) else ""
    if any("audio_tower." in name for name in names):
        return "qwen3_omni_moe, by its names"
    return f"qwen3_vl{moe}, by its names" if any("visual." in name for name in names) else f"qwen3{moe}, by its names"
