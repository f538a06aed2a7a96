"""FSDP2 around a model's blocks and its root: shards over ranks, replicas of shards (HSDP), or replicas alone (DDP).

DDP is HSDP with shards of one rank: parameters stay whole, gradients are summed, and mixed precision, accumulation,
clipping and checkpoints are the same code.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import pairwise

import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from train.config_trainer import FsdpConfig, MixedPrecisionConfig
from train.mesh import Mesh


def needs_wrapping(mesh: Mesh, config: FsdpConfig, master: torch.dtype = torch.float32) -> bool:
    """False for one process that computes in the dtype of its parameters, where they are. master: that dtype."""
    return mesh.world_size > 1 or config.offload or getattr(torch, config.mixed_precision.compute_dtype) != master


def precision_policy(config: MixedPrecisionConfig) -> MixedPrecisionPolicy:
    """Inputs are not cast: positions and statistics stay float32, and modules cast what they take themselves."""
    if not config.enable:
        return MixedPrecisionPolicy(cast_forward_inputs=False)
    return MixedPrecisionPolicy(
        param_dtype=getattr(torch, config.param_dtype),
        reduce_dtype=getattr(torch, config.reduce_dtype),
        cast_forward_inputs=False,
    )


def offload_policy(config: FsdpConfig, device: torch.device) -> OffloadPolicy:
    """Where sharded parameters, gradients and optimizer states stay."""
    return CPUOffloadPolicy(pin_memory=device.type == "cuda") if config.offload else OffloadPolicy()


def sum_gradients(wrapped: FSDPModule, ranks: int) -> None:
    """Gradients are summed over ranks, not averaged: the loss is divided by what the whole step has, see
    `train.loss.step_scale`. ranks: that hold its shards."""
    if ranks > 1:  # for one alone it is 1 anyway, and given one torch copies the gradients once more
        wrapped.set_gradient_divide_factor(1.0)
    # else a reduction that multiplies, which gloo lacks
    wrapped.set_force_sum_reduction_for_comms(True)


def apply_fsdp(
    model: nn.Module,
    blocks: Sequence[tuple[str, nn.Module]],
    mesh: Mesh,
    config: FsdpConfig,
    left: Collection[nn.Parameter] = (),
) -> FSDPModule:
    """Wraps in place; the model itself. blocks: (path, module) in the order of their forward passes, towers among them;
    left: parameters that it leaves alone. Parameters outside blocks (embedding, head) are gathered with the root and
    stay until its backward pass. Gradients are summed over ranks."""
    assert mesh.shards is not None, "FSDP needs process groups"
    precision = precision_policy(config.mixed_precision)
    offload = offload_policy(config, mesh.device)
    ignored = set(left)
    for _, block in blocks:
        fully_shard(
            block,
            mesh=mesh.shards,
            reshard_after_forward=config.reshard_after_forward,
            mp_policy=precision,
            offload_policy=offload,
            ignored_params=ignored,
        )
    root = fully_shard(
        model,
        mesh=mesh.shards,
        reshard_after_forward=False,
        mp_policy=precision,
        offload_policy=offload,
        ignored_params=ignored,
    )
    for module in model.modules():
        if isinstance(module, FSDPModule):
            sum_gradients(module, mesh.shards.size())
    if config.forward_prefetch:
        _prefetch(blocks)
    return root


def _prefetch(blocks: Sequence[tuple[str, nn.Module]]) -> None:
    """Each block gathers what is wrapped inside it, experts, and the next block of its tower while it computes."""
    after = {path: (next_path, following) for (path, _), (next_path, following) in pairwise(blocks)}
    for path, block in blocks:
        assert isinstance(block, FSDPModule)
        wanted: list[FSDPModule] = [m for m in block.modules() if m is not block and isinstance(m, FSDPModule)]
        next_path, following = after.get(path, ("", block))
        parent = path.rpartition(".")[0]
        # a whole tower may not run, and what was gathered for nothing would be stale when it does
        if parent and parent == next_path.rpartition(".")[0] and isinstance(following, FSDPModule):
            wanted.append(following)
        block.set_modules_to_forward_prefetch(wanted)


class GradientSync:
    """Between the micro-batches of a step: what is summed over ranks and what is freed. Does nothing to a model that
    is not wrapped."""

    def __init__(self, model: nn.Module, config: FsdpConfig) -> None:
        self._root = model if isinstance(model, FSDPModule) else None
        self._every = config.sync_every_micro_batch
        self._reshard = config.reshard_after_backward

    def before(self, *, last: bool) -> None:
        """To be called before the forward pass of a micro-batch."""
        if self._root is None:
            return
        self._root.set_is_last_backward(last)
        self._root.set_requires_all_reduce(last)  # of HSDP: replicas meet once per step
        self._root.set_requires_gradient_sync(last or self._every)
        self._root.set_reshard_after_backward(last or self._reshard)
