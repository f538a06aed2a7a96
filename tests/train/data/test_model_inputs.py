"""A batch as a model takes it, with and without sequence parallelism."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.train.data import hub
from tests.train.data.mixes import Mix, random_mix
from train.data.batch import Batch, BatchPlace
from train.data.collate import Collator
from train.data.device import make_features
from train.data.model_inputs import batch_segments, model_inputs
from train.data.processor import ProcessorAssets, load_assets
from train.data.transform import SampleTransform


@pytest.fixture(scope="module")
def assets() -> ProcessorAssets:
    return load_assets(hub.TOKENIZER)


def mixes() -> list[Mix]:
    """Of every kind of medium."""
    found = [random_mix(seed) for seed in range(6)]
    assert any(mix.clips for mix in found) and any(mix.images for mix in found) and any(mix.sounds for mix in found)
    return found


def packed(assets: ProcessorAssets, rank: int = 0, size: int = 1, pad: int = 64) -> Batch:
    transform = SampleTransform(assets)
    samples = [transform.packed(mix.sample(str(n)), "made") for n, mix in enumerate(mixes())]
    return Collator(sp_rank=rank, sp_size=size, pad_multiple=pad)(samples, BatchPlace(0, 0, 0))


def test_rows_segments_and_features_are_those_of_the_batch(assets: ProcessorAssets) -> None:
    batch = packed(assets)
    inputs = model_inputs(batch, assets, loss_scale=torch.tensor(0.5), aux_scale=0.25)
    assert torch.equal(inputs.ids, batch.ids[0]) and inputs.labels is not None
    assert torch.equal(inputs.labels, batch.labels[0])
    assert torch.equal(inputs.position_ids, batch.position_ids[:, 0])
    assert inputs.segments.lengths == (*batch.sample_tokens.tolist(), batch.num_pad)
    assert torch.equal(inputs.segments.cu_seqlens, batch.cu_seqlens)
    assert inputs.segments.max_seqlen == batch.max_seqlen
    assert inputs.num_valid == batch.length - batch.num_pad < batch.length
    assert inputs.loss_scale == 0.5 and inputs.aux_scale == 0.25
    ids, tokens = inputs.ids, assets.tokens
    assert inputs.vision_rows is not None and inputs.audio_rows is not None
    pictures = torch.sort(inputs.vision_rows).values
    assert torch.equal(pictures, torch.nonzero((ids == tokens.image) | (ids == tokens.video))[:, 0])
    assert torch.equal(torch.sort(inputs.audio_rows).values, torch.nonzero(ids == tokens.audio)[:, 0])
    assert inputs.patches is not None and len(inputs.patches) == 4 * len(inputs.vision_rows)
    made = make_features(batch, assets)
    ready = model_inputs(replace(batch, features=made))
    assert ready.patches is made.patches and ready.mel is made.mel
    assert torch.equal(inputs.patches, made.patches) and inputs.mel is not None and torch.equal(inputs.mel, made.mel)


def test_slices_know_their_valid_rows(assets: ProcessorAssets) -> None:
    whole = packed(assets, size=1, pad=512)
    slices = [packed(assets, rank, 4, 128) for rank in range(4)]
    valid = [model_inputs(part, assets).num_valid for part in slices]
    length = whole.length // 4
    assert sum(valid) == whole.length - whole.num_pad
    assert valid == sorted(valid, reverse=True) and valid[0] == length
    for part in slices:
        inputs = model_inputs(part, assets)
        assert inputs.vision_rows is None and inputs.audio_rows is None
        assert inputs.segments.total == whole.length and len(inputs.ids) == length


def test_a_sample_without_tokens_is_no_segment(assets: ProcessorAssets) -> None:
    batch = packed(assets)
    tokens = torch.cat([batch.sample_tokens, torch.zeros(1, dtype=torch.int64)])
    bounds = torch.from_numpy(np.cumsum([0, *tokens.tolist(), batch.num_pad]).astype(np.int32))
    found = batch_segments(replace(batch, sample_tokens=tokens, cu_seqlens=bounds))
    assert torch.equal(found.cu_seqlens, batch.cu_seqlens) and found.total == batch.length


def test_dummies_stand_in_for_what_a_batch_lacks(assets: ProcessorAssets) -> None:
    full = model_inputs(packed(assets), assets, dummy_towers=True)
    assert not full.dummy_vision and not full.dummy_audio
    empty = Collator()([], BatchPlace(0, 0, 0))
    inputs = model_inputs(empty, assets, dummy_towers=True)
    assert inputs.dummy_vision and inputs.dummy_audio and inputs.num_valid == 0
    assert not model_inputs(empty, assets).dummy_vision
    with pytest.raises(ValueError, match="without features"):
        model_inputs(empty)
