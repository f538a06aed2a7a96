"""All of the parallelism of a configuration, applied to a model that was built for one process."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from train.config_trainer import FsdpConfig
from train.mesh import Mesh
from train.models.foundation import FoundationModel
from train.models.moe import Experts
from train.parallel.expert_apply import apply_expert_parallel, shard_experts
from train.parallel.fsdp import apply_fsdp
from train.parallel.merge import apply_merge
from train.parallel.ulysses import apply_ulysses


def apply_parallel(
    model: nn.Module,
    blocks: Sequence[tuple[str, nn.Module]],
    mesh: Mesh,
    config: FsdpConfig,
    *,
    dispatch: str = "auto",
    rows: int | None = None,
) -> None:
    """Sequence parallelism, then expert parallelism, then FSDP around both, in place; the model may be on the meta
    device. blocks: (path, module) that FSDP wraps, in the order of their forward passes; dispatch, rows: of
    `apply_expert_parallel`. ConfigError: degrees that do not divide what the model has."""
    left: set[nn.Parameter] = set()
    if mesh.degrees.ulysses > 1:
        assert mesh.sp_group is not None, "sequence parallelism needs process groups"
        apply_ulysses(model, mesh.sp_group)
        if isinstance(model, FoundationModel):
            apply_merge(model, mesh.sp_group)
    if mesh.experts is not None and any(isinstance(module, Experts) for module in model.modules()):
        apply_expert_parallel(model, mesh.experts["ep"], dispatch, rows)
        left = shard_experts(model, mesh, config)
    apply_fsdp(model, blocks, mesh, config, left)
