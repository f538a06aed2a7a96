"""The section `train.optimizer`: AdamW and Muon, their numbers and dtypes, and the schedule of the learning rate."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from train.config_types import Beta, NotNegative, NotNegativeFloat, PositiveFloat, Share, Strict

Triple = Annotated[list[float], Field(min_length=3, max_length=3)]
ORIGINAL_LR = 25.0  # an update of Muon's own scale takes a rate so many times that of AdamW


class MuonConfig(Strict):
    """Keys of type: muon. muon_lr: learning rate of matrices after warm-up, null = lr with match_rms_adamw and 25 lr
    with original; rates of modules scale it by what they are to lr; muon_momentum: decay rate of the averaged gradient;
    muon_nesterov: orthogonalise the gradient mixed with the average instead of the average; muon_weight_decay: of its
    matrices, decoupled; muon_ns_steps: Newton-Schulz steps; muon_ns_coefficients: a, b, c of a x + b x^3 + c x^5, or
    one such triple for each step; muon_ns_dtype: in which matrices are orthogonalised, fp16 (on their Gram matrices
    where that is faster), bf16 or fp32; muon_eps: least norm that a matrix is divided by; muon_adjust_lr_fn:
    match_rms_adamw gives updates the size of AdamW's, original their own; muon_head_group_size: heads of a block that
    is orthogonalised alone (Muon Split), 0 = whole matrices; muon_head_split_modules: names of the projections that are
    split so, e.g. q_proj."""

    muon_lr: PositiveFloat | None = None
    muon_momentum: Beta = 0.95
    muon_nesterov: bool = True
    muon_weight_decay: NotNegativeFloat = 0.0
    muon_ns_steps: Annotated[int, Field(gt=0, lt=100)] = 5
    muon_ns_coefficients: Triple | Annotated[list[Triple], Field(min_length=1)] = Field(
        default=[3.4445, -4.775, 2.0315]
    )
    muon_ns_dtype: Literal["fp16", "bf16", "fp32"] = "fp16"
    muon_eps: PositiveFloat = 1.0e-7
    muon_adjust_lr_fn: Literal["match_rms_adamw", "original"] = "match_rms_adamw"
    muon_head_group_size: NotNegative = 0
    muon_head_split_modules: list[str] = Field(default=[])

    @property
    def ns_triples(self) -> tuple[tuple[float, float, float], ...]:
        """a, b, c of each Newton-Schulz step."""
        given: list[Any] = list(self.muon_ns_coefficients)
        each = given if isinstance(given[0], list) else [given] * self.muon_ns_steps
        return tuple((float(a), float(b), float(c)) for a, b, c in each)

    @model_validator(mode="after")
    def _fit_together(self) -> MuonConfig:
        if len(self.ns_triples) != self.muon_ns_steps:
            raise ValueError(
                f"muon_ns_coefficients has {len(self.ns_triples)} triples for muon_ns_steps {self.muon_ns_steps}; give "
                "one triple, or one for each step"
            )
        if bool(self.muon_head_group_size) != bool(self.muon_head_split_modules):
            raise ValueError(
                f"muon_head_group_size {self.muon_head_group_size} and muon_head_split_modules "
                f"{self.muon_head_split_modules} go together; give both, e.g. 1 and [q_proj, k_proj], or neither"
            )
        return self


class OptimizerConfig(MuonConfig):
    """The optimizer and its schedule. type: adamw, or muon for matrices with adamw for the rest; lr: learning rate
    after warm-up; lr_min: where decay ends; lr_start: where warm-up starts; lr_warmup_steps: steps of warm-up, null =
    lr_warmup_ratio; lr_warmup_ratio: share of all steps; lr_decay_style: constant, linear or cosine; lr_decay_ratio:
    share of all steps after which lr_min is reached; weight_decay: decoupled from the gradient; betas: decay rates of
    the two averages of AdamW; eps: added to the denominator; max_grad_norm: gradients are scaled down to this norm over
    all parameters, 0 = never; no_decay_modules: class names of modules without weight decay, e.g. RMSNorm;
    no_decay_params: parts of the names of parameters without weight decay, e.g. bias; module_weight_decay: weight decay
    of parameters by path or pattern, later ones win; master_dtype: in which parameters are kept, fp32, or bf16 where
    the model computes in bfloat16; state_dtype: of the averages; stochastic_rounding: what is kept in bf16 is rounded
    up or down at random, so that small changes add up (false: to the nearest value, where they are lost)."""

    type: Literal["adamw", "muon"] = "adamw"
    lr: PositiveFloat = 1.0e-5
    lr_min: NotNegativeFloat = 0.0
    lr_start: NotNegativeFloat = 0.0
    lr_warmup_steps: NotNegative | None = None
    lr_warmup_ratio: Share = 0.0
    lr_decay_style: Literal["constant", "linear", "cosine"] = "cosine"
    lr_decay_ratio: Share = 1.0
    weight_decay: NotNegativeFloat = 0.0
    betas: Annotated[list[Beta], Field(min_length=2, max_length=2)] = Field(default=[0.9, 0.95])
    eps: PositiveFloat = 1.0e-8
    max_grad_norm: NotNegativeFloat = 1.0
    no_decay_modules: list[str] = Field(default=[])
    no_decay_params: list[str] = Field(default=[])
    module_weight_decay: dict[str, NotNegativeFloat] = Field(default={})
    master_dtype: Literal["fp32", "bf16"] = "fp32"
    state_dtype: Literal["fp32", "bf16"] = "fp32"
    stochastic_rounding: bool = True

    @property
    def muon_base_lr(self) -> float:
        """Learning rate of Muon's matrices after warm-up."""
        if self.muon_lr is not None:
            return self.muon_lr
        return self.lr if self.muon_adjust_lr_fn == "match_rms_adamw" else ORIGINAL_LR * self.lr

    @model_validator(mode="after")
    def _in_order(self) -> OptimizerConfig:
        for name in ("lr_min", "lr_start"):
            if getattr(self, name) > self.lr:
                raise ValueError(f"{name} {getattr(self, name):g} is above lr {self.lr:g}")
        return self
