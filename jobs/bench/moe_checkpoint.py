"""A synthetic Megatron torch_dist checkpoint of a large mixture of experts, and its base, written fast.

Weights are bfloat16 and real bytes; Adam's states (12 bytes a parameter) are named in the index and lie in a hole of a
sparse file: a converter that reads them reads zeros, one that leaves them out loses nothing.
"""

from __future__ import annotations

import io
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from convert.dcp_metadata import StoredChunk, metadata_bytes
from convert.safetensors_io import lay_out, raw_bytes
from convert.tensors import TensorInfo

HEADS, KV_HEADS, HEAD_DIM = 32, 4, 128
ADAM = ("exp_avg", "exp_avg_sq", "fp32_param")
NOISE_ELEMENTS = 1 << 24


@dataclass(frozen=True)
class Size:
    layers: int
    experts: int
    hidden: int
    moe: int
    vocab: int

    @property
    def config(self) -> dict[str, object]:
        """config.json of a Qwen3-MoE."""
        return {
            "model_type": "qwen3_moe",
            "architectures": ["Qwen3MoeForCausalLM"],
            "dtype": "bfloat16",
            "hidden_size": self.hidden,
            "num_hidden_layers": self.layers,
            "num_attention_heads": HEADS,
            "num_key_value_heads": KV_HEADS,
            "head_dim": HEAD_DIM,
            "intermediate_size": 3 * self.moe,
            "moe_intermediate_size": self.moe,
            "num_experts": self.experts,
            "num_experts_per_tok": 8,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
            "norm_topk_prob": True,
            "vocab_size": self.vocab,
            "rms_norm_eps": 1e-6,
            "hidden_act": "silu",
            "max_position_embeddings": 32768,
            "rope_theta": 1e6,
            "attention_bias": False,
            "tie_word_embeddings": False,
        }

    def megatron(self) -> dict[str, tuple[int, ...]]:
        """Key -> global shape, as the default saves them: layers and experts stacked."""
        size, hidden, layers = HEADS * HEAD_DIM, self.hidden, self.layers
        at, experts = "decoder.layers.", (layers, self.experts)
        return {
            "embedding.word_embeddings.weight": (self.vocab, hidden),
            f"{at}self_attention.linear_qkv.layer_norm_weight": (layers, hidden),
            f"{at}self_attention.linear_qkv.weight": (layers, size + 2 * KV_HEADS * HEAD_DIM, hidden),
            f"{at}self_attention.q_layernorm.weight": (layers, HEAD_DIM),
            f"{at}self_attention.k_layernorm.weight": (layers, HEAD_DIM),
            f"{at}self_attention.linear_proj.weight": (layers, hidden, size),
            f"{at}pre_mlp_layernorm.weight": (layers, hidden),
            f"{at}mlp.router.weight": (layers, self.experts, hidden),
            f"{at}mlp.experts.experts.linear_fc1.weight": (*experts, 2 * self.moe, hidden),
            f"{at}mlp.experts.experts.linear_fc2.weight": (*experts, hidden, self.moe),
            "decoder.final_layernorm.weight": (hidden,),
            "output_layer.weight": (self.vocab, hidden),
        }

    def chunks(self, shape: tuple[int, ...]) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
        """(offset, sizes) as Megatron cuts: one per layer and expert; gate and up of fc1 apart."""
        lead = shape[:2] if len(shape) == 4 else shape[:1] if shape[0] == self.layers and len(shape) > 1 else ()
        halves = 2 if len(shape) == 4 and shape[2] == 2 * self.moe else 1
        for i in range(math.prod(lead)):
            at = (i // lead[1], i % lead[1]) if len(lead) == 2 else (i,) if lead else ()
            rows = shape[len(lead)] // halves
            for half in range(halves):
                rest = shape[len(lead) + 1 :]
                yield (*at, half * rows, *[0] * len(rest)), (*[1] * len(lead), rows, *rest)

    @property
    def weight_bytes(self) -> int:
        return 2 * sum(math.prod(shape) for shape in self.megatron().values())

    def hub(self) -> dict[str, tuple[int, ...]]:
        """Name -> shape of the base's tensors."""
        hidden, query, kv = self.hidden, HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
        shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (self.vocab, hidden)}
        for layer in range(self.layers):
            at = f"model.layers.{layer}."
            attention = {"q": (query, hidden), "k": (kv, hidden), "v": (kv, hidden), "o": (hidden, query)}
            shapes |= {f"{at}self_attn.{name}_proj.weight": shape for name, shape in attention.items()}
            shapes |= {f"{at}self_attn.{name}_norm.weight": (HEAD_DIM,) for name in "qk"}
            shapes |= {f"{at}{name}_layernorm.weight": (hidden,) for name in ("input", "post_attention")}
            shapes[f"{at}mlp.gate.weight"] = (self.experts, hidden)
            for expert in range(self.experts):
                shapes |= {f"{at}mlp.experts.{expert}.{n}_proj.weight": (self.moe, hidden) for n in ("gate", "up")}
                shapes[f"{at}mlp.experts.{expert}.down_proj.weight"] = (hidden, self.moe)
        return shapes | {"model.norm.weight": (hidden,), "lm_head.weight": (self.vocab, hidden)}


