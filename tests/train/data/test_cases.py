"""The handed cases T.. that the transform answers, each with the numbers it names."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from schemas.chat import ChatStyle, MediaCounts, VideoCount, build_layout
from schemas.media_counts import video_count
from tests.train.data import hub
from tests.train.data.mixes import Mix
from tests.train.data.packed import Clip
from train.data.features import log_mel
from train.data.processor import ProcessorAssets, load_assets
from train.data.rope_index import position_ids
from train.data.transform import SampleTransform, decode_unit


@pytest.fixture(scope="module")
def assets() -> ProcessorAssets:
    return load_assets(hub.TOKENIZER)


def _turns(*media: str) -> list[Any]:
    parts = [(kind, None) for kind in media]
    return [["user", *parts, ("text", "What?")], ["assistant", ("text", "That.")]]


def test_t01_sound_is_not_cut_at_30_s(assets: ProcessorAssets) -> None:
    mix = Mix(turns=_turns("audio"), sounds=[np.zeros(int(62.455 * 16000), np.int16)])
    sample = SampleTransform(assets).packed(mix.sample(), "made")
    assert sample.num_audio == 812
    unit = decode_unit(sample.media[0])
    assert assets.sound is not None and unit.values is not None
    assert log_mel(torch.from_numpy(unit.values), assets.sound).shape == (128, 6245)


def test_t02_frames_of_4_hz_are_half_a_second_apart(assets: ProcessorAssets) -> None:
    clip = Clip(np.zeros((20, 32, 32, 3), np.uint8), 4.0, np.zeros(5 * 16000, np.int16))
    transform = SampleTransform(hub.small_pictures(assets))  # one token per grid
    video, sound = transform.packed(Mix(turns=_turns("video"), clips=[clip]).sample(), "made").media
    assert video.second_per_grid == 0.5
    assert (len(video.rows), len(sound.rows)) == (10, 65)
    between = np.diff([*np.searchsorted(sound.rows, video.rows), 65])
    assert set(between.tolist()) == {6, 7}


def test_t03_time_marks_of_12_frames_at_2_hz() -> None:
    meta = Mix(turns=_turns("video"), clips=[Clip(np.zeros((12, 32, 32, 3), np.uint8), 2.0)]).sample().meta.videos[0]
    count = video_count(meta, ChatStyle(form="qwen3_vl"))
    assert [f"{time:.1f}" for time in count.grid_times_s] == ["0.2", "1.2", "2.2", "3.2", "4.2", "5.2"]
    assert count.grid[0] == 6


def test_t11_positions_of_per_frame_spans(assets: ProcessorAssets) -> None:
    turns = [["user", ("text", "12"), ("video", None), ("text", "99")]]
    style = ChatStyle(form="qwen3_vl", wrap_video=False)
    counts = MediaCounts([VideoCount((3, 4, 4), 1.0, 0, (0.0, 1.0, 2.0))])
    tokens = replace(assets.tokens, im_start=1, im_end=9)

    def encode(text: str) -> list[int]:  # 2 ids for each time mark, as the case has
        marks = text.count("seconds>")
        return [3, 4] * marks if marks and "user" not in text else [2, 3, 4] if marks else [9]

    layout = build_layout(turns, encode, tokens, counts, style)
    span = [tokens.vision_start, *[tokens.video] * 4, tokens.vision_end]
    assert layout.ids.tolist() == [1, 2, *[3, 4, *span] * 3, 9, 9, 9]
    expected = [0, 1, 2, 3, 4, *[5] * 4, 7, 8, 9, 10, *[11] * 4, 13, 14, 15, 16, *[17] * 4, 19, 20, 21]
    assert position_ids(layout, counts, style)[0].tolist() == [*expected, 22]


def test_t12_sizes_that_are_no_whole_tokens_are_resized(assets: ProcessorAssets) -> None:
    transform = SampleTransform(assets)
    odd = np.random.default_rng(0).integers(0, 256, (2, 121, 161, 3), dtype=np.uint8)
    tiny = np.zeros((20, 20, 3), np.uint8)
    sample = transform.packed(
        Mix(turns=_turns("video", "image"), clips=[Clip(odd, 2.0)], images=[tiny]).sample(), "made"
    )
    video, image = (decode_unit(unit) for unit in sample.media)
    assert video.values is not None and video.values.shape == (2, 121, 161, 3)
    assert video.size is not None and video.grid is not None and image.size is not None
    assert all(side % 32 == 0 for side in (*video.size, *image.size))
    assert video.size[0] * video.size[1] >= 128 * 32 * 32
    assert video.grid == (1, video.size[0] // 16, video.size[1] // 16)
    assert image.size == (64, 64)


def test_t12_whole_tokens_stay_as_packed_within_the_limits(assets: ProcessorAssets) -> None:
    for sides, expected in (((64, 96), (64, 96)), ((32, 64), (256, 512)), ((1088, 1920), (640, 1152))):
        clip = Clip(np.zeros((2, *sides, 3), np.uint8), 2.0)
        sample = SampleTransform(assets).packed(Mix(turns=_turns("video"), clips=[clip]).sample(), "made")
        assert sample.media[0].size == expected


def test_t12_a_tiny_clip_is_96_pixels_wide_or_more(assets: ProcessorAssets) -> None:
    clip = Clip(np.zeros((2, 20, 20, 3), np.uint8), 2.0)
    sample = SampleTransform(assets).packed(Mix(turns=_turns("video"), clips=[clip]).sample(), "made")
    assert sample.media[0].size == (384, 384)  # the case's 96x96 is of a processor with other limits


@pytest.mark.parametrize("count", [1, 2, 5])
def test_a17_odd_frame_counts_repeat_the_last_frame(assets: ProcessorAssets, count: int) -> None:
    clip = Clip(np.zeros((count, 64, 64, 3), np.uint8), 2.0)
    sample = SampleTransform(assets).packed(Mix(turns=_turns("video"), clips=[clip]).sample(), "made")
    assert sample.media[0].grid == (-(-count // 2), 4, 4)
    assert decode_unit(sample.media[0]).values.shape[0] == count  # type: ignore[union-attr]
