"""Rows with several responses, and the GRPO objective written out in float64, token by token."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from schemas.media_counts import media_counts
from schemas.rollouts import Response, RolloutRow, prompt_digest
from schemas.sample import PackedSample
from tests.train.data.mixes import Mix
from tests.train.models import media
from train.data.batch import Batch, BatchPlace
from train.data.collate import Collator
from train.data.processor import ProcessorAssets
from train.data.response_layout import prompt_layout
from train.data.rollouts import ROLLOUT_INFO, RolloutArrays
from train.data.sample import TrainSample
from train.data.transform import SampleTransform

USUAL = -6.2  # log-probability of a token by tiny models with random weights, about


def prompt_ids(sample: PackedSample, assets: ProcessorAssets) -> np.ndarray:
    return prompt_layout(sample.meta.conversation, media_counts(sample.meta, assets.style), assets).ids


def rollout_row(
    sample: PackedSample,
    assets: ProcessorAssets,
    rewards: Sequence[float],
    seed: int = 0,
    *,
    references: bool = True,
    spread: float = 0.4,
    vocabulary: int = 200,
    lengths: tuple[int, int] = (1, 12),
) -> RolloutRow:
    """A response of random tokens for each reward, with log-probabilities around those of a random policy."""
    random = np.random.default_rng(seed)
    ids = prompt_ids(sample, assets)
    responses = []
    for number, reward in enumerate(rewards):
        size = int(random.integers(*lengths))
        old, reference = (
            np.minimum(USUAL + spread * random.standard_normal(size), 0.0).astype(np.float32) for _ in range(2)
        )
        responses.append(
            Response(
                ids=random.integers(0, vocabulary, size).tolist(),
                logprobs=old.tolist(),
                ref_logprobs=reference.tolist() if references else None,
                reward=reward,
                text="",
                finish="length" if number % 2 else "stop",
            )
        )
    return RolloutRow(sample.meta.id, sample.meta.source, len(ids), prompt_digest(ids), responses)


@dataclass(frozen=True)
class Group:
    """A row of any media, and the rewards of its responses."""

    mix: Mix
    rewards: tuple[float, ...]
    seed: int

    def row(self) -> RolloutRow:
        return rollout_row(self.mix.sample(str(self.seed)), media.omni_assets(), self.rewards, self.seed)

    def samples(self) -> list[TrainSample]:
        """With ids of the tiny models' vocabulary."""
        assets = media.omni_assets()
        laid_out = SampleTransform(assets).responses(self.mix.sample(str(self.seed)), self.row(), "made")
        return [media.small(sample, assets) for sample in laid_out]


def batch_of(groups: Sequence[Group], *, normalize_std: bool = True, **how: Any) -> Batch:
    """how: of the collator, e.g. sp_rank and sp_size."""
    samples = [sample for group in groups for sample in group.samples()]
    collator = Collator(
        position_dtype="float32",
        route_spec=media.ROUTE,
        extra_arrays=RolloutArrays(normalize_std),
        extra_info=ROLLOUT_INFO,
        **how,
    )
    return collator(samples, BatchPlace(0, 0, 0))


@dataclass
class Expected:
    """loss: float64 [] with gradient, sums over tokens for the rest."""

    loss: Tensor
    tokens: int
    ratio: float
    clip_low: int
    clip_high: int
    kl_old: float
    kl_ref: float
    nll: float
    far: int = 0


def expected(
    logprobs: Sequence[Sequence[Tensor]],
    rows: Sequence[RolloutRow],
    *,
    clip_low: float,
    clip_high: float,
    kl_coef: float,
    normalize_std: bool = True,
) -> Expected:
    """The sum over tokens, not divided. logprobs: of each row and response, float64 [R] with gradient."""
    total = Expected(torch.zeros((), dtype=torch.float64), 0, 0.0, 0, 0, 0.0, 0.0, 0.0)
    for row, of_row in zip(rows, logprobs, strict=True):
        mean = statistics.fmean(row.rewards)
        for response, of_response in zip(row.responses, of_row, strict=True):
            equal = len(set(row.rewards)) == 1  # whose mean may be rounded to another number
            advantage = 0.0 if equal else response.reward - mean
            if normalize_std and not equal:
                advantage /= statistics.stdev(row.rewards) + 1e-6
            assert response.ref_logprobs is not None and len(of_response) == len(response.ids)
            for logprob, old, reference in zip(of_response, response.logprobs, response.ref_logprobs, strict=True):
                _add(total, logprob, old, reference, advantage, clip_low, clip_high, kl_coef)
    return total


def _add(
    total: Expected,
    logprob: Tensor,
    old: float,
    reference: float,
    advantage: float,
    low: float,
    high: float,
    coef: float,
) -> None:
    ratio, value = torch.exp(logprob - old), float(torch.exp(logprob.detach() - old))
    away = reference - logprob
    penalty = torch.exp(away) - away - 1
    if advantage >= 0:
        gain = advantage * (ratio if value <= 1 + high else torch.tensor(1 + high, dtype=torch.float64))
    else:
        gain = advantage * (ratio if value >= 1 - low else torch.tensor(1 - low, dtype=torch.float64))
    total.loss = total.loss - gain + coef * penalty
    total.tokens += 1
    total.ratio += value
    total.clip_low += advantage < 0 and value < 1 - low
    total.clip_high += advantage > 0 and value > 1 + high
    total.kl_old += value - 1 - math.log(value)
    total.kl_ref += float(penalty.detach())
    total.nll -= float(logprob.detach())


def with_old(row: RolloutRow, logprobs: Sequence[Tensor]) -> RolloutRow:
    """The same responses, drawn from the policy that has these log-probabilities."""
    drawn = [replace(r, logprobs=old.tolist()) for r, old in zip(row.responses, logprobs, strict=True)]
    return replace(row, responses=drawn)
