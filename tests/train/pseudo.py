"""A tiny Qwen3-Omni thinker with its processor, and what convert makes of it: a pseudo Qwen3-VL, a text model."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from convert.directions import omni_to_text_conversion, omni_to_vl_conversion
from convert.job import Options, run
from tests.train.data.hub import TOKENIZER
from tests.train.models import families
from tests.train.models.checkpoints import laid_out, write
from tests.train.tiny import AUDIO, IMAGE, VIDEO, VOCAB
from train.models.omni_thinker import OmniThinker
from train.ops.registry import eager_ops

AUDIO_START, AUDIO_END, USER = 8282, 8283, 872
IDS = {
    "image_token_id": IMAGE,
    "video_token_id": VIDEO,
    "audio_token_id": AUDIO,
    "audio_start_token_id": AUDIO_START,
    "audio_end_token_id": AUDIO_END,
    "vision_start_token_id": 8265,
    "vision_end_token_id": 8266,
    "user_token_id": USER,
}


def thinker_config(**text: Any) -> Any:
    """Of the test tokenizer's vocabulary."""
    values = {**families.TEXT, **families.MOE, "vocab_size": VOCAB, "rope_parameters": families.MROPE, **text}
    return families.omni(text_config=values, **IDS, seconds_per_chunk=2, tie_word_embeddings=False)


def make_omni(folder: Path, **text: Any) -> Path:
    """A thinker saved alone, its experts one by one, with tokenizer and preprocessor."""
    shutil.copytree(TOKENIZER, folder)
    config = thinker_config(**text)
    config.save_pretrained(folder)
    model = OmniThinker(config, eager_ops())
    families.randomise(model)
    weights = {name: parameter.detach() for name, parameter in model.named_parameters()}
    write(folder, laid_out(weights, "per-expert"))
    return folder


def make_pseudo(omni: Path, folder: Path) -> Path:
    """What `omniloom convert omni-to-vl` writes."""
    run(omni_to_vl_conversion(omni), folder, Options(workers=1), lambda count: None)
    return folder


def make_text(omni: Path, folder: Path) -> Path:
    """What `omniloom convert omni-to-text` writes."""
    run(omni_to_text_conversion(omni), folder, Options(workers=1), lambda count: None)
    return folder


def edit_config(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Changes a config.json."""
    file = folder / "config.json"
    values = json.loads(file.read_text())
    change(values)
    file.write_text(json.dumps(values))
