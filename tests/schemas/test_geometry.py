"""The arithmetic of media tokens against the libraries that models are trained with."""

import pytest
import torch
from qwen_omni_utils.v2_5 import vision_process as qwen
from transformers.models.qwen3_omni_moe import modeling_qwen3_omni_moe as modeling

from schemas import geometry

SIZES = [(h, w) for h in (20, 96, 121, 360, 720, 1079, 2160) for w in (20, 161, 480, 1280, 1921, 3840)]


@pytest.mark.parametrize("factor", [28, 32])
def test_smart_resize_equals_qwen_utils(factor):
    limits = [(4 * factor**2, 16384 * factor**2), (128 * factor**2, 768 * factor**2), (3136, 602112)]
    for low, high in limits:
        for height, width in SIZES:
            if max(height, width) / min(height, width) < geometry.MAX_ASPECT_RATIO:
                expected = qwen.smart_resize(height, width, factor, low, high)
                assert geometry.smart_resize(height, width, factor, low, high) == expected


def test_thin_pictures_are_refused_and_never_vanish():
    with pytest.raises(ValueError, match=r"1600x6 has an aspect ratio of 267"):
        geometry.smart_resize(6, 1600, 32, 1, 10**6)
    assert min(geometry.smart_resize(30, 5000, 32, 1024, 32 * 32 * 10)) == 32


@pytest.mark.parametrize("fps", [0.5, 1, 2, 4])
def test_frame_counts_equal_qwen_utils(fps):
    for total in [2, 3, 4, 5, 7, 25, 132, 899, 18000]:
        for rate in (5, 23.976, 25, 29.97, 60):
            for bounds in ({}, {"min_frames": 3, "max_frames": 9}):
                low, high = bounds.get("min_frames", 4), bounds.get("max_frames", 768)
                if total < high or not bounds:
                    high_for_qwen = min(high, total)
                else:
                    high_for_qwen = high
                expected = qwen.smart_nframes({"fps": fps, "min_frames": low, "max_frames": high_for_qwen}, total, rate)
                assert geometry.smart_nframes(total, rate, fps, low, high) == expected


def test_one_picture_is_no_clip():
    with pytest.raises(ValueError, match="1 pictures"):
        geometry.smart_nframes(1, 25, 2.0, 4, 768)


def test_frame_budget_of_long_clips():
    low, high = geometry.frame_pixel_limits(10, 32, None, None, None)
    assert (low, high) == (128 * 1024, 768 * 1024)
    assert geometry.frame_pixel_limits(768, 32, None, None, None)[1] == pytest.approx(128000 * 1024 * 0.9 / 768 * 2)
    assert geometry.frame_pixel_limits(100_000, 32, None, None, None)[1] == int(128 * 1024 * 1.05)
    assert geometry.frame_pixel_limits(10, 32, 4096, 200_000, None) == (4096, 200_000)


@pytest.mark.parametrize(
    ("num_samples", "tokens"), [(int(62.455 * 16000), 812), (16000, 13), (0, 0), (160, 1), (80000, 65)]
)
def test_sound_tokens(num_samples, tokens):
    assert geometry.audio_tokens(num_samples) == tokens


def test_sound_tokens_equal_transformers():
    """The convolution arithmetic of the audio tower, for every length of a window and more."""
    lengths = torch.arange(1, 1000)
    expected = modeling._get_feat_extract_output_lengths(lengths)
    assert [geometry.audio_tokens(int(n) * 160) for n in lengths] == expected.tolist()


def test_grids():
    assert geometry.video_grid(5, 352, 640) == (3, 22, 40)
    assert geometry.video_tokens(5, 352, 640) == 3 * 11 * 20
    assert geometry.image_tokens(64, 96) == 6
