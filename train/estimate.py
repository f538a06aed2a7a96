"""What a training takes, computed from shapes and the plan: memory of each GPU, and steps. No GPU, no weights, no
process group is needed.

Parameters, gradients and optimizer states are exact up to the rounding of shards; activations are an estimate of what
stays between forward and backward pass, and of the largest that is in between.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, fields

import torch
from torch import nn

from schemas.errors import ConfigError
from train.config import BatchConfig, LoraConfig, TrainConfig
from train.data.plan import rank_slots
from train.data.plan_store import PlanStore
from train.estimate_activations import activations, media
from train.mesh import Degrees
from train.model_build import AnyModel, read_dtype
from train.models.moe import Experts
from train.models.spec import fsdp_units
from train.optim.build import STATE_DTYPES
from train.optim.groups import names_without_decay
from train.optim.muon_parameters import muon_names
from train.parallel.expert_apply import needs_no_fsdp

WORKSPACE = 1 << 30  # bytes of CUDA context, NCCL and libraries


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes on each GPU. parameters: shards, in their own dtype; gradients: of those that are trained, in theirs;
    optimizer: AdamW's two averages or Muon's one; gathered: whole copies that are there at a time, in the dtype that is
    computed in, of the root and of two blocks, and a frozen audio tower beside the model; activations, media: see their
    functions; workspace: of CUDA and its libraries. With offload the first three are in CPU memory, with
    optimizer_offloaded the third; what of it visits the GPU in a step, when activations are gone, is not counted."""

    parameters: int
    gradients: int
    optimizer: int
    gathered: int
    activations: int
    media: int
    workspace: int
    offloaded: bool = False
    optimizer_offloaded: bool = False

    @property
    def gpu(self) -> int:
        """Bytes of all that is on the GPU."""
        states = self.parameters + self.gradients + self.optimizer
        return states - self.cpu + self.gathered + self.activations + self.media + self.workspace

    @property
    def cpu(self) -> int:
        """Bytes of states in CPU memory, for each GPU."""
        sizes: list[int] = [getattr(self, name) for name in self._moved]
        return sum(sizes)

    @property
    def _moved(self) -> tuple[str, ...]:
        if self.offloaded:
            return ("parameters", "gradients", "optimizer")
        return ("optimizer",) if self.optimizer_offloaded else ()

    def lines(self) -> list[str]:
        """'parameters 7.6 GB', ..., and the sum."""
        parts = [(f.name, getattr(self, f.name)) for f in fields(self) if not f.name.endswith("offloaded")]
        moved = self._moved
        said = [f"{name} {size_text(size)}" + (" (CPU)" if name in moved else "") for name, size in parts]
        return [*said, f"memory of each GPU {size_text(self.gpu)}"]


def size_text(nbytes: float) -> str:
    """`7.6 GB`; of what is below 0.1 GB, `31.4 MB`."""
    return f"{nbytes / 1e9:.1f} GB" if nbytes >= 1e8 or not nbytes else f"{nbytes / 1e6:.1f} MB"


def count_text(count: int) -> str:
    """`31.7 B`; of what is below a million, `54,321`."""
    if count < 10**6:
        return f"{count:,}"
    return f"{count / 1e9:.3g} B" if count >= 10**9 else f"{count / 1e6:.3g} M"


