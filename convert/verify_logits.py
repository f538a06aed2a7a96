"""The same seeded input through both models in transformers: what counts in the end are the logits.

The only module here that builds models. One model is in memory at a time, in float32 on the CPU.
"""

from __future__ import annotations

import gc
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from convert.families import Model, expert_form, model_of, read_config
from convert.printing import printable
from convert.safetensors_io import SafetensorsReader
from schemas.errors import ConfigError, UnsupportedError, VerificationError

TOLERANCE = 1e-6  # of the largest logit: fp32 sums in another order
GRID = (1, 2, 3)  # merged patches of the test image: time, height, width

# model type -> the class of transformers that reads the directory; the thinker alone is loaded from a whole Omni
_CLASSES = {
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "qwen3_vl": "Qwen3VLForConditionalGeneration",
    "qwen3_vl_moe": "Qwen3VLMoeForConditionalGeneration",
    "qwen3_omni_moe": "Qwen3OmniMoeThinkerForConditionalGeneration",
    "qwen3_omni_moe_thinker": "Qwen3OmniMoeThinkerForConditionalGeneration",
}


@dataclass(frozen=True)
class LogitsReport:
    """difference: largest absolute one; largest: of the reference's logits; agreement: share of equal argmax."""

    inputs: tuple[str, ...]
    difference: float
    largest: float
    agreement: float

    def as_json(self) -> dict[str, Any]:
        return {
            "inputs": list(self.inputs),
            "max_difference": self.difference,
            "largest_logit": self.largest,
            "argmax_agreement": self.agreement,
        }


def compare_logits(output: Path, reference: Path, *, tokens: int = 48, seed: int = 0) -> LogitsReport:
    """Logits of both directories on seeded text, and on an image where both have a vision tower.

    The families may differ (a thinker, its pseudo Qwen3-VL, its text model). UnsupportedError when a directory has
    fused experts with a square size, or needs more memory than there is; VerificationError when transformers misses or
    does not know a tensor, or when the logits differ by more than TOLERANCE of the largest.
    """
    models = [_open(folder) for folder in (output, reference)]
    for folder, (model, reader) in zip((output, reference), models, strict=True):
        _refuse_square(folder, model, reader)
        _refuse_large(folder, reader)
    vocab = min(model.geometry.size("vocab") for model, _ in models)
    vision = all(model.family.vision_at is not None for model, _ in models)
    ids = _text([model for model, _ in models], tokens, seed)
    found = [
        _logits(folder, model, ids, vision, seed)
        for folder, (model, _) in zip((output, reference), models, strict=True)
    ]
    ours, theirs = ([part[..., :vocab] for part in side] for side in found)
    if any(a.shape != b.shape for a, b in zip(ours, theirs, strict=True)):
        raise VerificationError(f"{output} and {reference} give logits of different shapes")
    difference = max(float((a - b).abs().max()) for a, b in zip(ours, theirs, strict=True))
    largest = max(float(part.abs().max()) for part in theirs)
    same = torch.cat([(a.argmax(-1) == b.argmax(-1)).flatten() for a, b in zip(ours, theirs, strict=True)])
    report = LogitsReport(("text", "image") if vision else ("text",), difference, largest, float(same.float().mean()))
    if not difference <= TOLERANCE * max(1.0, largest):
        raise VerificationError(
            f"logits of {output} and {reference} differ by {difference:.3g} (largest logit {largest:.3g}); "
            f"{report.agreement:.1%} of the positions agree on the next token"
        )
    return report


def _open(folder: Path) -> tuple[Model, SafetensorsReader]:
    reader = SafetensorsReader(folder)
    model = model_of(read_config(folder), str(folder / "config.json"), reader.tensors)
    if model.family.model_type not in _CLASSES:
        raise ConfigError(f"{folder}: no logits for the family {model.family.model_type}")
    return model, reader


def _refuse_square(folder: Path, model: Model, reader: SafetensorsReader) -> None:
    """transformers transposes fused experts when their shape is not the module's, so a square one is loaded as it is
    in the file, right or wrong."""
    form = expert_form(model, reader.tensors)
    if form not in ("hub", "v5"):
        return
    hidden, width = model.geometry.size("hidden"), model.geometry.size("moe_intermediate")
    for name, size in (("gate_up_proj", 2 * width), ("down_proj", width)):
        if size == hidden:
            raise UnsupportedError(
                f"{folder}: {name} is square ({size} x {hidden}); transformers tells the two layouts of fused experts "
                "apart by shape only and would guess, so its logits prove nothing here"
            )


