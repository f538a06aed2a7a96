"""The Hugging Face reference: processors, and `get_rope_index` of the models without their weights."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from transformers import AutoProcessor, AutoTokenizer, Qwen2VLImageProcessor, Qwen3VLProcessor
from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import (
    Qwen3OmniMoePreTrainedModelForConditionalGeneration,
)
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLModel
from transformers.models.qwen3_vl.video_processing_qwen3_vl import Qwen3VLVideoProcessor

import jobs
from schemas.chat import PixelLimits
from schemas.chat_tokens import ChatTokens
from tests.train.data.mixes import Mix
from train.data.processor import ProcessorAssets

TOKENIZER = Path(jobs.__file__).parent / "assets" / "tokenizer"


def omni_processor() -> Any:
    return AutoProcessor.from_pretrained(str(TOKENIZER))


def vl_processor() -> Any:
    half = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    template = (TOKENIZER / "chat_template.jinja").read_text()
    return Qwen3VLProcessor(
        image_processor=Qwen2VLImageProcessor(patch_size=16, **half),
        video_processor=Qwen3VLVideoProcessor(**half),
        tokenizer=AutoTokenizer.from_pretrained(str(TOKENIZER)),
        chat_template=template,
    )


def _pictures(mix: Mix) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if mix.images:
        found |= {"images": mix.images, "images_kwargs": {"do_resize": False}}
    if mix.clips:
        found["videos"] = [torch.from_numpy(clip.frames).permute(0, 3, 1, 2) for clip in mix.clips]
        found["videos_kwargs"] = {"do_resize": False, "do_sample_frames": False}
    return found


def small_pictures(assets: ProcessorAssets) -> ProcessorAssets:
    """The assets of a processor that leaves pictures of one token and more as they are: what `do_resize` False is."""
    limits = PixelLimits(image=(1024, 12845056), video=(1024, 786432), video_floor=1024)
    style = replace(assets.style, pixels=limits)
    return replace(assets, style=style, fingerprint=f"{assets.fingerprint}-small")


def omni_call(processor: Any, mix: Mix) -> dict[str, torch.Tensor]:
    """What the processor makes of a mix of one rate."""
    given = _pictures(mix)
    sounds, owners = mix.all_sounds()
    if mix.clips:
        given["videos_kwargs"]["fps"] = mix.fps
    if sounds:
        given["audio"] = [sound.astype("float32") / 32768 for sound in sounds]
        given["audio_kwargs"] = {"sampling_rate": 16000}
    if mix.clips and mix.with_sound:
        given |= {"load_audio_from_video": True, "audio_from_video_indices": owners}
    text = processor.apply_chat_template(mix.messages(), tokenize=False)
    return dict(processor(text=[text], return_tensors="pt", **given))


def omni_positions(found: dict[str, torch.Tensor], with_sound: bool, tokens: ChatTokens) -> torch.Tensor:
    """float32 [3, L] of the ids that the processor made."""
    config = SimpleNamespace(
        image_token_id=tokens.image,
        video_token_id=tokens.video,
        audio_token_id=tokens.audio,
        vision_start_token_id=tokens.vision_start,
        audio_start_token_id=tokens.audio_start,
        position_id_per_seconds=13,
        audio_config=SimpleNamespace(n_window=50),
    )
    model = Qwen3OmniMoePreTrainedModelForConditionalGeneration
    self = SimpleNamespace(config=config, spatial_merge_size=2)
    self.get_llm_pos_ids_for_vision = lambda *given: model.get_llm_pos_ids_for_vision(self, *given)
    mask = found.get("feature_attention_mask")
    positions, _ = model.get_rope_index(
        self,
        found["input_ids"],
        found.get("image_grid_thw"),
        found.get("video_grid_thw"),
        found["attention_mask"],
        with_sound and "video_grid_thw" in found,
        None if mask is None else mask.sum(-1),
        found.get("video_second_per_grid"),
    )
    return positions[:, 0]


def vl_call(processor: Any, mix: Mix) -> dict[str, torch.Tensor]:
    given = _pictures(mix)
    if mix.clips:
        given["videos_kwargs"]["video_metadata"] = [
            {"fps": clip.fps, "frames_indices": list(range(len(clip.frames))), "total_num_frames": len(clip.frames)}
            for clip in mix.clips
        ]
    text = processor.apply_chat_template(mix.messages(), tokenize=False)
    return dict(processor(text=[text], return_tensors="pt", **given))


def vl_positions(found: dict[str, torch.Tensor]) -> torch.Tensor:
    """int64 [3, L]."""
    self = SimpleNamespace(config=SimpleNamespace(vision_config=SimpleNamespace(spatial_merge_size=2)))
    self.get_vision_position_ids = lambda *given, **named: Qwen3VLModel.get_vision_position_ids(self, *given, **named)
    positions, _ = Qwen3VLModel.get_rope_index(
        self,
        found["input_ids"],
        found["mm_token_type_ids"],
        found.get("image_grid_thw"),
        found.get("video_grid_thw"),
        found["attention_mask"],
    )
    return positions[:, 0]