def estimate_memory(
    model: AnyModel, degrees: Degrees, train: TrainConfig, max_seq_len: int, lora: LoraConfig | None = None
) -> MemoryEstimate:
    """Of a model on the meta device, frozen as it will be. max_seq_len: tokens of a packed sequence."""
    fsdp = train.accelerator.fsdp_config
    itemsize = getattr(torch, fsdp.mixed_precision.compute_dtype).itemsize
    blocks = fsdp_units(model, whole_towers=fsdp.tower_units == "whole")
    in_blocks = {id(parameter) for _, block in blocks for parameter in block.parameters()}
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    root = sum(parameter.numel() for parameter in model.parameters() if id(parameter) not in in_blocks)
    moved = [part for part in model.modules() if isinstance(part, Experts)]
    left = {id(p) for part in moved for p in part.parameters(recurse=False) if _left_alone(p, degrees, train)}
    sizes = sorted((gathered_numel(block, degrees.ep, left) for _, block in blocks), reverse=True)
    whole = sum(sizes) if not fsdp.reshard_after_forward else sum(sizes[:2])
    alone = degrees.world == 1 and itemsize == read_dtype(lora, train).itemsize and not fsdp.offload
    beside = 0 if (tower := getattr(model, "frozen_audio", None)) is None else tower.nbytes
    gradients = sum(shard_bytes(parameter, degrees.fsdp) for parameter in trained)
    first_is_last = train.global_batch_size <= degrees.dp * train.micro_batch_size
    if not fsdp.sync_every_micro_batch and degrees.fsdp > 1 and not first_is_last:
        gradients += _summed(trained, model, degrees.ep, left, train)
    reduced = _reduced(model, blocks, degrees.ep, left, train)
    return MemoryEstimate(
        parameters=sum(shard_bytes(parameter, degrees.fsdp) for parameter in model.parameters()),
        gradients=gradients,
        optimizer=averages(model, degrees, train),
        gathered=beside if alone else beside + (root + whole) * itemsize + reduced,
        activations=activations(model, train, max_seq_len // degrees.ulysses, itemsize, degrees.ep),
        media=media(model, degrees, train, max_seq_len, itemsize),
        workspace=WORKSPACE,
        offloaded=fsdp.offload,
        optimizer_offloaded=train.accelerator.offload_config.enable_optimizer,
    )


@dataclass(frozen=True)
class StepEstimate:
    """steps_per_epoch: of the first epoch, which others differ little from; total_steps: of the whole training;
    micro_steps: forward passes of each rank in a step; tokens_per_step, samples_per_step: means over the first epoch,
    over all ranks; filled: share of the packed sequences that is not padding, were each padded to max_seq_len."""

    steps_per_epoch: int
    total_steps: int
    micro_steps: int
    tokens_per_step: float
    samples_per_step: float
    filled: float

    def lines(self) -> list[str]:
        """'1,234 steps per epoch, 3,702 in all', ..."""
        return [
            f"{self.steps_per_epoch:,} steps per epoch, {self.total_steps:,} in all",
            f"{self.micro_steps} micro-batches of each rank per step",
            f"{self.samples_per_step:,.1f} rows and {self.tokens_per_step:,.0f} tokens per step",
            f"packed sequences are {self.filled:.1%} full",
        ]


def estimate_steps(plans: PlanStore, batch: BatchConfig, degrees: Degrees) -> StepEstimate:
    """Of the plan. ConfigError when the sequences of a step cannot be dealt out evenly to ranks and micro-batches."""
    planner = plans.planner
    share = len(rank_slots(planner.lanes.count, batch.global_batch_size, 0, degrees.dp))
    if share % batch.micro_batch_size:
        raise ConfigError(
            f"train.global_batch_size {batch.global_batch_size} on {degrees.dp} data-parallel ranks is {share} "
            f"sequences each, no multiple of train.micro_batch_size {batch.micro_batch_size}"
        )
    first = plans.epoch(0)
    steps = first.steps
    tokens = int(planner.table.tokens[first.rows].astype("int64").sum())
    room = steps * batch.global_batch_size * planner.budget.max_seq_len
    return StepEstimate(
        steps_per_epoch=steps,
        total_steps=batch.max_steps or plans.total_steps(batch.num_train_epochs),
        micro_steps=share // batch.micro_batch_size,
        tokens_per_step=tokens / max(steps, 1),
        samples_per_step=len(first.rows) / max(steps, 1),
        filled=tokens / max(room, 1),
    )


def numel(module: nn.Module) -> int:
    """Elements of all its parameters."""
    return sum(parameter.numel() for parameter in module.parameters())


def gathered_numel(module: nn.Module, ep: int, left: Collection[int] = ()) -> int:
    """Elements that a rank gathers for a pass of it: all parameters, of experts its share. left: ids of those that FSDP
    leaves alone."""
    experts = sum(numel(part) for part in module.modules() if isinstance(part, Experts))
    here = sum(parameter.numel() for parameter in module.parameters() if id(parameter) in left)
    return numel(module) - experts + (experts - here) // ep


def _left_alone(parameter: nn.Parameter, degrees: Degrees, train: TrainConfig) -> bool:
    return degrees.ep > 1 and needs_no_fsdp(degrees, train.accelerator.fsdp_config, parameter.dtype)


def averages(model: AnyModel, degrees: Degrees, train: TrainConfig) -> int:
    """Bytes of the optimizer's: one of a parameter of Muon, two of the others."""
    config = train.optimizer
    one = muon_names(model, names_without_decay(model, config)) if config.type == "muon" else set()
    count = sum(
        shard_numel(parameter, degrees.fsdp) * (1 if name in one else 2)
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    )
    return count * STATE_DTYPES[config.state_dtype].itemsize


def shard_bytes(parameter: torch.Tensor, ranks: int) -> int:
    """Of the largest shard."""
    return shard_numel(parameter, ranks) * parameter.element_size()


def shard_numel(parameter: torch.Tensor, ranks: int) -> int:
    """Elements of the largest shard: rows are divided, the last shard may be smaller."""
    if not parameter.ndim or ranks == 1:
        return parameter.numel()
    rows = -(-parameter.shape[0] // ranks)
    return rows * (parameter.numel() // parameter.shape[0]) if parameter.shape[0] else 0


def _reduced(
    model: nn.Module, blocks: list[tuple[str, nn.Module]], ep: int, left: Collection[int], train: TrainConfig
) -> int:
    """Gradients of the largest group on their way to the shards: a block's, or those of what is in none."""
    in_blocks = {id(parameter) for _, block in blocks for parameter in block.parameters()}
    root = [parameter for parameter in model.parameters() if id(parameter) not in in_blocks]
    return max(_summed(group, model, ep, left, train) for group in [root, *(block.parameters() for _, block in blocks)])


def _summed(
    parameters: Iterable[nn.Parameter], model: nn.Module, ep: int, left: Collection[int], train: TrainConfig
) -> int:
    """Bytes of a rank's whole gradients of parameters, in the dtype in which FSDP sums them up."""
    precision = train.accelerator.fsdp_config.mixed_precision
    wide = getattr(torch, precision.reduce_dtype).itemsize if precision.enable else None
    divided = {id(p) for part in model.modules() if isinstance(part, Experts) for p in part.parameters(recurse=False)}
    found = [p for p in parameters if p.requires_grad and id(p) not in left]
    return sum(p.numel() // (ep if id(p) in divided else 1) * (wide or p.element_size()) for p in found)
