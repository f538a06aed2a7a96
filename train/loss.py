"""How the loss of a step is made up: the mean over all labelled tokens of all ranks and micro-batches, whatever their
shares are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from train.data.batch import Batch
from train.mesh import Mesh
from train.models.inputs import IGNORE


@dataclass(frozen=True, eq=False)
class StepScale:
    """label_tokens: int64 [], of the whole step on all ranks; loss_scale: float32 [], what each rank multiplies its
    summed cross-entropy by; aux_scale: float32 [], factor of the router's auxiliary loss of each micro-step."""

    label_tokens: Tensor
    loss_scale: Tensor
    aux_scale: Tensor


def step_scale(batches: Sequence[Batch], mesh: Mesh) -> StepScale:
    """Of the micro-batches of this rank's step; one collective, and nothing waits for the device.

    Gradients are summed over all ranks, so each rank's sum is scaled by 1 / N, N = labelled tokens of the step; the
    auxiliary loss, whose gradients of all ranks add up to the whole, by 1 / M, M = micro-steps in which some rank has
    more than padding: with padding alone it is 0, which belongs to no mean. A step without labels has loss 0.
    """
    labels = torch.stack([(batch.labels != IGNORE).sum() for batch in batches]).sum()
    tokens = torch.tensor([batch.length - batch.num_pad for batch in batches])
    found = torch.cat([labels.reshape(1), _to_device(tokens, labels.device)])
    if mesh.params is not None:
        dist.all_reduce(found)
    filled = (found[1:] > 0).sum()
    return StepScale(found[0], _one_over(found[0]), _one_over(filled))


def _one_over(count: Tensor) -> Tensor:
    return count.clamp(min=1).double().reciprocal().float()


@dataclass(frozen=True, eq=False)
class SourceLoss:
    """Of one data source on this rank. total: float32 [], sum of the losses of its tokens; tokens: labelled ones."""

    total: Tensor
    tokens: int

    def __add__(self, other: SourceLoss) -> SourceLoss:
        return SourceLoss(self.total + other.total, self.tokens + other.tokens)


def source_losses(token_loss: Tensor, batch: Batch) -> dict[str, SourceLoss]:
    """token_loss [S] of this rank's slice, by the source of its sample. Under sequence parallelism `tokens` counts the
    whole samples, on every rank of the group."""
    names = list(dict.fromkeys(batch.sources))
    if not names:
        return {}
    slice_start = batch.route.sp_rank * len(token_loss)
    ends = batch.sample_tokens.cumsum(0).sub(slice_start).clamp(0, len(token_loss))
    lengths = torch.diff(ends, prepend=ends.new_zeros(1))
    sums = torch.segment_reduce(
        token_loss[: int(ends[-1])], "sum", lengths=_to_device(lengths, token_loss.device), unsafe=True
    )
    owner = torch.tensor([[name == source for source in batch.sources] for name in names], dtype=torch.float32)
    totals = (_to_device(owner, token_loss.device) * sums).sum(1)
    counts = (owner.long() * batch.label_tokens).sum(1).tolist()
    return {name: SourceLoss(total, count) for name, total, count in zip(names, totals, counts, strict=True)}


def _to_device(values: Tensor, device: torch.device) -> Tensor:
    """A copy that does not wait; one from pageable memory would."""
    return values.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else values.to(device)
