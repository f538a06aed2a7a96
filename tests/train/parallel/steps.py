"""The same training steps on any number of ranks: rows that differ between ranks, and what became of the model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import SGD

from schemas.strict import check_config
from tests.train.data.mixes import Mix
from tests.train.models import families, media
from train.config_trainer import AcceleratorConfig, OptimizerConfig
from train.data.batch import Batch
from train.mesh import Mesh
from train.model_build import set_gradient_checkpointing, share_router
from train.models.checkpointing import CheckpointPolicy
from train.models.foundation import FoundationModel
from train.models.inputs import IGNORE
from train.models.omni_thinker import OmniThinker
from train.models.spec import fsdp_units
from train.ops.registry import Ops, eager_ops
from train.optim.groups import parameter_groups
from train.optim.schedule import LrScheduler, Schedule
from train.parallel.apply import apply_parallel
from train.parallel.fsdp import GradientSync, needs_wrapping
from train.parallel.loading import assign_slices, give_memory
from train.step import StepParts, StepResult, train_step

LR = 0.05
STEPS = 3
MOST_ROWS = 640  # of a rank in a forward pass, where rows are gathered
FP32 = {"mixed_precision": {"enable": False}}


def long_text() -> Mix:
    answer = " ".join(f"word{n}" for n in range(40))
    return Mix(turns=[["user", ("text", "go on")], ["assistant", ("text", answer)]])


# micro-step -> rows of a quarter of the ranks: with two ranks, one has text alone while the other has media, in turn
ROWS: list[list[list[Callable[[], Mix]]]] = [
    [[media.text_mix], [long_text], [media.clip_with_sound_mix], [media.everything_mix]],
    [[media.image_mix, long_text], [media.audio_mix], [media.text_mix], [long_text, media.text_mix]],
]


def batches_of(rank: int, world_size: int, rows: Sequence[Sequence[Sequence[Callable[[], Mix]]]] = ROWS) -> list[Batch]:
    """Of one rank; all ranks together have the same rows in each micro-step, however many there are."""
    share = 4 // world_size
    return [_batch(tuple(make for part in micro[rank * share : (rank + 1) * share] for make in part)) for micro in rows]


@cache
def _batch(makers: tuple[Callable[[], Mix], ...]) -> Batch:
    return media.batch_of(media.omni_assets(), [make() for make in makers])


def without_labels(batch: Batch) -> Batch:
    return replace(batch, labels=torch.full_like(batch.labels, IGNORE))


class Recorder(SGD):
    """Plain gradient descent that keeps the gradients of its first step, whole."""

    def __init__(self, groups: list[dict[str, Any]], model: torch.nn.Module) -> None:
        super().__init__(groups, lr=LR)
        self.model = model
        self.first: dict[str, Tensor] | None = None

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        if self.first is None:
            named = self.model.named_parameters()
            self.first = {name: whole(p.grad).clone() for name, p in named if p.grad is not None}
        super().step(closure)


def whole(tensor: Tensor) -> Tensor:
    """Gathered from all ranks, on the CPU."""
    full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return full.detach().cpu()


@dataclass
class Outcome:
    """Of STEPS steps. losses: global, per step; norms: of the gradients; gradients: of the first step."""

    losses: list[float] = field(default_factory=list)
    aux: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    gradients: dict[str, Tensor] = field(default_factory=dict)
    parameters: dict[str, Tensor] = field(default_factory=dict)


def meta_model(coef: float | None = None, ops: Ops | None = None, *, aligned: bool = False) -> OmniThinker:
    """coef: of the auxiliary loss; None: the config's. ops: None = the references. aligned: of sizes that kernels for
    GPUs take."""
    config = families.omni()
    if coef is not None:
        config.text_config.router_aux_loss_coef = coef
    if aligned:
        config.text_config.moe_intermediate_size, config.audio_config.d_model = 24, 48
    with torch.device("meta"):
        return OmniThinker(config, ops or eager_ops())


def make_parts(
    accelerator: dict[str, Any],
    model: FoundationModel,
    *,
    checkpointing: bool | CheckpointPolicy = False,
    max_grad_norm: float = 0.0,
    device: torch.device | str = "cpu",
) -> StepParts:
    """Around a model on the meta device, with the weights of `families.randomise`."""
    config = check_config({"fsdp_config": FP32} | accelerator, AcceleratorConfig)
    world, rank = (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)
    mesh = Mesh.make(config, world, rank, torch.device(device))
    policy = CheckpointPolicy() if checkpointing is True else checkpointing or None
    set_gradient_checkpointing(model, policy)
    share_router(model, mesh)
    if needs_wrapping(mesh, config.fsdp_config):
        units = fsdp_units(model, whole_towers=config.fsdp_config.tower_units == "whole")
        apply_parallel(model, units, mesh, config.fsdp_config, dispatch=config.expert_dispatch, rows=MOST_ROWS)
    give_memory(model, torch.device("cpu") if config.fsdp_config.offload else mesh.device)
    fill(model)
    schedule = OptimizerConfig(lr=LR, lr_decay_style="constant")
    optimizer = Recorder(parameter_groups(model, schedule), model)
    return StepParts(
        model=model,
        optimizer=optimizer,
        scheduler=LrScheduler(optimizer, Schedule.of(schedule, STEPS)),
        mesh=mesh,
        sync=GradientSync(model, config.fsdp_config),
        max_grad_norm=max_grad_norm,
        assets=media.omni_assets(),
    )


def fill(model: FoundationModel) -> None:
    """The weights that every model here starts with."""
    assign = assign_slices(model)
    for name, value in _weights(type(model), model.config).items():
        assign(name, lambda box=None, value=value: value[tuple(slice(*bounds) for bounds in box)])


def _weights(kind: type[FoundationModel], config: Any) -> dict[str, Tensor]:
    plain = kind(config, eager_ops())
    families.randomise(plain)
    return {name: parameter.detach() for name, parameter in plain.named_parameters()}


def outcome(parts: StepParts, batches: Sequence[Batch], steps: int = STEPS) -> Outcome:
    """Of training so many times on the same batches."""
    found = Outcome()
    assert isinstance(parts.optimizer, Recorder)
    parts.optimizer.first = None
    for _ in range(steps):
        left = list(batches)
        result = train_step(parts, left)
        assert not left
        loss, aux = global_loss(result)
        found.losses.append(loss)
        found.aux.append(aux)
        found.norms.append(float(result.grad_norm))
    assert parts.optimizer.first is not None
    found.gradients = parts.optimizer.first
    found.parameters = {name: whole(p).clone() for name, p in parts.model.named_parameters()}
    return found


def global_loss(result: StepResult) -> tuple[float, float]:
    total = result.loss_sum.clone()
    if dist.is_initialized():
        dist.all_reduce(total)
    return float(total / result.step_tokens.clamp(min=1)), 0.0 if result.aux_loss is None else float(result.aux_loss)


def assert_equal(found: Outcome, expected: Outcome, *, aux: bool = True) -> None:
    """Gradients within 1e-5 of their own greatest + 1e-7 of the greatest of all; losses within 1e-6; parameters after
    the steps within the same of how far they moved."""
    families.assert_equal_gradients(found.gradients, expected.gradients)
    for name in ("losses", "norms", "aux") if aux else ("losses", "norms"):
        for got, want in zip(getattr(found, name), getattr(expected, name), strict=True):
            assert abs(got - want) <= 2e-6 * abs(want), f"{name}: {getattr(found, name)} {getattr(expected, name)}"
    greatest = LR * max(gradient.abs().max() for gradient in expected.gradients.values())
    for name, want in expected.parameters.items():
        difference = (found.parameters[name] - want).abs().max()
        limit = 2e-6 * want.abs().max() + 1e-5 * greatest
        assert difference <= limit, f"{name} after {len(expected.losses)} steps: {difference:.3g} over {limit:.3g}"
