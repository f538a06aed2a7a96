"""Answers drawn on a GPU in bfloat16: their log-probabilities against the trainer's own model there."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from jobs.rollout.config import LocalConfig, SamplingConfig
from jobs.rollout.hub import HubEngine, load_model
from schemas.rollouts import Response, RolloutRow
from train.data.batch import BatchPlace
from train.data.collate import Collator
from train.data.model_inputs import model_inputs
from train.data.transform import SampleTransform
from train.models.spec import build_foundation_model
from train.ops.registry import eager_ops

pytestmark = pytest.mark.gpu
MEAN_TOLERANCE = 0.05  # the head of this model is 40 times as large as usual


@pytest.mark.parametrize("key", ["clip1", "image", "heard", "text0"])
def test_logprobs_in_bfloat16(key, world, prompts, assets):
    prompt = prompts[key]
    model = load_model(world / "model", LocalConfig(device="cuda", dtype="bfloat16", experts_implementation="eager"))
    answers = HubEngine(model, assets, SamplingConfig(group_size=16, max_new_tokens=8)).answers(prompt, seed=5)
    native = build_foundation_model(world / "model", eager_ops(), device="cuda", dtype=torch.bfloat16).eval()
    responses = [Response(a.ids, a.logprobs, 0.0, "", a.finish) for a in answers]
    row = RolloutRow(key, "", len(prompt.ids), prompt.digest, responses)
    samples = SampleTransform(assets).responses(prompt.sample, row, "source")
    batch = Collator()(samples, BatchPlace(0, 0, 0)).to(torch.device("cuda"))
    with torch.no_grad():
        losses = native(model_inputs(batch, assets)).token_loss.cpu()
    differences, start = [], 0
    for sample, answer in zip(samples, answers, strict=True):
        first = start + len(prompt.ids) - 1
        differences += (-losses[first : first + len(answer.ids)].numpy() - np.array(answer.logprobs)).tolist()
        start += len(sample)
    assert np.abs(differences).mean() <= MEAN_TOLERANCE
