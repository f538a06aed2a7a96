"""One optimizer step: forward and backward of each micro-batch, clipping, the update, the schedule.

Nothing here waits for the device: results are tensors that are still being computed, and only this rank's.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from train.data.batch import Batch
from train.data.model_inputs import model_inputs
from train.data.processor import ProcessorAssets
from train.loss import SourceLoss, StepScale, source_losses, step_scale
from train.mesh import Mesh
from train.models.inputs import ModelOutput
from train.objective import GrpoObjective, objective_sums
from train.optim.adamw import fill_missing_gradients
from train.optim.clip import clip_gradients
from train.optim.schedule import LrScheduler
from train.parallel.fsdp import GradientSync


@dataclass(frozen=True, eq=False)
class StepParts:
    """What a step works with. sync: what happens between micro-batches; flops: of the forward and backward pass of a
    batch; max_grad_norm: 0 = gradients are not scaled down; objective: None = the cross-entropy."""

    model: nn.Module
    optimizer: Optimizer
    scheduler: LrScheduler
    mesh: Mesh
    sync: GradientSync
    max_grad_norm: float
    assets: ProcessorAssets | None = None
    flops: Callable[[Batch], float] | None = None
    objective: GrpoObjective | None = None

    @property
    def dummy_towers(self) -> bool:
        """Whether towers run on a dummy unit where this rank has no media: other ranks may have some, and all take part
        in the collectives of a tower."""
        return self.mesh.world_size > 1


@dataclass(frozen=True, eq=False)
class StepResult:
    """Of one step on this rank, before any sum over ranks, but for grad_norm and step_tokens, which are global.

    loss_sum: float32 [], losses of all labelled tokens; step_tokens: int64 [], labelled tokens of all ranks, so that
    the loss is the sum of loss_sum over ranks / step_tokens; aux_loss: float32 [], mean over micro-steps with more than
    padding, None without experts; grad_norm: float32 [], before clipping; lr: by group, that the step was taken with;
    label_tokens, tokens (without padding), samples, padding: of this rank's sequences, which the first rank of a
    sequence-parallel group counts and the others do not; modality_tokens: text, video, audio, image; source_loss: by
    source; expert_counts: float32 [MoE layers, E]; flops: of this rank; wait_s: for the loader; step_s: of this
    function, which does not wait for a GPU; objective_sums: float32 [] each, by name, those of `train.objective`.
    """

    loss_sum: Tensor
    step_tokens: Tensor
    aux_loss: Tensor | None
    grad_norm: Tensor
    lr: dict[str, float]
    label_tokens: int
    tokens: int
    samples: int
    padding: int
    modality_tokens: dict[str, int]
    source_loss: dict[str, SourceLoss]
    expert_counts: Tensor | None
    flops: float
    wait_s: float
    step_s: float
    objective_sums: dict[str, Tensor] = field(default_factory=dict)


@dataclass
class StepTotals:
    """Sums over micro-batches. Ranks of a sequence-parallel group have the same samples; the first one counts them."""

    loss_sum: Tensor
    aux_loss: Tensor | None = None
    expert_counts: Tensor | None = None
    label_tokens: int = 0
    tokens: int = 0
    samples: int = 0
    padding: int = 0
    flops: float = 0.0
    modality_tokens: Counter[str] = field(default_factory=Counter)
    source_loss: dict[str, SourceLoss] = field(default_factory=dict)
    objective_sums: dict[str, Tensor] = field(default_factory=dict)

    @torch.no_grad()
    def add(self, batch: Batch, output: ModelOutput, flops: float) -> None:
        assert output.token_loss is not None
        self.loss_sum = self.loss_sum + output.token_loss.sum()
        self.aux_loss = _plus(self.aux_loss, output.aux_loss)
        self.expert_counts = _plus(self.expert_counts, output.expert_counts)
        self.flops += flops
        first = batch.route.sp_rank == 0
        if first:
            self.label_tokens += int(batch.label_tokens.sum())
            self.tokens += batch.length - batch.num_pad
            self.samples += len(batch.keys)
            self.padding += batch.num_pad
            self.modality_tokens.update(batch.modality_tokens)
        for source, found in source_losses(output.token_loss, batch).items():
            loss = found if first else replace(found, tokens=0)
            self.source_loss[source] = self.source_loss[source] + loss if source in self.source_loss else loss
        if output.objective_sums is not None:
            for name, value in objective_sums(batch, output.objective_sums).items():
                self.objective_sums[name] = self.objective_sums[name] + value if name in self.objective_sums else value


def train_step(parts: StepParts, batches: list[Batch], wait_s: float = 0.0) -> StepResult:
    """The list is emptied on the way, so that each micro-batch is freed right after its backward pass."""
    began = time.monotonic()
    scale = step_scale(batches, parts.mesh)
    totals = StepTotals(torch.zeros((), device=parts.mesh.device))
    lr = parts.scheduler.rates()
    parts.model.train()
    while batches:
        batch = batches.pop(0)
        parts.sync.before(last=not batches)
        _micro_step(parts, batch, scale, totals)
        del batch
    fill_missing_gradients(parts.optimizer)
    trained = [parameter for group in parts.optimizer.param_groups for parameter in group["params"]]
    norm = clip_gradients(trained, parts.max_grad_norm, parts.mesh.device)
    parts.optimizer.step()
    parts.scheduler.step()
    parts.optimizer.zero_grad(set_to_none=True)
    return StepResult(
        loss_sum=totals.loss_sum,
        step_tokens=scale.label_tokens,
        aux_loss=None if totals.aux_loss is None else totals.aux_loss * scale.aux_scale,
        grad_norm=norm,
        lr=lr,
        label_tokens=totals.label_tokens,
        tokens=totals.tokens,
        samples=totals.samples,
        padding=totals.padding,
        modality_tokens=dict(totals.modality_tokens),
        source_loss=totals.source_loss,
        expert_counts=totals.expert_counts,
        flops=totals.flops,
        wait_s=wait_s,
        step_s=time.monotonic() - began,
        objective_sums=totals.objective_sums,
    )


def _micro_step(parts: StepParts, batch: Batch, scale: StepScale, totals: StepTotals) -> None:
    inputs = model_inputs(
        batch,
        parts.assets,
        loss_scale=scale.loss_scale,
        objective=None if parts.objective is None else parts.objective.on(batch),
        aux_scale=scale.aux_scale,
        dummy_towers=parts.dummy_towers,
    )
    output: ModelOutput = parts.model(inputs)
    assert output.loss is not None
    output.loss.backward()
    totals.add(batch, output, 0.0 if parts.flops is None else parts.flops(batch))


def _plus(total: Tensor | None, value: Tensor | None) -> Tensor | None:
    if value is None:
        return total
    return value.detach() if total is None else total + value.detach()
