"""What is minimised in place of the cross-entropy: `train.objective.type: grpo`.

Group relative policy optimisation (Shao et al. 2024, arXiv:2402.03300, section 4.1) on recorded rollouts, with the two
clip ranges of DAPO (arXiv:2503.14476, section 3.1) and its mean over all response tokens (section 3.3). For response
token t of the step, of N,

    r_t = exp(log p_t - log p_old,t)
    f_t = -min(r_t A_t, clip(r_t, 1 - clip_low, 1 + clip_high) A_t) + kl_coef * (exp(d_t) - d_t - 1),
    d_t = log p_ref,t - log p_t,        loss = sum_t f_t / N

A_t is the advantage of its response (`train.data.rollouts`). The penalty is the estimator k3 of the divergence from
the reference (Schulman 2020, "Approximating KL divergence"), which is never negative. N counts the response tokens of
the whole step on all ranks, clipped ones and those of groups with equal rewards, too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from schemas.errors import ConfigError
from train.config_objective import ObjectiveConfig
from train.data.batch import Batch
from train.data.rollouts import ADVANTAGE, OLD_LOGPROB, REF_LOGPROB, RESPONSE, ROLLOUT_INFO, RolloutArrays
from train.ops.token_objective import TokenObjective, TokenTerms

if TYPE_CHECKING:
    from train.data.serving import ModelInputs
    from train.data.sources import OpenSource

# sums over response tokens, in the order of `TokenTerms.sums`; the last one only of an objective with a penalty
TOKEN_SUMS = ("ratio", "clip_low", "clip_high", "kl_old", "nll", "far", "kl_ref")
FAR = 20.0  # a probability that is 5e8 times another; exp() of 89 is no float32
# sums over responses
RESPONSE_SUMS = ("responses", "reward", "reward_square", "no_advantage")


@dataclass(frozen=True)
class GrpoObjective:
    """clip_low, clip_high: how far the ratio may leave 1 downwards and upwards; kl_coef: of the penalty, which needs
    the reference's log-probabilities."""

    clip_low: float
    clip_high: float
    kl_coef: float = 0.0

    @classmethod
    def of(cls, config: ObjectiveConfig) -> GrpoObjective | None:
        """None for the cross-entropy."""
        return None if config.type == "cross_entropy" else cls(config.clip_low, config.clip_high, config.kl_coef)

    def on(self, batch: Batch) -> TokenObjective:
        """The objective of one micro-batch, whose `extra` has the entries of `RolloutArrays`."""
        missing = {ADVANTAGE, OLD_LOGPROB, REF_LOGPROB} - batch.extra.keys()
        if missing:
            raise ValueError(f"a batch without {', '.join(sorted(missing))}: its loader was not told of the objective")
        advantage, old, reference = (batch.extra[name] for name in (ADVANTAGE, OLD_LOGPROB, REF_LOGPROB))
        return lambda logprobs, labelled: self.terms(logprobs, labelled, advantage, old, reference)

    def terms(
        self, logprobs: Tensor, labelled: Tensor, advantage: Tensor, old: Tensor, reference: Tensor
    ) -> TokenTerms:
        """All [S]; where the derivative jumps, at a ratio of exactly 1 - clip_low or 1 + clip_high, it is that of the
        unclipped side. Further than FAR from the recorded log-probability a token is no token of this policy, whatever
        it was recorded by: its ratio stays there and has no slope."""
        moved, near = _bounded(logprobs - old, labelled)
        ratio = moved.exp()
        low = labelled & (ratio < 1 - self.clip_low) & (advantage < 0)
        high = labelled & (ratio > 1 + self.clip_high) & (advantage > 0)
        clipped = ratio.clamp(1 - self.clip_low, 1 + self.clip_high)
        loss = -torch.minimum(ratio * advantage, clipped * advantage)
        slope = torch.where(low | high | ~near, 0.0, -ratio * advantage)
        kept = [ratio * labelled, low, high, ratio - moved - 1, torch.where(labelled, -logprobs, 0.0), labelled & ~near]
        if self.kl_coef:
            away, near = _bounded(reference - logprobs, labelled)
            penalty = away.exp() - away - 1
            loss = loss + self.kl_coef * penalty
            slope = slope + torch.where(near, self.kl_coef * (1 - away.exp()), 0.0)
            kept.append(penalty)
        sums = torch.stack([values.float().sum() for values in kept])
        return TokenTerms(torch.where(labelled, loss, 0.0), torch.where(labelled, slope, 0.0), sums)


def _bounded(difference: Tensor, labelled: Tensor) -> tuple[Tensor, Tensor]:
    """(differences within FAR, 0 without a label; whether they were)."""
    return torch.where(labelled, difference.clamp(-FAR, FAR), 0.0), difference.abs() <= FAR


def with_rollouts(inputs: ModelInputs, config: ObjectiveConfig) -> ModelInputs:
    """What the data path is told, with what the objective takes from it."""
    if config.type == "cross_entropy":
        return inputs
    assert inputs.extra_arrays is None  # no model has any beside
    return replace(inputs, extra_arrays=RolloutArrays(config.normalize_std), extra_info=ROLLOUT_INFO)


def check_references(config: ObjectiveConfig, sources: Sequence[OpenSource]) -> None:
    """ConfigError: a penalty by a reference that the rollouts of a source have no log-probabilities of."""
    for source in sources:
        if config.kl_coef and source.rollouts is not None and not source.rollouts.card.references:
            raise ConfigError(
                f"train.objective.kl_coef is {config.kl_coef}, but the rollouts of data source {source.rows.name} "
                f"({source.config.rollouts}) have no ref_logprobs; make them with a reference, or set kl_coef to 0"
            )


def objective_sums(batch: Batch, token_sums: Tensor) -> dict[str, Tensor]:
    """All sums of one micro-batch by name, float32 [] each. Of a sequence that ranks share, the first one counts the
    responses."""
    found = dict(zip(TOKEN_SUMS, token_sums.unbind(), strict=False))
    reward, advantage = batch.extra[RESPONSE]
    if batch.route.sp_rank:
        reward, advantage = reward[:0], advantage[:0]
    count = torch.full_like(token_sums[0], len(reward))
    return found | dict(
        zip(RESPONSE_SUMS, (count, reward.sum(), reward.square().sum(), (advantage == 0).sum().float()), strict=True)
    )


def objective_metrics(total: Mapping[str, float], tokens: float) -> dict[str, float]:
    """Means of sums over all ranks, by the names of `train.metric_names`. tokens: response tokens."""
    responses = max(total["responses"], 1.0)
    reward = total["reward"] / responses
    found = {f"grpo/{name}": total[name] / max(tokens, 1.0) for name in TOKEN_SUMS if name in total}
    return found | {
        "grpo/reward": reward,
        "grpo/reward_std": max(total["reward_square"] / responses - reward**2, 0.0) ** 0.5,
        "grpo/no_advantage": total["no_advantage"] / responses,
    }
