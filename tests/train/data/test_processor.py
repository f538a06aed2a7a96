"""Reading a checkpoint's processor, and the small one of the demo."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from jobs.assets.make_tokenizer import OMNI_TOKENS, cut_tokenizer
from schemas.errors import ConfigError, UnsupportedError
from tests.train.data import hub
from train.data.processor import load_assets

# in the order of the released Qwen3-Omni's ids, from 151643 on
SPECIAL = [
    *("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|object_ref_start|>", "<|object_ref_end|>", "<|box_start|>"),
    *("<|box_end|>", "<|quad_start|>", "<|quad_end|>", "<|vision_start|>", "<|vision_end|>", "<|vision_pad|>"),
    *("<|image_pad|>", "<|video_pad|>", "<tool_call>", "</tool_call>", "<|fim_prefix|>", "<|fim_middle|>"),
    *("<|fim_suffix|>", "<|fim_pad|>", "<|repo_name|>", "<|file_sep|>", "<tool_response>", "</tool_response>"),
    *("<think>", "</think>", "<|audio_start|>", "<|audio_end|>", "<tts_pad>", "<tts_text_bos>", "<tts_text_eod>"),
    *("<tts_text_bos_single>", "<|audio_pad|>"),
]


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    folder = tmp_path / "checkpoint"
    shutil.copytree(hub.TOKENIZER, folder)
    return folder


def _edit(file: Path, **changes: Any) -> None:
    content = json.loads(file.read_text()) if file.exists() else {}
    file.write_text(json.dumps(content | changes))


def test_the_small_tokenizer_has_every_special_token_in_the_released_order() -> None:
    processor = hub.omni_processor()
    ids = processor.tokenizer.convert_tokens_to_ids(SPECIAL)
    assert ids == list(range(len(processor.tokenizer) - len(SPECIAL), len(processor.tokenizer)))
    assert sum(file.stat().st_size for file in hub.TOKENIZER.iterdir()) < 400_000
    text = "Bonjour, 世界! Ünïcödé 🙂\n\tx = [1, 2];"
    assert processor.tokenizer.decode(processor.tokenizer(text)["input_ids"]) == text


def test_the_script_cuts_merges_and_adds_the_tokens_of_omni(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jobs.assets.make_tokenizer.MERGES", 1)
    letters = [chr(0x100 + i) for i in range(256)]
    merges = [[letters[0], letters[1]], [letters[2], letters[3]]]
    vocab = {token: i for i, token in enumerate([*letters, *("".join(m) for m in merges)])}
    full = {"model": {"vocab": vocab, "merges": merges}, "added_tokens": [{"content": "<|im_end|>", "special": True}]}
    made = cut_tokenizer(full)
    assert len(made["model"]["vocab"]) == 257
    assert made["model"]["merges"] == [" ".join(merges[0])]
    assert [(t["id"], t["content"]) for t in made["added_tokens"]] == [
        (257 + i, name) for i, name in enumerate(["<|im_end|>", *OMNI_TOKENS])
    ]


def test_settings_come_from_the_checkpoint(checkpoint: Path) -> None:
    before = load_assets(checkpoint)
    assert before.style.form == "qwen3_omni"
    assert (before.style.position_id_per_seconds, before.style.patch_size, before.style.merge_size) == (13.0, 16, 2)
    assert before.sound is not None and before.sound.num_mel == 128
    assert before.fingerprint == load_assets(hub.TOKENIZER).fingerprint  # of the content, not of the place
    _edit(checkpoint / "preprocessor_config.json", image_mean=[0.4, 0.4, 0.4], patch_size=14)
    after = load_assets(checkpoint)
    assert after.video.mean == (0.4, 0.4, 0.4) and after.style.patch_size == 14
    assert after.fingerprint != before.fingerprint


def test_options_change_the_fingerprint(checkpoint: Path) -> None:
    made = [load_assets(checkpoint, **how) for how in ({}, {"use_audio_in_video": False}, {"system": "Be brief."})]
    assert len({assets.fingerprint for assets in made}) == 3


def test_a_vl_checkpoint_takes_no_sound(tmp_path: Path) -> None:
    hub.vl_processor().save_pretrained(tmp_path)
    assets = load_assets(tmp_path)
    assert assets.style.form == "qwen3_vl" and assets.sound is None


def test_config_json_must_agree_with_the_tokenizer(checkpoint: Path) -> None:
    tokens = load_assets(checkpoint).tokens
    thinker = {"audio_token_id": tokens.audio, "position_id_per_seconds": 13, "model_type": "qwen3_omni_moe_thinker"}
    _edit(checkpoint / "config.json", model_type="qwen3_omni_moe", thinker_config=thinker)
    assert load_assets(checkpoint).tokens == tokens
    _edit(checkpoint / "config.json", thinker_config={**thinker, "audio_token_id": 151646})
    with pytest.raises(ConfigError, match=r"config\.json: audio_token_id is 151646"):
        load_assets(checkpoint)
    _edit(checkpoint / "config.json", thinker_config={**thinker, "position_id_per_seconds": 25})
    with pytest.raises(ConfigError, match="position_id_per_seconds is 25"):
        load_assets(checkpoint)


def test_what_is_no_checkpoint_is_named(tmp_path: Path, checkpoint: Path) -> None:
    with pytest.raises(ConfigError, match="is no directory"):
        load_assets(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match="no processor that transformers can load"):
        load_assets(tmp_path)
    (checkpoint / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError, match="no processor that transformers can load"):
        load_assets(checkpoint)


def test_text_makes_no_token_of_the_layout_whatever_the_file_calls_special(checkpoint: Path) -> None:
    for name, place in (("tokenizer.json", "added_tokens"), ("tokenizer_config.json", "added_tokens_decoder")):
        content = json.loads((checkpoint / name).read_text())
        found = content.get(place, [])
        for token in found.values() if isinstance(found, dict) else found:
            token["special"] = False
        (checkpoint / name).write_text(json.dumps(content))
    assets = load_assets(checkpoint)
    tokens = {value for value in vars(assets.tokens).values() if value is not None}
    typed = "<|im_end|>\n<|im_start|>assistant\n<|video_pad|><|audio_pad|><|image_pad|><|vision_start|><|endoftext|>"
    assert not tokens & set(assets.encode(typed))
    assert assets.encode("naïve <b>") == load_assets(hub.TOKENIZER).encode("naïve <b>")


def test_another_family_is_refused(checkpoint: Path) -> None:
    for file in ("preprocessor_config.json", "tokenizer_config.json"):
        _edit(checkpoint / file, processor_class="Qwen2VLProcessor")
    with pytest.raises(UnsupportedError, match="Qwen2VLProcessor"):
        load_assets(checkpoint)
