"""adapter_config.json of a PEFT LoRA adapter: what a merge needs of it, and everything that it does not implement.

A merge is the plain sum of the base's weights and the low-rank products. Every key that could make it something else
is known here with the values under which it does not; a key that nobody knows is refused once it says anything.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from convert.small_files import read_object
from schemas.errors import ConfigError, UnsupportedError

CONFIG_FILE = "adapter_config.json"
MAX_RANK = 1 << 20
MAX_ALPHA = 1e30

# keys that do not change what the saved factors mean: which modules were chosen (their names tell), training, origin
_FREE = frozenset(
    (
        *("peft_type", "r", "lora_alpha", "rank_pattern", "alpha_pattern", "use_rslora", "init_lora_weights"),
        *("task_type", "auto_mapping", "base_model_name_or_path", "revision", "inference_mode", "peft_version"),
        *("target_modules", "exclude_modules", "modules_to_save", "layers_to_transform", "layers_pattern"),
        *("target_parameters", "lora_dropout", "megatron_core", "qalora_group_size", "eva_config"),
        "omniloom_lora",  # how the trainer divides fused pairs; their product is the same
    )
)
# key -> why a merge of an adapter that has it is not the plain sum
_FEATURES = {
    "use_dora": "the magnitude of every row is a weight of its own",
    "use_qalora": "inputs are pooled in groups",
    "use_bdlora": "the factors are block-diagonal",
    "lora_bias": "the factors have biases",
    "fan_in_fan_out": "weights are stored the other way round",
    "layer_replication": "layers of the base are used more than once",
    "trainable_token_indices": "single rows of the embedding are replaced",
    "alora_invocation_tokens": "the adapter only acts behind its invocation tokens",
    "ensure_weight_tying": "tied weights are trained together",
    "megatron_config": "modules are Megatron's",
    "arrow_config": "adapters are chosen token by token",
    "loftq_config": "the weights of the base were replaced by quantised ones",
    "corda_config": "the weights of the base were changed before the training",
    "lora_ga_config": "the weights of the base were changed before the training",
}
# under these the base was trained on as it is; pissa, olora, corda, lora_ga and loftq change it first, so that the base
# at hand is not the one that the adapter was trained on
_PLAIN_STARTS = ("gaussian", "eva", "orthogonal", "mica")
ENDLESS = re.compile(r"[+*}]\??\)+[+*{]")  # (a+)+ and the like, which can search for ever


def read_adapter_config(folder: Path) -> dict[str, Any]:
    """The settings of an adapter. ConfigError for missing values and wrong types, UnsupportedError for adapters whose
    merge is more than a sum of low-rank products; both name the key."""
    path = folder / CONFIG_FILE
    try:
        config = read_object(path)
    except FileNotFoundError as error:
        raise ConfigError(f"{path}: no such file; {folder} is no PEFT adapter") from error
    for key in ("peft_type", "r", "lora_alpha"):
        if config.get(key) is None:
            raise ConfigError(f"{path}: {key}: missing")
    if config["peft_type"] != "LORA":
        raise UnsupportedError(f"{path}: peft_type is {_short(config['peft_type'])}; only LORA can be merged")
    _check_numbers(path, config)
    _check_features(path, config)
    return config


def _check_numbers(path: Path, config: Mapping[str, Any]) -> None:
    _check_rank(path, "r", config["r"])
    _check_alpha(path, "lora_alpha", config["lora_alpha"])
    for key, check in (("rank_pattern", _check_rank), ("alpha_pattern", _check_alpha)):
        patterns = config.get(key)
        if patterns is not None and not isinstance(patterns, dict):
            raise ConfigError(f"{path}: {key}: is {_short(patterns)}; it must be an object")
        for pattern, value in (patterns or {}).items():
            check(path, f"{key}.{pattern}", value)
            try:
                re.compile(pattern)
            except (re.error, RecursionError, OverflowError) as error:
                raise ConfigError(f"{path}: {key}: {_short(pattern)} is no regular expression: {error}") from error
            if ENDLESS.search(pattern):
                raise ConfigError(f"{path}: {key}: {_short(pattern)} repeats a repetition; write it another way")
    if not isinstance(config.get("use_rslora"), bool | None):
        raise ConfigError(f"{path}: use_rslora: is {_short(config['use_rslora'])}; it must be true or false")


def _check_rank(path: Path, key: str, value: Any) -> None:
    if type(value) is not int or not 0 < value <= MAX_RANK:
        raise ConfigError(f"{path}: {key}: is {_short(value)}; it must be a whole number from 1")


def _check_alpha(path: Path, key: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < MAX_ALPHA:
        raise ConfigError(f"{path}: {key}: is {_short(value)}; it must be a number")


def _check_features(path: Path, config: Mapping[str, Any]) -> None:
    if config.get("bias") not in ("none", None):
        raise UnsupportedError(f"{path}: bias is {_short(config['bias'])}: biases were trained, which is not handled")
    start = config.get("init_lora_weights")
    if not (start is None or isinstance(start, bool) or (isinstance(start, str) and start.lower() in _PLAIN_STARTS)):
        raise UnsupportedError(
            f"{path}: init_lora_weights is {_short(start)}, which changes the base's weights before the training, so "
            "the adapter does not belong to the base as it is; save it with path_initial_model_for_weight_conversion"
        )
    for key, value in config.items():
        if key in _FREE or key == "bias" or value is None or value is False or value in ({}, [], ""):
            continue
        if key in _FEATURES:
            raise UnsupportedError(f"{path}: {key} is {_short(value)}: {_FEATURES[key]}; only plain LoRA can be merged")
        raise UnsupportedError(
            f"{path}: {_short(key)} is {_short(value)}; the key is not known here, so the merge could be wrong"
        )


def _short(value: Any) -> str:
    """A value for a message, on one line."""
    text = ascii(value) if not isinstance(value, str) or not value.isprintable() else repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
