"""The model, the rows and the step that the parallel benchmark measures: the text model of Qwen3-Omni-30B-A3B with few
layers, all of its experts, and random weights that are made on the device."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import Qwen3MoeConfig

from schemas.strict import check_config
from train.config_trainer import AcceleratorConfig
from train.mesh import Mesh
from train.models.checkpointing import CheckpointPolicy, set_checkpointing
from train.models.inputs import ModelInputs
from train.models.spec import fsdp_blocks
from train.models.text_lm import Qwen3LM
from train.ops.device import describe_device
from train.ops.registry import bind_ops, resolve
from train.ops.segments import Segments
from train.optim.clip import clip_gradients
from train.parallel.apply import apply_parallel
from train.parallel.fsdp import GradientSync
from train.parallel.loading import give_memory, local_part
from train.parallel.router import RouterReduction

DTYPE = "bfloat16"
LR, MAX_NORM = 1e-6, 1.0


@dataclass(frozen=True)
class Shape:
    """Of the model and its rows. inner: width of an expert; tokens: of each rank in a step; document: tokens of each
    document, None = one document of all; attention, moe: backends."""

    layers: int = 6
    hidden: int = 2048
    heads: int = 32
    kv_heads: int = 4
    head_dim: int = 128
    experts: int = 128
    top_k: int = 8
    inner: int = 768
    vocab: int = 151936
    tokens: int = 16384
    document: int | None = 4096
    attention: str = "auto"
    moe: str = "auto"

    def config(self) -> Qwen3MoeConfig:
        make: Any = Qwen3MoeConfig
        config: Qwen3MoeConfig = make(
            vocab_size=self.vocab, hidden_size=self.hidden, intermediate_size=self.inner,
            num_hidden_layers=self.layers, num_attention_heads=self.heads, num_key_value_heads=self.kv_heads,
            head_dim=self.head_dim, num_experts=self.experts, num_experts_per_tok=self.top_k,
            moe_intermediate_size=self.inner, norm_topk_prob=True, router_aux_loss_coef=0.001,
            max_position_embeddings=1 << 20, tie_word_embeddings=False,
            rope_parameters={"rope_type": "default", "rope_theta": 1e6},
        )  # fmt: skip
        return config

    def rows(self) -> str:
        """'4 documents of 4096 tokens'"""
        length = self.document or self.tokens
        return f"{self.tokens // length} documents of {length} tokens a rank"


TINY = Shape(
    layers=2, hidden=64, heads=8, kv_heads=4, head_dim=16, experts=8, top_k=2, inner=32, vocab=512, tokens=256,
    document=64,
)  # fmt: skip


class Trained:
    """One rank's model with its optimizer. layout: keys of train.accelerator; checkpointing: None = nothing is
    computed again."""

    def __init__(
        self, shape: Shape, layout: Mapping[str, Any], device: torch.device, checkpointing: CheckpointPolicy | None
    ) -> None:
        config = check_config(dict(layout), AcceleratorConfig)
        self.shape, self.device = shape, device
        self.mesh = Mesh.make(config, dist.get_world_size(), dist.get_rank(), device)
        place = describe_device(device)
        chosen = {"attn_implementation": shape.attention, "moe_implementation": shape.moe}
        self.chosen = resolve(chosen, place, DTYPE)
        with torch.device("meta"):
            self.model = Qwen3LM(shape.config(), bind_ops(self.chosen, place, DTYPE))
        set_checkpointing(self.model, checkpointing)
        if self.mesh.world_size > 1:
            self.model.reduce_router = RouterReduction()
        rows, dispatch = shape.tokens, config.expert_dispatch
        apply_parallel(self.model, fsdp_blocks(self.model), self.mesh, config.fsdp_config, dispatch=dispatch, rows=rows)
        give_memory(self.model, device)
        fill(self.model, self.mesh.rank)
        self.parameters = list(self.model.parameters())
        self.sync = GradientSync(self.model, config.fsdp_config)
        # of the local parts, which share the parameters' memory: one fused kernel whatever the mesh; made at the first
        # step, when FSDP has given the parts their final place
        self.local: list[Tensor] = []
        self.optimizer: torch.optim.AdamW | None = None
        self.inputs = rows_of(shape, self.mesh)

    def backward(self, inputs: ModelInputs | None = None) -> Tensor:
        """Forward and backward pass; the loss of these rows."""
        self.sync.before(last=True)
        output = self.model(self.inputs if inputs is None else inputs)
        loss: Tensor = output.loss
        loss.backward()
        return loss.detach()

    def step(self) -> Tensor:
        """A whole step."""
        loss = self.backward()
        clip_gradients(self.parameters, MAX_NORM, self.device)
        if self.optimizer is None:
            self.local = [local_part(parameter).detach() for parameter in self.parameters]
            self.optimizer = torch.optim.AdamW(self.local, lr=LR, fused=self.device.type == "cuda")
        for part, parameter in zip(self.local, self.parameters, strict=True):
            part.grad = None if parameter.grad is None else local_part(parameter.grad)
        self.optimizer.step()
        self.clear()
        return loss

    def clear(self) -> None:
        """Frees the gradients."""
        for part in self.local:
            part.grad = None
        self.model.zero_grad(set_to_none=True)

    @property
    def kernels(self) -> str:
        """Backends of attention and experts."""
        return f"{self.chosen['attention']}, {self.chosen['moe_experts']}"


@torch.no_grad()
def fill(model: torch.nn.Module, seed: int) -> None:
    """Small random matrices, norms of 1; other values on every rank."""
    torch.manual_seed(seed)
    for parameter in model.parameters():
        part = local_part(parameter)
        if parameter.ndim > 1:
            part.normal_(0.0, 0.02)
        else:
            part.fill_(1.0)


def rows_of(shape: Shape, mesh: Mesh) -> ModelInputs:
    """This rank's slice of a sequence of random tokens: ranks of a sequence share one of `ulysses` times as many."""
    degrees, tokens = mesh.degrees, shape.tokens
    total = tokens * degrees.ulysses
    lengths = [total] if shape.document is None else [shape.document] * (total // shape.document)
    generator = torch.Generator().manual_seed(100 + mesh.dp_rank)
    ids = torch.randint(0, shape.vocab, (total,), generator=generator)
    labels = torch.cat([torch.cat([part[1:], torch.tensor([-100])]) for part in ids.split(lengths)])
    positions = torch.cat([torch.arange(length) for length in lengths])
    mine = slice(mesh.sp_rank * tokens, (mesh.sp_rank + 1) * tokens)
    return ModelInputs(
        ids=ids[mine].to(mesh.device),
        position_ids=positions[mine].expand(3, -1).to(mesh.device),
        segments=Segments.from_lengths(lengths, mesh.device),
        num_valid=tokens,
        labels=labels[mine].to(mesh.device),
        loss_scale=torch.full((), 1.0 / total, device=mesh.device),
    )


def with_tokens(shape: Shape, tokens: int) -> Shape:
    """One document of all ranks of a sequence, so many tokens of it on each rank."""
    return replace(shape, tokens=tokens, document=None)


def device_of(rank: int) -> torch.device:
    """Of this process."""
    return torch.device("cuda", rank) if torch.cuda.is_available() else torch.device("cpu")
