"""Makes the checkpoints with `base/` and `logits.safetensors` in this folder, by megatron-core itself on the CPU.

Not run by the tests, since megatron-core is no dependency of this project. With its sources (0.16.1) on the path:

    python tests/convert/megatron/generate.py OUT per_layer              one process: checkpoint and logits
    torchrun --nproc-per-node 2 ... OUT singleton --tp 2                 the same tensors from several ranks
    torchrun --nproc-per-node 4 ... OUT ep2_pp2 --pp 2 --ep 2 --prefix thinker.language_model.

Every tensor is seeded by its key, so all parallel degrees of a variant hold the same model, and the logits of one
process are those of all.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file

LAYERS, HIDDEN, HEADS, GROUPS, HEAD_DIM, EXPERTS, WIDTH, DENSE, VOCAB = 2, 32, 4, 2, 12, 4, 20, 28, 128


def without_cuda() -> None:
    """What megatron-core asks of CUDA in passing, answered for a machine that has none; before anything else of it is
    imported."""
    from megatron.core import tensor_parallel  # noqa: PLC0415 - not installed where tests run

    class Tracker:
        def fork(self, *_: Any) -> contextlib.AbstractContextManager[None]:
            return contextlib.nullcontext()

        def is_initialized(self) -> bool:
            return True

    torch.cuda.synchronize = lambda *_, **__: None  # type: ignore[assignment]
    torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment,return-value]
    for module in (tensor_parallel, tensor_parallel.random, tensor_parallel.layers):
        module.get_cuda_rng_tracker = lambda *_, **__: Tracker()
    from megatron.core.transformer.moe import moe_utils  # noqa: PLC0415

    moe_utils.te_general_gemm = None


def build(variant: str, tp: int, pp: int, ep: int) -> Any:
    """A GPTModel with the sizes above: grouped queries, q and k norms, RMSNorm, SwiGLU."""
    from megatron.core import parallel_state as ranks  # noqa: PLC0415
    from megatron.core.models.gpt import gpt_layer_specs as specs  # noqa: PLC0415
    from megatron.core.models.gpt.gpt_model import GPTModel  # noqa: PLC0415
    from megatron.core.transformer.transformer_config import TransformerConfig  # noqa: PLC0415

    etp = 1 if ep > 1 else None
    ranks.initialize_model_parallel(tp, pp, expert_model_parallel_size=ep, expert_tensor_parallel_size=etp)
    options: dict[str, Any] = {}
    if not variant.startswith("dense"):
        frequency = {"mixed": [0, 1], "per_layer": [1] * LAYERS}.get(variant, 1)
        options = {"num_moe_experts": EXPERTS, "moe_ffn_hidden_size": WIDTH, "moe_router_topk": 2}
        options |= {"expert_model_parallel_size": ep, "expert_tensor_parallel_size": etp}
        options |= {"moe_layer_freq": frequency, "moe_token_dispatcher_type": "allgather"}
    config = TransformerConfig(
        num_layers=LAYERS, hidden_size=HIDDEN, num_attention_heads=HEADS, num_query_groups=GROUPS,
        kv_channels=HEAD_DIM, ffn_hidden_size=DENSE, gated_linear_unit=True, add_bias_linear=False,
        activation_func=torch.nn.functional.silu, normalization="RMSNorm", qk_layernorm=True, layernorm_epsilon=1e-6,
        attention_dropout=0.0, hidden_dropout=0.0, use_cpu_initialization=True, gradient_accumulation_fusion=False,
        tensor_model_parallel_size=tp, pipeline_model_parallel_size=pp, pipeline_dtype=torch.float32, **options,
    )  # fmt: skip
    if variant == "mixed":
        spec = specs.get_gpt_decoder_block_spec(config, use_transformer_engine=False)
    else:
        experts = options.get("num_moe_experts")
        spec = specs.get_gpt_layer_local_spec(experts, False, qk_layernorm=True, normalization="RMSNorm")
    return GPTModel(
        config, spec, VOCAB, 64, ranks.is_pipeline_first_stage(), ranks.is_pipeline_last_stage(),
        share_embeddings_and_output_weights=variant == "dense_tied", position_embedding_type="rope",
    )  # fmt: skip


def fill(tensor: Any) -> None:
    """This rank's shard of a global tensor that its key seeds."""
    seed = int.from_bytes(hashlib.sha256(tensor.key.encode()).digest()[:4], "big")
    values = 0.2 * torch.randn(tensor.global_shape, generator=torch.Generator().manual_seed(seed))
    values = values + 1 if "norm" in tensor.key else values
    sizes = (1,) * tensor.prepend_axis_num + tuple(tensor.local_shape)
    where = tuple(slice(start, start + size) for start, size in zip(tensor.global_offset, sizes, strict=True))
    with torch.no_grad():
        tensor.data.copy_(values[where].reshape(tensor.data.shape))


def save(model: Any, folder: Path, singleton: bool, prefix: str) -> None:
    from megatron.core import dist_checkpointing  # noqa: PLC0415
    from megatron.core import parallel_state as ranks  # noqa: PLC0415
    from megatron.core.dist_checkpointing.dict_utils import nested_values  # noqa: PLC0415
    from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory  # noqa: PLC0415

    metadata: dict[str, Any] = {"dp_cp_group": ranks.get_data_parallel_group(with_context_parallel=True)}
    metadata |= {"singleton_local_shards": True} if singleton else {}
    state = model.sharded_state_dict(prefix=prefix, metadata=metadata)
    for value in nested_values(state):
        built = value.build() if isinstance(value, ShardedTensorFactory) else [value]
        for tensor in built if isinstance(built, list) else [built]:
            if isinstance(tensor, ShardedTensor):
                fill(tensor)
    folder.mkdir(parents=True, exist_ok=True)
    dist.barrier()
    dist_checkpointing.save(state, str(folder), ("torch_dist", 1))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("variant")
    for name in ("--tp", "--pp", "--ep"):
        parser.add_argument(name, type=int, default=1)
    parser.add_argument("--prefix", default="")
    options = parser.parse_args()
    for name, value in {"MASTER_ADDR": "localhost", "MASTER_PORT": "29511", "RANK": "0", "WORLD_SIZE": "1"}.items():
        os.environ.setdefault(name, value)
    dist.init_process_group("gloo")
    without_cuda()
    model = build(options.variant, options.tp, options.pp, options.ep)
    folder = options.out / options.variant
    save(model, folder / "iter_0000001", "singleton" in options.variant, options.prefix)
    if dist.get_world_size() == 1:
        ids = torch.randint(0, 100, (1, 9), generator=torch.Generator().manual_seed(3))
        mask = torch.ones(1, 1, 9, 9, dtype=torch.bool).triu(1)
        with torch.no_grad():
            logits = model.eval()(ids, torch.arange(9)[None], mask)
        save_file({"ids": ids, "logits": logits}, folder / "logits.safetensors")


if __name__ == "__main__":  # the saver starts processes that import this file
    main()
