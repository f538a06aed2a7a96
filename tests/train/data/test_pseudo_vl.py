"""A pseudo Qwen3-VL lays out tokens and positions as Qwen3-Omni does; what its sideband must say; what it refuses."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from schemas.errors import ConfigError, OmniloomError, UnsupportedError
from schemas.strict import check_config
from tests.train import pseudo
from tests.train.data import hub
from tests.train.data.mixes import Mix, random_mix
from tests.train.data.packed import Clip
from train.config import OmniConfig
from train.data.lengths import LengthsBuilder, packed_row_lengths
from train.data.processor import ProcessorAssets
from train.data.transform import SampleTransform
from train.model_assets import training_assets

MIXES, SILENT_MIXES, STILL_MIXES = 300, 100, 100
NO_SOUND = {"mm_configs": {"use_audio_in_video": False}}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    top = tmp_path_factory.mktemp("models")
    omni = pseudo.make_omni(top / "omni")
    return {
        "omni": omni,
        "vl": pseudo.make_pseudo(omni, top / "vl"),
        "text": pseudo.make_text(omni, top / "text"),
    }


def config_of(folder: Path, data: dict[str, Any] | None = None, **model: Any) -> OmniConfig:
    values = {"model": {"model_path": str(folder)} | model, "data": {"sources": [{"path": "packed"}]} | (data or {})}
    return check_config(values, OmniConfig)


def small(assets: ProcessorAssets) -> ProcessorAssets:
    return hub.small_pictures(assets)


@pytest.fixture(scope="module")
def silent(folders: dict[str, Path]) -> ProcessorAssets:
    """Of the pseudo Qwen3-VL alone."""
    return small(training_assets(config_of(folders["vl"], NO_SOUND)))


@pytest.fixture(scope="module")
def hearing(folders: dict[str, Path]) -> ProcessorAssets:
    """With the audio tower beside it."""
    return small(training_assets(config_of(folders["vl"], audio_tower_path=str(folders["omni"]))))


@pytest.mark.parametrize("start", range(0, MIXES, 50))
def test_positions_are_those_of_qwen3_omni(hearing: ProcessorAssets, start: int) -> None:
    processor, transform = hub.omni_processor(), SampleTransform(hearing)
    for seed in range(40_000 + start, 40_000 + start + 50):
        mix = random_mix(seed)
        sample, found = transform.packed(mix.sample(), "made"), hub.omni_call(processor, mix)
        assert np.array_equal(sample.ids, found["input_ids"][0].numpy()), f"ids of mix {seed}"
        positions = hub.omni_positions(found, mix.with_sound, hearing.tokens)
        assert sample.position_ids.dtype == np.float32
        assert np.array_equal(sample.position_ids, positions.numpy()), f"positions of mix {seed}"


def test_without_a_tower_the_sound_of_clips_is_left_out(silent: ProcessorAssets) -> None:
    processor, transform = hub.omni_processor(), SampleTransform(silent)
    for seed in range(50_000, 50_000 + SILENT_MIXES):
        mix = random_mix(seed, sound=False)
        found = hub.omni_call(processor, mix)
        noise = np.full(8000, 7, np.int16)
        heard = replace(mix, clips=[Clip(clip.frames, clip.fps, noise) for clip in mix.clips])
        sample = transform.packed(heard.sample(), "made")
        assert np.array_equal(sample.ids, found["input_ids"][0].numpy()), f"ids of mix {seed}"
        assert np.array_equal(sample.position_ids, hub.omni_positions(found, False, silent.tokens).numpy())
        assert {unit.kind for unit in sample.media} <= {"video", "image"} and not sample.num_audio


def _still(seed: int) -> Mix:
    """A mix whose clips are dropped from its turns."""
    mix = random_mix(seed, sound=False)
    turns = [[turn[0], *([part for part in turn[1:] if part[0] != "video"] or [("text", "So?")])] for turn in mix.turns]
    return replace(mix, turns=turns, clips=[])


def test_text_and_images_have_the_positions_of_qwen3_vl(silent: ProcessorAssets, tmp_path: Path) -> None:
    processor = hub.vl_processor()
    transform, images = SampleTransform(silent), 0
    for seed in range(60_000, 60_000 + STILL_MIXES):
        mix = _still(seed)
        sample, found = transform.packed(mix.sample(), "made"), hub.vl_call(processor, mix)
        assert np.array_equal(sample.ids, found["input_ids"][0].numpy()), f"ids of mix {seed}"
        assert np.array_equal(sample.position_ids, hub.vl_positions(found).numpy()), f"positions of mix {seed}"
        images += len(mix.images)
    assert images > STILL_MIXES / 2


def test_a_clip_has_one_block_its_own_rate_and_fractional_times(silent: ProcessorAssets) -> None:
    frames = np.zeros((6, 32, 32, 3), np.uint8)
    turns: list[Any] = [["user", ("video", None), ("video", None)], ["assistant", ("text", "Yes.")]]
    mix = Mix(turns=turns, clips=[Clip(frames, 3.0), Clip(frames, 1.7)])
    sample = SampleTransform(silent).packed(mix.sample(), "made")
    tokens = silent.tokens
    assert np.count_nonzero(sample.ids == tokens.vision_start) == 2  # one pair of markers for all grids of a clip
    for unit, fps in zip(sample.media, (3.0, 1.7), strict=True):
        assert unit.second_per_grid == 2 / fps
        assert np.all(np.diff(unit.rows) == 1)
        steps = np.diff(sample.position_ids[0, unit.rows])
        assert np.allclose(steps, 2 / fps * 13, rtol=1e-6) and not np.array_equal(steps, np.round(steps))


def test_the_clock_is_the_one_of_the_sideband(folders: dict[str, Path], tmp_path: Path) -> None:
    folder = _copy(folders["vl"], tmp_path)
    pseudo.edit_config(folder, lambda c: c["omni_sideband"].update(position_id_per_seconds=25))
    assets = small(training_assets(config_of(folder, NO_SOUND)))
    turns: list[Any] = [["user", ("video", None)], ["assistant", ("text", "Yes.")]]
    mix = Mix(turns=turns, clips=[Clip(np.zeros((6, 32, 32, 3), np.uint8), 2.0)])
    sample = SampleTransform(assets).packed(mix.sample(), "made")
    assert np.diff(sample.position_ids[0, sample.media[0].rows]).tolist() == [25.0, 25.0]
    with pytest.raises(ConfigError, match=r"position_id_per_seconds: is 25.*drift apart"):
        training_assets(config_of(folder, audio_tower_path=str(folders["omni"])))


def _copy(folder: Path, to: Path) -> Path:
    """The small files of a model."""
    copied = to / "model"
    copied.mkdir()
    for file in folder.iterdir():
        if file.suffix != ".safetensors":
            (copied / file.name).write_bytes(file.read_bytes())
    return copied


FIELDS = [
    "position_id_per_seconds",
    "seconds_per_chunk",
    "audio_token_id",
    "audio_start_token_id",
    "audio_end_token_id",
    "user_token_id",
]


@pytest.mark.parametrize("field", FIELDS)
def test_a_missing_field_is_named_with_its_file(folders: dict[str, Path], tmp_path: Path, field: str) -> None:
    folder = _copy(folders["vl"], tmp_path)
    pseudo.edit_config(folder, lambda c: c["omni_sideband"].pop(field))
    with pytest.raises(ConfigError, match="missing") as caught:
        training_assets(config_of(folder, NO_SOUND))
    assert f"{folder}/config.json.omni_sideband.{field}:" in str(caught.value)


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("position_id_per_seconds", "13", "must be a number over 0"),
        ("position_id_per_seconds", 0, "must be a number over 0"),
        ("audio_token_id", 8287.5, "must be an id"),
        ("audio_token_id", 8287, "the tokenizer's audio is 8288"),
        ("im_end_token_id", 5, "the tokenizer's im_end is"),
    ],
)
def test_a_wrong_field_is_named(folders: dict[str, Path], tmp_path: Path, field: str, value: Any, said: str) -> None:
    folder = _copy(folders["vl"], tmp_path)
    pseudo.edit_config(folder, lambda c: c["omni_sideband"].update({field: value}))
    with pytest.raises(ConfigError, match=said) as caught:
        training_assets(config_of(folder, NO_SOUND))
    assert field in str(caught.value) and str(folder) in str(caught.value)


def test_the_sideband_may_come_from_elsewhere(
    folders: dict[str, Path], tmp_path: Path, silent: ProcessorAssets
) -> None:
    folder = _copy(folders["vl"], tmp_path)
    pseudo.edit_config(folder, lambda c: c.pop("omni_sideband"))
    with pytest.raises(ConfigError, match="omni_sideband: missing"):
        training_assets(config_of(folder, NO_SOUND, omni_sideband=True))
    with pytest.raises(ConfigError, match="without omni_sideband in use"):
        training_assets(config_of(folder, NO_SOUND))
    for other in (folders["vl"], folders["omni"], folders["omni"] / "config.json"):
        assets = training_assets(config_of(folder, NO_SOUND, omni_sideband=str(other)))
        assert small(assets).style == silent.style
    with pytest.raises(ConfigError, match="is a qwen3_moe, no qwen3_omni_moe"):
        training_assets(config_of(folder, NO_SOUND, omni_sideband=str(folders["text"])))


def test_it_can_be_turned_off(folders: dict[str, Path], tmp_path: Path) -> None:
    hub.vl_processor().save_pretrained(tmp_path)
    data = {"processor_path": str(tmp_path)}
    assert training_assets(config_of(folders["vl"], data, omni_sideband=False)).style.form == "qwen3_vl"
    with pytest.raises(ConfigError, match="writes time marks"):
        training_assets(config_of(folders["vl"], {**data, **NO_SOUND}))
    with pytest.raises(ConfigError, match="without omni_sideband in use"):
        training_assets(config_of(folders["vl"], omni_sideband=False))


@pytest.mark.parametrize(
    ("change", "kind", "said"),
    [
        ({"model_type": "qwen3_moe"}, ConfigError, "is a qwen3_moe; a qwen3_vl_moe"),
        ({"omni_sideband": [1]}, ConfigError, "omni_sideband: is list"),
        ({"video_token_id": 3}, ConfigError, "video"),
    ],
)
def test_what_does_not_go_together(
    folders: dict[str, Path], tmp_path: Path, change: dict[str, Any], kind: type[OmniloomError], said: str
) -> None:
    folder = _copy(folders["vl"], tmp_path)
    pseudo.edit_config(folder, lambda c: c.update(change))
    with pytest.raises(kind, match=said):
        training_assets(config_of(folder, NO_SOUND))


def test_a_router_that_does_not_divide_is_refused(folders: dict[str, Path], tmp_path: Path) -> None:
    folder = _copy(folders["vl"], tmp_path)
    pseudo.edit_config(folder, lambda c: c["text_config"].update(norm_topk_prob=False))
    with pytest.raises(UnsupportedError, match="norm_topk_prob"):
        training_assets(config_of(folder, NO_SOUND))


def test_sound_without_a_tower_is_refused(folders: dict[str, Path], silent: ProcessorAssets) -> None:
    with pytest.raises(ConfigError, match="use_audio_in_video: true, but a pseudo Qwen3-VL has no audio tower"):
        training_assets(config_of(folders["vl"]))
    turns: list[Any] = [["user", ("audio", None)], ["assistant", ("text", "Yes.")]]
    mix = Mix(turns=turns, sounds=[np.zeros(16000, np.int16)])
    _refused(silent, mix, "row 17: audios: holds 1")


@pytest.mark.parametrize("kind", ["image", "video"])
def test_a_text_model_refuses_pictures(folders: dict[str, Path], kind: str) -> None:
    assets = training_assets(config_of(folders["text"], audio_tower_path=str(folders["omni"])))
    assert assets.style.media == ("audio",) and assets.sound is not None
    turns: list[Any] = [["user", (kind, None)], ["assistant", ("text", "Yes.")]]
    frames = np.zeros((4, 32, 32, 3), np.uint8)
    media = {"images": [frames[0]]} if kind == "image" else {"clips": [Clip(frames, 2.0)]}
    _refused(assets, Mix(turns=turns, **media), f"row 17: {kind}s: holds 1")


def _refused(assets: ProcessorAssets, mix: Mix, said: str) -> None:
    """When it is laid out, and before, when its tokens are counted."""
    sample = mix.sample("17")
    with pytest.raises(UnsupportedError, match=said):
        SampleTransform(assets).packed(sample, "made")
    builder = LengthsBuilder(assets)
    packed_row_lengths(builder, sample.meta.model_dump_json())
    [(row, why)] = builder.lengths().faults
    assert row == 0 and said in why
