"""The log-probabilities that a reference model gives to answers it did not draw, for the divergence from it."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import torch

from jobs.rollout.engine import Answer
from jobs.rollout.prompts import Prompt
from schemas.rollouts import Response, RolloutRow
from train.data.batch import BatchPlace
from train.data.collate import Collator
from train.data.device import make_features
from train.data.processor import ProcessorAssets
from train.data.reader import position_dtype
from train.data.transform import SampleTransform
from train.logprob_reference import Reference, sample_rows


class AnswerReference:
    """model: of transformers, on its device, in eval mode. Usable from several threads, which wait for one another."""

    def __init__(self, model: Any, assets: ProcessorAssets) -> None:
        self.model, self.assets = model, assets
        self._reference = Reference(model, sees=hasattr(model.config, "vision_config"))
        self._one_at_a_time = threading.Lock()

    def logprobs(self, prompt: Prompt, answers: Sequence[Answer]) -> list[list[float]]:
        """Of each token of each answer, behind the same prompt."""
        responses = [Response(answer.ids, answer.logprobs, 0.0, "", answer.finish) for answer in answers]
        row = RolloutRow(prompt.meta.id, prompt.meta.source, len(prompt.ids), prompt.digest, responses)
        samples = SampleTransform(self.assets).responses(prompt.sample, row, prompt.meta.source)
        collate = Collator(temporal_patch=self.assets.video.temporal_patch, position_dtype=position_dtype(self.assets))
        first = len(prompt.ids) - 1  # the row that predicts the first token
        found = []
        with self._one_at_a_time, torch.inference_mode():
            for sample in samples:  # one at a time, as they were drawn: no more memory than that
                batch = collate([sample], BatchPlace(0, 0, 0)).to(self.model.device)
                (laid_out,) = sample_rows(batch, make_features(batch, self.assets))
                found.append((-self._reference.losses(laid_out)[first : len(sample) - 1]).tolist())
        return found
