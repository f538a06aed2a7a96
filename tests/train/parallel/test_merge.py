"""Embeddings of media that other ranks made: with parts of the model frozen, in every family, and with media, labels or
rows missing anywhere."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests import dist as processes
from tests.train.data.mixes import Mix
from tests.train.data.packed import Clip
from tests.train.models import families, media
from tests.train.parallel.steps import Outcome, assert_equal, make_parts, meta_model, outcome, without_labels
from train.data.batch import Batch, BatchPlace
from train.data.collate import Collator
from train.data.model_inputs import model_inputs
from train.data.processor import ProcessorAssets
from train.models.foundation import FoundationModel
from train.models.freeze import freeze
from train.ops.registry import eager_ops

Maker = Callable[[], Mix]
LAYOUT = {"ulysses_size": 2}
# what is not trained
FROZEN: dict[str, dict[str, Any]] = {
    "towers without their joints": {"vit": True, "audio_tower": True},
    "vision": {"modules": ["visual"]},
    "sound and embeddings": {"modules": ["audio_tower", "model.embed_tokens"]},
    "all but the text layers": {"modules": ["visual", "audio_tower", "model.embed_tokens", "lm_head"]},
    "all but a merger": {"modules": ["audio_tower", "model", "lm_head", "visual.b*", "visual.p*", "visual.merger"]},
    "experts": {"modules": ["model.layers.*.mlp.experts"]},
}
FAMILIES: dict[str, list[Maker]] = {
    "dense": [media.text_mix, media.text_mix],
    "tied": [media.text_mix],
    "mixed_moe": [media.text_mix, media.text_mix],
    "vl_tied": [media.image_mix, media.text_mix, media.video_mix],
    "vl_moe": [media.video_mix, media.image_mix],
}


def place() -> tuple[int, int]:
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def with_frozen(name: str) -> Outcome:
    model = meta_model()
    freeze(model, **FROZEN[name])
    rank, ranks = place()
    mixes = [media.text_mix(), media.everything_mix(), media.clip_with_sound_mix()]
    batch = media.batch_of(media.omni_assets(), mixes, sp_rank=rank, sp_size=ranks)
    return outcome(make_parts(LAYOUT if ranks > 1 else {}, model), [batch], 1)


def of_family(name: str, assets: ProcessorAssets) -> Outcome:
    family = families.FAMILIES[name]
    with torch.device("meta"):
        model = family.ours(family.make_config(), eager_ops())
    rank, ranks = place()
    batch = media.batch_of(assets, [make() for make in FAMILIES[name]], sp_rank=rank, sp_size=ranks)
    keys: dict[str, int] = LAYOUT if ranks > 1 else {}
    if ranks > 1 and "moe" in name:
        keys = keys | {"ep_size": 2}
    return outcome(replace(make_parts(keys, model), assets=assets), [batch], 1)


def _all(folder: Path) -> dict[str, Outcome]:
    assets = media.vl_assets(folder / str(dist.get_rank()))
    return {name: with_frozen(name) for name in FROZEN} | {name: of_family(name, assets) for name in FAMILIES}


def test_two_ranks_equal_one_process(tmp_path: Path) -> None:
    found = processes.run(2, _all, tmp_path)[0]
    assets = media.vl_assets(tmp_path / "one")
    for name, got in found.items():
        expected = with_frozen(name) if name in FROZEN else of_family(name, assets)
        assert {n for n, g in got.gradients.items() if g.any()} == {n for n, g in expected.gradients.items() if g.any()}
        try:
            assert_equal(got, expected, aux=got.aux[0] != 0)
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}") from error


def small_image() -> Mix:
    return Mix(turns=media._turns("image"), images=[media.pictures(1, 64, 64)])


def small_sound() -> Mix:
    return Mix(turns=media._turns("audio"), sounds=[media.sound(2, 0.4)])


def small_clip() -> Mix:
    return Mix(turns=media._turns("video"), clips=[Clip(media.pictures(3, 4, 64, 64), 2.0, media.sound(3, 2.0))])


MAKERS: list[Maker] = [media.text_mix, small_image, small_sound, small_clip]


@cache
def small_batch(makers: tuple[Maker, ...], sp_rank: int, sp_size: int) -> Batch:
    """Nothing but padding without makers."""
    if not makers:
        return Collator(sp_rank, sp_size)([], BatchPlace(0, 0, 0))
    return media.batch_of(media.omni_assets(), [make() for make in makers], sp_rank=sp_rank, sp_size=sp_size)


def small_model() -> FoundationModel:
    sizes = families.omni().to_dict()
    sizes["text_config"] |= {"num_hidden_layers": 2}
    sizes["vision_config"] |= {"depth": 1, "deepstack_visual_indexes": [0]}
    sizes["audio_config"] |= {"encoder_layers": 1}
    with torch.device("meta"):
        return families.FAMILIES["omni"].ours(type(families.omni())(**sizes), eager_ops())


def _random(layouts: list[dict[str, int]], batches: int) -> list[float]:
    """Losses of forward and backward passes, on all ranks together."""
    losses = []
    for number, layout in enumerate(layouts):
        model = small_model()
        freeze(model, **[{"modules": ["visual.pos_embed"]}, *FROZEN.values()][number % 3])
        parts = make_parts(layout, model, checkpointing=number % 2 == 1)
        degrees, mesh = parts.mesh.degrees, parts.mesh
        chance = random.Random(number)
        for _ in range(batches):
            rows = [tuple(chance.choices(MAKERS, k=chance.choice((0, 1, 1, 2)))) for _ in range(degrees.dp)]
            labelled = [chance.random() < 0.8 for _ in rows]
            batch = small_batch(rows[mesh.dp_rank], mesh.sp_rank, degrees.ulysses)
            if not labelled[mesh.dp_rank]:
                batch = without_labels(batch)
            inputs = model_inputs(batch, parts.assets, loss_scale=torch.tensor(0.01), dummy_towers=True)
            loss = parts.model(inputs).loss
            loss.backward()
            parts.optimizer.zero_grad()
            losses.append(loss.detach())
    total = torch.stack(losses)
    dist.all_reduce(total)
    return total.tolist()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "layouts"),
    [
        (2, [{"ulysses_size": 2}, {"ep_size": 2}, {"ulysses_size": 2, "ep_size": 2}]),
        (4, [{"ulysses_size": 2, "ep_size": 2}, {"ulysses_size": 4, "ep_size": 2}]),
    ],
)
def test_random_batches_never_wait_for_ever(ranks: int, layouts: list[dict[str, int]]) -> None:
    """200 in all; ranks that wait for one another are ended after three minutes."""
    found = processes.run(ranks, _random, layouts, 40, timeout_s=180.0)
    assert all(rank == found[0] for rank in found) and len(found[0]) == 40 * len(layouts)
    assert torch.tensor(found[0]).isfinite().all()
