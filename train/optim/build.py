"""The optimizer of a configuration, one object for the whole model."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from schemas.errors import UnsupportedError
from train.config_optimizer import OptimizerConfig
from train.optim.adamw import AdamWNumbers, AdamWTensors, adamw_updates, fused_update
from train.optim.adamw_pieces import ADAMW_PORTION, Piece, adamw_portions
from train.optim.muon import Muon, MuonState
from train.optim.muon_layout import Matrices
from train.optim.muon_parameters import head_blocks
from train.optim.newton_schulz import NewtonSchulz
from train.optim.offload import OffloadedAverages, aligned
from train.optim.rounding import Draws, Place
from train.parallel.loading import local_part

Part = tuple[AdamWTensors, int, tuple[Draws, Draws] | None]  # number of the step; bits that it is rounded with
STATE_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
log = logging.getLogger("omniloom.train")


def make_optimizer(
    model: nn.Module,
    groups: list[dict[str, Any]],
    config: OptimizerConfig,
    *,
    seed: int = 0,
    device: torch.device | None = None,
    offload: bool = False,
) -> Optimizer:
    """Over groups of `parameter_groups`: torch's AdamW where parameters and averages are float32, `ModelOptimizer`
    otherwise. seed: of rounding; device: that Muon computes on, None = that of the parameters; offload: the averages
    live in CPU memory, which torch's AdamW has no place for: `ModelOptimizer` in any case."""
    trained = [parameter for group in groups for parameter in group["params"]]
    plain = all(parameter.dtype == torch.float32 for parameter in trained)
    if config.type == "adamw" and config.state_dtype == "fp32" and plain and not offload:
        beta1, beta2 = config.betas
        fused = all(parameter.is_cuda for parameter in trained)
        return AdamW(groups, lr=config.lr, betas=(beta1, beta2), eps=config.eps, fused=fused or None)
    return ModelOptimizer(model, groups, config, seed=seed, device=device, offload=offload)


