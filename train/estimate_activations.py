"""What is on a GPU between forward and backward pass: what blocks keep, and the patches of a step's micro-batches.
Estimates from shapes, see `train.estimate`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from train.config import TrainConfig
from train.mesh import Degrees
from train.model_build import AnyModel
from train.models.checkpointing import BlockStack
from train.ops.expert_backward import ROOM
from train.parallel.expert_apply import gathers

FLOAT32 = 4
ACTIVATIONS_OF_A_BLOCK = 16  # of its input's size, that a block keeps without checkpointing (Korthikanti et al. 2022)
OFFLOAD_WINDOW = 2 + 1  # inputs of blocks on the GPU that are on their way to or from the CPU
LOSS_CHUNK = 1 << 28  # bytes of logits at a time
EXPERT_PADDING = 63  # rows at most behind those of each expert, which begin at multiples of 64 on Hopper


@dataclass(frozen=True)
class _Stack:
    """A stack of blocks in bytes of one rank's micro-batch. row_input: of a block's input; kept: of what a block keeps
    of its results after all; whole: of all that a block makes; layers, computed: blocks, and those that are computed
    again."""

    row_input: int
    kept: int
    whole: int
    layers: int
    computed: int


def activations(model: AnyModel, train: TrainConfig, tokens: int, itemsize: int, ep: int = 1) -> int:
    """Bytes of blocks of the text model and of a vision tower that is trained, were all tokens of pictures: of those
    that are computed again the input, and what attention, its projections and the MLP made where it is kept; of others
    everything, and everything of one block of the text model; and the logits of a chunk with their gradient. tokens: of
    a packed sequence on a rank; ep: ranks that divide the experts; where they gather rows, buffers are those of the
    rows of all."""
    text = _of_text(model, train, tokens * train.micro_batch_size, itemsize, ep)
    stacks = [text, *_of_vision(model, train, tokens * train.micro_batch_size, itemsize)]
    inputs = sum(stack.row_input * stack.computed for stack in stacks)
    offload = train.accelerator.offload_config
    if offload.enable_activation:
        window = OFFLOAD_WINDOW * max(stack.row_input for stack in stacks)
        inputs = min(inputs, int(offload.activation_gpu_limit * 1e9) + window)
    results = sum(stack.kept * stack.computed for stack in stacks)
    keep_gb = train.gradient_checkpointing.keep_gb
    if keep_gb is not None:
        results = min(results, int(keep_gb * 1e9))
    whole = sum(stack.whole * (stack.layers - stack.computed) for stack in stacks)
    inside = text.whole if text.computed else 0
    return inputs + results + whole + inside + 2 * LOSS_CHUNK


def _of_text(model: AnyModel, train: TrainConfig, rows: int, itemsize: int, ep: int) -> _Stack:
    config = model.config.get_text_config()
    row = config.hidden_size * itemsize
    top_k = getattr(config, "num_experts_per_tok", 0)
    experts = top_k * 3 * getattr(config, "moe_intermediate_size", 0) * itemsize
    gathered = ep > 1 and gathers(train.accelerator.expert_dispatch, ep, top_k, rows)
    if gathered:
        experts = ep * (experts + row)
    again = train.gradient_checkpointing
    heads = config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    kept = 0
    if again.keep != "inputs":
        kept += heads * (head_dim * itemsize + FLOAT32)  # the output, and a number of each softmax
    if again.keep in ("projections", "mlp"):
        pairs = 2 * (getattr(config, "num_key_value_heads", None) or heads)
        kept += ((heads + pairs) * head_dim + config.hidden_size) * itemsize
    mlp = _kept_of_mlp(config, rows, ep, gathered=gathered) * itemsize if again.keep == "mlp" else 0.0
    layers = config.num_hidden_layers
    return _Stack(
        row_input=rows * row,
        kept=int(rows * kept + mlp),
        whole=rows * (ACTIVATIONS_OF_A_BLOCK * row + experts),
        layers=layers,
        computed=round(layers * again.share) if again.enable else 0,
    )


def _of_vision(model: AnyModel, train: TrainConfig, tokens: int, itemsize: int) -> list[_Stack]:
    """None without a vision tower that is trained."""
    towers = [part for part in model.modules() if isinstance(part, BlockStack) and part.part == "vision"]
    if not any(parameter.requires_grad for tower in towers for parameter in tower.parameters()):
        return []
    config, again = model.config.vision_config, train.gradient_checkpointing
    rows, row = tokens * config.spatial_merge_size**2, config.hidden_size * itemsize
    kept = 0 if again.keep == "inputs" else row + config.num_heads * FLOAT32
    if again.keep in ("projections", "mlp"):
        kept += row  # of the output's projection; those of queries, keys and values are made again
    share = again.share if again.vision_share is None else again.vision_share
    return [
        _Stack(
            row_input=rows * row,
            kept=rows * kept,
            whole=rows * ACTIVATIONS_OF_A_BLOCK * row,
            layers=config.depth,
            computed=round(config.depth * share) if again.enable else 0,
        )
    ]


def media(model: AnyModel, degrees: Degrees, train: TrainConfig, max_seq_len: int, itemsize: int) -> int:
    """Bytes of the patches of a step's micro-batches, which are all on the GPU when it begins, and of the one after
    them, if all their tokens were of pictures."""
    vision = getattr(model.config, "vision_config", None)
    if vision is None:
        return 0
    patch = 3 * vision.temporal_patch_size * vision.patch_size**2
    sequences = -(-train.global_batch_size // degrees.dp) + train.micro_batch_size
    return sequences * max_seq_len // degrees.ulysses * vision.spatial_merge_size**2 * patch * itemsize


def _kept_of_mlp(config: Any, rows: int, ep: int, *, gathered: bool) -> float:
    """Elements that a layer keeps of what its activation is of, gate and up."""
    top_k = getattr(config, "num_experts_per_tok", 0)
    if not top_k:
        return 2.0 * rows * config.intermediate_size
    choices = rows * top_k * (ROOM if gathered else 1)
    return 2 * (choices + config.num_experts // ep * EXPERT_PADDING) * config.moe_intermediate_size
