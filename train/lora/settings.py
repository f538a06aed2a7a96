"""adapter_config.json of what was trained, as PEFT reads it, and a block of our own that divides fused pairs again."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from train.lora.layers import PairSettings

BLOCK, BLOCK_VERSION = "omniloom_lora", 1


def adapter_settings(
    modules: Mapping[str, PairSettings],
    parameters: Mapping[str, PairSettings],
    held: tuple[Collection[str], Collection[str]],
    saved: Sequence[str],
) -> dict[str, Any]:
    """modules, parameters: what is adapted, by the adapter's names; held: all modules and all parameters of the model,
    by these names; saved: modules that were trained whole."""
    everything = {**modules, **parameters}
    usual = Counter((modules or parameters).values()).most_common(1)[0][0]
    return {
        "peft_type": "LORA",
        "task_type": None,
        "base_model_name_or_path": None,
        "r": usual.rank,
        "lora_alpha": usual.alpha,
        "use_rslora": usual.rslora,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": ends(modules, held[0]) or None,
        "target_parameters": ends(parameters, held[1]) or None,
        "rank_pattern": patterns({name: pair.rank for name, pair in everything.items()}, usual.rank),
        "alpha_pattern": patterns({name: pair.alpha for name, pair in everything.items()}, usual.alpha),
        "modules_to_save": sorted(saved) or None,
        "init_lora_weights": True,
        "inference_mode": True,
        "fan_in_fan_out": False,
    }


def ends(names: Collection[str], held: Collection[str]) -> list[str]:
    """What PEFT is to look for: ends of names that mean these and no others, whole names else."""
    found: set[str] = set()
    for name in names:
        end = end_of(name)
        meant = {other for other in held if other == end or other.endswith(f".{end}")}
        found.add(end if meant <= set(names) else name)
    return sorted(found)


def patterns(values: Mapping[str, Any], usual: Any) -> dict[str, Any]:
    """rank_pattern or alpha_pattern: none where all have the usual value. Else every name has its own, by its end where
    all with that end agree; PEFT takes the first that fits, so the longest stands first."""
    if all(value == usual for value in values.values()):
        return {}
    by_end: dict[str, set[Any]] = {}
    for name, value in values.items():
        by_end.setdefault(end_of(name), set()).add(value)
    found = {
        _expression(end_of(name) if len(by_end[end_of(name)]) == 1 else name): value for name, value in values.items()
    }
    return dict(sorted(found.items(), key=lambda item: (-len(item[0]), item[0])))


def _expression(name: str) -> str:
    """Of a name, for a weight also as its module."""
    module = name.removesuffix(".weight")
    return re.escape(module) + (r"(\.weight)?" if module != name else "")


def end_of(name: str) -> str:
    """What stands behind the last number of a name: `self_attn.q_proj`; the whole name when nothing does."""
    parts = name.split(".")
    numbers = [index for index, part in enumerate(parts) if part.isdigit()]
    return ".".join(parts[numbers[-1] + 1 :]) if numbers and numbers[-1] + 1 < len(parts) else name


def block(experts: Mapping[str, Mapping[str, PairSettings]], *, shared: bool) -> dict[str, Any]:
    """What PEFT has no key for: the pairs of the projections of experts, by the adapter's path of the experts."""
    pairs = {
        path: {name: {"rank": pair.rank, "alpha": pair.alpha} for name, pair in of.items()}
        for path, of in experts.items()
    }
    return {"schema_version": BLOCK_VERSION, "share_expert_lora": shared, "experts": pairs}