def _refuse_large(folder: Path, reader: SafetensorsReader) -> None:
    """A model in float32 that does not fit would bring the machine down."""
    needed, available = 4 * sum(info.numel for info in reader.tensors.values()), available_memory()
    if available is not None and needed > available:
        raise UnsupportedError(
            f"{folder}: the logits need {needed / 1e9:.1f} GB of memory for the model in float32, "
            f"{available / 1e9:.1f} GB are free; run it on a larger machine"
        )


def available_memory() -> int | None:
    """Bytes that a process may still take, None where the system does not tell."""
    meminfo = Path("/proc/meminfo")
    found = re.search(r"MemAvailable:\s+(\d+) kB", meminfo.read_text()) if meminfo.is_file() else None
    return int(found[1]) * 1024 if found else None


def _logits(folder: Path, model: Model, ids: torch.Tensor, vision: bool, seed: int) -> list[torch.Tensor]:
    """One tensor [1, tokens, vocab] for the text, and one for the image."""
    network = _load(folder, model)
    with torch.no_grad():
        found = [network(input_ids=ids, attention_mask=torch.ones_like(ids)).logits]
        if vision:
            found.append(network(**_image_input(ids, model, seed)).logits)
    del network
    gc.collect()
    return [part.float() for part in found]


def _load(folder: Path, model: Model) -> Any:
    # transformers is heavy and only this check needs it
    import transformers  # noqa: PLC0415

    build: Callable[..., Any] = getattr(transformers, _CLASSES[model.family.model_type]).from_pretrained
    try:
        network, info = build(
            folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True, local_files_only=True
        )
    except (RuntimeError, ValueError) as error:  # shapes that do not fit, settings that it does not take
        said = printable(str(error).strip().splitlines()[0])[:300] if str(error).strip() else type(error).__name__
        raise VerificationError(f"transformers cannot load {folder}: {said}") from error
    rest = tuple(model.family.rest)
    unexpected = [name for name in info["unexpected_keys"] if not (rest and name.startswith(rest))]
    if info["missing_keys"] or unexpected or info.get("mismatched_keys"):
        raise VerificationError(
            f"transformers loads {folder} with missing={sorted(info['missing_keys'])[:8]} "
            f"unexpected={sorted(unexpected)[:8]} mismatched={sorted(map(str, info.get('mismatched_keys') or ()))[:8]}"
        )
    return network.eval()


def _token_ids(model: Model) -> dict[str, int]:
    """The ids that stand for media, from the part of config.json that holds the text section."""
    config = model.config
    for key in model.family.text_at[:-1]:
        config = config[key]
    return {key: value for key, value in config.items() if key.endswith("_token_id") and type(value) is int}


def _text(models: Sequence[Model], tokens: int, seed: int) -> torch.Tensor:
    """Random token ids [1, tokens] that both models know and that stand for no medium in either."""
    vocab = min(model.geometry.size("vocab") for model in models)
    special = {token for model in models for token in _token_ids(model).values()}
    plain = torch.tensor([token for token in range(vocab) if token not in special])
    generator = torch.Generator().manual_seed(seed)
    return plain[torch.randint(0, len(plain), (1, tokens), generator=generator)]


def _image_input(ids: torch.Tensor, model: Model, seed: int) -> dict[str, torch.Tensor]:
    """The text with an image of noise after its third token."""
    names, size = _token_ids(model), model.geometry.size
    merge = math.isqrt(size("vision_merged") // size("vision_hidden"))
    grid = (GRID[0], GRID[1] * merge, GRID[2] * merge)
    image = [names["image_token_id"]] * math.prod(GRID)
    image = [names["vision_start_token_id"], *image, names["vision_end_token_id"]]
    ids = torch.cat([ids[:, :3], torch.tensor([image]), ids[:, 3:]], dim=1)
    patch = size("in_channels") * size("temporal_patch") * size("patch") ** 2
    inputs = {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "pixel_values": torch.randn(math.prod(grid), patch, generator=torch.Generator().manual_seed(seed)),
        "image_grid_thw": torch.tensor([grid]),
    }
    if model.family.audio_at is None:  # Qwen3-VL of transformers 5 takes the place of the image from here
        inputs["mm_token_type_ids"] = (ids == names["image_token_id"]).long()
    return inputs
