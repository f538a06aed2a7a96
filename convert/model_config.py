"""config.json <-> config.json: the configuration of a target from that of its source, and the files to carry along.

Nothing is defaulted: a value that the target needs and the source does not state is an error with its key, as the
defaults of the libraries are not those of the published models (position_id_per_seconds, audio token ids). The two
numbers that the weights themselves tell (head_dim, rows of pos_embed) come from the weights.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from convert.agreement import MEDIA_IDS, VISION, VISION_THETA
from convert.families import Model
from convert.geometry import Section, expert_count
from convert.rope import axes_of, default_type, need_rope, need_theta
from convert.small_files import is_carried, json_bytes, parse_json, read_carried, read_object
from convert.tensors import dtype_name
from schemas.errors import ConfigError, UnsupportedError

TEXT_NEEDS = (
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "vocab_size",
    "hidden_act",
    "max_position_embeddings",
    "rms_norm_eps",
    "moe_intermediate_size",
    "num_experts_per_tok",
    "norm_topk_prob",
    "decoder_sparse_step",
    "mlp_only_layers",
)
# what a text section of the source holds and a target's must not: rebuilt here, meant for other classes, or noise that
# transformers writes into nested sections
TEXT_DROPS = frozenset(
    (
        *("model_type", "architectures", "_name_or_path", "transformers_version", "dtype", "torch_dtype"),
        *("tie_word_embeddings", "num_local_experts", "rope_theta", "rope_scaling", "rope_parameters"),
        *("shared_expert_intermediate_size", "use_qk_norm", "sliding_window", "use_sliding_window"),
        *("max_window_layers", "layer_types", "id2label", "label2id", "is_encoder_decoder", "problem_type"),
        *("return_dict", "output_attentions", "output_hidden_states", "chunk_size_feed_forward"),
    )
)
SIDEBAND = (
    "position_id_per_seconds",
    "seconds_per_chunk",
    "audio_token_id",
    "audio_start_token_id",
    "audio_end_token_id",
    "user_token_id",
)
TEXT_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "vocab.json",
    "merges.txt",
    "special_tokens_map.json",
    "added_tokens.json",
    "generation_config.json",
    "chat_template.json",
    "chat_template.jinja",
)
PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")


def omni_to_vl(thinker: Model, folder: Path, dtype: torch.dtype) -> dict[str, Any]:
    """The flat Qwen3-VL-MoE configuration of a Qwen3-Omni thinker; what it has no place for goes to `omni_sideband`.

    folder: the source's directory; dtype: of the weights that are written. ConfigError for missing values.
    """
    config, inner = _thinker_sections(thinker, folder)
    text = inner.section("text_config")
    vision = inner.section("vision_config")
    size = thinker.geometry.size
    vision_config = {key: vision.need(key) for key in VISION}
    rope = vision.optional_section("rope_parameters")
    if rope.get("rope_theta", VISION_THETA) != VISION_THETA:
        vision_config["rope_parameters"] = rope
    return {
        "architectures": ["Qwen3VLMoeForConditionalGeneration"],
        "model_type": "qwen3_vl_moe",
        "dtype": dtype_name(dtype),
        "tie_word_embeddings": thinker.tied,
        **{key: inner.whole_number(key) for key in MEDIA_IDS},
        **_special_ids(config, folder),
        "text_config": {
            **_text_values(text, thinker),
            "model_type": "qwen3_vl_moe_text",
            "tie_word_embeddings": thinker.tied,
            "dtype": dtype_name(dtype),
            **_mrope(text),
        },
        "vision_config": {
            **vision_config,
            "model_type": "qwen3_vl_moe",
            "num_position_embeddings": size("positions"),
        },
        "omni_sideband": _sideband(config, inner, folder),
    }


def omni_to_text(thinker: Model, folder: Path, dtype: torch.dtype) -> dict[str, Any]:
    """The Qwen3-MoE configuration of a thinker's text model. On text all three axes of its rotary positions are equal,
    which is plain rotary embedding, so the keys of the three axes go."""
    config, inner = _thinker_sections(thinker, folder)
    text = inner.section("text_config")
    default_type(text)
    theta = need_theta(text)
    return {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "dtype": dtype_name(dtype),
        "tie_word_embeddings": thinker.tied,
        **_text_values(text, thinker),
        **_special_ids(config, folder),
        "rope_theta": theta,
        "rope_scaling": None,
        "rope_parameters": {"rope_type": "default", "rope_theta": theta},
    }


def carried_files(folder: Path, names: tuple[str, ...] | None = None) -> dict[str, bytes]:
    """Tokenizer, processor and template files of a directory by name, each if it is there.

    names: those to take; None: all that `small_files.is_carried` knows. A template that stands in chat_template.json
    alone is unpacked to chat_template.jinja as well, the only form that AutoTokenizer reads. ConfigError for a file
    that is too large to be one of these.
    """
    found: dict[str, bytes] = {}
    for path in sorted(folder.iterdir()):
        wanted = path.name in names if names is not None else is_carried(path.name)
        if wanted and path.is_file():
            found[path.name] = read_carried(path)
    if "chat_template.json" in found and "chat_template.jinja" not in found:
        where = folder / "chat_template.json"
        content = parse_json(found["chat_template.json"], where)
        if not isinstance(content, dict) or "chat_template" not in content:
            raise ConfigError(f"{where}: has no chat_template")
        if isinstance(content["chat_template"], str):
            found["chat_template.jinja"] = content["chat_template"].encode(errors="surrogatepass")
    return found


def config_bytes(config: Mapping[str, Any]) -> bytes:
    """config.json as it is written."""
    return json_bytes(config)


def _thinker_sections(thinker: Model, folder: Path) -> tuple[Section, Section]:
    """The whole configuration, and the thinker's part of it (the same for a thinker alone)."""
    config = Section(thinker.config, str(folder / "config.json"))
    return config, config.section("thinker_config") if "thinker_config" in thinker.config else config


