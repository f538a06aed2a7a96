"""What a folder of rollouts is like, in a few numbers."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass

from schemas.rollouts import RolloutRow


@dataclass(frozen=True)
class Summary:
    """mean_reward: over answers; by_source: the same per source; equal_groups: share of rows whose rewards are all the
    same, which teach nothing; cut_off: share of answers that reached max_new_tokens; mean_logprob: per token."""

    rows: int
    responses: int
    tokens: int
    mean_reward: float
    by_source: dict[str, float]
    equal_groups: float
    cut_off: float
    mean_logprob: float

    def as_json(self) -> dict[str, object]:
        return asdict(self)


def summarise(rows: Iterable[RolloutRow]) -> Summary:
    """One pass; no rows give zeros."""
    rewards: dict[str, list[float]] = {}
    count = tokens = equal = cut = 0
    logprob = 0.0
    for row in rows:
        count += 1
        rewards.setdefault(row.source, []).extend(row.rewards)
        tokens += row.response_tokens
        equal += len(set(row.rewards)) == 1
        cut += sum(response.finish == "length" for response in row.responses)
        logprob += sum(float(sum(response.logprobs)) for response in row.responses)
    every = [reward for found in rewards.values() for reward in found]
    return Summary(
        rows=count,
        responses=len(every),
        tokens=tokens,
        mean_reward=sum(every) / max(len(every), 1),
        by_source={source: sum(found) / len(found) for source, found in sorted(rewards.items())},
        equal_groups=equal / max(count, 1),
        cut_off=cut / max(len(every), 1),
        mean_logprob=logprob / max(tokens, 1),
    )
