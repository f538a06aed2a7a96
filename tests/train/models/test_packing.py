"""A row gives the same alone, beside others, in pieces and before a pad tail."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from tests.train.data.mixes import Mix
from tests.train.models import media
from tests.train.models.families import (
    Pair,
    assert_equal_gradients,
    make_pair,
    run_ours,
    run_reference,
    text_config,
)
from train.data.model_inputs import model_inputs
from train.data.processor import ProcessorAssets
from train.models.audio import tokens_of
from train.models.omni_thinker import OmniThinker

MIXES = [
    media.everything_mix(),
    media.text_mix(),
    media.audio_mix(),
    media.clip_with_sound_mix(),
    media.video_mix(),
    media.image_mix(),
]


@pytest.fixture(scope="module")
def pair() -> Pair:
    return make_pair("omni")


@pytest.fixture(scope="module")
def thinker(pair: Pair) -> OmniThinker:
    assert isinstance(pair.ours, OmniThinker)
    return pair.ours


@pytest.fixture(scope="module")
def assets() -> ProcessorAssets:
    return media.omni_assets()


def test_packed_rows_equal_rows_alone(thinker: OmniThinker, assets: ProcessorAssets) -> None:
    """Loss and gradients too: the packed loss is the mean over all labels."""
    packed = media.batch_of(assets, MIXES)
    output, gradients = run_ours(thinker, model_inputs(packed, assets, aux_scale=0))
    assert output.logits is not None and output.token_loss is not None
    labels = (packed.labels != -100).sum()
    start, summed, losses = 0, {}, []
    for mix in MIXES:
        alone = media.batch_of(assets, [mix])
        inputs = model_inputs(alone, assets, loss_scale=1 / labels, aux_scale=0)
        own, parts = run_ours(thinker, inputs)
        assert own.logits is not None and own.loss is not None
        rows = inputs.num_valid
        assert (own.logits[:rows] - output.logits[start : start + rows]).abs().max() < 1e-5
        start += rows
        losses.append(own.loss.detach())
        summed = {name: parts.get(name, 0) + summed.get(name, 0) for name in parts.keys() | summed.keys()}
    assert output.loss is not None and torch.allclose(sum(losses, torch.zeros(())), output.loss, rtol=1e-6)
    assert_equal_gradients(gradients, {name: torch.as_tensor(value) for name, value in summed.items()})
    assert torch.allclose(output.token_loss.sum() / labels, output.loss.detach(), rtol=1e-6)


def test_a_short_sound_alone_is_padded_to_the_whole_second(pair: Pair, assets: ProcessorAssets) -> None:
    """transformers pads to the longest sound of a call: beside a long one it gives what we always give."""
    short = Mix(turns=[["user", ("audio", None)], ["assistant", ("text", "A bark.")]], sounds=[media.sound(1, 0.31)])
    both = media.case_of(assets, [media.audio_mix(), short])
    expected = run_reference(pair, both.inputs, both.media)
    output, _ = run_ours(pair.ours, media.case_of(assets, [short]).inputs)
    rows = both.inputs.segments.lengths[1]
    assert output.logits is not None
    assert (output.logits[:rows] - expected.logits[-rows:]).abs().max() < 1e-5


@pytest.mark.parametrize("size", [2, 3])
def test_towers_make_the_same_rows_of_pieces(thinker: OmniThinker, assets: ProcessorAssets, size: int) -> None:
    """Clips cut between temporal grids and sounds at windows, as sequence parallelism deals them."""
    whole = thinker.encode(model_inputs(media.batch_of(assets, MIXES), assets))
    parts = []
    for rank in range(size):
        inputs = model_inputs(media.batch_of(assets, MIXES, sp_rank=rank, sp_size=size), assets, dummy_towers=True)
        assert inputs.vision_rows is None and inputs.audio_rows is None
        parts.append(thinker.encode(inputs))
    for name in ("vision", "audio"):
        made = torch.cat([rows for part in parts if (rows := getattr(part, name)) is not None])
        assert (made - getattr(whole, name)).abs().max() < 1e-5
    for level, rows in enumerate(whole.deepstack):
        made = torch.cat([part.deepstack[level] for part in parts if part.deepstack])
        assert (made - rows).abs().max() < 1e-5


def test_a_sound_cut_at_any_window_gives_the_same_rows(thinker: OmniThinker) -> None:
    mel = torch.randn(128, 731, generator=torch.Generator().manual_seed(0))
    whole = thinker.audio_tower(mel, [731])
    assert len(whole) == tokens_of(731) == 7 * 13 + 4
    for lengths in ([200, 531], [400, 331], [600, 131], [200, 200, 200, 131]):
        assert (thinker.audio_tower(mel, lengths) - whole).abs().max() < 1e-5
    assert (thinker.audio_tower(mel, [100, 631]) - whole).abs().max() > 1e-3  # within a window


def test_a_pad_tail_changes_nothing(thinker: OmniThinker, assets: ProcessorAssets) -> None:
    mixes = [media.text_mix(), media.image_mix()]
    short, long = (media.batch_of(assets, mixes, pad_multiple=multiple) for multiple in (1, 128))
    assert short.num_pad == 0 and long.num_pad > 40
    plain, gradients = run_ours(thinker, model_inputs(short, assets))
    padded, others = run_ours(thinker, model_inputs(long, assets))
    assert plain.loss is not None and padded.loss is not None and torch.allclose(plain.loss, padded.loss, rtol=1e-6)
    assert plain.expert_counts is not None and padded.expert_counts is not None
    assert torch.equal(plain.expert_counts, padded.expert_counts)
    config = text_config(thinker.config)
    assert (plain.expert_counts.sum(1) == short.length * config.num_experts_per_tok).all()
    assert_equal_gradients(others, gradients)


def test_all_padding_gives_no_loss_and_finite_gradients(thinker: OmniThinker, assets: ProcessorAssets) -> None:
    batch = media.empty_batch()
    output, gradients = run_ours(thinker, model_inputs(batch, assets, dummy_towers=True))
    assert output.loss == 0
    assert gradients.keys() == dict(thinker.named_parameters()).keys()
    assert not any(value.any() for value in gradients.values())


def test_dummy_units_reach_every_parameter_and_change_nothing(thinker: OmniThinker, assets: ProcessorAssets) -> None:
    batch = media.batch_of(assets, [media.text_mix()])
    plain, gradients = run_ours(thinker, model_inputs(batch, assets))
    dummies, others = run_ours(thinker, model_inputs(batch, assets, dummy_towers=True))
    assert plain.logits is not None and dummies.logits is not None
    assert torch.equal(plain.logits, dummies.logits) and plain.loss == dummies.loss
    towers = {name for name, _ in thinker.named_parameters() if name.startswith(("visual.", "audio_tower."))}
    assert others.keys() - gradients.keys() == towers
    assert not any(others[name].any() for name in towers)
    assert all(torch.equal(others[name], value) for name, value in gradients.items())


@pytest.mark.parametrize("tower", ["visual", "audio_tower"])
def test_dummy_units_lie_where_the_rows_do(thinker: OmniThinker, assets: ProcessorAssets, tower: str) -> None:
    """FSDP keeps parameters in CPU memory until the tower that they are of runs."""
    seen: list[str] = []

    def look(_module: nn.Module, given: tuple[Any, ...]) -> None:
        seen.append(given[0].device.type)
        raise StopIteration

    inputs = model_inputs(media.batch_of(assets, [media.text_mix()]), assets, dummy_towers=True)
    inputs = replace(inputs, ids=inputs.ids.to("meta"), dummy_vision=tower == "visual")
    handle = getattr(thinker, tower).register_forward_pre_hook(look)
    try:
        with pytest.raises(StopIteration):
            thinker.encode(inputs)
    finally:
        handle.remove()
    assert seen == ["meta"]


def test_embeddings_without_rows_are_refused(thinker: OmniThinker, assets: ProcessorAssets) -> None:
    inputs = media.case_of(assets, [media.image_mix()]).inputs
    assert inputs.vision_rows is not None
    with pytest.raises(ValueError, match=r"vision_rows names 9 rows for \d+ embeddings"):
        thinker(replace(inputs, vision_rows=inputs.vision_rows[:9]))
    with pytest.raises(ValueError, match="patches for grids"):
        thinker(replace(inputs, grids=inputs.grids[:1]))
