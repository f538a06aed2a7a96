"""Tokenizer and preprocessor of a training, in the layout that its model takes."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import AutoConfig

from convert.families import read_config
from convert.tables.trainer import STYLES
from schemas.chat_types import ALL_MEDIA, MediaKind
from schemas.errors import ConfigError
from train.config import ModelConfig, OmniConfig
from train.data.processor import POSITIONS_PER_SECOND, ProcessorAssets, load_assets
from train.data.sideband import Sideband, find_sideband
from train.models.spec import SPECS, read_model

log = logging.getLogger("omniloom.train")


def training_assets(config: OmniConfig) -> ProcessorAssets:
    """Read once for all ranks. ConfigError: the processor, the model and `model.omni_sideband` do not go together."""
    folder, layout = config_folder(config.model), config.data.mm_configs
    values = read_config(folder)
    native = config.model.backend == "native"
    sideband = find_sideband(config.model.omni_sideband, folder) if native else None
    media = media_of(values, sound_beside=config.model.audio_tower_path is not None) if native else ()
    if sideband is not None:
        _check_sound(sideband, media, use_audio_in_video=layout.use_audio_in_video)
    assets = load_assets(
        config.processor_folder,
        use_audio_in_video=layout.use_audio_in_video,
        wrap_video=layout.wrap_video,
        system=layout.system,
        media=media,
        sideband=sideband,
        vocab_size=vocab_size_of(folder, trust_remote_code=config.model.trust_remote_code),
    )
    if config.model.audio_tower_path is not None and assets.sound is None:
        raise ConfigError(
            f"model.audio_tower_path: the processor in {assets.path} knows no sound; set data.processor_path to the "
            "folder of a Qwen3-Omni processor"
        )
    if sideband is not None:
        assets.tokens.check_model_config(values, str(folder / "config.json"))
    elif str(values.get("model_type")).startswith("qwen3_vl") and assets.style.form == "qwen3_omni":
        raise ConfigError(
            f"{folder}/config.json is a {values['model_type']} without omni_sideband in use, and the processor in "
            f"{assets.path} is Qwen3-Omni's, whose layout it does not know; set model.omni_sideband to a folder that "
            "has one, or data.processor_path to the folder of a Qwen3-VL processor"
        )
    return assets


def config_folder(model: ModelConfig) -> Path:
    """Folder of the model's config.json."""
    place = Path(model.config_path or model.model_path or "")
    return place.parent if place.name.endswith(".json") else place


def vocab_size_of(folder: Path, *, trust_remote_code: bool = False) -> int:
    """Rows of the embedding, of the model of a directory."""
    if read_config(folder).get("model_type") in SPECS:
        config = read_model(folder).config
    else:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code, local_files_only=True)
    return int(config.get_text_config().vocab_size)


def media_of(values: Mapping[str, Any], *, sound_beside: bool) -> tuple[MediaKind, ...]:
    """What the model of a config.json has towers for. sound_beside: it gets an audio tower that is not its own."""
    names = STYLES.get(str(values.get("model_type")), ())
    sees = any(each.visual is not None for each in names)
    hears = sound_beside or any(each.audio is not None for each in names)
    return tuple(kind for kind in ALL_MEDIA if (hears if kind == "audio" else sees))


def _check_sound(sideband: Sideband, media: tuple[MediaKind, ...], *, use_audio_in_video: bool) -> None:
    """ConfigError when clips would bring sound that no tower hears."""
    if "audio" not in media and use_audio_in_video:
        raise ConfigError(
            "data.mm_configs.use_audio_in_video: true, but a pseudo Qwen3-VL has no audio tower: write false to leave "
            "the sound of clips out, or give model.audio_tower_path the Qwen3-Omni whose frozen tower hears it"
        )
    if sideband.position_id_per_seconds == POSITIONS_PER_SECOND:
        return
    said = (
        f"{sideband.where}.position_id_per_seconds: is {sideband.position_id_per_seconds:g}; the published models have "
        f"{POSITIONS_PER_SECOND:g}, which is the rate of sound tokens"
    )
    if "audio" in media:
        raise ConfigError(f"{said}, so sound and picture would drift apart")
    log.warning("%s; clips are counted at the former", said)
