"""Part `veomni`: the text model of few layers on all GPUs, whole steps, ours and VeOmni's.

Both: the same random rows, float32 masters that compute in bfloat16 under FSDP2, every block computed again, torch's
fused AdamW, our clipping. VeOmni's model is its generated Qwen3-MoE with its own kernels (Triton experts, chunk_loss,
Liger's norms and rotary embedding), made parallel by its own code. Two depths, whose difference is the time of a layer.
"""

from __future__ import annotations

import gc
import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib import import_module
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from jobs.bench import kernel_veomni
from jobs.bench.claims import Claim, at_least
from jobs.bench.headline_setup import Run
from jobs.bench.parallel_measure import timed
from jobs.bench.parallel_model import TINY, Shape, Trained, device_of, fill, rows_of
from train.config import AcceleratorConfig
from train.mesh import Mesh, Process, start_process_group
from train.models.checkpointing import CheckpointPolicy
from train.models.inputs import ModelInputs

# name -> (whose, attention backend); the last of ours divides the experts over the ranks
SUBJECTS: dict[str, tuple[str, str]] = {
    "veomni, torch_varlen": ("theirs", "torch_varlen"),
    "ours, auto": ("ours", "auto"),
    "ours, auto, experts over the ranks": ("ours", "auto"),
    "ours, torch_varlen": ("ours", "torch_varlen"),
    "veomni, our cudnn attention": ("theirs", "cudnn"),
}
QUICK_ATTENTION = "sdpa"
PEER, SAME, BEST, DIVIDED, HELPED = (
    "veomni, torch_varlen",
    "ours, torch_varlen",
    "ours, auto",
    "ours, auto, experts over the ranks",
    "veomni, our cudnn attention",
)
OVER = 1.5
WARM, STEPS = 2, 5
TIMEOUT_S = 120.0

Tell = Callable[[Claim], None]


class Peer(Trained):
    """VeOmni's model in the place of ours, with the same rows, optimizer and clipping. how: what made it parallel."""

    def __init__(self, shape: Shape, device: torch.device) -> None:
        self.shape, self.device = shape, device
        self.mesh = Mesh.make(AcceleratorConfig(), dist.get_world_size(), dist.get_rank(), device)
        self.inputs = rows_of(shape, self.mesh)
        model, self.how = parallel_peer(shape, self.inputs, self.mesh)
        self.model: Any = model  # of another class
        fill(self.model, self.mesh.rank)
        self.parameters = list(self.model.parameters())
        self.local: list[Tensor] = []
        self.optimizer: torch.optim.AdamW | None = None

    def backward(self, inputs: ModelInputs | None = None) -> Tensor:
        rows = self.inputs if inputs is None else inputs
        loss = kernel_veomni.loss_of(self.model, rows.ids, rows.position_ids[0], rows.segments)
        loss.backward()
        return loss.detach()

    @property
    def kernels(self) -> str:
        return self.how


def parallel_peer(shape: Shape, inputs: ModelInputs, mesh: Mesh) -> tuple[nn.Module, str]:
    """The model, and who sharded it: VeOmni's own code, or fully_shard of its layers where that does not run."""
    try:
        return sharded_by_veomni(shape, inputs, mesh), "FSDP2 by VeOmni"
    except Exception as error:  # noqa: BLE001  # said with the figures
        said = " ".join(f"{type(error).__name__}: {error}".split())[:160]
        print(f"VeOmni's own parallel code does not run here: {said}", flush=True)
    return sharded_by_us(shape, inputs, mesh), f"fully_shard of its layers by us (VeOmni's own code: {said})"


def build_peer(shape: Shape, inputs: ModelInputs, device: str) -> Any:
    """Float32, with its kernels where there is a GPU."""
    choice = import_module("veomni.arguments.arguments_types").OpsImplementationConfig
    kernels = kernel_veomni.FUSED if torch.cuda.is_available() else kernel_veomni.EAGER
    import_module("veomni.ops").apply_ops_config(choice(**kernels))
    attend = kernel_veomni.packed_attention(shape.attention, inputs.segments)
    ALL_ATTENTION_FUNCTIONS.register(kernel_veomni.ATTENTION, attend)
    make = import_module("veomni.models.auto").build_foundation_model
    config = shape.config()
    config.architectures = ["Qwen3MoeForCausalLM"]
    model = make(config, torch_dtype="float32", attn_implementation=kernel_veomni.ATTENTION, init_device=device)
    return model.train()