class Noise:
    """Normal bfloat16 values, cheap: windows of one block, another for every tensor."""

    def __init__(self, seed: int) -> None:
        self._block = (torch.randn(NOISE_ELEMENTS, generator=torch.Generator().manual_seed(seed)) * 0.02).bfloat16()
        self._at = 0

    def windows(self, count: int) -> Iterator[torch.Tensor]:
        """Views of the block that hold so many elements together."""
        self._at = (self._at + 7919) % NOISE_ELEMENTS
        at = self._at
        while count:
            window = self._block[at : at + count]
            yield window
            count, at = count - len(window), 0

    def take(self, shape: tuple[int, ...]) -> torch.Tensor:
        return torch.cat(list(self.windows(math.prod(shape)))).view(shape)


def write_megatron(folder: Path, size: Size) -> Path:
    """`iter_0000001` in the folder: two weight files, one sparse file of optimizer states."""
    checkpoint = folder / "iter_0000001"
    checkpoint.mkdir(parents=True)
    noise = Noise(1)
    infos: dict[str, TensorInfo] = {}
    chunks: dict[str, list[StoredChunk]] = {}
    position = 0
    with (checkpoint / "__0_0.distcp").open("wb") as file:
        for key, shape in size.megatron().items():
            infos[key], chunks[key] = TensorInfo(shape, torch.bfloat16), []
            for offset, sizes in size.chunks(shape):
                record = io.BytesIO()
                torch.save(noise.take(sizes), record)
                length = file.write(record.getbuffer())
                chunks[key].append(StoredChunk(offset, sizes, "__0_0.distcp", position, length))
                position += length
    position = 0
    for key, shape in size.megatron().items():
        for state in ADAM:
            name = f"optimizer.state.{state}.{key}"
            infos[name], chunks[name] = TensorInfo(shape, torch.float32), []
            for offset, sizes in size.chunks(shape):
                length = 4 * math.prod(sizes) + 1024
                chunks[name].append(StoredChunk(offset, sizes, "__0_1.distcp", position, length))
                position += length
    with (checkpoint / "__0_1.distcp").open("wb") as file:
        file.truncate(position)
    (checkpoint / ".metadata").write_bytes(metadata_bytes(infos, chunks))
    (checkpoint / "metadata.json").write_text(json.dumps({"sharded_backend": "torch_dist"}))
    return checkpoint


def write_base(folder: Path, size: Size) -> Path:
    """The hub model in one file."""
    folder.mkdir(parents=True)
    noise = Noise(2)
    (folder / "config.json").write_text(json.dumps(size.config))
    layout = lay_out({name: TensorInfo(shape, torch.bfloat16) for name, shape in size.hub().items()}, {"format": "pt"})
    with (folder / "model.safetensors").open("wb") as file:
        file.write(layout.header)
        for shape in size.hub().values():
            for window in noise.windows(math.prod(shape)):
                file.write(raw_bytes(window))
    return folder
