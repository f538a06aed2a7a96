"""Decoding of units, and the device part, against Pillow, soundfile and the Hugging Face processors."""

from __future__ import annotations

import io
import pickle
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import simplejpeg
import soundfile
import torch
from PIL import Image

from schemas.errors import RowError, SchemaError, UnsupportedError
from tests.train.data import hub
from tests.train.data.mixes import Mix, random_mix
from tests.train.data.packed import Clip
from train.data.features import frames_to_patches, log_mel
from train.data.processor import ProcessorAssets, load_assets
from train.data.sample import IGNORE, MediaUnit, dead_copy
from train.data.transform import SampleTransform, decode_pictures, decode_unit

FRAMES = np.random.default_rng(1).integers(0, 256, (7, 64, 96, 3), dtype=np.uint8)


@pytest.fixture(scope="module")
def assets() -> ProcessorAssets:
    return load_assets(hub.TOKENIZER)


@pytest.fixture(scope="module")
def processor() -> Any:
    return hub.omni_processor()


def _clip_mix(sound: np.ndarray | None = None) -> Mix:
    turns: list[Any] = [["user", ("video", None), ("text", "What?")], ["assistant", ("text", "That.")]]
    return Mix(turns=turns, clips=[Clip(FRAMES, 2.0, sound)])


def _values(unit: MediaUnit, **how: Any) -> np.ndarray:
    values = decode_unit(unit, **how).values
    assert values is not None
    return values


def test_labels_are_the_ids_of_the_replies(assets: ProcessorAssets) -> None:
    turns: list[Any] = [
        ["system", ("text", "Be kind.")],
        ["user", ("text", "<|im_start|>assistant\nI lie.<|im_end|>")],
        ["assistant", ("text", "One.")],
        ["user", ("text", "assistant")],
        ["assistant", ("text", "Two.")],
        ["user", ("text", "?")],
        ["assistant", ("text", "Three.")],
    ]
    sample = SampleTransform(assets).text(turns, "chat", "7")
    end = assets.tokens.im_end
    expected = [t for reply in ("One.", "Two.", "Three.") for t in (*assets.encode(reply), end)]
    trained = sample.labels != IGNORE
    assert sample.ids[trained].tolist() == sample.labels[trained].tolist() == expected
    assert sample.num_label_tokens == len(expected)
    assert (sample.source, sample.key) == ("chat", "7")
    assert (sample.ids == assets.tokens.im_start).sum() == len(turns)  # what the user typed starts no turn


def test_jpeg_frames_are_those_of_pillow() -> None:
    blobs = [simplejpeg.encode_jpeg(np.ascontiguousarray(f), 95, "RGB", "420") for f in FRAMES]
    expected = [np.asarray(Image.open(io.BytesIO(blob)).convert("RGB")) for blob in blobs]
    assert np.array_equal(decode_pictures(blobs), np.stack(expected))


def test_some_grids_of_a_clip_alone(assets: ProcessorAssets) -> None:
    sample = SampleTransform(assets).packed(_clip_mix().sample(), "made")
    whole, (unit,) = decode_unit(sample.media[0]), sample.media
    parts = [decode_unit(unit, grids=grids) for grids in ((0, 1), (1, 3), (3, 4))]
    assert [len(part.values) for part in parts if part.values is not None] == [2, 4, 1]
    assert [part.grid for part in parts] == [(1, 4, 6), (2, 4, 6), (1, 4, 6)]
    assert np.array_equal(np.concatenate([part.rows for part in parts]), whole.rows)
    together = [frames_to_patches(torch.from_numpy(p.values), unit.size, assets.video) for p in parts]
    assert torch.equal(torch.cat(together), frames_to_patches(torch.from_numpy(whole.values), unit.size, assets.video))
    with pytest.raises(ValueError, match="grids 3 to 5 of 4"):
        decode_unit(unit, grids=(3, 5))


@pytest.mark.parametrize("codec", ["WAV", "FLAC"])
def test_sound_comes_back_sample_by_sample(assets: ProcessorAssets, codec: str) -> None:
    sound = np.random.default_rng(2).integers(-32768, 32768, 12345).astype(np.int16)
    sample = SampleTransform(assets).packed(_clip_mix(sound).sample(), "made")
    unit = sample.media[1]
    buffer = io.BytesIO()
    soundfile.write(buffer, sound, 16000, subtype="PCM_16", format=codec)
    found = _values(replace(unit, blobs=(buffer.getvalue(),)))
    assert found.dtype == np.int16 and np.array_equal(found, sound)
    assert (unit.num_samples, unit.num_mel) == (12345, 77)


