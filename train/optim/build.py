"""The optimizer of a configuration, one object for the whole model."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from train.config_optimizer import OptimizerConfig
from train.optim.adamw import AdamWNumbers, AdamWTensors, adamw_update, fused_update
from train.optim.muon import Muon, MuonState
from train.optim.muon_layout import Matrices
from train.optim.muon_parameters import head_blocks
from train.optim.newton_schulz import NewtonSchulz
from train.optim.rounding import Draws, Place
from train.parallel.loading import local_part

STATE_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
log = logging.getLogger("omniloom.train")


def make_optimizer(
    model: nn.Module,
    groups: list[dict[str, Any]],
    config: OptimizerConfig,
    *,
    seed: int = 0,
    device: torch.device | None = None,
) -> Optimizer:
    """Over groups of `parameter_groups`: torch's AdamW where parameters and averages are float32, `ModelOptimizer`
    otherwise. seed: of rounding; device: that Muon computes on, None = that of the parameters."""
    trained = [parameter for group in groups for parameter in group["params"]]
    plain = all(parameter.dtype == torch.float32 for parameter in trained)
    if config.type == "adamw" and config.state_dtype == "fp32" and plain:
        beta1, beta2 = config.betas
        fused = all(parameter.is_cuda for parameter in trained)
        return AdamW(groups, lr=config.lr, betas=(beta1, beta2), eps=config.eps, fused=fused or None)
    return ModelOptimizer(model, groups, config, seed=seed, device=device)


class ModelOptimizer(Optimizer):
    """AdamW for the groups of kind adamw, Muon for those of kind muon; parameters and averages in float32 or bfloat16.

    States: step (float32 scalar on the CPU, as of torch's optimizers), exp_avg and exp_avg_sq, or momentum_buffer, each
    placed as its parameter. What is kept in bfloat16 is rounded stochastically, the same way on any number of ranks.
    """

    def __init__(
        self,
        model: nn.Module,
        groups: list[dict[str, Any]],
        config: OptimizerConfig,
        *,
        seed: int = 0,
        device: torch.device | None = None,
    ) -> None:
        for group in groups:
            if group["kind"] == "adamw":
                group |= {"betas": tuple(config.betas), "eps": config.eps}
        super().__init__(groups, {})
        self._seed = seed if config.stochastic_rounding else None
        self._state_dtype = STATE_DTYPES[config.state_dtype]
        trained = {parameter for group in self.param_groups for parameter in group["params"]}
        self._names: dict[Tensor, str] = {
            parameter: name for name, parameter in model.named_parameters() if parameter in trained
        }
        self._places = {parameter: Place.of(parameter) for parameter in trained}
        muon = [group for group in self.param_groups if group["kind"] == "muon"]
        named = [(self._names[parameter], parameter, group) for group in muon for parameter in group["params"]]
        blocks = head_blocks(model, (name for name, _, _ in named), config) if muon else {}
        found = [Matrices.of(name, parameter, group, blocks.get(name, 1)) for name, parameter, group in named]
        where = device or (found[0].parameter.device if found else torch.device("cpu"))
        self._muon = Muon(found, NewtonSchulz.of(config), where)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Parameters without a gradient are an error: `fill_missing_gradients` comes before."""
        assert closure is None, "the gradients are there already"
        for group in self.param_groups:
            if group["kind"] == "adamw":
                self._adamw(group)
        states: dict[Tensor, MuonState] = {}
        self._muon.step(partial(self._muon_state, states))

    def _adamw(self, group: dict[str, Any]) -> None:
        (beta1, beta2), eps = group["betas"], group["eps"]
        alike: list[tuple[AdamWTensors, AdamWNumbers]] = []
        for parameter in group["params"]:
            state, step = self._advance(parameter, "exp_avg", "exp_avg_sq")
            tensors = AdamWTensors(
                *(local_part(t) for t in (parameter, parameter.grad, state["exp_avg"], state["exp_avg_sq"]))
            )
            numbers = AdamWNumbers(group["lr"], beta1, beta2, eps, group["weight_decay"], step)
            if tensors.fused:
                alike.append((tensors, numbers))
            else:
                adamw_update(tensors, numbers, self._draws(parameter, step, "parameter", "exp_avg_sq"))
        fused_update(alike)

    def _muon_state(self, known: dict[Tensor, MuonState], matrices: Matrices) -> MuonState:
        """Once for each parameter and step."""
        parameter = matrices.parameter
        if parameter not in known:
            state, step = self._advance(parameter, "momentum_buffer")
            draws = self._draws(parameter, step, "momentum_buffer", "parameter")
            known[parameter] = MuonState(state["momentum_buffer"], draws)
        return known[parameter]

    def _advance(self, parameter: Tensor, *averages: str) -> tuple[dict[str, Any], int]:
        """The states of a parameter, made or brought to their dtype where needed, and the number of this step."""
        state = self.state[parameter]
        if "step" not in state:
            state["step"] = torch.zeros((), dtype=torch.float32)
        for name in averages:
            found = state.get(name)
            if found is None:
                state[name] = torch.zeros_like(parameter, dtype=self._state_dtype, requires_grad=False)
            elif found.dtype != self._state_dtype:
                state[name] = found.to(self._state_dtype)
        state["step"] += 1
        return state, int(state["step"].item())  # on the CPU: nothing waits

    def _draws(self, parameter: Tensor, step: int, first: str, second: str) -> tuple[Draws, Draws] | None:
        if self._seed is None or torch.bfloat16 not in (parameter.dtype, self._state_dtype):
            return None
        name, place = self._names[parameter], self._places[parameter]
        return Draws.of(self._seed, step, name, first, place), Draws.of(self._seed, step, name, second, place)
