"""The prompt of a rollout is the trainer's own."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from jobs.rollout.prompts import make_prompt
from pack.reader import PackedDataset
from schemas.errors import SchemaError
from schemas.rollouts import Response, RolloutRow
from train.data.sample import IGNORE
from train.data.transform import SampleTransform
from train.models.spec import read_model


def test_the_training_lays_out_the_same_prompt(world, assets, prompts):
    """`responses` of the trainer compares digests; it refuses another prompt."""
    transform = SampleTransform(assets)
    answer = [Response([7, 8], [-1.0, -2.0], 1.0, "x", "length")]
    for key, prompt in prompts.items():
        row = RolloutRow(key, "", len(prompt.ids), prompt.digest, answer)
        (laid_out,) = transform.responses(prompt.sample, row, "s")
        np.testing.assert_array_equal(laid_out.ids, [*prompt.ids, 7, 8])
        np.testing.assert_array_equal(laid_out.position_ids[:, :-2], prompt.layout.position_ids)
        with pytest.raises(SchemaError, match="its prompt had"):
            transform.responses(prompt.sample, replace(row, prompt_digest="0" * 16), "s")


def test_it_is_the_supervised_layout_up_to_the_answer(world, assets, prompts):
    transform = SampleTransform(assets)
    for sample in PackedDataset(str(world / "packed")):
        whole, prompt = transform.packed(sample, "s"), prompts[sample.meta.id]
        stop = len(prompt.ids)
        np.testing.assert_array_equal(prompt.ids, whole.ids[:stop])
        assert (whole.labels[:stop] == IGNORE).all()
        assert whole.labels[stop] == whole.ids[stop]
        counts = ("num_text", "num_video", "num_audio", "num_image")
        assert sum(getattr(prompt.layout, name) for name in counts) == stop


def test_a_row_without_answer_is_asked_too_and_earlier_answers_stay(prompts, assets):
    transform = SampleTransform(assets)
    sample = prompts["text1"].sample
    turns = sample.meta.conversation

    def of(conversation):
        return make_prompt(
            replace(sample, meta=sample.meta.model_copy(update={"conversation": conversation})), transform
        )

    assert of(turns[:-1]).digest == prompts["text1"].digest
    longer = of([*turns, turns[0], turns[1]])
    said = transform.packed(sample, "s")
    np.testing.assert_array_equal(longer.ids[: len(said)], said.ids)
    assert longer.turns == [*turns, turns[0]]


def test_the_vocabulary_is_the_models(world, assets):
    assert assets.vocab_size == read_model(world / "model").config.text_config.vocab_size
