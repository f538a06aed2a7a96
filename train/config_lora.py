"""The section `model.lora_config`, with VeOmni's names and PEFT's beside them."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from convert.adapter_config import ENDLESS
from train.config_types import Positive, Strict

# PEFT's name -> ours
ALIASES = {"r": "rank", "lora_alpha": "alpha", "target_modules": "lora_modules"}
# what an adapter that training starts from says itself
OF_THE_ADAPTER = (
    *("rank", "alpha", "lora_modules", "exclude_modules", "target_parameters", "share_expert_lora", "use_rslora"),
    *("init_lora_weights", "modules_to_save", "rank_pattern", "alpha_pattern"),
)
PATTERN_KEYS = ("rank_pattern", "alpha_pattern")
NAME_KEYS = ("lora_modules", "exclude_modules")

Alpha = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Dropout = Annotated[float, Field(ge=0, lt=1)]


class LoraConfig(Strict):
    """Low-rank adapters (LoRA): the base is frozen, kept in the dtype that is computed in, and only adapters are
    trained, saved and exported. rank: of each pair, also called r; alpha: a pair is multiplied by alpha / rank, also
    called lora_alpha; lora_modules: linear layers by name or its end (q_proj), or one regular expression of whole
    names, or all-linear; gate_proj, up_proj and down_proj mean those of the experts, too; also called target_modules;
    exclude_modules: names as in lora_modules that are left out; target_parameters: fused experts by parameter, its end
    or pattern (experts.gate_up_proj); share_expert_lora: one pair for all experts of a layer instead of one for each;
    lora_dropout: share of the inputs of adapters that is dropped, of dense layers only; bias: none is the one that is
    supported; use_rslora: multiply by alpha / sqrt(rank); init_lora_weights: true = A uniform as a linear layer's, B
    zero; gaussian = A normal with standard deviation 1 / rank, B zero; false = both uniform; modules_to_save: modules
    that are trained whole and saved with the adapters; rank_pattern, alpha_pattern: of single modules, by end of name
    or regular expression of it, the first that fits; lora_adapter: folder of a PEFT adapter to start from, which then
    says all of the above but lora_dropout; is_trainable: true is the one that is supported."""

    rank: Positive = 8
    alpha: Alpha = 8.0
    lora_modules: list[str] | str | None = None
    exclude_modules: list[str] | str | None = None
    target_parameters: list[str] | None = None
    share_expert_lora: bool = False
    lora_dropout: Dropout = 0.0
    bias: Literal["none", "all", "lora_only"] = "none"
    use_rslora: bool = False
    init_lora_weights: bool | Literal["gaussian"] = True
    modules_to_save: list[str] | None = None
    rank_pattern: dict[str, Positive] = Field(default={})
    alpha_pattern: dict[str, Alpha] = Field(default={})
    lora_adapter: str | None = None
    is_trainable: bool = True

    @model_validator(mode="before")
    @classmethod
    def _by_our_names(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        if both := [f"{ours} and {theirs}" for theirs, ours in ALIASES.items() if theirs in data and ours in data]:
            raise ValueError(f"{both[0]} are two names of one key; give one of them")
        return {ALIASES.get(key, key): value for key, value in data.items()}

    @model_validator(mode="after")
    def _supported(self) -> LoraConfig:
        if self.bias != "none":
            raise ValueError(f"bias {self.bias} is not supported: biases of the base stay as they are; write none")
        if not self.is_trainable:
            raise ValueError("is_trainable false would leave nothing to train; write true")
        return self

    @model_validator(mode="after")
    def _has_targets(self) -> LoraConfig:
        if self.lora_adapter is not None:
            defaults = {key: type(self).model_fields[key].default for key in OF_THE_ADAPTER}
            if said := [key for key, default in defaults.items() if getattr(self, key) != default]:
                raise ValueError(f"lora_adapter brings its own {said[0]}; leave {', '.join(said)} out")
        elif not self.lora_modules and not self.target_parameters:
            raise ValueError("needs lora_modules (q_proj, gate_proj, ...) or target_parameters, or a lora_adapter")
        return self

    @model_validator(mode="after")
    def _regular(self) -> LoraConfig:
        texts = [(key, pattern) for key in PATTERN_KEYS for pattern in getattr(self, key)]
        texts += [(key, getattr(self, key)) for key in NAME_KEYS if isinstance(getattr(self, key), str)]
        for key, pattern in texts:
            try:
                re.compile(pattern)
            except (re.error, RecursionError, OverflowError) as error:
                raise ValueError(f"{key}: {pattern!r} is no regular expression: {error}") from error
            if ENDLESS.search(pattern):
                raise ValueError(f"{key}: {pattern!r} repeats a repetition; write it another way")
        return self
