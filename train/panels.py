"""Which charts the page of a training has, and what stands below their titles."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from train.metric_names import describe


@dataclass(frozen=True)
class Panel:
    """One chart. names: metrics drawn in it; one that ends in `/` means all that begin with it; about: below the title,
    "" = the unit of the first metric; of_objective: values of what is minimised, which has no unit under grpo; smooth:
    its one curve also as a moving average; cut: a few values far above all others do not stretch the axis; spread:
    what its many curves are of, such as layers, of which the highest, the median and the lowest are drawn."""

    title: str
    names: tuple[str, ...]
    about: str = ""
    of_objective: bool = False
    smooth: bool = False
    from_zero: bool = False
    cut: bool = False
    spread: str = ""

    @property
    def subtitle(self) -> str:
        return self.about or describe(self.names[0])[0]


PANELS = (
    Panel("Loss", ("loss",), of_objective=True, smooth=True),
    Panel("Loss by source", ("loss/",), of_objective=True),
    Panel("Loss by source since the start", ("source/loss/",), of_objective=True),
    Panel("Evaluation", ("eval/loss", "eval/loss/")),
    Panel("Reward", ("grpo/reward", "grpo/reward_std"), "mean and standard deviation over responses"),
    Panel("Responses without advantage", ("grpo/no_advantage",), "share of responses", from_zero=True),
    Panel("Ratio", ("grpo/ratio",), "probability of a token / the one it was drawn with"),
    Panel(
        "Clipped tokens", ("grpo/clip_low", "grpo/clip_high", "grpo/far"), "share of response tokens", from_zero=True
    ),
    Panel("Divergence", ("grpo/kl_old", "grpo/kl_ref"), from_zero=True),
    Panel("Negative log probability of the responses", ("grpo/nll",)),
    Panel("Load-balancing loss", ("aux_loss",), "of the routers, before its coefficient"),
    Panel("Gradient norm", ("grad_norm", "grad_norm_max"), "before clipping: of the last step, and the largest"),
    Panel("Learning rate", ("lr/",), "of each group of parameters", from_zero=True),
    Panel("Tokens per second and GPU", ("tokens_per_second_per_gpu",), from_zero=True),
    Panel("MFU", ("mfu",), "share of the GPU's peak", from_zero=True),
    Panel("Step and waiting for data", ("step_s", "data_wait_s"), "s per step", from_zero=True, cut=True),
    Panel("Memory", ("memory_gb", "memory_reserved_gb"), from_zero=True),
    Panel("Tokens by modality", ("tokens/",), from_zero=True),
    Panel("Padding", ("padding",), "share of the tokens", from_zero=True),
    Panel("Expert load", ("expert_load_max", "expert_load_mean"), "fullest expert / mean: worst layer, mean of layers"),
    Panel("Fullest expert by layer", ("moe/max/",), "its tokens / mean of the layer", spread="layers"),
    Panel("Emptiest expert by layer", ("moe/min/",), "its tokens / mean of the layer", from_zero=True, spread="layers"),
    Panel("Idle experts", ("experts_idle",), "share of experts", from_zero=True),
)


def panels_of(line_names: Mapping[str, Any]) -> tuple[Panel, ...]:
    """The panels of a training whose lines have these names."""
    if not any(name.startswith("grpo/") for name in line_names):
        return PANELS
    objective = "objective, without unit"
    return tuple(replace(panel, about=objective) if panel.of_objective else panel for panel in PANELS)