def _text_values(text: Section, model: Model) -> dict[str, Any]:
    """The section without what does not belong in a target, with the numbers that must be explicit."""
    for key in TEXT_NEEDS:
        text.need(key)
    for key in ("max_position_embeddings", "num_experts_per_tok"):
        text.whole_number(key)
    if text.values.get("use_sliding_window"):
        raise UnsupportedError(f"{text.where}.use_sliding_window: true; sliding windows are not handled")
    values = {key: value for key, value in text.values.items() if key not in TEXT_DROPS and value is not None}
    return {**values, "head_dim": model.geometry.size("head_dim"), "num_experts": expert_count(text)}


def _mrope(text: Section) -> dict[str, Any]:
    """Rotary keys of a VL text section: rope_scaling and rope_theta for transformers 4, rope_parameters for 5."""
    rope = need_rope(text)
    axes = axes_of(text)
    if not axes:
        raise ConfigError(f"{text.where}.rope_scaling.mrope_section: missing; the conversion needs it")
    if rope.get("mrope_interleaved", True) is False:
        raise UnsupportedError(f"{text.where}: rotary axes that are not interleaved have no counterpart in Qwen3-VL")
    scaling = {
        "rope_type": default_type(text),
        "mrope_section": axes,
        "mrope_interleaved": True,
    }
    theta = need_theta(text)
    return {"rope_theta": theta, "rope_scaling": scaling, "rope_parameters": {**scaling, "rope_theta": theta}}


def _special_ids(config: Section, folder: Path) -> dict[str, Any]:
    """bos, eos and pad of the top level, else of generation_config.json; each only if it is stated."""
    generation: dict[str, Any] = {}
    path = folder / "generation_config.json"
    if path.is_file():
        generation = read_object(path)
    ids = {}
    for key in ("bos_token_id", "eos_token_id", "pad_token_id"):
        value = config.values.get(key, generation.get(key))
        if value is not None:
            ids[key] = value
    return ids


def _sideband(config: Section, inner: Section, folder: Path) -> dict[str, Any]:
    """What the thinker knows and a VL configuration has no key for, with where it came from."""
    values = {key: inner.whole_number(key) if key.endswith("_id") else inner.number(key) for key in SIDEBAND}
    if inner is not config:  # a thinker saved alone does not have the two
        values |= {key: config.whole_number(key) for key in ("im_start_token_id", "im_end_token_id")}
    repository, revision = _origin(folder)
    digest = hashlib.sha256((folder / "config.json").read_bytes()).hexdigest()
    return {
        **values,
        "source_repository": repository,
        "source_revision": revision,
        "source_config_sha256": digest,
    }


def _origin(folder: Path) -> tuple[str, str | None]:
    """(repository, revision) of a snapshot in a hub cache, else the directory's name and None."""
    found = re.search(r"models--([^/]+)--([^/]+)/snapshots/([0-9a-f]+)$", str(folder.absolute()))
    return (f"{found[1]}/{found[2]}", found[3]) if found else (folder.resolve().name, None)