def sharded_by_veomni(shape: Shape, inputs: ModelInputs, mesh: Mesh) -> nn.Module:
    """As its trainer does: from the meta device, mixed precision, checkpointing."""
    state = import_module("veomni.distributed.parallel_state")
    world = mesh.world_size
    state.init_parallel_state(dp_size=world, dp_shard_size=world, dp_mode="fsdp2", device_type=mesh.device.type)
    model = build_peer(shape, inputs, "meta")
    make = import_module("veomni.distributed.torch_parallelize").build_parallelize_model
    precision = import_module("veomni.arguments.arguments_types").MixedPrecisionConfig(enable=True)
    found: nn.Module = make(
        model,
        weights_path=None,
        init_device="meta",
        mixed_precision=precision,
        enable_gradient_checkpointing=True,
        basic_modules=list(getattr(model, "_no_split_modules", None) or []),
    )
    return found


def sharded_by_us(shape: Shape, inputs: ModelInputs, mesh: Mesh) -> nn.Module:
    """fully_shard of each decoder layer and of the whole."""
    model = build_peer(shape, inputs, mesh.device.type)
    kernel_veomni.recompute_blocks(model, True)
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    assert mesh.shards is not None
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh.shards, mp_policy=policy)
    fully_shard(model, mesh=mesh.shards, mp_policy=policy, reshard_after_forward=False)
    found: nn.Module = model
    return found


def measure_subject(run: Run, tell: Tell) -> None:
    """Steps of one subject at both depths."""
    name = str(run.options["subject"])
    whose, attention = SUBJECTS[name]
    process = Process.from_environment()
    device = device_of(process.local_rank)
    start_process_group(process, device, TIMEOUT_S)
    base = replace(TINY, attention=QUICK_ATTENTION) if run.quick else replace(Shape(), attention=attention)
    depths = (max(1, run.layers // 2), run.layers)
    times: list[float] = []
    for layers in depths:
        shape = replace(base, layers=layers)
        layout = {"ep_size": run.nproc} if name == DIVIDED else {}
        made = Peer(shape, device) if whose == "theirs" else Trained(shape, layout, device, CheckpointPolicy())
        for _ in range(WARM):
            loss = made.step()
        found, peak = timed(made, 1 if run.quick else STEPS)
        step_s, said = statistics.median(found), f"{made.kernels}; {shape.rows()}; loss {float(loss):.4f}"
        times.append(step_s)
        said = f"{shape.tokens / step_s:,.0f} tokens/s a GPU; peak {peak / 1e9:.1f} GB; {said}; {run.nproc} ranks"
        tell(Claim(f"veomni: {name}, {layers} layers", round(1e3 * step_s, 2), "ms a step", "", None, said))
        del made
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
    layer_ms = 1e3 * (times[1] - times[0]) / (depths[1] - depths[0])
    said = f"{depths[1]} layers less {depths[0]}; forward, recompute, backward, clipping, AdamW, FSDP2"
    tell(Claim(f"veomni: {name}, a layer", round(layer_ms, 3), "ms", "", None, said))


def compare(claims: Sequence[Claim], *, bounded: bool) -> list[Claim]:
    """Ratios of the layers, from the claims of all subjects. bounded: the goal holds here."""
    layers = {
        name: claim.value
        for name in SUBJECTS
        for claim in claims
        if claim.claim.startswith(f"veomni: {name}, a layer") and claim.value > 0
    }
    found = []
    for ours, theirs in ((BEST, PEER), (DIVIDED, PEER), (SAME, PEER), (BEST, HELPED)):
        if ours in layers and theirs in layers:
            ratio, said = layers[theirs] / layers[ours], f"{layers[theirs]:.2f} ms / {layers[ours]:.2f} ms of a layer"
            title = f"veomni: {theirs} / {ours}"
            goal = bounded and (ours, theirs) == (BEST, PEER)
            found.append(
                at_least(title, ratio, OVER, "x", said) if goal else Claim(title, round(ratio, 3), "x", "", None, said)
            )
    return found
