"""Gradient checkpointing changes no number."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy as Keep
from torch.utils.checkpoint import create_selective_checkpoint_contexts

from tests.train.models import media
from tests.train.models.families import make_ours, run_ours
from train.data.processor import ProcessorAssets
from train.models.audio import AudioBlock
from train.models.checkpointing import CheckpointPolicy, set_checkpointing
from train.models.foundation import FoundationModel
from train.models.text import TextBlock
from train.models.vision import VisionBlock


@pytest.fixture(scope="module")
def thinker() -> FoundationModel:
    return make_ours("omni")


@pytest.fixture(scope="module")
def assets() -> ProcessorAssets:
    return media.omni_assets()


def test_gradients_are_the_same_bit_for_bit(thinker: FoundationModel, assets: ProcessorAssets) -> None:
    inputs = media.case_of(assets, [media.everything_mix()]).inputs
    blocks = [module for module in thinker.modules() if isinstance(module, TextBlock | VisionBlock | AudioBlock)]
    assert len(blocks) == 3 + 3 + 2
    runs: dict[nn.Module, int] = {}

    def count(module: nn.Module, *_: Any) -> None:
        runs[module] = runs.get(module, 0) + 1

    handles = [block.register_forward_pre_hook(count) for block in blocks]
    kept_products = partial(create_selective_checkpoint_contexts, _keep_products)
    results = {}
    for name, policy in (("off", None), ("on", CheckpointPolicy()), ("selective", CheckpointPolicy(kept_products))):
        set_checkpointing(thinker, policy)
        runs.clear()
        output, gradients = run_ours(thinker, inputs)
        results[name] = (output, gradients)
        assert set(runs.values()) == {1 if policy is None else 2} and len(runs) == len(blocks), name
    with torch.no_grad():
        runs.clear()
        thinker(inputs)
        assert set(runs.values()) == {1}  # nothing to recompute for
    set_checkpointing(thinker, None)
    for handle in handles:
        handle.remove()
    off, gradients = results.pop("off")
    for output, others in results.values():
        assert output.loss == off.loss
        assert gradients.keys() == others.keys()
        assert all(torch.equal(others[name], value) for name, value in gradients.items())


def _keep_products(_: Any, op: Any, *args: Any, **kwargs: Any) -> Keep:
    return Keep.MUST_SAVE if op == torch.ops.aten.mm.default else Keep.PREFER_RECOMPUTE
