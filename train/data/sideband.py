"""`omni_sideband`: what a pseudo Qwen3-VL knows of the Qwen3-Omni thinker that it was converted from.

`omniloom convert omni-to-vl` writes it into config.json. With it the trainer lays out tokens as Qwen3-Omni does (one
block per video, no time marks) and counts positions on its clock. Nothing is defaulted: a field that is missing or of
another kind is an error with its name and file, as the defaults of the libraries are not those of the published models.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from convert.families import read_config
from convert.model_config import SIDEBAND
from schemas.chat_tokens import ChatTokens
from schemas.errors import ConfigError, UnsupportedError

KEY = "omni_sideband"
THINKERS = ("qwen3_omni_moe", "qwen3_omni_moe_thinker")
PSEUDO = ("qwen3_vl_moe",)  # families that a thinker is converted to
OPTIONAL_IDS = ("im_start_token_id", "im_end_token_id")  # a thinker that was saved alone does not have them
# of the sideband -> field of ChatTokens
TOKENS = {
    "audio_token_id": "audio",
    "audio_start_token_id": "audio_start",
    "audio_end_token_id": "audio_end",
    "im_start_token_id": "im_start",
    "im_end_token_id": "im_end",
}


@dataclass(frozen=True)
class Sideband:
    """where: file and section, for messages; position_id_per_seconds: positions per second of a clip's clock;
    seconds_per_chunk: of the thinker, not used in training; ids: `..._token_id` -> id."""

    where: str
    position_id_per_seconds: float
    seconds_per_chunk: float
    ids: Mapping[str, int]

    def check_tokens(self, tokens: ChatTokens, path: str | Path) -> None:
        """ConfigError when the tokenizer in `path` has other ids."""
        wrong = [
            f"{key} is {self.ids[key]}, the tokenizer's {field} is {getattr(tokens, field)}"
            for key, field in TOKENS.items()
            if key in self.ids and self.ids[key] != getattr(tokens, field)
        ]
        if wrong:
            raise ConfigError(f"{self.where} and the tokenizer in {path} do not agree: {'; '.join(wrong)}")


def find_sideband(choice: str | bool, folder: Path) -> Sideband | None:
    """What `model.omni_sideband` means for the model of a folder; None: it is trained as what its config.json says.

    choice: "auto" = if config.json has one; True: it must; False: even if it has; else a folder with another
    config.json that has one, or of a Qwen3-Omni that states the same fields. ConfigError: there is none where one is
    wanted, a field is missing or of another kind, or the model is none that can have one.
    """
    config = read_config(folder)
    own = config.get(KEY) is not None
    if choice is False or (choice == "auto" and not own):
        return None
    file = folder / "config.json"
    if config.get("model_type") not in PSEUDO:
        raise ConfigError(
            f"model.omni_sideband: {file} is a {config.get('model_type')}; a {' or '.join(PSEUDO)} is trained in the "
            "layout of Qwen3-Omni by it"
        )
    _check_router(config, file)
    return _read(config, file) if choice in ("auto", True) else _read_other(Path(str(choice)))


def _read(config: Mapping[str, Any], file: Path) -> Sideband:
    if config.get(KEY) is None:
        raise ConfigError(
            f"{file}.{KEY}: missing; `omniloom convert omni-to-vl` writes it. Give model.omni_sideband a folder that "
            "has it (a converted model, or the Qwen3-Omni itself), or false to train as Qwen3-VL"
        )
    return _from_values(config[KEY], f"{file}.{KEY}")


def _read_other(folder: Path) -> Sideband:
    """Of another converted model, or from the configuration of a Qwen3-Omni."""
    folder = folder.parent if folder.suffix == ".json" else folder
    config, file = read_config(folder), folder / "config.json"
    if config.get(KEY) is not None:
        return _read(config, file)
    if config.get("model_type") not in THINKERS:
        raise ConfigError(
            f"model.omni_sideband: {file} has no {KEY} and is a {config.get('model_type')}, no {' or '.join(THINKERS)}"
        )
    inner = config.get("thinker_config", config)
    if not isinstance(inner, dict):
        raise ConfigError(f"{file}.thinker_config: is no object")
    ids = {key: config[key] for key in OPTIONAL_IDS if key in config}
    return _from_values({**inner, **ids}, f"{file}.thinker_config" if inner is not config else str(file))


def _from_values(values: Any, where: str) -> Sideband:
    if not isinstance(values, dict):
        raise ConfigError(f"{where}: is {type(values).__name__}; it must be an object")
    numbers = {key: _number(values, key, where) for key in SIDEBAND}
    ids = {key: int(value) for key, value in numbers.items() if key.endswith("_token_id")}
    ids |= {key: int(_number(values, key, where)) for key in OPTIONAL_IDS if values.get(key) is not None}
    return Sideband(where, float(numbers["position_id_per_seconds"]), float(numbers["seconds_per_chunk"]), ids)


def _number(values: Mapping[str, Any], key: str, where: str) -> int | float:
    """An id, which is whole and may be 0, or a number above 0."""
    value = values.get(key)
    if value is None:
        raise ConfigError(f"{where}.{key}: missing; training needs it and there is no safe default")
    is_id = key.endswith("_token_id")
    right = type(value) is int and value >= 0 if is_id else type(value) in (int, float) and 0 < value < 1e9
    if not right:
        kind = "an id" if is_id else "a number over 0"
        raise ConfigError(f"{where}.{key}: is {ascii(value)[:60]}; it must be {kind}")
    assert isinstance(value, int | float)
    return value


def _check_router(config: Mapping[str, Any], file: Path) -> None:
    """UnsupportedError for a thinker whose router Qwen3-VL-MoE does not compute."""
    text = config.get("text_config")
    if isinstance(text, dict) and text.get("norm_topk_prob") is False:
        raise UnsupportedError(
            f"{file}.text_config.norm_topk_prob: false; a Qwen3-VL-MoE always divides the weights of its experts, so "
            "this thinker would not compute what it does as Qwen3-Omni"
        )
