"""What users of VeOmni are told about keys that differ."""

from __future__ import annotations

from pathlib import Path

import pytest

from schemas.config_keys import describe_keys
from schemas.errors import ConfigError
from schemas.strict import check_config, load_config
from train.config import OmniConfig
from train.veomni_keys import VEOMNI_KEYS

PAGE = Path(__file__).parents[2] / "docs/veomni.md"
START = "model: {model_path: m}\ndata: {sources: [{path: p}]"
OURS = {info.key for info in describe_keys(OmniConfig)}


def test_no_key_of_ours_is_called_foreign_and_every_replacement_exists() -> None:
    assert OURS.isdisjoint(VEOMNI_KEYS)
    missing = sorted({line.use for line in VEOMNI_KEYS.values() if line.use is not None} - OURS)
    assert missing == []


@pytest.mark.parametrize("key", sorted(VEOMNI_KEYS))
def test_each_key_is_answered_with_what_takes_its_place(key: str) -> None:
    data: dict[str, object] = {"model": {"model_path": "m"}, "data": {"sources": [{"path": "p"}]}}
    holder = data
    *sections, last = key.split(".")
    for section in sections:
        holder = holder.setdefault(section, {})  # type: ignore[assignment]
    holder[last] = 1
    with pytest.raises(ConfigError) as error:
        check_config(data, OmniConfig)
    assert f"{key}: is not a key here; {VEOMNI_KEYS[key]}" in str(error.value)


def test_a_key_of_a_foreign_section_and_the_line_it_stands_on(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(f"{START}, train_path: x}}\ntrain:\n  channel_loss:\n    enable: true\n  dyn_bzs: true\n")
    with pytest.raises(ConfigError) as error:
        load_config(path, [], OmniConfig)
    lines = str(error.value).splitlines()
    assert len(lines) == 3
    assert lines[0].startswith(f"{path}:2:")
    assert "data.train_path: is not a key here; use data.sources" in lines[0]
    assert lines[1].startswith(f"{path}:4:3: train.channel_loss: is not a key here; always on")
    assert "train.dyn_bzs: unknown key" in lines[2]  # of nobody: the usual message


RECIPE = """
model: {model_path: m, ops_implementation: {attn_implementation: sdpa}}
data:
  train_path: d.yaml
  data_type: conversation
  max_seq_len: 8196
  train_size: 80000000
  source_name: qwen_omni_offline_av
  mm_configs: {scale_factor: 28, image_max_pixels: 1, video_max_pixels: 1, max_ratio: 200, max_frames: 20,
    frame_factor: 2, sample_rate: 16000, fps: 2.0, use_audio_in_video: true}
train:
  accelerator: {ulysses_size: 1, fsdp_config: {fsdp_mode: fsdp2}}
  optimizer: {lr: 1.0e-5, lr_decay_style: cosine}
  rmpad_with_pos_ids: true
  data_parallel_mode: fsdp2
  save_steps: 100
  checkpoint: {output_dir: out}
  wandb: {project: p}
"""


def test_no_key_of_a_whole_recipe_is_met_with_a_guess(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(RECIPE)
    with pytest.raises(ConfigError) as error:
        load_config(path, [], OmniConfig)
    lines = str(error.value).splitlines()
    assert not [line for line in lines if "unknown key" in line or "did you mean" in line]
    assert sum("is not a key here" in line for line in lines) == 16
    assert any("data.mm_configs.fps: is not a key here; at packing: pack.video.fps" in line for line in lines)
    assert any("train.save_steps: is not a key here; use train.checkpoint.save_steps" in line for line in lines)


def test_the_page_shows_the_table() -> None:
    page = PAGE.read_text()
    for key, line in VEOMNI_KEYS.items():
        use = f"`{line.use}`" if line.use else ""
        assert f"| `{key}` | {use} | {line.why} |" in page
