"""What an engine is: something that answers a prompt several times and tells the log-probability of each token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from jobs.rollout.prompts import Prompt
from schemas.errors import OmniloomError
from schemas.rollouts import Finish


@dataclass(frozen=True)
class Answer:
    """ids: sampled tokens, the end token included when finish is stop; logprobs: of each, natural logarithm, of the
    model's own distribution (temperature 1, all tokens)."""

    ids: Sequence[int]
    logprobs: Sequence[float]
    finish: Finish


class EngineError(OmniloomError):
    """An engine does not answer as it should: nothing that another row would mend."""


class Engine(Protocol):
    """concurrency: how many prompts may be asked at a time, from several threads."""

    concurrency: int

    def answers(self, prompt: Prompt, seed: int) -> list[Answer]:
        """`sampling.group_size` answers. RowError, UnsupportedError, DecodeError: this row cannot be asked;
        EngineError: none can."""
