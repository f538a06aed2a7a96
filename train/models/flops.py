"""Floating-point operations of a micro-batch, towers included, for utilisation figures.

Counted are the products of matrices (2 operations for each multiplication with its addition): linear layers and
convolutions, the experts that a token chooses, the head on rows with a label, and attention over the pairs of rows that
see each other: the lower triangle of each document, whole temporal grids, whole audio windows. Norms, activations,
embeddings and the stretching of position embeddings are left out, as is what padding costs.

The backward pass has, for each product, one for the gradient of the weight if it is trained and one for the gradient
of the input if anything before it is; for attention twice the forward. Checkpointing runs the blocks once more.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from schemas.geometry import MEL_WINDOW, TOKENS_PER_WINDOW
from train.models.audio import AudioTower, halved, tokens_of
from train.models.foundation import FoundationModel
from train.models.hub_model import HubModel
from train.models.inputs import Grid
from train.models.moe import SparseMLP
from train.models.rope import head_dim_of
from train.models.spec import fsdp_blocks, spec_of
from train.models.vision import VisionTower

VISION, AUDIO, TEXT, HEAD = range(4)  # in the order of the forward pass; the first two side by side
BEFORE, AFTER = -1, 1 << 30  # the blocks
# where a part stands inside a block, or before and after the blocks; attention itself stands at ATTENTION
RANKS: dict[str, int] = {
    **dict.fromkeys(("norm1", "input_layernorm", "self_attn_layer_norm", "ln_q", "ln_post", "norm", "conv2d1"), 0),
    **dict.fromkeys(("qkv", "q_proj", "k_proj", "v_proj", "conv2d2", "proj1"), 1),
    **dict.fromkeys(("q_norm", "k_norm", "conv2d3", "proj2"), 2),
    **dict.fromkeys(("proj", "o_proj", "out_proj", "conv_out"), 4),
    "pos_embed": 5,
    **dict.fromkeys(("norm2", "post_attention_layernorm", "final_layer_norm"), 5),
    **dict.fromkeys(("linear_fc1", "fc1", "gate_proj", "up_proj", "gate", "gate_up_proj", "0"), 6),
    **dict.fromkeys(("linear_fc2", "fc2", "down_proj", "2"), 7),
}
ATTENTION = 3
Place = tuple[int, int, int]  # part of the model, block, rank


@dataclass(frozen=True)
class MicroBatch:
    """What is computed on. documents: rows of each sample, without the pad tail; grids: (t, h, w) in patches of each
    picture or clip; mel_lengths: log-mel frames of each sound; labels: rows that the head is applied to, None = all."""

    documents: Sequence[int]
    grids: Sequence[Grid] = ()
    mel_lengths: Sequence[int] = ()
    labels: int | None = None


@dataclass(frozen=True)
class Flops:
    """forward: by part (vision, audio, text, head), in floating-point operations; backward, recompute: of all."""

    forward: Mapping[str, float]
    backward: float
    recompute: float

    @property
    def model(self) -> float:
        """What the mathematics of a training step needs: the numerator of MFU."""
        return sum(self.forward.values()) + self.backward

    @property
    def hardware(self) -> float:
        """With what checkpointing computes twice."""
        return self.model + self.recompute


@dataclass(frozen=True)
class Product:
    """One product. units: what it is counted by (a key of `_units`); per_unit: operations; parameter: its weight, None
    for attention; rerun: it lies in a block, which checkpointing runs again."""

    place: Place
    units: str
    per_unit: int
    parameter: str | None = None
    rerun: bool = False


class ModelFlops:
    """Counts the operations of one model. Made before it is sharded or wrapped; requires_grad is read then."""

    def __init__(self, model: FoundationModel | HubModel, adapted: Collection[str] = ()) -> None:
        """adapted: frozen weights with an adapter, whose gradients flow though theirs are not made; the adapters' own
        operations are left out."""
        self._prefixes = _prefixes(model)
        beside = model.frozen_audio if isinstance(model, FoundationModel) else None
        self.products = _products(model, self._prefixes) + ([] if beside is None else _beside(beside.tower))
        trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
        self._trained = trained
        self._learning = sorted({self._place(name) for name in trained | set(adapted)})
        self._shares = [
            self._backward_share(product) for product in self.products
        ]  # slow, and the same for every batch
        towers = [*model.modules(), *([] if beside is None else [beside.tower])]
        self._audio = next((module for module in towers if isinstance(module, AudioTower)), None)
        self._merge = next((module.merge_size for module in model.modules() if isinstance(module, VisionTower)), 1)

    def count(self, batch: MicroBatch, *, checkpointing: bool = False) -> Flops:
        """Of one micro-batch forward and backward."""
        units = self.units(batch)
        forward = dict.fromkeys(("vision", "audio", "text", "head"), 0.0)
        backward = recompute = 0.0
        for product, share in zip(self.products, self._shares, strict=True):
            operations = float(units[product.units] * product.per_unit)
            forward[tuple(forward)[product.place[0]]] += operations
            backward += operations * share
            recompute += operations * (checkpointing and product.rerun)
        return Flops(forward, backward, recompute)

    def units(self, batch: MicroBatch) -> dict[str, int]:
        """How often each kind of product is computed: rows, or pairs of rows for attention."""
        patches = sum(t * h * w for t, h, w in batch.grids)
        seconds = sum(-(-length // MEL_WINDOW) for length in batch.mel_lengths)
        windows = [w for length in batch.mel_lengths for w in self._windows(tokens_of(length))]
        return {
            "rows": sum(batch.documents),
            "labels": sum(batch.documents) if batch.labels is None else batch.labels,
            "pairs": sum(length * (length + 1) // 2 for length in batch.documents),
            "patches": patches,
            "merged": patches // self._merge**2,
            "patch_pairs": sum(t * (h * w) ** 2 for t, h, w in batch.grids),
            "seconds": seconds,
            "frames": seconds * TOKENS_PER_WINDOW,
            "audio": sum(windows),
            "audio_pairs": sum(window**2 for window in windows),
        }

    def _windows(self, rows: int) -> list[int]:
        size = rows if self._audio is None else self._audio.window_tokens
        return [min(size, rows - start) for start in range(0, rows, size)]

    def _place(self, name: str) -> Place:
        return _place(name, self._prefixes)

    def _backward_share(self, product: Product) -> int:
        """Products of the backward pass for one of the forward."""
        flows = any(self._before(place, product.place) for place in self._learning)
        if product.parameter is None:
            return 2 * flows
        return flows + (product.parameter in self._trained)

    @staticmethod
    def _before(place: Place, other: Place) -> bool:
        """Whether what a place makes goes into another; the towers do not see each other."""
        return place < other and (place[0] == other[0] or other[0] >= TEXT)


def _prefixes(model: FoundationModel | HubModel) -> dict[int, str]:
    """Part of the model -> what its parameters begin with."""
    if isinstance(model, HubModel):
        return {TEXT: ""}
    names = spec_of(model).names
    return {part: p for part, p in ((VISION, names.visual), (AUDIO, names.audio), (TEXT, names.text)) if p is not None}


def _place(name: str, prefixes: Mapping[int, str]) -> Place:
    if name == "lm_head.weight":
        return HEAD, 0, 0
    part = next(part for part in (VISION, AUDIO, TEXT) if part in prefixes and name.startswith(prefixes[part]))
    inner = name.removeprefix(prefixes[part])
    pieces = inner.split(".")
    rank = next((RANKS[piece] for piece in reversed(pieces) if piece in RANKS), 0)
    block = re.search(r"(?:^|\.)(?:blocks|layers|h)\.(\d+)\.", inner)
    if block:
        return part, int(block[1]), rank
    before = pieces[0] in ("patch_embed", "pos_embed", "conv2d1", "conv2d2", "conv2d3", "conv_out")
    return part, BEFORE if before or "embed" in inner else AFTER, rank


def _products(model: FoundationModel | HubModel, prefixes: Mapping[int, str]) -> list[Product]:
    """Every product of the forward pass, from the shapes of the parameters."""
    found: list[Product] = []
    top_k = {f"{path}.experts": m.gate.top_k for path, m in model.named_modules() if isinstance(m, SparseMLP)}
    for name, parameter in model.named_parameters():
        place = _place(name, prefixes)
        path, _, leaf = name.rpartition(".")
        if parameter.ndim < 2 or "embed_tokens" in name or "pos_embed" in name or leaf == "bias":
            continue
        if isinstance(model, HubModel) and not isinstance(model.get_submodule(path), nn.Linear):
            continue
        per_unit = 2 * parameter.numel()
        if path in top_k:
            per_unit = per_unit * top_k[path] // parameter.shape[0]
        units = _units_of(place, name.removeprefix(prefixes.get(place[0], "")))
        if place[0] == AUDIO and parameter.ndim == 4:
            per_unit *= _positions(model.config.audio_config.num_mel_bins, path.rpartition(".")[2])
        found.append(Product(place, units, per_unit, name, rerun=_is_block(place)))
    head = model.head_weight
    if not any(product.parameter == "lm_head.weight" for product in found):
        name = next(name for name, parameter in model.named_parameters() if parameter is head)
        found.append(Product((HEAD, 0, 0), "labels", 2 * head.numel(), name))
    return found + _attention(model, prefixes)


def _beside(tower: nn.Module) -> list[Product]:
    """The forward pass of a frozen audio tower that is no part of the model."""
    assert isinstance(tower, AudioTower)
    prefixes = {AUDIO: "audio_tower."}
    found = []
    for name, parameter in tower.named_parameters():
        path, _, leaf = name.rpartition(".")
        if parameter.ndim < 2 or leaf == "bias":
            continue
        place = _place(prefixes[AUDIO] + name, prefixes)
        places = _positions(tower.num_mel, path) if parameter.ndim == 4 else 1
        found.append(Product(place, _units_of(place, name), 2 * parameter.numel() * places, prefixes[AUDIO] + name))
    width = tower.proj1.in_features
    return found + [Product((AUDIO, block, ATTENTION), "audio_pairs", 4 * width) for block in range(len(tower.layers))]


def _units_of(place: Place, inner: str) -> str:
    part, block, _ = place
    if part == HEAD:
        return "labels"
    if part == TEXT:
        return "rows"
    if part == VISION:
        return "merged" if block == AFTER else "patches"
    if block == BEFORE:
        return "frames" if inner.startswith("conv_out") else "seconds"
    return "audio"


def _is_block(place: Place) -> bool:
    return place[1] not in (BEFORE, AFTER) and place[0] != HEAD


def _positions(num_mel: int, convolution: str) -> int:
    """Places that one of the convolutions conv2d1, conv2d2, conv2d3 computes for one second."""
    bins, frames = num_mel, MEL_WINDOW
    for _ in range(int(convolution[-1])):
        bins, frames = halved(bins), halved(frames)
    return bins * frames


def _attention(model: FoundationModel | HubModel, prefixes: Mapping[int, str]) -> list[Product]:
    """Scores and sums of values of every block: 4 operations for each pair and each dimension of all heads."""
    config = model.config
    text = config.get_text_config()
    found = []
    for path, _ in fsdp_blocks(model):
        part, block, _ = _place(f"{path}.norm1", prefixes)
        if part == TEXT:
            width, units = text.num_attention_heads * head_dim_of(text), "pairs"
        elif part == VISION:
            width, units = config.vision_config.hidden_size, "patch_pairs"
        else:
            width, units = config.audio_config.d_model, "audio_pairs"
        found.append(Product((part, block, ATTENTION), units, 4 * width, rerun=True))
    return found
