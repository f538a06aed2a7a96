"""Which tokens of a sample have labels, and what kind of token each is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal, get_args

import numpy as np

from train.data.collate import MODALITIES, DataCollateInfo
from train.data.sample import IGNORE, TrainSample

TokenChoice = Literal["labelled", "text", "all"]
TOKEN_CHOICES: tuple[str, ...] = get_args(TokenChoice)
MODALITY = "modality"  # extra collate entry: number of the token's kind in MODALITIES
MODALITY_INFO: Mapping[str, DataCollateInfo] = {MODALITY: DataCollateInfo(sp_slice=True, sp_pad_value=0)}


@dataclass(frozen=True)
class Relabel:
    """Gives a sample other labels. choice: labelled = its own, text = all tokens but those that media fill, all.
    Picklable."""

    choice: TokenChoice

    def __call__(self, sample: TrainSample) -> TrainSample:
        if self.choice == "labelled":
            return sample
        wanted = np.ones(len(sample), bool) if self.choice == "all" else token_modalities(sample)[MODALITY] == 0
        labels = np.where(wanted, sample.ids, IGNORE)
        return replace(sample, labels=labels, num_label_tokens=int(wanted.sum()))


def token_modalities(sample: TrainSample) -> dict[str, np.ndarray]:
    """int8 [L] under MODALITY: which of MODALITIES each token is; text where no medium fills it."""
    kinds = np.zeros(len(sample), np.int8)
    for unit in sample.media:
        kinds[unit.rows] = MODALITIES.index(unit.kind)
    return {MODALITY: kinds}
