"""A tiny Qwen3-Omni of the real architecture and a packed dataset, as a configuration of the trainer."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from schemas.strict import check_config
from tests.train.data.loading import TOKENIZER, write_clips, write_text
from tests.train.models.families import MOE, MROPE, SOUND, TEXT, VISION
from train.config import OmniConfig

VOCAB = 8320  # of the test tokenizer, rounded up
IMAGE, VIDEO, AUDIO = 8268, 8269, 8288


def write_omni_config(folder: Path, **text: Any) -> Path:
    """config.json of a thinker."""
    folder.mkdir(parents=True, exist_ok=True)
    values = {
        "model_type": "qwen3_omni_moe_thinker",
        "architectures": ["Qwen3OmniMoeThinkerForConditionalGeneration"],
        "text_config": {**TEXT, **MOE, "vocab_size": VOCAB, "rope_parameters": MROPE, **text},
        "vision_config": VISION,
        "audio_config": SOUND,
        "image_token_id": IMAGE,
        "video_token_id": VIDEO,
        "audio_token_id": AUDIO,
        "position_id_per_seconds": 13,
        "tie_word_embeddings": False,
    }
    own = folder / f"config.{os.getpid()}"  # ranks write the same file, and read it at once
    own.write_text(json.dumps(values))
    own.rename(folder / "config.json")
    return folder


def write_data(folder: Path, clips: int = 12, texts: int = 12) -> list[dict[str, Any]]:
    """Sources of clips with sound and of text."""
    write_clips(folder / "clips", clips)
    write_text(folder / "text.jsonl", texts)
    return [
        {"path": str(folder / "clips"), "name": "clips"},
        {"path": str(folder / "text.jsonl"), "name": "text", "source_name": "openai_messages"},
    ]


def omni_config(folder: Path, sources: list[dict[str, Any]], coef: float = 0.05, **train: Any) -> OmniConfig:
    """Reads the model's config.json from folder/model and writes to folder/output. coef: of the auxiliary loss."""
    defaults: dict[str, Any] = {
        "global_batch_size": 4,
        "max_steps": 5,
        "optimizer": {"lr": 1e-3, "lr_decay_style": "constant"},
        "accelerator": {"fsdp_config": {"mixed_precision": {"enable": False}}},
        "checkpoint": {"output_dir": str(folder / "output"), "save_steps": 0, "save_hf_weights": False},
    }
    values = {
        "model": {"config_path": str(write_omni_config(folder / "model", router_aux_loss_coef=coef))},
        "data": {
            "sources": sources,
            "processor_path": str(TOKENIZER),
            "max_seq_len": 512,
            "lanes": 4,
            "window_rows": 8,
            "cache": {"dir": str(folder / "cache")},
            "dataloader": {"num_workers": 0},
        },
        "train": defaults | train,
    }
    return check_config(values, OmniConfig)
