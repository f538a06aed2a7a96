"""Sizes of pictures against the Hugging Face processors with their own resize: tiny, huge, thin, whole tokens."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from schemas.chat import ChatStyle
from schemas.media_counts import image_size, video_size
from schemas.sample import ImageMeta, Origin, VideoMeta
from tests.train.data import hub
from tests.train.data.mixes import Mix
from train.data.features import frames_to_patches
from train.data.processor import ProcessorAssets, load_assets
from train.data.transform import SampleTransform, decode_unit

SIZES = [
    *[(32, 32), (33, 33), (32, 64), (31, 64), (20, 20), (1, 1), (1, 200), (10, 1000), (6, 1200), (1199, 6), (15, 16)],
    *[(56, 56), (64, 64), (48, 48), (60, 60), (161, 121), (384, 384), (352, 384)],
]
LARGE = [(4351, 4351), (4352, 4352)]  # images only
CLIPS = [
    *((n, *size) for n in (1, 2, 5) for size in SIZES),
    (2, 1080, 1920),
    (2, 1088, 1920),
    (3, 864, 928),
    (61, 64, 64),
]


@pytest.fixture(scope="module", params=["omni", "vl"])
def both(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, ProcessorAssets]:
    if request.param == "omni":
        return hub.omni_processor(), load_assets(hub.TOKENIZER)
    folder = tmp_path_factory.mktemp("vl")
    hub.vl_processor().save_pretrained(folder)
    return hub.vl_processor(), load_assets(folder)


def _image(height: int, width: int) -> ImageMeta:
    return ImageMeta(width=width, height=height, codec="png", origin=Origin(uri="i"))


def _clip(frames: int, height: int, width: int) -> VideoMeta:
    times = [k / 2 for k in range(frames)]
    return VideoMeta(
        num_frames=frames,
        width=width,
        height=height,
        codec="png",
        video_fps=2.0,
        frame_times_s=times,
        shown_times_s=times,
        duration_s=frames / 2,
        sampling="time_grid",
        origin=Origin(uri="c"),
    )


def _hub_image(processor: Any, height: int, width: int) -> tuple[int, int]:
    found = processor.image_processor(images=[torch.zeros(3, height, width, dtype=torch.uint8)], return_tensors="pt")
    _, rows, columns = found["image_grid_thw"][0].tolist()
    return rows * 16, columns * 16


def _hub_clip(processor: Any, frames: int, height: int, width: int, **how: Any) -> tuple[int, int]:
    """As a call of the whole processor: with its own arguments of the video processor."""
    how = dict(getattr(processor, "videos_kwargs", {})) | how
    video = torch.zeros(frames, 3, height, width, dtype=torch.uint8)
    found = processor.video_processor([video], do_sample_frames=False, return_tensors="pt", **how)
    _, rows, columns = found["video_grid_thw"][0].tolist()
    return rows * 16, columns * 16


def test_images_have_the_size_that_the_processor_gives(both: tuple[Any, ProcessorAssets]) -> None:
    processor, assets = both
    for height, width in [*SIZES, *LARGE]:
        assert image_size(_image(height, width), assets.style) == _hub_image(processor, height, width), (height, width)


@pytest.mark.parametrize("capped", [False, True])
def test_clips_have_the_size_that_the_processor_gives(both: tuple[Any, ProcessorAssets], capped: bool) -> None:
    processor, assets = both
    style = _capped(assets.style) if capped else assets.style
    for frames, height, width in CLIPS:
        if frames == 1 and style.pixel_limits.per_clip:
            continue  # the processor of Qwen3-VL refuses one frame
        expected = _hub_clip(processor, frames, height, width, cap_pixels_per_frame=capped)
        if not style.pixel_limits.per_clip and _kept(height, width, style):
            expected = height, width
        assert video_size(_clip(frames, height, width), style) == expected, (frames, height, width)


def _capped(style: ChatStyle) -> ChatStyle:
    return replace(style, pixels=replace(style.pixel_limits, capped=True))


def _kept(height: int, width: int, style: ChatStyle) -> bool:
    """What packing may have made smaller on purpose."""
    return height % 32 == width % 32 == 0 and style.pixel_limits.video_floor <= height * width < 131072


def test_one_frame_of_a_clip_counts_as_two(both: tuple[Any, ProcessorAssets]) -> None:
    processor, assets = both
    if assets.style.form == "qwen3_vl":
        for height, width in SIZES[::3]:
            assert video_size(_clip(1, height, width), assets.style) == _hub_clip(processor, 2, height, width)


@pytest.mark.parametrize("sides", [(6, 1600), (1600, 6)])
def test_t12_thin_pictures_are_refused_as_by_the_processor(both: tuple[Any, ProcessorAssets], sides: Any) -> None:
    processor, assets = both
    for ours in (lambda: image_size(_image(*sides), assets.style), lambda: _hub_image(processor, *sides)):
        with pytest.raises(ValueError, match="aspect ratio"):
            ours()


@pytest.mark.parametrize("sides", [(32, 32), (20, 20), (121, 161), (70, 300)])
def test_resized_pixels_are_those_of_the_processor(both: tuple[Any, ProcessorAssets], sides: tuple[int, int]) -> None:
    processor, assets = both
    chance = np.random.default_rng(0)
    image = chance.integers(0, 256, (*sides, 3), dtype=np.uint8)
    turns: list[Any] = [["user", ("image", None)], ["assistant", ("text", "Yes.")]]
    (unit,) = SampleTransform(assets).packed(Mix(turns=turns, images=[image]).sample(), "made").media
    decoded = decode_unit(unit)
    assert decoded.values is not None and unit.size is not None
    found = frames_to_patches(torch.from_numpy(decoded.values), unit.size, assets.image)
    expected = processor.image_processor(images=[image], return_tensors="pt")["pixel_values"]
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)


def test_the_limits_come_from_the_checkpoint(tmp_path: Any) -> None:
    processor = hub.vl_processor()
    processor.image_processor.size = {"shortest_edge": 4096, "longest_edge": 65536}
    processor.save_pretrained(tmp_path)
    assets = load_assets(tmp_path)
    assert assets.style.pixel_limits.image == (4096, 65536)
    assert image_size(_image(512, 512), assets.style) == (256, 256)
    before = load_assets(hub.TOKENIZER)
    assert before.style.pixel_limits.video == (131072, 786432)
    assert assets.fingerprint != before.fingerprint
