"""Everything the data path needs of a checkpoint's processor, read once and handed to workers as plain values."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import xxhash

from schemas.chat import ChatStyle, Form, PixelLimits
from schemas.chat_tokens import ChatTokens, PlainEncoder
from schemas.chat_types import ALL_MEDIA, MediaKind
from schemas.errors import ConfigError, UnsupportedError
from schemas.geometry import MEL_HOP, MEL_WINDOW, TOKENS_PER_WINDOW
from schemas.media_counts import SAMPLE_RATE
from train.data.sideband import Sideband

LAYOUT_VERSION = 2  # raised whenever the same row gives other tokens, so that cached lengths are made again
POSITIONS_PER_SECOND = TOKENS_PER_WINDOW * SAMPLE_RATE / (MEL_HOP * MEL_WINDOW)  # of the clock: one per sound token
VL_MEDIA = frozenset(("video", "image"))  # all that its layout has, so that lengths counted without a model serve, too


@dataclass(frozen=True)
class VisionSpec:
    """How pixels become patches. mean, std: per channel, of pixels scaled to [0, 1]."""

    patch_size: int
    temporal_patch: int
    merge_size: int
    mean: tuple[float, ...]
    std: tuple[float, ...]


@dataclass(frozen=True)
class SoundSpec:
    """How samples become log-mel frames."""

    sample_rate: int
    n_fft: int
    hop_length: int
    num_mel: int


@dataclass(frozen=True)
class ProcessorAssets:
    """encode: text -> ids; tokens: special ids; style: of the layout; video, image, sound: of the device part, sound
    None for a model without; fingerprint: of all that decides how many tokens a row takes; vocab_size: token ids of the
    model are under it, None where no model is known."""

    path: str
    encode: PlainEncoder
    tokens: ChatTokens
    style: ChatStyle
    video: VisionSpec
    image: VisionSpec
    sound: SoundSpec | None
    fingerprint: str
    vocab_size: int | None = None


def load_assets(
    path: str | Path,
    *,
    use_audio_in_video: bool = True,
    wrap_video: bool = True,
    system: str | None = None,
    media: tuple[MediaKind, ...] = ALL_MEDIA,
    sideband: Sideband | None = None,
    vocab_size: int | None = None,
) -> ProcessorAssets:
    """The assets of a checkpoint directory (tokenizer and preprocessor files; config.json is checked when there).

    media: what the model has towers for; sideband: of a pseudo Qwen3-VL, which has the layout of Qwen3-Omni;
    vocab_size: rows of the model's embedding.
    ConfigError for a directory without a processor or with ids that disagree, UnsupportedError for another family.
    """
    from transformers import AutoProcessor  # noqa: PLC0415  # seconds to import, and loader workers never need it

    if not Path(path).is_dir():
        raise ConfigError(f"processor_path {path} is no directory; it is a checkpoint with its tokenizer")
    try:
        processor = AutoProcessor.from_pretrained(str(path), local_files_only=True, trust_remote_code=False)
    except Exception as error:  # a damaged tokenizer.json is a plain Exception of tokenizers
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ConfigError(f"processor_path {path} has no processor that transformers can load: {reason}") from error
    form = _form(processor, path)
    tokens = ChatTokens.from_tokenizer(processor)
    if sideband is not None:
        if form != "qwen3_omni":
            raise ConfigError(
                f"processor_path {path} has a {type(processor).__name__}, which writes time marks; with "
                f"{sideband.where} the model takes the layout of Qwen3-Omni: give the folder of its processor"
            )
        sideband.check_tokens(tokens, path)
    image, video = vision_spec(processor.image_processor), vision_spec(processor.video_processor)
    if (image.patch_size, image.merge_size) != (video.patch_size, video.merge_size):
        raise UnsupportedError(f"processor_path {path}: images and videos have other patches ({image}, {video})")
    config = _model_config(Path(path))
    if config is not None:
        tokens.check_model_config(config, f"{path}/config.json")
        _check_rate(config, path)
    style = ChatStyle(
        form=form,
        position_id_per_seconds=POSITIONS_PER_SECOND if sideband is None else sideband.position_id_per_seconds,
        patch_size=video.patch_size,
        merge_size=video.merge_size,
        temporal_patch=video.temporal_patch,
        use_audio_in_video=use_audio_in_video,
        wrap_video=wrap_video,
        system=system,
        pixels=pixel_limits(processor),
        media=ALL_MEDIA if form == "qwen3_vl" and set(media) >= VL_MEDIA else media,
    )
    sound = None
    if form == "qwen3_omni":
        tokens.audio_ids()
        sound = sound_spec(processor.feature_extractor)
    encode = PlainEncoder(processor)
    fingerprint = _fingerprint(encode, tokens, style)
    return ProcessorAssets(str(path), encode, tokens, style, video, image, sound, fingerprint, vocab_size)


def vision_spec(processor: Any) -> VisionSpec:
    """Of a Hugging Face image or video processor; UnsupportedError for steps that the device part does not do."""
    if not (processor.do_rescale and processor.do_normalize) or abs(processor.rescale_factor * 255 - 1) > 1e-6:
        raise UnsupportedError(f"{type(processor).__name__} does not scale by 1/255 and normalise")
    return VisionSpec(
        patch_size=processor.patch_size,
        temporal_patch=processor.temporal_patch_size,
        merge_size=processor.merge_size,
        mean=tuple(processor.image_mean),
        std=tuple(processor.image_std),
    )


def pixel_limits(processor: Any) -> PixelLimits:
    """Of a Hugging Face processor: what a call of it gives. UnsupportedError for sizes in another form."""
    image, video = processor.image_processor, processor.video_processor
    own = _edges(video, video.size)
    # Qwen3-Omni's processor calls its video processor with a size of its own
    called = getattr(processor, "videos_kwargs", None) or _older_defaults(processor).get("videos_kwargs", {})
    limits = _edges(video, called["size"]) if "size" in called else own
    return PixelLimits(
        image=_edges(image, image.size),
        video=limits,
        video_floor=min(own[0], limits[0]),
        per_clip=type(video).__name__.startswith("Qwen3VL"),
        capped=bool(called.get("cap_pixels_per_frame", getattr(video, "cap_pixels_per_frame", None))),
        max_video_tokens=int(getattr(video, "max_video_tokens", PixelLimits.max_video_tokens)),
    )


def _older_defaults(processor: Any) -> dict[str, Any]:
    """Of transformers before 5.20, which keeps them in another place."""
    found: dict[str, Any] = getattr(getattr(processor, "valid_processor_kwargs", None), "_defaults", {})
    return found


def _edges(processor: Any, size: Any) -> tuple[int, int]:
    """(min, max) pixels."""
    low, high = dict(size).get("shortest_edge"), dict(size).get("longest_edge")
    if not processor.do_resize or not low or not high:
        raise UnsupportedError(
            f"{type(processor).__name__} has do_resize {processor.do_resize} and size {dict(size)}; omniloom takes "
            "do_resize true with size.shortest_edge and size.longest_edge (or min_pixels and max_pixels)"
        )
    return int(low), int(high)


def sound_spec(extractor: Any) -> SoundSpec:
    """Of a Hugging Face Whisper feature extractor; UnsupportedError for other rates than the sound tower's."""
    spec = SoundSpec(extractor.sampling_rate, extractor.n_fft, extractor.hop_length, extractor.feature_size)
    if (spec.sample_rate, spec.hop_length) != (SAMPLE_RATE, MEL_HOP) or extractor.dither:
        raise UnsupportedError(
            f"{type(extractor).__name__} takes {spec.sample_rate} Hz in steps of {spec.hop_length} with dither "
            f"{extractor.dither}; Qwen3-Omni's takes {SAMPLE_RATE} Hz in steps of {MEL_HOP} without"
        )
    return spec


