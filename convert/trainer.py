"""Training checkpoints (torch DCP of an FSDP2 / expert-parallel run) <-> Hugging Face."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from convert.assemble import Base, Origin, base_files, into, masters_missing, open_base
from convert.dcp import DcpReader
from convert.dcp_index import METADATA_FILE
from convert.engine import resolve
from convert.families import Model, expected, expert_form
from convert.job import Conversion
from convert.ledger import check_ledger, recipes
from convert.patterns import some
from convert.rules import Copy, Drop, Rule, inverse, prefixed, rename
from convert.small_files import read_object, read_small
from convert.tables.experts import FORMS
from convert.tables.hub import FAMILIES
from convert.tables.trainer import ROOT, STYLES, Names
from convert.tensors import TensorInfo
from schemas.errors import ConfigError, IncompleteSourceError, UnsupportedError

LATEST_FILE = "LATEST"
COMPLETE_FILE = "COMPLETE"
STATE_FILE = "state.json"


def dcp_to_hf_conversion(
    source: Path, base: Path | None, dtype: torch.dtype | None = None, from_master: bool = False
) -> Conversion:
    """A training checkpoint -> the family of the base, as a whole model directory.

    source: the directory of the DCP, a step's directory around it, or the run's output directory, of which the newest
    complete step is taken. base: None takes the config.json beside the checkpoint, which is enough where the
    checkpoint holds every tensor of the family. Towers that the checkpoint lacks come from the base.
    """
    step, directory = find_step(source)
    if base is None:
        base = next((folder for folder in (directory, step) if (folder / "config.json").is_file()), None)
    if base is None:
        raise ConfigError(f"{source}: there is no config.json beside the checkpoint; give --base")
    target = open_base(base)
    _check_family(step, target.model)
    reader = DcpReader(directory, from_master=from_master)
    names, root = find_names(reader.tensors, target.model)
    form = expert_form(target.model, reader.tensors, root + names.text)
    rules = _rules(names, root, form, target, reader.tensors)
    notes = (f"the checkpoint has {names.style} names behind {root!r}, experts in the form {form!r}",)
    name, warnings = step.resolve().name, masters_missing(reader.without_masters)
    return into(Origin("dcp-to-hf", name, reader, target.model.geometry, notes, warnings), rules, target, dtype)


def hf_to_dcp_conversion(source: Path, style: str = "native", dtype: torch.dtype | None = None) -> Conversion:
    """A model directory -> a torch DCP that a training run of any world size loads.

    style: "native" for the trainer's names, "transformers" for the module paths of transformers 5; behind `model.`,
    experts fused as both have them in memory. config.json and the small files go along, for the way back.
    """
    base = open_base(source)
    if base.reader is None:
        raise ConfigError(f"{source}: has no weights")
    if style not in ("native", "transformers"):
        raise ConfigError(f"{style!r} is no style of names; known: native, transformers")
    styles = STYLES[base.model.family.model_type]
    names = next((names for names in styles if names.style == style), styles[0])  # most families have one for both
    form = base.experts if base.experts == "none" else "v5"
    rules = from_hub(names, base.model, form, base.experts, "model.")
    tensors, geometry = base.reader.tensors, base.model.geometry
    complete = {name: TensorInfo(shape, torch.float32) for name, shape in expected(base.model, base.experts).items()}
    wanted = {name: assembly.shape for name, assembly in resolve(rules, complete, geometry).made.items()}
    resolution = resolve(rules, tensors, geometry)
    check_ledger(resolution, tensors, wanted)
    made = tuple(recipes(resolution, tensors, {}, dtype))
    written = tensors if dtype is None else {name: TensorInfo(info.shape, dtype) for name, info in tensors.items()}
    return Conversion(
        direction="hf-to-dcp",
        source=source.resolve().name,
        reader=base.reader,
        recipes=made,
        files=base_files(base, written),
        dropped=resolution.dropped,
        as_dcp=True,
    )


def find_step(source: Path) -> tuple[Path, Path]:
    """(directory of the step, directory that holds `.metadata`). ConfigError when there is none or several to choose
    from, IncompleteSourceError for a step that was not saved to its end."""
    if not source.is_dir():
        raise ConfigError(f"{source}: no such directory")
    step = source
    latest = source / LATEST_FILE
    if latest.is_file():
        name = read_small(latest, 4096).decode("utf8", "replace").strip()
        if not name.isprintable() or Path(name).name != name or name in ("", ".", ".."):
            raise ConfigError(f"{latest}: says {name[:60]!r}, which is no directory beside it")
        step = source / name
        if not step.is_dir():
            raise IncompleteSourceError(f"{latest}: names {name}, which does not exist")
    if (step / STATE_FILE).exists() and not (step / COMPLETE_FILE).exists():
        raise IncompleteSourceError(
            f"{step}: has no {COMPLETE_FILE}: it was not saved to its end; take an earlier step"
        )
    if (step / METADATA_FILE).is_file():
        return step, step
    found = sorted(path.parent for path in step.glob(f"*/{METADATA_FILE}"))
    if len(found) != 1:
        raise ConfigError(
            f"{source}: holds {len(found) or 'no'} torch distributed checkpoints ({METADATA_FILE}); name one"
            + (f" of {some(path.name for path in found)}" if found else "")
        )
    return step, found[0]


def find_names(tensors: Mapping[str, TensorInfo], model: Model) -> tuple[Names, str]:
    """Under which names, and behind which root, a checkpoint holds a model of this family; the token embedding tells.

    UnsupportedError when there are several models or the names are of another family, or for LoRA adapters.
    """
    adapters = [name for name in tensors if re.search(r"(^|\.)lora_[AB](\.|$)|\.base_layer\.", name)]
    if adapters:
        raise UnsupportedError(
            f"{len(adapters)} tensors are of LoRA adapters: {some(adapters)}; export the adapter and use merge-lora"
        )
    embeddings = [name for name in tensors if name.endswith("embed_tokens.weight")]
    for names in STYLES[model.family.model_type]:
        pattern = re.compile(f"({ROOT}){re.escape(names.text)}embed_tokens\\.weight")
        found = [match[1] for match in map(pattern.fullmatch, embeddings) if match]
        if len(found) > 1:
            raise UnsupportedError(f"there are {len(found)} language models, which one is meant? {some(embeddings)}")
        if found:
            return names, found[0]
    if not embeddings:
        raise IncompleteSourceError(
            f"no token embedding (embed_tokens.weight) among {len(tensors)} tensors: {some(tensors)}"
        )
    raise UnsupportedError(f"{some(embeddings)} is not where a {model.family.model_type} has its token embedding")


def to_hub(names: Names, model: Model, form: str, experts: str, root: str = "") -> tuple[Rule, ...]:
    """The rules from a training checkpoint's names to those of a family's files; all of them invert.
    form, experts: in which the two sides have their experts."""
    family = model.family
    rules: list[Rule] = []
    if experts != "none":
        rules += prefixed(FORMS[form, experts], root + names.text, family.text)
    for target, source in _towers(names, model):
        rules.append(rename(root + source + "{name}", target + "{name}"))
    rules.append(rename(f"{root}{names.head}lm_head.weight", f"{family.head}lm_head.weight"))
    rules += [
        rename(f"{root}{names.text}{part}", f"{family.text}{part}")
        for part in ("embed_tokens.weight", "norm.weight", "layers.{layer}.{name}")
    ]
    return tuple(rules)


def from_hub(names: Names, model: Model, form: str, experts: str, root: str) -> tuple[Rule, ...]:
    """The inverse of `to_hub`; what a training checkpoint does not hold is dropped."""
    rules = inverse(to_hub(names, model, form, experts, root))
    return (*rules, *(Drop(prefix + "{name}", "only the thinker is trained") for prefix in model.family.rest))


def _rules(names: Names, root: str, form: str, target: Base, tensors: Mapping[str, TensorInfo]) -> tuple[Rule, ...]:
    rules = list(to_hub(names, target.model, form, target.experts, root))
    for hub, source in _towers(names, target.model):
        if not any(name.startswith(root + source) for name in tensors):
            rules.append(Copy(hub + "{name}", "the checkpoint does not hold this tower"))
    rules += [Copy(prefix + "{name}", "no conversion makes this part") for prefix in target.model.family.rest]
    return tuple(rules)


def _towers(names: Names, model: Model) -> Sequence[tuple[str, str]]:
    """(prefix in the hub's files, prefix in the checkpoint) of each tower that the family has."""
    found = []
    for kind, source in (("visual.", names.visual), ("audio_tower.", names.audio)):
        if source is not None:
            found.append((next(prefix for prefix, _ in model.family.parts if prefix.endswith(kind)), source))
    return found


def _check_family(step: Path, model: Model) -> None:
    """The trainer's state.json names the family; a base of another one is a mistake."""
    path = step / STATE_FILE
    if not path.is_file():
        return
    stated = read_object(path, IncompleteSourceError).get("family")
    ours = model.family.model_type.removesuffix("_thinker")
    if isinstance(stated, str) and stated in FAMILIES and stated.removesuffix("_thinker") != ours:
        raise ConfigError(f"{path}: the checkpoint is a {stated}, the base a {model.family.model_type}")
