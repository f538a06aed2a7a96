"""The arguments of a Megatron training run, as common.pt has them, held against the config.json of the base.

The weights of two models can have the same names and shapes and mean different functions. Only arguments that are there
are looked at, and only those that decide about the function: sizes that every shape shows are here for the message.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from convert.geometry import Geometry, Section
from convert.rope import axes_of, rope_of, theta_of
from schemas.errors import UnsupportedError

_NO = (False, None)
_ONE = (1, 1.0, None)
_ZERO = (0, 0.0, None)
# argument -> values under which the weights mean what the hub model takes them for
_PLAIN: tuple[tuple[str, tuple[Any, ...], str], ...] = (
    ("apply_layernorm_1p", _NO, "norm weights are stored as their difference from 1"),
    ("layernorm_zero_centered_gamma", _NO, "norm weights are stored as their difference from 1"),
    ("rotary_interleaved", _NO, "rotary pairs lie side by side"),
    ("rotary_percent", _ONE, "only a part of each head is rotated"),
    ("use_rope_scaling", _NO, "rotary frequencies are scaled"),
    ("rotary_scaling_factor", _ONE, "rotary frequencies are scaled"),
    ("rotary_seq_len_interpolation_factor", _ONE, "rotary positions are interpolated"),
    ("no_rope_freq", (None, 0), "some layers have no rotary embedding"),
    ("normalization", ("RMSNorm", None), "norms are not RMSNorm"),
    ("apply_residual_connection_post_layernorm", _NO, "the residual is taken behind the norm"),
    ("swiglu", (True, None), "the MLP is not gated"),
    ("squared_relu", _NO, "the MLP is not gated by SiLU"),
    ("quick_geglu", _NO, "the MLP is not gated by SiLU"),
    ("glu_linear_offset", _ZERO, "a number is added to the MLP's linear half"),
    ("activation_func_clamp_value", (None,), "the MLP's activations are clamped"),
    ("add_bias_linear", _NO, "linear layers have biases"),
    ("add_qkv_bias", _NO, "attention has biases"),
    ("qk_l2_norm", _NO, "q and k are normalised another way"),
    ("attention_output_gate", _NO, "the attention's output is gated"),
    ("softmax_type", ("vanilla", None), "the attention's softmax has a sink"),
    ("window_size", (None, (-1, -1), [-1, -1]), "attention sees a window only"),
    ("multi_latent_attention", _NO, "attention is latent"),
    ("experimental_attention_variant", (None,), "attention is another one"),
)
_PLAIN_EXPERTS: tuple[tuple[str, tuple[Any, ...], str], ...] = (
    ("moe_router_score_function", ("softmax", None), "experts are scored another way"),
    ("moe_router_topk_scaling_factor", _ONE, "the experts' weights are scaled"),
    ("moe_router_group_topk", (None,), "experts are chosen by groups"),
    ("moe_router_topk_limited_devices", (None,), "experts are chosen by groups"),
    ("moe_router_enable_expert_bias", _NO, "the choice of experts has a bias"),
    ("moe_apply_probs_on_input", _NO, "the experts' inputs are scaled instead of their outputs"),
)
# argument -> size of the geometry, where the model has it
_SIZES = (
    *(("num_attention_heads", "heads"), ("num_query_groups", "kv_heads"), ("kv_channels", "head_dim")),
    *(("hidden_size", "hidden"), ("moe_ffn_hidden_size", "moe_intermediate"), ("ffn_hidden_size", "intermediate")),
)
_POSITIONS = ("rope", "mrope", None)


def check_arguments(where: str, arguments: Mapping[str, Any], geometry: Geometry, text: Section) -> None:
    """UnsupportedError with the argument, its value and that of the base, for the first that contradicts it.

    where: the file of the arguments. text: the text section of the base's config.json.
    """
    experts = bool(geometry.ranges["moe_layer"])
    for name, allowed, why in (*_PLAIN, *(_PLAIN_EXPERTS if experts else ())):
        value = arguments.get(name)
        if not any(type(value) is type(each) and value == each for each in allowed):
            raise UnsupportedError(f"{where}: {name} is {_said(value)}: {why}, which the hub model does not expect")
    pairs = [*_counts(arguments, geometry), *_settings(arguments, text, experts)]
    for name, value, wanted in pairs:
        if value is not None and wanted is not None and value != wanted:
            raise UnsupportedError(f"{where}: {name} is {_said(value)}, config.json of the base says {_said(wanted)}")
    rows = arguments.get("vocab_size")
    if type(rows) is int and rows > geometry.size("vocab"):
        raise UnsupportedError(
            f"{where}: vocab_size is {rows}, config.json of the base says {geometry.size('vocab')}: rows that were "
            "trained would be cut off; give a base with the larger vocabulary"
        )


def _counts(arguments: Mapping[str, Any], geometry: Geometry) -> Iterator[tuple[str, Any, Any]]:
    """(argument, its value, the base's), whole numbers only."""
    for name, size in _SIZES:
        value = _stated_size(arguments, name)
        if type(value) is int and size in geometry.sizes:
            yield name, value, geometry.size(size)
    for name, index in (("num_layers", "layer"), ("num_experts", "expert"), ("num_moe_experts", "expert")):
        value = arguments.get(name)
        if type(value) is int:
            yield name, value, len(geometry.ranges[index])


def _settings(arguments: Mapping[str, Any], text: Section, experts: bool) -> Iterator[tuple[str, Any, Any]]:
    """(argument, its value, the base's), for what no shape shows; None where the base does not say it."""
    rope = rope_of(text)
    yield "rotary_base", arguments.get("rotary_base"), theta_of(text)
    for name in ("norm_epsilon", "layernorm_epsilon"):
        yield name, arguments.get(name), text.values.get("rms_norm_eps")
    kind = rope.get("rope_type", "default")
    position = arguments.get("position_embedding_type")
    if kind != "default" or position not in _POSITIONS:
        yield "position_embedding_type", position, f"rotary embedding of type {kind}"
    section = arguments.get("mrope_section")
    yield "mrope_section", list(section) if isinstance(section, list | tuple) else None, axes_of(text) or None
    if not experts:
        return
    yield "moe_router_topk", arguments.get("moe_router_topk"), text.values.get("num_experts_per_tok")
    softmax_first, normalised = arguments.get("moe_router_pre_softmax"), text.values.get("norm_topk_prob")
    if isinstance(softmax_first, bool) and isinstance(normalised, bool) and softmax_first == normalised:
        yield "moe_router_pre_softmax", softmax_first, f"norm_topk_prob {normalised}"


def _stated_size(arguments: Mapping[str, Any], name: str) -> Any:
    """An argument; without grouped queries every head has its own key and value, whatever the number of groups is.
    Where it is not said, 1 may be the default of that number: then the shapes must tell."""
    value = arguments.get(name)
    if name != "num_query_groups":
        return value
    if "group_query_attention" not in arguments:
        return None if value == 1 else value
    return value if arguments["group_query_attention"] else arguments.get("num_attention_heads")


def _said(value: Any) -> str:
    known = isinstance(value, str | int | float | tuple | list) or value is None
    return ascii(value)[:60] if known else type(value).__name__
