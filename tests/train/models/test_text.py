"""Qwen3 language models against transformers with the same weights."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests.train.models.families import Pair, assert_equal_runs, make_pair, run_ours, run_reference
from train.models.inputs import ModelInputs, text_inputs

NAMES = ("dense", "tied", "moe", "mixed_moe")


@pytest.fixture(scope="module")
def pairs() -> dict[str, Pair]:
    return {name: make_pair(name) for name in NAMES}


def documents(lengths: tuple[int, ...], seed: int = 0) -> tuple[list[Tensor], list[Tensor]]:
    """(ids, labels) of each; a third of the labels is left out."""
    generator = torch.Generator().manual_seed(seed)
    ids = [torch.randint(0, 200, (length,), generator=generator) for length in lengths]
    kept = [torch.rand(length, generator=generator) > 0.33 for length in lengths]
    return ids, [torch.where(keep, one, -100) for one, keep in zip(ids, kept, strict=True)]


def packed(lengths: tuple[int, ...], seed: int = 0) -> ModelInputs:
    return text_inputs(*documents(lengths, seed))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("lengths", [(37,), (5, 1, 23, 12)], ids=["alone", "packed"])
def test_logits_losses_and_gradients_are_those_of_transformers(
    pairs: dict[str, Pair], name: str, lengths: tuple[int, ...]
) -> None:
    inputs = packed(lengths)
    expected = run_reference(pairs[name], inputs, {})
    assert_equal_runs(*run_ours(pairs[name].ours, inputs), expected)


def test_bfloat16_is_as_near_to_float32_as_that_of_transformers(pairs: dict[str, Pair]) -> None:
    """At positions where bfloat16 itself knows every 256th only."""
    pair, inputs = pairs["dense"], packed((64, 40))
    inputs = replace(inputs, position_ids=inputs.position_ids + 40000)
    reference, ours = deepcopy(pair.reference).bfloat16(), deepcopy(pair.ours).bfloat16()
    restart = torch.cat([torch.arange(length) for length in (64, 40)])
    with torch.no_grad():
        exact = pair.ours(inputs, logits=True).logits
        theirs = reference(input_ids=inputs.ids[None], position_ids=restart[None], use_cache=False).logits[0]
        found = ours(inputs, logits=True).logits
    assert found.dtype == torch.bfloat16
    errors = [(logits.float() - exact).square().mean().sqrt() for logits in (found, theirs)]
    assert 0 < errors[0] < 1.1 * errors[1]
