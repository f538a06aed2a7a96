"""The direction megatron-to-hf: a torch_dist checkpoint and the base it was trained from -> a model directory."""

from __future__ import annotations

from pathlib import Path

import torch

from convert.assemble import Origin, into, masters_missing, open_base
from convert.dcp import DcpReader
from convert.engine import check_names
from convert.families import text_section
from convert.job import Conversion
from convert.megatron import MegatronLayout, check_sizes, find_layout, megatron_rules
from convert.megatron_source import check_common, find_checkpoint
from schemas.errors import ConfigError


def megatron_to_hf_conversion(
    source: Path,
    base: Path | None,
    dtype: torch.dtype | None = None,
    *,
    from_master: bool = False,
    keep_base_towers: bool = False,
) -> Conversion:
    """Megatron -> the family, names, layout and dtypes of `base`.

    source: an iteration's directory or its parent. base: a model directory; its config.json decides the family and all
    sizes; weights may be missing for a text model. from_master: take the fp32 masters of the optimizer.
    keep_base_towers: keep the base's vision and audio towers though the checkpoint has its own.
    Errors: those of `find_checkpoint`, `check_common`, `DcpReader`, `find_layout`, `check_sizes` and the ledger.
    """
    if base is None:
        raise ConfigError(
            "megatron-to-hf needs --base: the Hugging Face directory that the model was trained from; its config.json "
            "tells the family and the sizes"
        )
    folder = find_checkpoint(source)
    target = open_base(base)
    iteration = check_common(folder, target.model.geometry, text_section(target.model, base))
    reader = DcpReader(folder, from_master=from_master)
    layout = find_layout(reader.tensors)
    rules = megatron_rules(layout, target.model, target.experts, keep_base_towers=keep_base_towers)
    check_names(rules, reader.tensors)
    check_sizes(reader.tensors, layout, target.model)
    notes = [f"iteration {iteration}"] if iteration is not None else []
    notes.append(describe(layout))
    if from_master:
        notes.append(f"{len(reader.masters)} of {len(reader.tensors)} tensors from the optimizer's fp32 masters")
    origin = Origin(
        "megatron-to-hf",
        folder.resolve().name,
        reader,
        target.model.geometry,
        tuple(notes),
        masters_missing(reader.without_masters),
    )
    return into(origin, rules, target, dtype)


def describe(layout: MegatronLayout) -> str:
    """The layout in a line."""
    towers = [f"{name} {kind}" for name, kind in (("vision", layout.vision), ("audio", layout.audio)) if kind != "none"]
    parts = [
        f"prefix {layout.prefix!r}",
        f"layers {layout.layers}",
        f"experts {layout.experts}",
        f"norm before the MLP in {layout.norms}",
        "head of its own" if layout.head else "no head",
        f"{layout.vocab_rows} vocabulary rows",
        *towers,
    ]
    return "; ".join(parts)
