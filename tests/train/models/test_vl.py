"""Qwen3-VL, dense and with experts, against transformers with the same weights, on rows of the real data path."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.train.data.mixes import Mix
from tests.train.models import media
from tests.train.models.families import Pair, assert_equal_runs, make_pair, run_ours, run_reference
from train.data.processor import ProcessorAssets


def mixed() -> Mix:
    return Mix(
        turns=[
            ["user", ("video", None), ("text", "and"), ("image", None), ("text", "?")],
            ["assistant", ("text", "So it is.")],
        ],
        clips=[media.Clip(media.pictures(1, 6, 96, 64), 2.0)],
        images=[media.pictures(2, 64, 64)],
    )


MIXES = {"text": media.text_mix, "image": media.image_mix, "video": media.video_mix, "mixed": mixed}

FAMILIES = ("vl", "vl_tied", "vl_moe")


@pytest.fixture(scope="module")
def pairs() -> dict[str, Pair]:
    return {name: make_pair(name) for name in FAMILIES}


@pytest.fixture(scope="module")
def assets(tmp_path_factory: pytest.TempPathFactory) -> ProcessorAssets:
    return media.vl_assets(tmp_path_factory.mktemp("processor"))


@pytest.mark.parametrize("family", ["vl", "vl_moe"])
@pytest.mark.parametrize("name", MIXES)
def test_logits_losses_and_gradients_are_those_of_transformers(
    pairs: dict[str, Pair], assets: ProcessorAssets, family: str, name: str
) -> None:
    make: Callable[[], Mix] = MIXES[name]
    case = media.case_of(assets, [make()])
    expected = run_reference(pairs[family], case.inputs, case.media)
    assert_equal_runs(*run_ours(pairs[family].ours, case.inputs), expected)


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_rows_are_those_of_transformers(pairs: dict[str, Pair], assets: ProcessorAssets, family: str) -> None:
    case = media.case_of(assets, [make() for make in MIXES.values()])
    expected = run_reference(pairs[family], case.inputs, case.media)
    assert_equal_runs(*run_ours(pairs[family].ours, case.inputs), expected)
