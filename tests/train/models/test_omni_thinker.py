"""The Omni thinker against transformers with the same weights, on rows of the real data path."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.train.data.mixes import Mix
from tests.train.models import media
from tests.train.models.families import Pair, assert_equal_runs, make_pair, run_ours, run_reference
from train.data.processor import ProcessorAssets

MIXES = {
    "text": media.text_mix,
    "image": media.image_mix,
    "video": media.video_mix,
    "audio": media.audio_mix,
    "clip_with_sound": media.clip_with_sound_mix,
    "everything": media.everything_mix,
}


@pytest.fixture(scope="module")
def pair() -> Pair:
    return make_pair("omni")


@pytest.fixture(scope="module")
def assets() -> ProcessorAssets:
    return media.omni_assets()


@pytest.mark.parametrize("name", MIXES)
def test_logits_losses_and_gradients_are_those_of_transformers(pair: Pair, assets: ProcessorAssets, name: str) -> None:
    make: Callable[[], Mix] = MIXES[name]
    case = media.case_of(assets, [make()])
    expected = run_reference(pair, case.inputs, case.media)
    assert_equal_runs(*run_ours(pair.ours, case.inputs), expected)


def test_packed_rows_are_those_of_transformers(pair: Pair, assets: ProcessorAssets) -> None:
    case = media.case_of(assets, [make() for make in MIXES.values()])
    expected = run_reference(pair, case.inputs, case.media)
    assert_equal_runs(*run_ours(pair.ours, case.inputs), expected)
