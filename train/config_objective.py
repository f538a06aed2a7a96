"""The section `train.objective`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from train.config_types import NotNegativeFloat, PositiveFloat, Strict


class ObjectiveConfig(Strict):
    """What is minimised. type: cross_entropy of the labelled tokens, or grpo on recorded rollouts, which every data
    source then has (data.sources.N.rollouts); clip_low: how far the probability of a token may fall below the one it
    was drawn with before its gradient stops, as a share of that; clip_high: how far the probability of a token may
    rise above the one it was drawn with before its gradient stops, as a share of that; kl_coef: factor of the
    divergence from the reference, which needs rollouts with ref_logprobs; normalize_std: advantages are divided by the
    standard deviation of the rewards of their row."""

    type: Literal["cross_entropy", "grpo"] = "cross_entropy"
    clip_low: Annotated[float, Field(gt=0, le=1)] = 0.2
    clip_high: PositiveFloat = 0.2
    kl_coef: NotNegativeFloat = 0.0
    normalize_std: bool = True

    @model_validator(mode="after")
    def _of_grpo_alone(self) -> ObjectiveConfig:
        # a configuration that was written out whole and read again has set all of them
        defaults = {name: field.default for name, field in type(self).model_fields.items()}
        foreign = sorted(name for name in defaults if name != "type" and getattr(self, name) != defaults[name])
        if self.type == "cross_entropy" and foreign:
            raise ValueError(f"{', '.join(foreign)} of type grpo; the type is cross_entropy")
        return self
