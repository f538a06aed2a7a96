"""In which form a Megatron checkpoint writes its layers, and the rules for that form.

Everything comes from the names and shapes of the checkpoint and the config.json of the base, never from parallel
degrees: the global tensors of torch_dist do not depend on them. What is known but has no place in a hub model is
refused by name.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from convert.families import Model
from convert.patterns import some
from convert.rules import Copy, Drop, Rule, prefixed, rename
from convert.tables.megatron import EXPERT_FORMS, HEAD, TEXT
from convert.tables.megatron_vision import BLOCKS, MERGERS
from convert.tensors import TensorInfo
from schemas.errors import IncompleteSourceError, UnsupportedError

EMBEDDING = "embedding.word_embeddings.weight"
LANGUAGE_MODEL = "language_model."

# parts of names that no hub model of these families has a place for, and what can be done
_REFUSED: tuple[tuple[re.Pattern[str], str], ...] = (
    (re.compile(r"(.*\.)?mtp\..*"), "multi-token prediction layers, for which these families have no tensors"),
    (
        re.compile(r".*\.(adapter|to_wrap|lora_[AaBb])(\..*)?"),
        "LoRA adapters; merge them in Megatron and save again",
    ),
    (
        re.compile(r".*\.router\.expert_bias"),
        "a router bias (loss-free balancing), which changes the routing and which these families lack",
    ),
    (re.compile(r".*\.shared_experts\..*"), "shared experts, which these families lack"),
    (
        re.compile(r".*\.experts\.(experts\.)?(linear_fc[12]\.)?weight\d+(_[wv])?"),
        "experts under the names of a live module (formats `torch` and `fsdp_dtensor`); save as torch_dist",
    ),
    (
        re.compile(r"(?!(?:.*\.)?vision_model\.).*\.linear_(qkv|proj)\.bias"),
        "attention with biases, which is not handled",
    ),
    (re.compile(r".*\.position_embeddings\.weight"), "learned positions, which these families lack"),
)


@dataclass(frozen=True)
class MegatronLayout:
    """How a checkpoint is written.

    prefix: before the language model's names; root: before the towers' names.
    layers: "stacked" | "per layer". experts: "stacked" | "one by one" | "none". norms: where the norm before the MLP
    stands.
    vision: "none" | "hub names" | "Megatron blocks". audio: "none" | "hub names". The tower prefixes are full.
    """

    prefix: str
    root: str
    layers: str
    experts: str
    norms: str
    head: bool
    vocab_rows: int
    vision: str
    vision_prefix: str
    audio: str
    audio_prefix: str


def is_megatron(names: Mapping[str, Any]) -> bool:
    """True when the names of a distributed checkpoint are those of a Megatron GPT model."""
    return any(name == EMBEDDING or name.endswith("." + EMBEDDING) or "decoder.layers." in name for name in names)


def find_layout(tensors: Mapping[str, TensorInfo]) -> MegatronLayout:
    """The layout that the names of a checkpoint show.

    UnsupportedError for several language models, and for tensors that have no place in a hub model;
    IncompleteSourceError when the embedding is missing.
    """
    _refuse(tensors)
    found = [name for name in tensors if name == EMBEDDING or name.endswith("." + EMBEDDING)]
    if len(found) > 1:
        raise UnsupportedError(f"there are {len(found)} language models, which one is meant? {some(found)}")
    if not found:
        kind = IncompleteSourceError if is_megatron(tensors) else UnsupportedError
        raise kind(f"no tensor is called {EMBEDDING}: not a whole Megatron GPT checkpoint; it has {some(tensors)}")
    prefix = found[0].removesuffix(EMBEDDING)
    root = prefix.removesuffix(LANGUAGE_MODEL)
    blocks = root + "vision_model."
    if any(name.startswith(blocks + "decoder.layers.") for name in tensors):
        vision, vision_prefix = "Megatron blocks", blocks
    else:
        vision, vision_prefix = _tower(tensors, root, ("visual.", "vision_model."))
    audio, audio_prefix = _tower(tensors, root, ("audio_model.", "audio_tower."))
    layer = re.compile(re.escape(prefix) + r"decoder\.layers\.(\d+\.)?(.+)")
    matches = [match for match in map(layer.fullmatch, tensors) if match]
    tails = {match[2] for match in matches}
    experts = "none"
    if any(tail.startswith("mlp.experts.") for tail in tails):
        experts = "one by one" if any(re.match(r"mlp\.experts\.experts\.\d", tail) for tail in tails) else "stacked"
    norms = [tail for tail in ("pre_mlp_layernorm.weight", "mlp.linear_fc1.layer_norm_weight") if tail in tails]
    return MegatronLayout(
        prefix=prefix,
        root=root,
        layers="per layer" if any(match[1] for match in matches) else "stacked",
        experts=experts,
        norms=" and ".join(norms) or "none",
        head=f"{prefix}output_layer.weight" in tensors,
        vocab_rows=tensors[found[0]].shape[0] if tensors[found[0]].shape else 0,
        vision=vision,
        vision_prefix=vision_prefix,
        audio=audio,
        audio_prefix=audio_prefix,
    )


def _tower(tensors: Mapping[str, TensorInfo], root: str, names: tuple[str, ...]) -> tuple[str, str]:
    there = [root + name for name in names if any(tensor.startswith(root + name) for tensor in tensors)]
    if len(there) > 1:
        raise UnsupportedError(f"there are several towers of one kind: {', '.join(there)}")
    return ("hub names", there[0]) if there else ("none", root + names[0])


def _refuse(tensors: Mapping[str, TensorInfo]) -> None:
    for pattern, reason in _REFUSED:
        names = [name for name in tensors if pattern.fullmatch(name)]
        if names:
            raise UnsupportedError(f"{len(names)} tensors are {reason}: {some(names)}")


def check_sizes(tensors: Mapping[str, TensorInfo], layout: MegatronLayout, model: Model) -> None:
    """Holds the stacked tensors against config.json, so that a wrong count is named before any rule fails on it.

    IncompleteSourceError when rows of the vocabulary, layers or experts are missing; UnsupportedError when there are
    more than config.json has, or when k and v were repeated for more tensor-parallel ranks than query groups.
    """
    size, ranges = model.geometry.size, model.geometry.ranges
    if layout.vocab_rows < size("vocab"):
        raise IncompleteSourceError(
            f"{layout.prefix}{EMBEDDING} has {layout.vocab_rows} rows, config.json has a vocabulary of {size('vocab')}"
        )
    at = layout.prefix + "decoder.layers."
    stacked = layout.layers == "stacked"
    for name, info in tensors.items():
        if not name.startswith(at):
            continue
        tail = re.sub(r"^\d+\.", "", name.removeprefix(at))
        axes = [("layers", len(ranges["layer"]))] if stacked else []
        if tail.startswith("mlp.experts.experts.linear_") and "expert" in ranges:
            axes.append(("experts", len(ranges["expert"])))
        for (what, wanted), found in zip(axes, info.shape, strict=False):
            if found != wanted:
                kind = IncompleteSourceError if found < wanted else UnsupportedError
                raise kind(f"{name} {list(info.shape)} holds {found} {what}, config.json has {wanted}")
        rows = info.shape[len(axes)] if len(info.shape) > len(axes) else 0
        if tail == "self_attention.linear_qkv.weight" and rows != size("qkv"):
            raise UnsupportedError(
                f"{name} {list(info.shape)} has {rows} rows of q, k and v, config.json says {size('qkv')} "
                f"({size('heads')} heads, {size('kv_heads')} key/value heads of {size('head_dim')}); with more "
                "tensor-parallel ranks than key/value heads Megatron repeats k and v, which is not handled"
            )


def megatron_rules(
    layout: MegatronLayout, model: Model, experts: str, *, keep_base_towers: bool = False
) -> tuple[Rule, ...]:
    """The rules that make every tensor of the model's family from a checkpoint of this layout.

    experts: form of the target's experts ("per-expert", "hub", "v5"; "none" for a dense model). Towers that the
    checkpoint lacks, and those that no conversion makes, are copied from the base; keep_base_towers: also those that
    the checkpoint has.
    """
    family = model.family
    text = TEXT if experts == "none" else TEXT + EXPERT_FORMS[experts]
    rules = list(prefixed(text, source=layout.prefix, target=family.text))
    rules += prefixed(HEAD, source=layout.prefix, target=family.head)
    targets = [prefix for prefix, _ in family.parts]
    visual = next((prefix for prefix in targets if prefix.endswith("visual.")), None)
    audio = next((prefix for prefix in targets if prefix.endswith("audio_tower.")), None)
    for target, kind, source in (
        (visual, layout.vision, layout.vision_prefix),
        (audio, layout.audio, layout.audio_prefix),
    ):
        if target is None:
            continue
        if kind == "none":
            rules.append(Copy(target + "{name}", "the checkpoint does not hold this tower"))
        elif keep_base_towers:
            rules.append(Drop(source + "{name}", "the tower of the base is kept, as asked for"))
            rules.append(Copy(target + "{name}", "the tower of the base is kept, as asked for"))
        elif kind == "hub names":
            rules.append(rename(source + "{name}", target + "{name}"))
        else:
            mergers = MERGERS["omni" if audio else "vl"]
            rules += prefixed(BLOCKS + mergers, source=source, target=target)
    rules += [Copy(prefix + "{name}", "no conversion makes this part") for prefix in family.rest]
    return tuple(rules)
