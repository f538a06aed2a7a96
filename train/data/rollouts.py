"""Rollouts of the sources of a training, and what of them goes beside the ids of a batch.

The advantage of response i of a row with G responses is (reward_i - mean) / (std + 1e-6) (arXiv:2402.03300, section
4.1.2), with the standard deviation of a sample (divided by G - 1), or without the division (arXiv:2503.20783). All
responses of a row stand in the same packed sequence, and a group is whole wherever the sequence goes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from train.data.collate import DataCollateInfo
from train.data.sample import TrainSample

ADVANTAGE, OLD_LOGPROB, REF_LOGPROB, RESPONSE = "advantage", "old_logprob", "ref_logprob", "response"
STD_FLOOR = 1e-6

_PER_TOKEN = DataCollateInfo(sp_slice=True, sp_pad_value=0)
ROLLOUT_INFO: Mapping[str, DataCollateInfo] = {
    ADVANTAGE: _PER_TOKEN,
    OLD_LOGPROB: _PER_TOKEN,
    REF_LOGPROB: _PER_TOKEN,
    RESPONSE: DataCollateInfo(per_token=False),
}


def advantages(rewards: np.ndarray, *, normalize_std: bool) -> np.ndarray:
    """float64 [G] of the rewards [G] of one row; all 0 where the rewards are equal."""
    if rewards.max() == rewards.min():  # exactly, whatever the mean is rounded to
        return np.zeros(len(rewards))
    centred = rewards - rewards.mean()
    return centred / (rewards.std(ddof=1) + STD_FLOOR) if normalize_std else centred


@dataclass(frozen=True)
class RolloutArrays:
    """The extra collate entries of a sample, laid out by `ROLLOUT_INFO`. Picklable.

    advantage, old_logprob, ref_logprob: float32 [L], at the row that predicts the token, as shifted labels are, 0
    elsewhere; response: float32 [2, 1], reward and advantage, [2, 0] of a sample without response.
    """

    normalize_std: bool = True

    def __call__(self, sample: TrainSample) -> dict[str, np.ndarray]:
        arrays = {name: np.zeros(len(sample), np.float32) for name in (ADVANTAGE, OLD_LOGPROB, REF_LOGPROB)}
        found = sample.response
        if found is None:
            return arrays | {RESPONSE: np.zeros((2, 0), np.float32)}
        advantage = advantages(found.rewards, normalize_std=self.normalize_std)[found.number]
        rows = slice(found.start - 1, len(sample) - 1)
        arrays[ADVANTAGE][rows] = advantage
        arrays[OLD_LOGPROB][rows] = found.logprobs
        if found.ref_logprobs is not None:
            arrays[REF_LOGPROB][rows] = found.ref_logprobs
        return arrays | {RESPONSE: np.array([[found.rewards[found.number]], [advantage]], np.float32)}
