"""Answers of transformers' generate: whose probabilities are told, what is drawn, where answers end."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from jobs.rollout.config import LocalConfig, SamplingConfig
from jobs.rollout.hub import HubEngine, find_device, load_model
from schemas.errors import ConfigError
from schemas.rollouts import Response, RolloutRow
from train.data.batch import BatchPlace
from train.data.collate import Collator
from train.data.model_inputs import model_inputs
from train.data.transform import SampleTransform
from train.models.spec import build_foundation_model
from train.ops.registry import eager_ops

KINDS = ("clip0", "clip1", "image", "heard", "sound", "text1")


def engine(model, assets, **sampling):
    return HubEngine(model, assets, SamplingConfig(**{"group_size": 3, "max_new_tokens": 6} | sampling))


@pytest.fixture(scope="module")
def native(world):
    """The trainer's own model with the same weights."""
    return build_foundation_model(world / "model", eager_ops()).eval()


def trainer_logprobs(native, assets, prompt, answers):
    """Of every answer token, by the trainer's layout and model, all answers in one packed sequence."""
    responses = [Response(a.ids, a.logprobs, 0.0, "", a.finish) for a in answers]
    row = RolloutRow(prompt.meta.id, "", len(prompt.ids), prompt.digest, responses)
    samples = SampleTransform(assets).responses(prompt.sample, row, "source")
    batch = Collator()(samples, BatchPlace(0, 0, 0))
    with torch.no_grad():
        losses = native(model_inputs(batch, assets)).token_loss
    found, start = [], 0
    for sample, answer in zip(samples, answers, strict=True):
        first = start + len(prompt.ids) - 1
        found.append((-losses[first : first + len(answer.ids)]).tolist())
        start += len(sample)
    return found


@pytest.mark.parametrize("key", KINDS)
@pytest.mark.parametrize("how", [{}, {"temperature": 0.6, "top_p": 0.8}], ids=["plain", "sharpened"])
def test_logprobs_are_those_of_the_trainer_at_temperature_1(key, how, prompts, model, assets, native):
    """The same prompt, the same pixels and positions, and log softmax of the raw logits whatever was drawn from."""
    answers = engine(model, assets, **how).answers(prompts[key], seed=5)
    expected = trainer_logprobs(native, assets, prompts[key], answers)
    for answer, wanted in zip(answers, expected, strict=True):
        np.testing.assert_allclose(answer.logprobs, wanted, atol=1e-4)


@pytest.mark.parametrize("key", ["clip1", "image", "heard", "sound"])
def test_in_16_bits_answers_agree_with_the_trainer_in_16_bits(key, prompts, world, assets):
    """Mean difference; both round, each in its own order, and the head of this model, 40 times as large as usual,
    scales what comes of it."""
    half = load_model(world / "model", LocalConfig(device="cpu", dtype="bfloat16", experts_implementation="eager"))
    native = build_foundation_model(world / "model", eager_ops(), dtype=torch.bfloat16).eval()
    answers = engine(half, assets, group_size=6).answers(prompts[key], seed=5)
    expected = trainer_logprobs(native, assets, prompts[key], answers)
    told = np.concatenate([answer.logprobs for answer in answers])
    assert np.abs(told - np.concatenate(expected)).mean() <= 0.05


def test_tokens_are_drawn_from_that_very_distribution(prompts, model, assets):
    """One-token answers: how often each of the likeliest comes, against its probability."""
    count = 400
    drawer = engine(model, assets, group_size=count, max_new_tokens=1)
    answers = drawer.answers(prompts["text0"], seed=1)
    told = {answer.ids[0]: math.exp(answer.logprobs[0]) for answer in answers}
    seen = {token: sum(answer.ids[0] == token for answer in answers) / count for token in told}
    likely = [token for token, share in told.items() if share > 0.02]
    assert len(likely) >= 3
    for token in likely:
        error = math.sqrt(told[token] * (1 - told[token]) / count)
        assert abs(seen[token] - told[token]) < 4.5 * error, (token, seen[token], told[token])


def test_temperature_sharpens_what_is_drawn(prompts, model, assets):
    sharp = engine(model, assets, group_size=40, max_new_tokens=1, temperature=0.05).answers(prompts["text0"], 1)
    plain = engine(model, assets, group_size=40, max_new_tokens=1).answers(prompts["text0"], 1)
    assert len({answer.ids[0] for answer in sharp}) < len({answer.ids[0] for answer in plain})


def test_a_row_is_answered_the_same_whatever_came_before(prompts, model, assets):
    drawer = engine(model, assets)
    first = drawer.answers(prompts["clip0"], seed=9)
    torch.manual_seed(1234)
    before = torch.random.get_rng_state()
    drawer.answers(prompts["clip2"], seed=8)
    assert torch.equal(before, torch.random.get_rng_state())
    assert drawer.answers(prompts["clip0"], seed=9) == first
    assert drawer.answers(prompts["clip0"], seed=10) != first


def test_answers_in_smaller_batches_are_as_many_and_as_likely(prompts, model, assets, native):
    drawer = engine(model, assets, group_size=5)
    drawer.batch_size = 2
    answers = drawer.answers(prompts["clip1"], seed=3)
    assert len(answers) == 5
    for answer, wanted in zip(answers, trainer_logprobs(native, assets, prompts["clip1"], answers), strict=True):
        np.testing.assert_allclose(answer.logprobs, wanted, atol=1e-4)


def test_an_answer_ends_with_its_end_token(prompts, model, assets):
    """The third token of the first answer is made an end token: that answer is cut behind it, logprob included."""
    whole = engine(model, assets).answers(prompts["image"], seed=2)
    assert [answer.finish for answer in whole] == ["length"] * 3
    drawer = engine(model, assets)
    drawer.ends = [whole[0].ids[2]]
    cut = drawer.answers(prompts["image"], seed=2)
    assert cut[0].finish == "stop"
    stop = list(whole[0].ids).index(drawer.ends[0]) + 1
    assert cut[0].ids == whole[0].ids[:stop]
    np.testing.assert_allclose(cut[0].logprobs, whole[0].logprobs[:stop], atol=1e-6)
    for answer in cut:
        assert (answer.finish == "stop") == (answer.ids[-1] in drawer.ends)
        assert not set(answer.ids[:-1]) & set(drawer.ends)


def test_the_checkpoint_has_no_say_in_sampling(prompts, model, assets):
    """Released checkpoints come with top_k and repetition_penalty, which would change what is drawn."""
    plain = engine(model, assets).answers(prompts["clip0"], seed=4)
    model.generation_config.top_k = 1
    model.generation_config.repetition_penalty = 3.0
    assert engine(model, assets).answers(prompts["clip0"], seed=4) == plain


def test_devices():
    assert find_device("cpu").type == "cpu"
    for name in ("gpu", "cuda:99"):
        with pytest.raises(ConfigError, match=r"rollouts.local.device"):
            find_device(name)
