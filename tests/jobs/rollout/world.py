"""What the tests of rollouts share: rows of reward data packed for real, and a tiny Qwen3-Omni with its tokenizer."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import soundfile
import torch
from PIL import Image
from transformers import Qwen3OmniMoeThinkerForConditionalGeneration
from transformers.models.qwen3_omni_moe.configuration_qwen3_omni_moe import Qwen3OmniMoeThinkerConfig

from jobs.rollout.config import RolloutsConfig
from schemas.chat_tokens import CONFIG_KEYS
from schemas.strict import check_config
from tests.train.data.loading import TOKENIZER, omni_assets
from tests.train.tiny import write_omni_config

COLOURS = {"red": (220, 30, 30), "green": (30, 200, 40), "blue": (30, 40, 220), "white": (240, 240, 240)}
NAMES = list(COLOURS)


def picture(path: Path, colour: str, seed: int, size: tuple[int, int] = (64, 64)) -> str:
    """A noisy picture of one colour; its name."""
    noise = np.random.default_rng(seed).integers(-20, 20, (*size, 3))
    values = np.clip(np.array(COLOURS[colour]) + noise, 0, 255).astype(np.uint8)
    Image.fromarray(values).save(path)
    return path.name


def reward_rows(folder: Path) -> list[dict[str, Any]]:
    """Clips, an image, a sound beside a clip, and text, in the form of Video-R1."""
    rows: list[dict[str, Any]] = []
    for number, colour in enumerate([*NAMES, "red", "blue"]):
        frames = [picture(folder / f"{number}_{k}.png", colour, 10 * number + k) for k in range(2 + 2 * (number % 2))]
        rows.append(_choice(f"clip{number}", colour, videos=[{"frames": frames, "video_fps": 2.0}]))
    rows.append(_choice("image", "green", images=[picture(folder / "image.png", "green", 99, (64, 96))]))
    tone = (9000 * np.sin(np.arange(8000) / 9)).astype(np.int16)
    soundfile.write(folder / "tone.wav", tone, 16000, subtype="PCM_16")
    frames = [picture(folder / f"s{k}.png", "white", 70 + k) for k in range(2)]
    clip = {"frames": frames, "video_fps": 2.0, "audio": "tone.wav"}
    rows.append(_choice("heard", "white", videos=[clip]))
    rows.append(_choice("sound", "blue", audios=["tone.wav"]))
    for number in range(3):
        rows.append(
            {
                "id": f"text{number}",
                "problem": f"What is {number} and 2?",
                "problem_type": "numerical",
                "solution": f"<answer>{number + 2}</answer>",
                "source": "text",
            }
        )
    return rows


def _choice(key: str, colour: str, **media: Any) -> dict[str, Any]:
    return {
        "id": key,
        "problem": "Which colour is it?",
        "problem_type": "multiple choice",
        "options": [f"{letter}. {name}" for letter, name in zip("ABCD", NAMES, strict=True)],
        "solution": f"<answer>{'ABCD'[NAMES.index(colour)]}</answer>",
        "source": "colours",
        **media,
    }


def write_model(folder: Path, seed: int = 0, scale: float = 40.0) -> Path:
    """A checkpoint directory with tokenizer and preprocessor. scale: of the head, so that some tokens are likely."""
    write_omni_config(folder)
    values = json.loads((folder / "config.json").read_text())
    ids = {key: getattr(omni_assets().tokens, name) for name, key in CONFIG_KEYS.items()}
    (folder / "config.json").write_text(json.dumps(values | ids))
    config = Qwen3OmniMoeThinkerConfig.from_pretrained(folder)
    torch.manual_seed(seed)
    model = Qwen3OmniMoeThinkerForConditionalGeneration._from_config(config, dtype=torch.float32)
    with torch.no_grad():
        model.lm_head.weight.mul_(scale)
    model.save_pretrained(folder)
    for path in TOKENIZER.iterdir():
        shutil.copy(path, folder / path.name)
    return folder


def rollouts_config(folder: Path, **keys: Any) -> RolloutsConfig:
    """Of the dataset and the model in a folder, with small answers in float32."""
    values: dict[str, Any] = {
        "dataset": str(folder / "packed"),
        "model_path": str(folder / "model"),
        "out": str(folder / "rollouts"),
        "part_rows": 4,
        "sampling": {"group_size": 3, "max_new_tokens": 5},
        "local": {"device": "cpu", "dtype": "float32"},
        "max_bad_ratio": 1.0,
    }
    return check_config(values | keys, RolloutsConfig)
