"""Gradient checkpointing (Chen et al. 2016): a block keeps its inputs only and runs again in the backward pass. A
policy says which blocks do so, what they keep after all (`train.ops.recorded`), and where the inputs stay in the
meantime."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd
from torch.utils.checkpoint import checkpoint, noop_context_fn

from train.ops.recorded import Kind, Recording, linear
from train.ops.recorded_room import Room

ContextPair = tuple[AbstractContextManager[Any], AbstractContextManager[Any]]
Run = Callable[..., Any]


@dataclass(frozen=True)
class CheckpointPolicy:
    """context_fn: makes the contexts of a block's first run and of its second, which decide what is kept after all; the
    default keeps nothing; share: of the blocks of each stack that are computed again, evenly spread, the others keep
    everything; shares: those of stacks that differ, by `BlockStack.part`; whole: these others, once `set_checkpointing`
    knows them; carry(run, block, *inputs): runs a block so that its inputs stay elsewhere, see
    `train.parallel.offload`; draws: whether blocks draw random numbers, the same in both runs, for which the states of
    all generators are kept: longer work for the host than all else about a block."""

    context_fn: Callable[[], ContextPair] = noop_context_fn
    share: float = 1.0
    shares: Mapping[str, float] = field(default_factory=dict)
    whole: frozenset[nn.Module] = frozenset()
    carry: Callable[..., Any] | None = None
    draws: bool = True

    def __call__(self, block: Run, *inputs: Any) -> Any:
        if not torch.is_grad_enabled() or block in self.whole:
            return block(*inputs)
        run = partial(checkpoint, use_reentrant=False, context_fn=self.context_fn, preserve_rng_state=self.draws)
        return run(block, *inputs) if self.carry is None else self.carry(run, block, *inputs)


@dataclass(frozen=True)
class Keep:
    """A `context_fn`: results of these kinds are kept while all that are kept take at most `limit` bytes, None = there
    is enough; what does not fit is computed again. first: of blocks that come first, see `Room`."""

    kinds: frozenset[Kind]
    limit: int | None = None
    room: Room = field(default_factory=Room, compare=False)
    first: bool = True

    @classmethod
    def within(cls, kinds: frozenset[Kind], limit: int) -> Keep:
        """At most so many bytes."""
        return cls(kinds, limit, Room(limit))

    def __call__(self) -> ContextPair:
        return Recording(self.kinds, self.room, first=self.first).contexts()


keep_attention = Keep(frozenset({"attention"}))
keep_projections = Keep(frozenset({"attention", "projection"}))  # of the `Projection`s around it
keep_mlp = Keep(frozenset({"attention", "projection", "mlp"}))  # of the text model, dense or of experts
# by the name that the configuration has for it; inputs: nothing else
KEEPING = {"attention": keep_attention, "projections": keep_projections, "mlp": keep_mlp}


def keeping(name: str, limit: int | None = None) -> Callable[[], ContextPair]:
    """The `context_fn` of a name in the configuration. limit: bytes of what is kept; None = all of it."""
    found = KEEPING.get(name)
    if found is None:
        return noop_context_fn
    return found if limit is None else Keep.within(found.kinds, limit)


def keeps(policy: CheckpointPolicy, kind: Kind) -> bool:
    """Whether results of that kind are among what blocks keep."""
    return isinstance(policy.context_fn, Keep) and kind in policy.context_fn.kinds


class Projection(nn.Linear):
    """A linear layer whose result a block can keep. kind: of result; compute: makes it of x, weight and bias, None =
    as torch does."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        kind: Kind = "projection",
        compute: Callable[..., Tensor] | None = None,
    ) -> None:
        super().__init__(in_features, out_features, bias)
        self.kind = kind
        self.compute = partial(linear, kind=kind) if compute is None else compute

    def forward(self, x: Tensor) -> Tensor:
        """[..., out] of [..., in]."""
        return self.compute(x, self.weight, self.bias)


def run_plainly(block: Callable[..., Any], *inputs: Any) -> Any:
    """How a block runs without checkpointing."""
    return block(*inputs)


class BlockStack(nn.Module):
    """A module that runs its blocks through `run_block`, which `set_checkpointing` replaces. part: of a model: text,
    vision or audio; draws: whether blocks draw random numbers by themselves, apart from modules that drop out."""

    part = "text"
    draws = False

    def __init__(self) -> None:
        super().__init__()
        self.run_block: Callable[..., Any] = run_plainly


def set_checkpointing(model: nn.Module, policy: CheckpointPolicy | None) -> None:
    """Turns gradient checkpointing on for the blocks of the text model and of the towers, or off with None."""
    stacks = [module for module in model.modules() if isinstance(module, BlockStack)]
    for stack in stacks:
        stack.run_block = run_plainly if policy is None else _of_stack(policy, stack, stacks)


def _of_stack(policy: CheckpointPolicy, stack: BlockStack, stacks: Sequence[BlockStack]) -> CheckpointPolicy:
    found = policy.context_fn
    if isinstance(found, Keep):
        # its attention over whole documents costs more than that of towers
        text = [other for other in stacks if other.part == "text"]
        again = any(_share(policy, other) and _blocks(other) for other in text)
        found = replace(found, first=stack in text or not again)
    draws = stack.draws or any(_drops_out(module) for module in stack.modules())
    return replace(policy, whole=_whole(stack, _share(policy, stack)), context_fn=found, draws=draws)


def _drops_out(module: nn.Module) -> bool:
    """A layer of torch, or one with a rate of its own, as adapters have."""
    rate = module.p if isinstance(module, _DropoutNd) else getattr(module, "dropout", None)
    return isinstance(rate, int | float) and rate > 0


def _share(policy: CheckpointPolicy, stack: BlockStack) -> float:
    return policy.shares.get(stack.part, policy.share)


def _blocks(stack: BlockStack) -> list[nn.ModuleList]:
    return [blocks for blocks in stack.children() if isinstance(blocks, nn.ModuleList)]


def _whole(stack: BlockStack, share: float) -> frozenset[nn.Module]:
    """The blocks of each list in a stack that are not computed again."""
    found: set[nn.Module] = set()
    for blocks in _blocks(stack):
        found |= {block for n, block in enumerate(blocks) if int((n + 1) * share) == int(n * share)}
    return frozenset(found)
