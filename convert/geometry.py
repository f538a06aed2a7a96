"""The sizes of a model by name, from its config.json: what "hidden" or `{expert}` in a rule stands for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from schemas.errors import ConfigError, UnsupportedError

MAX_SIZE = 1 << 40
MAX_COUNT = 100_000
MAX_NUMBER = 1e300


@dataclass(frozen=True)
class Geometry:
    """sizes: name -> number of elements; ranges: placeholder -> the indices it runs over, in order."""

    sizes: Mapping[str, int]
    ranges: Mapping[str, tuple[int, ...]]

    def size(self, name: str | int) -> int:
        """A size by name; a number is itself. KeyError when the model has no such size."""
        return name if isinstance(name, int) else self.sizes[name]

    def indices(self, placeholder: str) -> tuple[int, ...]:
        return self.ranges[placeholder]

    def with_sizes(self, **sizes: int) -> Geometry:
        """The same with some sizes set, such as those that the tensors themselves tell."""
        return Geometry({**self.sizes, **sizes}, self.ranges)

    def __or__(self, other: Geometry) -> Geometry:
        return Geometry({**self.sizes, **other.sizes}, {**self.ranges, **other.ranges})


@dataclass(frozen=True)
class Section:
    """One object of a config.json with its place, so that a missing key is named in full."""

    values: Mapping[str, Any]
    where: str

    def need(self, key: str) -> Any:
        """The value of a key that has no default. ConfigError when it is missing or null."""
        value = self.values.get(key)
        if value is None:
            raise ConfigError(f"{self.where}.{key}: missing; the conversion needs it and there is no safe default")
        return value

    def whole_number(self, key: str) -> int:
        value = self.need(key)
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise ConfigError(f"{self.where}.{key}: is {ascii(value)[:60]}; it must be a whole number")
        return value

    def size(self, key: str) -> int:
        """A whole number that measures something: neither 0 nor beyond what a tensor can be."""
        value = self.whole_number(key)
        if not 0 < value <= MAX_SIZE:
            raise ConfigError(f"{self.where}.{key}: is {value}; it must lie between 1 and {MAX_SIZE}")
        return value

    def count(self, key: str) -> int:
        """A number of layers, blocks or experts."""
        value = self.whole_number(key)
        if value > MAX_COUNT:
            raise ConfigError(f"{self.where}.{key}: is {value}; more than {MAX_COUNT} are not handled")
        return value

    def number(self, key: str) -> float:
        """A finite number, whole or not."""
        value = self.need(key)
        if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < MAX_NUMBER:
            raise ConfigError(f"{self.where}.{key}: is {ascii(value)[:60]}; it must be a number")
        return value

    def whole_numbers(self, key: str) -> list[int]:
        value = self.need(key)
        if not isinstance(value, list) or not all(type(item) is int and item >= 0 for item in value):
            raise ConfigError(f"{self.where}.{key}: is {str(value)[:80]}; it must be a list of whole numbers")
        return value

    def flag(self, key: str) -> bool | None:
        """True or False, None when the key is missing or null."""
        value = self.values.get(key)
        if value is not None and not isinstance(value, bool):
            raise ConfigError(f"{self.where}.{key}: is {ascii(value)[:60]}; it must be true or false")
        return value

    def section(self, key: str) -> Section:
        value = self.need(key)
        if not isinstance(value, dict):
            raise ConfigError(f"{self.where}.{key}: is {type(value).__name__}; it must be an object")
        return Section(value, f"{self.where}.{key}")

    def optional_section(self, key: str) -> Mapping[str, Any]:
        """The values of an object, {} when it is missing or null."""
        return {} if self.values.get(key) is None else self.section(key).values


def text_geometry(config: Section, head_dim: int | None = None, *, moe: bool) -> Geometry:
    """Of a Qwen3 text model, dense or MoE. head_dim: as the weights tell it, for a config.json that leaves it out.
    moe: a family with experts, which must state how many there are; in a dense family such a number means nothing."""
    if config.flag("attention_bias"):
        raise UnsupportedError(f"{config.where}.attention_bias: true; attention with biases is not handled")
    number = config.size
    if head_dim is None or config.values.get("head_dim") is not None:
        head_dim = number("head_dim")
    heads, kv_heads, hidden = number("num_attention_heads"), number("num_key_value_heads"), number("hidden_size")
    if heads % kv_heads:
        raise ConfigError(
            f"{config.where}.num_key_value_heads: is {kv_heads}, which does not divide num_attention_heads ({heads})"
        )
    sizes = {
        "hidden": hidden,
        "vocab": number("vocab_size"),
        "head_dim": head_dim,
        "heads": heads,
        "kv_heads": kv_heads,
        "query": heads * head_dim,
        "kv": kv_heads * head_dim,
        "qkv": (heads + 2 * kv_heads) * head_dim,
    }
    layers = tuple(range(config.count("num_hidden_layers")))
    sparse = moe_layers(config, len(layers)) if moe else ()
    dense = tuple(sorted(set(layers) - set(sparse)))
    ranges = {"layer": layers, "moe_layer": sparse, "dense_layer": dense, "expert": ()}
    if dense:
        sizes |= {"intermediate": number("intermediate_size"), "dense_gate_up": 2 * number("intermediate_size")}
    if sparse:
        experts, width = expert_count(config), number("moe_intermediate_size")
        sizes |= {"experts": experts, "moe_intermediate": width, "gate_up": 2 * width}
        ranges["expert"] = tuple(range(experts))
    return Geometry(sizes, ranges)


def expert_count(config: Section) -> int:
    """Experts per layer, 0 for a dense model; transformers 5 writes some configurations under the second name."""
    other = config.values.get("num_experts") is None and config.values.get("num_local_experts") is not None
    return config.count("num_local_experts" if other else "num_experts")


def moe_layers(config: Section, layers: int) -> tuple[int, ...]:
    """The layers that have experts, as transformers decides it; none for a model with no expert."""
    if not expert_count(config):
        return ()
    dense, step = set(config.whole_numbers("mlp_only_layers")), config.whole_number("decoder_sparse_step")
    return tuple(i for i in range(layers) if i not in dense and step > 0 and (i + 1) % step == 0)


def vision_geometry(config: Section, positions: int | None = None) -> Geometry:
    """Of a Qwen3-VL or Qwen3-Omni vision tower. positions: rows of pos_embed as the weights tell them."""
    number = config.size
    hidden, heads, merge = number("hidden_size"), number("num_heads"), number("spatial_merge_size")
    if hidden % heads:
        raise ConfigError(f"{config.where}.num_heads: is {heads}, which does not divide hidden_size ({hidden})")
    sizes = {
        "vision_hidden": hidden,
        "vision_heads": heads,
        "vision_head_dim": hidden // heads,
        "vision_qkv": 3 * hidden,
        "vision_intermediate": number("intermediate_size"),
        "vision_merged": hidden * merge**2,
        "vision_out": number("out_hidden_size"),
        "in_channels": number("in_channels"),
        "patch": number("patch_size"),
        "temporal_patch": number("temporal_patch_size"),
        "positions": number("num_position_embeddings") if positions is None else positions,
    }
    mergers = tuple(range(len(config.whole_numbers("deepstack_visual_indexes"))))
    return Geometry(sizes, {"block": tuple(range(config.count("depth"))), "merger": mergers})


def audio_geometry(config: Section) -> Geometry:
    """Of the Qwen3-Omni audio tower."""
    number = config.size
    mel = number("num_mel_bins")
    for _ in range(3):  # three convolutions of stride 2
        mel = (mel + 1) // 2
    sizes = {
        "audio_hidden": number("d_model"),
        "audio_intermediate": number("encoder_ffn_dim"),
        "audio_channels": number("downsample_hidden_size"),
        "audio_flat": number("downsample_hidden_size") * mel,
        "audio_out": number("output_dim"),
    }
    return Geometry(sizes, {"audio_layer": tuple(range(config.count("encoder_layers")))})
