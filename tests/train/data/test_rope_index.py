"""Positions beyond what one call of the Hugging Face processors can express, and those that a naive rule gets wrong."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.train.data import hub
from tests.train.data.mixes import Mix, random_mix
from tests.train.data.packed import Clip
from tests.train.data.slow import SlowOmni
from train.data.processor import ProcessorAssets, load_assets
from train.data.sample import TrainSample
from train.data.transform import SampleTransform


@pytest.fixture(scope="module")
def assets() -> ProcessorAssets:
    return hub.small_pictures(load_assets(hub.TOKENIZER))


def _frames(count: int, height: int = 32, width: int = 32) -> np.ndarray:
    return np.zeros((count, height, width, 3), np.uint8)


def _sound(seconds: float) -> np.ndarray:
    return np.zeros(round(seconds * 16000), np.int16)


def _made(assets: ProcessorAssets, mix: Mix) -> TrainSample:
    return SampleTransform(assets).packed(mix.sample(), "made")


def _mix(*clips: Clip, text: str = "What?") -> Mix:
    parts: list[Any] = [("video", None) for _ in clips]
    turns: list[Any] = [["user", *parts, ("text", text)], ["assistant", ("text", "That.")]]
    return Mix(turns=turns, clips=list(clips))


@pytest.mark.parametrize("start", range(0, 150, 50))
def test_different_rates_with_and_without_sound_in_one_sample(assets: ProcessorAssets, start: int) -> None:
    for seed in range(start, start + 50):
        mix = random_mix(20_000 + seed, one_rate=False)
        sample, slow = _made(assets, mix), SlowOmni(mix, assets.encode, assets.tokens)
        assert sample.ids.tolist() == slow.ids, f"ids of mix {seed}"
        assert sample.labels.tolist() == slow.labels, f"labels of mix {seed}"
        expected = np.array(slow.positions, np.float32).T
        assert np.array_equal(sample.position_ids, expected), f"positions of mix {seed}"


@pytest.mark.parametrize("fps", [7.0, 0.9, 1.7, 24 / 7])
def test_grids_that_meet_a_sound_token_exactly(assets: ProcessorAssets, fps: float) -> None:
    mix = _mix(Clip(_frames(64), fps, _sound(64 / fps)))
    mix.fps, mix.with_sound = fps, True
    sample, found = _made(assets, mix), hub.omni_call(hub.omni_processor(), mix)
    assert np.array_equal(sample.ids, found["input_ids"][0].numpy())
    assert np.array_equal(sample.position_ids, hub.omni_positions(found, True, assets.tokens).numpy())


def test_text_goes_on_behind_the_last_stretch_of_one_kind(assets: ProcessorAssets) -> None:
    # one grid of 1 x 20 tokens, then 0.5 s of sound: 7 tokens, so the text is not behind the picture's width
    sample = _made(assets, _mix(Clip(_frames(1, 32, 640), 2.0, _sound(0.5))))
    sound = next(unit.rows for unit in sample.media if unit.kind == "audio")
    base = sample.position_ids[0, sound[0]]
    assert len(sound) == 7
    assert sample.position_ids[:, sound[-1]].tolist() == [base + 6] * 3
    assert sample.position_ids[:, sound[-1] + 1].tolist() == [base + 7] * 3
    video = next(unit.rows for unit in sample.media if unit.kind == "video")
    assert sample.position_ids[2, video[-1]] == base + 19


def test_positions_stay_fractional_behind_a_clip(assets: ProcessorAssets) -> None:
    sample = _made(assets, _mix(Clip(_frames(4), 1.7)))
    last = sample.media[0].rows[-1]
    after = sample.position_ids[:, last + 1 :]
    assert (after == after[0]).all()
    assert np.allclose(after[0], sample.position_ids[0, last] + 1 + np.arange(after.shape[1]))
    assert (after != np.floor(after)).all()


def test_each_clip_has_its_own_rate(assets: ProcessorAssets) -> None:
    sample = _made(assets, _mix(Clip(_frames(6), 2.0), Clip(_frames(6), 4.0)))
    rows = [unit.rows for unit in sample.media]
    times = [np.diff(sample.position_ids[0, r]).tolist() for r in rows]
    assert times == [[13.0, 13.0], [6.5, 6.5]]
    assert [unit.second_per_grid for unit in sample.media] == [1.0, 0.5]


@pytest.mark.parametrize("fps", [0.2, 0.5, 1.0, 1.894, 2.0, 3.996, 8.0, 29.97])
def test_picture_and_sound_of_one_moment_differ_by_less_than_a_sound_token(assets: ProcessorAssets, fps: float) -> None:
    sample = _made(assets, _mix(Clip(_frames(16), fps, _sound(16 / fps))))
    video, sound = (next(u.rows for u in sample.media if u.kind == kind) for kind in ("video", "audio"))
    heard = sample.position_ids[0, sound]
    for k, row in enumerate(video):
        moment = k * 2 / fps  # of the grid's first frame
        token = min(int(moment * 13), len(heard) - 1)
        assert abs(sample.position_ids[0, row] - heard[token]) < 1
        assert abs((heard[token] - heard[0]) / 13 - moment) < 1 / 13 + 1e-6


def test_text_alone_counts_up(assets: ProcessorAssets) -> None:
    sample = SampleTransform(assets).text([["user", ("text", "Hi")], ["assistant", ("text", "Yes")]], "made", "1")
    assert sample.position_ids.tolist() == [list(range(len(sample)))] * 3
    assert sample.num_text == len(sample)
