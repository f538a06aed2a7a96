"""Hub directories of the tiny families, in every layout that the files of these models have."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from tests.train.models.families import FAMILIES, Family, hub_names, randomise

EXPERT_LAYOUTS = ("per-expert", "hub", "v5")


def save_model(name: str, folder: Path, layout: str = "v5", names: str = "hub", **how: bool) -> dict[str, Tensor]:
    """Writes a directory with config.json and one file of weights; gives the weights under native names.

    layout: of the experts; names: "hub", "thinker" (behind `thinker.`), "memory" (those of transformers 5's modules).
    """
    family: Family = FAMILIES[name]
    config = family.make_config()
    reference = family.reference._from_config(config)
    randomise(reference)
    folder.mkdir(parents=True, exist_ok=True)
    config.save_pretrained(folder)
    weights = hub_names(reference)
    files = {_named(key, names): value for key, value in laid_out(weights, layout).items()}
    if how.get("with_head"):
        files["lm_head.weight"] = next(v for k, v in weights.items() if k.endswith("embed_tokens.weight")).clone()
    write(folder, files)
    return weights


def write(folder: Path, tensors: dict[str, Tensor]) -> None:
    contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(contiguous, folder / "model.safetensors", {"format": "pt"})


def laid_out(weights: dict[str, Tensor], layout: str) -> dict[str, Tensor]:
    """The experts of native weights in one of the three layouts."""
    found: dict[str, Tensor] = {}
    for name, value in weights.items():
        if ".experts." not in name or layout == "v5":
            found[name] = value
        elif layout == "hub":
            found[name] = value.transpose(1, 2)
        else:
            path, _, kind = name.rpartition(".")
            for number, expert in enumerate(value):
                parts = torch.chunk(expert, 2) if kind == "gate_up_proj" else [expert]
                kinds = ["gate_proj", "up_proj"] if kind == "gate_up_proj" else ["down_proj"]
                found |= {f"{path}.{number}.{k}.weight": p for k, p in zip(kinds, parts, strict=True)}
    return found


def _named(name: str, names: str) -> str:
    if names == "memory":
        if name.startswith("model."):
            return "model.language_model." + name.removeprefix("model.")
        return name if name.startswith("lm_head") else f"model.{name}"
    return f"thinker.{name}" if names == "thinker" else name