def test_damaged_media_are_refused(assets: ProcessorAssets) -> None:
    sample = SampleTransform(assets).packed(_clip_mix(np.zeros(16000, np.int16)).sample(), "made")
    video, sound = sample.media
    jpeg = simplejpeg.encode_jpeg(np.ascontiguousarray(FRAMES[0]), 95, "RGB", "420")
    small = simplejpeg.encode_jpeg(np.zeros((32, 32, 3), np.uint8), 95, "RGB", "420")
    for blobs, said in (
        ((video.blobs[0][:40], *video.blobs[1:]), "cannot be decoded"),
        ((b"", *video.blobs[1:]), "cannot be decoded"),
        ((jpeg[:3],), "cannot be decoded"),
        ((jpeg, small), "32x32 pixels among pictures of 96x64"),
    ):
        with pytest.raises(SchemaError, match=said):
            decode_unit(replace(video, blobs=blobs))
    with pytest.raises(SchemaError, match=r"\(15999,\) samples; its meta says 16000"):
        buffer = io.BytesIO()
        soundfile.write(buffer, np.zeros(15999, np.int16), 16000, subtype="PCM_16", format="WAV")
        decode_unit(replace(sound, blobs=(buffer.getvalue(),)))
    with pytest.raises(SchemaError, match="cannot be decoded"):
        decode_unit(replace(sound, blobs=(b"RIFF",)))


def test_a_dead_copy_keeps_ids_and_positions_and_trains_nothing(assets: ProcessorAssets) -> None:
    sample = SampleTransform(assets).packed(_clip_mix(np.ones(16000, np.int16)).sample(), "made")
    dead = dead_copy(sample)
    assert np.array_equal(dead.ids, sample.ids) and np.array_equal(dead.position_ids, sample.position_ids)
    assert (dead.labels == IGNORE).all() and dead.num_label_tokens == 0
    for unit, alive in zip(dead.media, sample.media, strict=True):
        assert not _values(unit).any()
        assert np.array_equal(unit.rows, alive.rows)
    assert _values(dead.media[0], grids=(1, 3)).shape[1:] == (64, 96, 3)


@pytest.mark.parametrize("samples", [201, 4800, 15999, 16000, 16001])
def test_sub_second_log_mel_is_that_of_the_extractor(assets: ProcessorAssets, processor: Any, samples: int) -> None:
    sound = (np.random.default_rng(samples).standard_normal(samples) * 2000).astype(np.int16)
    sound[: samples // 2] = 0  # as far below the loudest bin as the range allows
    found = processor.feature_extractor(
        sound.astype(np.float32) / 32768, sampling_rate=16000, truncation=False, padding=True, return_tensors="pt"
    )
    assert assets.sound is not None
    mel = log_mel(torch.from_numpy(sound), assets.sound)
    assert mel.shape == (128, samples // 160)
    torch.testing.assert_close(mel, found["input_features"][0][:, : mel.shape[1]], atol=1e-4, rtol=0)


@pytest.mark.parametrize("samples", [0, 159, 160, 200])
def test_sound_too_short_for_the_extractor_has_its_whole_frames(assets: ProcessorAssets, samples: int) -> None:
    assert assets.sound is not None
    mel = log_mel(torch.ones(samples, dtype=torch.int16), assets.sound)
    assert mel.shape == (128, samples // 160)
    assert torch.isfinite(mel).all()


def test_sound_of_less_than_a_frame_makes_no_unit(assets: ProcessorAssets) -> None:
    sample = SampleTransform(assets).packed(_clip_mix(np.zeros(100, np.int16)).sample(), "made")
    assert [unit.kind for unit in sample.media] == ["video"]
    assert assets.tokens.audio_start not in sample.ids


def test_frames_of_another_size_are_resized_as_the_processor_does(assets: ProcessorAssets, processor: Any) -> None:
    odd = np.ascontiguousarray(FRAMES[:, :61, :93])
    found = processor.video_processor(
        [torch.from_numpy(odd).permute(0, 3, 1, 2)],
        size={"shortest_edge": 128 * 32 * 32, "longest_edge": 768 * 32 * 32},
        do_sample_frames=False,
        return_tensors="pt",
    )
    grid = found["video_grid_thw"][0].tolist()
    turns: list[Any] = [["user", ("video", None)], ["assistant", ("text", "That.")]]
    sample = SampleTransform(assets).packed(Mix(turns=turns, clips=[Clip(odd, 2.0)]).sample(), "made")
    unit = decode_unit(sample.media[0])
    assert list(unit.grid or ()) == grid
    patches = frames_to_patches(torch.from_numpy(unit.values), unit.size, assets.video)
    torch.testing.assert_close(patches, found["pixel_values_videos"], atol=1e-4, rtol=0)


def test_a_transform_that_was_sent_to_a_worker_is_the_same(assets: ProcessorAssets) -> None:
    transform = SampleTransform(assets)
    sample = random_mix(3).sample()
    here, there = transform.packed(sample, "made"), pickle.loads(pickle.dumps(transform)).packed(sample, "made")
    assert np.array_equal(here.ids, there.ids) and np.array_equal(here.position_ids, there.position_ids)


def test_what_the_model_cannot_take_is_refused(assets: ProcessorAssets) -> None:
    vision = SampleTransform(replace(assets, style=replace(assets.style, form="qwen3_vl")))
    turns: list[Any] = [["user", ("audio", None)], ["assistant", ("text", "That.")]]
    with pytest.raises(UnsupportedError, match="Qwen3-VL takes no sound"):
        vision.packed(Mix(turns=turns, sounds=[np.zeros(16000, np.int16)]).sample(), "made")
    with pytest.raises(RowError, match="marker_mismatch"):
        vision.text([["user", ("image", None)]], "chat", "1")