class ModelOptimizer(Optimizer):
    """AdamW for the groups of kind adamw, Muon for those of kind muon; parameters and averages in float32 or bfloat16.

    States: step (float32 scalar on the CPU, as of torch's optimizers), exp_avg and exp_avg_sq, or momentum_buffer, each
    placed as its parameter. What is kept in bfloat16 is rounded stochastically, the same way on any number of ranks.

    offload: averages live in pinned CPU memory and are on the GPU while a step needs them; the results are the same,
    bit by bit. A step does not wait until they are back: who reads `state` calls `wait_for_states` before, `state_dict`
    does so itself.
    """

    def __init__(
        self,
        model: nn.Module,
        groups: list[dict[str, Any]],
        config: OptimizerConfig,
        *,
        seed: int = 0,
        device: torch.device | None = None,
        offload: bool = False,
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
        self._offload = self._offloaded() if offload else None
        self._portions = [
            (number, pieces)
            for number, group in enumerate(self.param_groups if offload else ())
            if group["kind"] == "adamw"
            for pieces in adamw_portions(group["params"], self._places, ADAMW_PORTION)
        ]

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Parameters without a gradient are an error: `fill_missing_gradients` comes before."""
        assert closure is None, "the gradients are there already"
        states: dict[Tensor, MuonState] = {}
        state_of = partial(self._muon_state, states)
        averages = self._muon.averages(state_of)
        if self._offload is None:
            for group in self.param_groups:
                if group["kind"] == "adamw":
                    self._adamw(group)
            self._muon.step(state_of, lambda: nullcontext(next(averages)))
            return
        with self._offload.visits([*self._adamw_averages(), *averages]) as visit:
            for number, pieces in self._portions:
                with visit() as found:
                    self._adamw_pieces(self.param_groups[number], pieces, found)
            self._muon.step(state_of, visit)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As of torch's optimizers; UnsupportedError once averages in CPU memory have their places."""
        if getattr(self, "_offload", None) is not None:
            raise UnsupportedError(
                "averages in CPU memory have their places: the optimizer takes no more parameters; make another"
            )
        super().add_param_group(param_group)

    def wait_for_states(self) -> None:
        """Until the host can read the averages of the last step."""
        if self._offload is not None:
            self._offload.wait()

    def state_dict(self) -> dict[str, Any]:
        """See `torch.optim.Optimizer.state_dict`; waits for averages in CPU memory."""
        self.wait_for_states()
        return super().state_dict()

    def new_average(self, parameter: Tensor, dtype: torch.dtype) -> Tensor:
        """Zeros placed as the parameter, where averages live. Of another dtype than theirs: for a checkpoint to be read
        into, until the next step."""
        if self._offload is None:
            return torch.zeros_like(parameter, dtype=dtype, requires_grad=False)
        if dtype != self._state_dtype:
            return torch.zeros_like(parameter, dtype=dtype, device="cpu", requires_grad=False)
        return self._offload.like(parameter, dtype)

    def _offloaded(self) -> OffloadedAverages:
        sizes = [
            (1 if group["kind"] == "muon" else 2) * aligned(local_part(p).numel() * self._state_dtype.itemsize)
            for group in self.param_groups
            for p in group["params"]
        ]
        return OffloadedAverages(next(iter(self._places)).device, sum(sizes))

    def _adamw(self, group: dict[str, Any]) -> None:
        parts: list[Part] = []
        for parameter in group["params"]:
            state, step = self._advance(parameter, "exp_avg", "exp_avg_sq")
            tensors = AdamWTensors(
                *(local_part(t) for t in (parameter, parameter.grad, state["exp_avg"], state["exp_avg_sq"]))
            )
            parts.append((tensors, step, self._draws(parameter, step, "parameter", "exp_avg_sq")))
        self._update(group, parts)

    def _adamw_averages(self) -> Iterator[list[Tensor]]:
        """Of each portion, both of each piece."""
        for _, pieces in self._portions:
            found = []
            for piece in pieces:
                if not piece.start:  # once for each parameter
                    self._advance(piece.parameter, "exp_avg", "exp_avg_sq")
                state = self.state[piece.parameter]
                found += [piece.of(state["exp_avg"]), piece.of(state["exp_avg_sq"])]
            yield found

    def _adamw_pieces(self, group: dict[str, Any], pieces: Sequence[Piece], averages: Sequence[Tensor]) -> None:
        parts: list[Part] = []
        for piece, exp_avg, exp_avg_sq in zip(pieces, averages[::2], averages[1::2], strict=True):
            parameter = piece.parameter
            assert parameter.grad is not None
            step = int(self.state[parameter]["step"].item())
            tensors = AdamWTensors(piece.of(parameter), piece.of(parameter.grad), exp_avg, exp_avg_sq)
            parts.append((tensors, step, piece.draws(self._draws(parameter, step, "parameter", "exp_avg_sq"))))
        self._update(group, parts)

    def _update(self, group: dict[str, Any], parts: Sequence[Part]) -> None:
        (beta1, beta2), eps = group["betas"], group["eps"]
        alike: list[tuple[AdamWTensors, AdamWNumbers]] = []
        others: list[tuple[AdamWTensors, AdamWNumbers, tuple[Draws, Draws] | None]] = []
        for tensors, step, draws in parts:
            numbers = AdamWNumbers(group["lr"], beta1, beta2, eps, group["weight_decay"], step)
            if tensors.fused:
                alike.append((tensors, numbers))
            else:
                others.append((tensors, numbers, draws))
        fused_update(alike)
        adamw_updates(others)

    def _muon_state(self, known: dict[Tensor, MuonState], matrices: Matrices) -> MuonState:
        """Once for each parameter and step."""
        parameter = matrices.parameter
        if parameter not in known:
            state, step = self._advance(parameter, "momentum_buffer")
            draws = self._draws(parameter, step, "momentum_buffer", "parameter")
            known[parameter] = MuonState(state["momentum_buffer"], draws)
        return known[parameter]

    def _advance(self, parameter: Tensor, *averages: str) -> tuple[dict[str, Any], int]:
        """The states of a parameter, made or brought to their dtype and place where needed, and the number of this
        step."""
        state = self.state[parameter]
        if "step" not in state:
            state["step"] = torch.zeros((), dtype=torch.float32)
        for name in averages:
            found = state.get(name)
            if found is None:
                state[name] = self.new_average(parameter, self._state_dtype)
            elif self._offload is not None and not (found.dtype == self._state_dtype and self._offload.holds(found)):
                state[name] = self._offload.taken(parameter, found, self._state_dtype)
            elif found.dtype != self._state_dtype:
                state[name] = found.to(self._state_dtype)
        state["step"] += 1
        return state, int(state["step"].item())  # on the CPU: nothing waits

    def _draws(self, parameter: Tensor, step: int, first: str, second: str) -> tuple[Draws, Draws] | None:
        if self._seed is None or torch.bfloat16 not in (parameter.dtype, self._state_dtype):
            return None
        name, place = self._names[parameter], self._places[parameter]
        return Draws.of(self._seed, step, name, first, place), Draws.of(self._seed, step, name, second, place)
