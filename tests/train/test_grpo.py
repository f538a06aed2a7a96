"""The GRPO objective: values and gradients against float64, token by token."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from schemas.rollouts import RolloutRow
from tests.train.grpo import Expected, Group, batch_of, expected, rollout_row, with_old
from tests.train.models import media
from tests.train.models.families import assert_equal_gradients
from tests.train.parallel.steps import fill, make_parts, meta_model
from train.data.batch import Batch
from train.data.model_inputs import model_inputs
from train.models.foundation import FoundationModel
from train.models.inputs import IGNORE
from train.objective import TOKEN_SUMS, GrpoObjective, objective_metrics, objective_sums
from train.ops.registry import OPS
from train.step import train_step

# of unequal, equal, single and negative rewards
GROUPS = [
    Group(media.text_mix(), (1.0, 0.0, 0.0, 0.5), 0),
    Group(media.clip_with_sound_mix(), (-2.0, 3.0, 0.25), 1),
    Group(media.image_mix(), (0.7, 0.7, 0.7), 2),
    Group(media.audio_mix(), (1.0,), 3),
]
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {"clip_low": 0.2, "clip_high": 0.28, "kl_coef": 0.0},
    "penalty": {"clip_low": 0.3, "clip_high": 0.1, "kl_coef": 0.2},
    "wide": {"clip_low": 1.0, "clip_high": 50.0, "kl_coef": 0.0},
}


def model_of() -> FoundationModel:
    model = make_parts({}, meta_model(coef=0.0)).model
    assert isinstance(model, FoundationModel)
    return model


def logprobs_of(model: FoundationModel, batch: Batch, rows: list[RolloutRow]) -> list[list[Tensor]]:
    """Of each response token, float64 with gradient, from whole logits: row p - 1 predicts the token at p."""
    logits = model(model_inputs(batch, media.omni_assets()), logits=True).logits
    found, at = [], iter(zip([0, *batch.sample_tokens.cumsum(0).tolist()], batch.sample_tokens.tolist(), strict=False))
    for row in rows:
        group = []
        for response in row.responses:
            start, size = next(at)
            first = start + size - len(response.ids)
            whole = logits[first - 1 : first - 1 + len(response.ids)].double().log_softmax(-1)
            group.append(whole[range(len(response.ids)), list(response.ids)])
        found.append(group)
    assert next(at, None) is None
    return found


def by_definition(model: FoundationModel, groups: list[Group], normalize_std: bool = True, **how: Any) -> Expected:
    rows = [group.row() for group in groups]
    return expected(logprobs_of(model, batch_of(groups), rows), rows, normalize_std=normalize_std, **how)


def gradients(model: FoundationModel, loss: Tensor) -> dict[str, Tensor]:
    model.zero_grad(set_to_none=True)
    loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize(
    ("how", "normalize_std"), [("plain", True), ("penalty", False), ("penalty", True), ("wide", True)]
)
def test_loss_gradients_and_statistics(how: str, normalize_std: bool) -> None:
    model, keys = model_of(), SETTINGS[how]
    wanted = by_definition(model, GROUPS, normalize_std, **keys)
    assert (wanted.clip_low > 1 and wanted.clip_high > 1) or how == "wide"
    batch, scale = batch_of(GROUPS, normalize_std=normalize_std), torch.tensor(1 / wanted.tokens)
    assert int((batch.labels != IGNORE).sum()) == int(batch.label_tokens.sum()) == wanted.tokens
    by_hand = gradients(model, wanted.loss / wanted.tokens)
    objective = GrpoObjective(**keys)
    for name in ("eager", "chunk_loss", "fused_triton"):
        model.cross_entropy = OPS["linear_cross_entropy"].backends[name].load()
        output = model(model_inputs(batch, media.omni_assets(), loss_scale=scale, objective=objective.on(batch)))
        assert float(output.loss.detach()) == pytest.approx(float(wanted.loss.detach()) / wanted.tokens, abs=2e-6)
        assert float(output.token_loss.sum()) == pytest.approx(float(wanted.loss.detach()), abs=1e-4)
        assert_equal_gradients(gradients(model, output.loss), by_hand)
        for found, name in zip(output.objective_sums.tolist(), TOKEN_SUMS, strict=False):
            assert found == pytest.approx(getattr(wanted, name), rel=1e-5, abs=1e-5), name
        assert len(output.objective_sums) == (7 if keys["kl_coef"] else 6)


def test_what_no_policy_drew_teaches_nothing_and_spoils_nothing() -> None:
    """Engines write -9999 for a probability of 0; exp() of the difference is no float32."""
    old = torch.tensor([-1.0, -9999.0, -9999.0, -90.0, 0.0, -1.2])
    advantage = torch.tensor([1.0, 0.0, -2.0, 3.0, -1.0, -1.0])
    logprobs, labelled = torch.tensor([-1.0, -1.0, -2.0, -1.0, -95.0, -1.1]), torch.ones(6, dtype=torch.bool)
    for coef in (0.0, 0.5):
        found = GrpoObjective(0.2, 0.2, coef).terms(logprobs, labelled, advantage, old, old)
        assert all(bool(values.isfinite().all()) for values in found)
        assert found.slope[1:5].eq(0).all() and found.slope[[0, 5]].ne(0).all()
        assert found.loss[1] == pytest.approx(coef * (math.exp(-20) + 20 - 1))
        assert dict(zip(TOKEN_SUMS, found.sums.tolist(), strict=False))["far"] == 4


def test_a_ratio_of_1_gives_the_policy_gradient() -> None:
    """Of -A log p / N, whose value differs."""
    model, group = model_of(), GROUPS[1]
    batch, row = batch_of([group]), group.row()
    (logprobs,) = logprobs_of(model, batch, [row])
    fresh = with_old(row, [found.detach() for found in logprobs])
    old = batch.extra["old_logprob"].clone()
    old[batch.labels[0] != IGNORE] = torch.cat([torch.tensor(r.logprobs) for r in fresh.responses])
    batch = replace(batch, extra=batch.extra | {"old_logprob": old})
    tokens = row.response_tokens
    mean = sum(row.rewards) / 3
    std = (sum((reward - mean) ** 2 for reward in row.rewards) / 2) ** 0.5
    advantages = [(reward - mean) / (std + 1e-6) for reward in row.rewards]
    direct = -sum(a * found.sum() for a, found in zip(advantages, logprobs, strict=True)) / tokens
    objective = GrpoObjective(0.2, 0.2).on(batch)
    output = model(model_inputs(batch, media.omni_assets(), loss_scale=torch.tensor(1 / tokens), objective=objective))
    assert_equal_gradients(gradients(model, output.loss), gradients(model, direct))
    assert float(output.objective_sums[0]) == pytest.approx(tokens, rel=1e-5)
    assert output.objective_sums[1:3].tolist() == [0, 0]
    mean_advantage = sum(a * len(r.ids) for a, r in zip(advantages, row.responses, strict=True)) / tokens
    assert float(output.loss.detach()) == pytest.approx(-mean_advantage, abs=1e-6)


def test_clipping_stops_the_gradient_on_one_side_only() -> None:
    """Ratio 1.5 and 0.5, advantage of either sign."""
    ratio = torch.tensor([1.5, 1.5, 0.5, 0.5, 1.0, 7.0])
    advantage = torch.tensor([1.0, -1.0, 1.0, -1.0, 2.0, 3.0])
    labelled = torch.tensor([True] * 5 + [False])
    zeros = torch.zeros(6)
    found = GrpoObjective(0.2, 0.3).terms(ratio.log(), labelled, advantage, zeros, zeros)
    assert found.loss.tolist() == pytest.approx([-1.3, 1.5, -0.5, 0.8, -2.0, 0.0])
    assert found.slope.tolist() == pytest.approx([0.0, 1.5, -0.5, 0.0, -2.0, 0.0])
    assert found.sums.tolist()[:3] == pytest.approx([5.0, 1.0, 1.0])
    with_penalty = GrpoObjective(0.2, 0.3, 0.5).terms(ratio.log(), labelled, zeros, zeros, zeros - 1)
    away = -1 - ratio.log()
    assert torch.allclose(with_penalty.loss[:5], 0.5 * (away.exp() - away - 1)[:5])
    assert torch.allclose(with_penalty.slope[:5], 0.5 * (1 - away.exp())[:5])
    assert with_penalty.loss[5] == with_penalty.slope[5] == 0


def test_rows_with_equal_rewards_teach_nothing() -> None:
    parts = replace(make_parts({}, meta_model(coef=0.0)), objective=GrpoObjective(0.2, 0.2))
    fill(parts.model)  # type: ignore[arg-type]
    before = {name: p.detach().clone() for name, p in parts.model.named_parameters()}
    result = train_step(parts, [batch_of(GROUPS[2:])])
    assert float(result.grad_norm) == 0.0 and float(result.loss_sum) == 0.0
    assert all(torch.equal(p, before[name]) for name, p in parts.model.named_parameters())
    metrics = objective_metrics({name: float(value) for name, value in result.objective_sums.items()}, 1.0)
    assert metrics["grpo/no_advantage"] == 1.0 and metrics["grpo/reward"] == pytest.approx((0.7 * 3 + 1) / 4)


def test_a_step_counts_responses_and_their_rewards() -> None:
    parts = replace(make_parts({}, meta_model(coef=0.0)), objective=GrpoObjective(0.2, 0.28, 0.1))
    wanted = by_definition(parts.model, GROUPS, clip_low=0.2, clip_high=0.28, kl_coef=0.1)  # type: ignore[arg-type]
    result = train_step(parts, [batch_of(GROUPS[:2]), batch_of(GROUPS[2:])])
    rewards = torch.tensor([reward for group in GROUPS for reward in group.rewards])
    assert (int(result.step_tokens), result.label_tokens, result.samples) == (wanted.tokens, wanted.tokens, 11)
    assert float(result.loss_sum) == pytest.approx(float(wanted.loss.detach()), abs=1e-4)
    assert float(result.source_loss["made"].total) == pytest.approx(float(wanted.loss.detach()), abs=1e-4)
    sums = {name: float(value) for name, value in result.objective_sums.items()}
    assert list(sums) == [*TOKEN_SUMS, "responses", "reward", "reward_square", "no_advantage"]
    found = objective_metrics(sums, wanted.tokens)
    assert found["grpo/reward"] == pytest.approx(float(rewards.mean()))
    assert found["grpo/reward_std"] == pytest.approx(float(rewards.std(correction=0)), rel=1e-5)
    assert found["grpo/no_advantage"] == pytest.approx(4 / 11)
    assert found["grpo/kl_ref"] == pytest.approx(wanted.kl_ref / wanted.tokens, rel=1e-5)
    assert found["grpo/ratio"] == pytest.approx(wanted.ratio / wanted.tokens, rel=1e-5)


def test_the_first_rank_of_a_sequence_counts_its_responses() -> None:
    counts = [
        objective_sums(batch_of(GROUPS[:1], sp_rank=rank, sp_size=2), torch.zeros(5))["responses"] for rank in range(2)
    ]
    assert [float(count) for count in counts] == [4.0, 0.0]


def test_a_loader_without_the_objective_is_an_error() -> None:
    batch = media.batch_of(media.omni_assets(), [media.text_mix()])
    with pytest.raises(ValueError, match="a batch without advantage, old_logprob, ref_logprob"):
        GrpoObjective(0.2, 0.2).on(batch)


def test_no_response_and_padding_alone() -> None:
    """What a rank without rows computes."""
    batch = batch_of([])
    objective = GrpoObjective(0.2, 0.2, 0.1)
    model = model_of()
    output = model(
        model_inputs(batch, media.omni_assets(), loss_scale=torch.tensor(0.5), objective=objective.on(batch))
    )
    assert float(output.loss.detach()) == 0.0 and not output.objective_sums.any()
    assert not any(gradient.any() for gradient in gradients(model, output.loss).values())
    assert float(objective_sums(batch, output.objective_sums)["responses"]) == 0.0


def test_responses_of_a_row_do_not_see_one_another() -> None:
    """Alone in a batch each has the loss that it has beside the others."""
    group = GROUPS[1]
    row = group.row()
    assert rollout_row(group.mix.sample("1"), media.omni_assets(), group.rewards, 1) == row
    model, batch = model_of(), batch_of([group])
    together = model(model_inputs(batch, media.omni_assets()), logits=True).logits
    ends = batch.sample_tokens.cumsum(0).tolist()
    for number, sample in enumerate(group.samples()):
        other = media.collate([sample])
        alone = model(model_inputs(other, media.omni_assets()), logits=True).logits
        assert torch.allclose(together[ends[number] - len(sample) : ends[number]], alone[: len(sample)], atol=1e-5)