def _form(processor: Any, path: str | Path) -> Form:
    name = type(processor).__name__
    if name.startswith("Qwen3Omni"):
        return "qwen3_omni"
    if name.startswith("Qwen3VL"):
        return "qwen3_vl"
    raise UnsupportedError(f"{path} has a {name}; omniloom lays out Qwen3-Omni and Qwen3-VL")


def _model_config(path: Path) -> dict[str, Any] | None:
    file = path / "config.json"
    if not file.is_file():
        return None
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{file} is no JSON: {error}") from error
    if not isinstance(config, dict):
        raise ConfigError(f"{file} is no JSON object")
    return config


def _check_rate(config: dict[str, Any], path: str | Path) -> None:
    """The library's default of 25 is not what the released models use, nor what the sound tower gives."""
    found = config.get("thinker_config", config).get("position_id_per_seconds")
    if found is not None and found != POSITIONS_PER_SECOND:
        raise ConfigError(
            f"{path}/config.json: position_id_per_seconds is {found}; the sound tower makes "
            f"{POSITIONS_PER_SECOND:g} tokens a second, so with another rate sound and picture drift apart; set it to "
            f"{POSITIONS_PER_SECOND:g}"
        )


def _fingerprint(encode: PlainEncoder, tokens: ChatTokens, style: ChatStyle) -> str:
    parts = [LAYOUT_VERSION, encode.fingerprint, asdict(tokens), asdict(style)]
    return str(xxhash.xxh3_64_hexdigest(json.dumps(parts, sort_keys=True).encode()))
