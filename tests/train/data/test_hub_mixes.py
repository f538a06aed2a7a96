"""300 random mixes of media, within what one call of the Hugging Face processors can express: the same ids, grids,
positions, pixels and log-mel."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from tests.train.data import hub
from tests.train.data.mixes import Mix, random_mix
from train.data.features import frames_to_patches, log_mel
from train.data.processor import ProcessorAssets, load_assets
from train.data.sample import MediaUnit, TrainSample
from train.data.transform import SampleTransform, decode_unit

OMNI_MIXES, VL_MIXES = 200, 100


@pytest.fixture(scope="module")
def omni() -> tuple[Any, ProcessorAssets]:
    return hub.omni_processor(), hub.small_pictures(load_assets(hub.TOKENIZER))


@pytest.fixture(scope="module")
def vision(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, ProcessorAssets]:
    processor = hub.vl_processor()
    folder = tmp_path_factory.mktemp("vl")
    processor.save_pretrained(folder)
    return processor, hub.small_pictures(load_assets(folder))


def _units(sample: TrainSample, kind: str) -> list[MediaUnit]:
    """Decoded units in the order of the media of that kind."""
    return [decode_unit(unit) for unit in sample.media if unit.kind == kind]


def _patches(units: list[MediaUnit], spec: Any) -> torch.Tensor:
    return torch.cat([frames_to_patches(torch.from_numpy(u.values), u.size, spec) for u in units])


def _check_vision(sample: TrainSample, found: dict[str, torch.Tensor], assets: ProcessorAssets) -> None:
    for kind, grid, pixels, spec in (
        ("image", "image_grid_thw", "pixel_values", assets.image),
        ("video", "video_grid_thw", "pixel_values_videos", assets.video),
    ):
        units = _units(sample, kind)
        assert (grid in found) == bool(units)
        if units:
            assert [list(unit.grid) for unit in units] == found[grid].tolist()
            torch.testing.assert_close(_patches(units, spec), found[pixels], atol=1e-4, rtol=0)


def _check_sound(sample: TrainSample, found: dict[str, torch.Tensor], assets: ProcessorAssets) -> None:
    units = _units(sample, "audio")
    assert ("input_features" in found) == bool(units)
    if not units:
        return
    lengths = found["feature_attention_mask"].sum(-1)
    assert [unit.num_mel for unit in units] == lengths.tolist()
    mels = [log_mel(torch.from_numpy(unit.values), assets.sound) for unit in units]
    for mel, features, length in zip(mels, found["input_features"], lengths, strict=True):
        # a shorter sound of the same call is padded with silence, where one alone is mirrored at its end
        whole = int(length) if length == lengths.max() else int(length) - 2
        torch.testing.assert_close(mel[:, :whole], features[:, :whole], atol=1e-4, rtol=0)


@pytest.mark.parametrize("start", range(0, OMNI_MIXES, 25))
def test_omni_mixes_are_those_of_the_processor(omni: tuple[Any, ProcessorAssets], start: int) -> None:
    processor, assets = omni
    transform = SampleTransform(assets)
    for seed in range(start, start + 25):
        mix = random_mix(seed)
        sample, found = transform.packed(mix.sample(), "made"), hub.omni_call(processor, mix)
        assert np.array_equal(sample.ids, found["input_ids"][0].numpy()), f"ids of mix {seed}"
        positions = hub.omni_positions(found, mix.with_sound, assets.tokens)
        assert sample.position_ids.dtype == np.float32
        assert np.array_equal(sample.position_ids, positions.numpy()), f"positions of mix {seed}"
        _check_vision(sample, found, assets)
        _check_sound(sample, found, assets)
        _check_targets(sample, mix, assets)


@pytest.mark.parametrize("start", range(0, VL_MIXES, 25))
def test_vl_mixes_are_those_of_the_processor(vision: tuple[Any, ProcessorAssets], start: int) -> None:
    processor, assets = vision
    transform = SampleTransform(assets)
    for seed in range(start, start + 25):
        mix = random_mix(10_000 + seed, sound=False)
        sample, found = transform.packed(mix.sample(), "made"), hub.vl_call(processor, mix)
        assert np.array_equal(sample.ids, found["input_ids"][0].numpy()), f"ids of mix {seed}"
        assert sample.position_ids.dtype == np.int64
        assert np.array_equal(sample.position_ids, hub.vl_positions(found).numpy()), f"positions of mix {seed}"
        _check_vision(sample, found, assets)
        _check_targets(sample, mix, assets)


def _check_targets(sample: TrainSample, mix: Mix, assets: ProcessorAssets) -> None:
    """Every placeholder belongs to exactly one unit, of its kind."""
    expected = {"video": assets.tokens.video, "image": assets.tokens.image, "audio": assets.tokens.audio}
    for kind, token in expected.items():
        rows = [unit.rows for unit in sample.media if unit.kind == kind]
        claimed = np.sort(np.concatenate(rows)) if rows else np.zeros(0, np.int64)
        assert np.array_equal(claimed, np.flatnonzero(sample.ids == token))
    assert sample.num_video + sample.num_audio + sample.num_image + sample.num_text == len(sample)
