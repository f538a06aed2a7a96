"""The sections of `train`: optimizer, parallelism, checkpoints, logging, evaluation, profiling."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, field_validator, model_validator

from train.config_optimizer import OptimizerConfig as OptimizerConfig
from train.config_types import Gigabytes, NotNegative, Positive, Share, Strict


class MixedPrecisionConfig(Strict):
    """Computing in a narrower dtype than that of the parameters. enable: compute with a copy of the parameters in
    param_dtype; param_dtype: of the copy; reduce_dtype: in which gradients are summed over ranks."""

    enable: bool = True
    param_dtype: Literal["bfloat16", "float32"] = "bfloat16"
    reduce_dtype: Literal["float32", "bfloat16"] = "float32"

    @property
    def compute_dtype(self) -> str:
        """Name of the dtype that the model computes in."""
        return self.param_dtype if self.enable else "float32"


class FsdpConfig(Strict):
    """How parameters are shared among ranks. fsdp_mode: fsdp2 shards parameters, gradients and optimizer states; ddp
    keeps them whole on every rank and sums gradients; reshard_after_forward: free a block's whole parameters after its
    forward pass and gather them again for the backward pass; reshard_after_backward: false keeps them whole between
    the micro-batches of a step; sync_every_micro_batch: false keeps each rank's whole gradients until the last
    micro-batch of a step, which saves communication and costs memory; forward_prefetch: gather the next block while
    one computes; tower_units: whole gathers each tower at once, blocks gathers it block by block, which takes less
    memory and, with towers of short blocks, much more time; offload: parameters, gradients and optimizer states live
    in CPU memory."""

    fsdp_mode: Literal["fsdp2", "ddp"] = "fsdp2"
    reshard_after_forward: bool = True
    reshard_after_backward: bool = True
    sync_every_micro_batch: bool = True
    forward_prefetch: bool = True
    tower_units: Literal["whole", "blocks"] = "whole"
    offload: bool = False
    mixed_precision: MixedPrecisionConfig = MixedPrecisionConfig()


class OffloadConfig(Strict):
    """Activations and optimizer states in CPU memory. enable_activation: inputs of blocks that are computed again wait
    there for the backward pass, copied while blocks compute; activation_gpu_limit: GB of them that stay on each GPU;
    enable_optimizer: the averages of AdamW and Muon live in pinned CPU memory and visit the GPU portion by portion in
    each step, while others are computed (with fsdp_config.offload they are in CPU memory in any case)."""

    enable_activation: bool = False
    activation_gpu_limit: Gigabytes = 0.0
    enable_optimizer: bool = False


class AcceleratorConfig(Strict):
    """Over which ranks what is divided: world size = dp_replicate_size x dp_shard_size x ulysses_size.
    dp_replicate_size: groups of ranks that each hold the whole model; dp_shard_size: ranks that shard it, -1 = all that
    are left; ulysses_size: ranks that share each sequence; ep_size: ranks that divide the experts among them, a
    divisor of dp_shard_size x ulysses_size; expert_dispatch: how rows reach the ranks that have their experts:
    all_to_all sends each row to those that it chose, all_gather every row to all ranks of the ep group, without a wait
    for the device, auto = all_gather where 2 x ep_size is at most the experts of a row."""

    dp_replicate_size: Positive = 1
    dp_shard_size: int = -1
    ulysses_size: Positive = 1
    ep_size: Positive = 1
    expert_dispatch: Literal["auto", "all_to_all", "all_gather"] = "auto"
    fsdp_config: FsdpConfig = FsdpConfig()
    offload_config: OffloadConfig = OffloadConfig()

    @field_validator("dp_shard_size")
    @classmethod
    def _all_or_some(cls, size: int) -> int:
        if size != -1 and size < 1:
            raise ValueError(f"{size} ranks; give a number > 0, or -1 for all that are left")
        return size


class GradientCheckpointingConfig(Strict):
    """Memory for time. enable: blocks keep their inputs only and run again in the backward pass; keep: attention = they
    keep the results of attention, too, which then is not computed again, projections = also those of the linear layers
    around it, mlp = also what the activation of the text model's MLPs, dense or of experts, is of, inputs = nothing
    else; keep_gb: GB of such results that each GPU keeps at most, those of the text model before those of towers and in
    it those of MLPs last, what does not fit is computed again, null = all; share: how many of the blocks run again,
    from 0 to 1, evenly spread; the others keep everything; vision_share: share of the vision tower's blocks that run
    again, null = share; audio_share: of the sound tower's, null = share."""

    enable: bool = True
    keep: Literal["inputs", "attention", "projections", "mlp"] = "inputs"
    keep_gb: Gigabytes | None = None
    share: Share = 1.0
    vision_share: Share | None = None
    audio_share: Share | None = None

    @model_validator(mode="after")
    def _has_something_to_limit(self) -> GradientCheckpointingConfig:
        if self.keep_gb is not None and self.keep == "inputs":
            raise ValueError("keep_gb limits the results that keep names, which is inputs; write keep: attention")
        return self


class CheckpointConfig(Strict):
    """Checkpoints to go on from, and exports in the Hugging Face layout. output_dir: folder of all that a run writes;
    save_steps: every so many steps, 0 = only where training ends or is stopped, which is saved in any case;
    save_epochs: also every so many epochs, 0 = never; save_async: go on training while it is written; keep_last: how
    many complete checkpoints stay, 0 = all; load_path: auto = the newest complete one in output_dir, if any, null =
    start anew, or a folder; save_hf_weights: export at the end of training; hf_save_steps: also every so many steps,
    which are then saved, too, 0 = never; hf_base: whole Omni checkpoint that an exported thinker is put into;
    lora_per_expert: export adapters also with one pair for each projection of each expert, to output_dir/hf/per_expert;
    timeout_s: of the collectives around saving and loading."""

    output_dir: Annotated[str, Field(min_length=1)] = "output"
    save_steps: NotNegative = 500
    save_epochs: NotNegative = 0
    save_async: bool = True
    keep_last: NotNegative = 3
    load_path: str | None = "auto"
    save_hf_weights: bool = True
    hf_save_steps: NotNegative = 0
    hf_base: str | None = None
    lora_per_expert: bool = False
    timeout_s: Positive = 7200


class WandbConfig(Strict):
    """Metrics in Weights & Biases. enable: needs the package wandb; project: in which the run is listed; name: of the
    run in its project, null = one that Weights & Biases makes up."""

    enable: bool = False
    project: str = "omniloom"
    name: str | None = None


class LoggingConfig(Strict):
    """Metrics always go to output_dir/metrics.jsonl. log_steps: every so many steps, told while the device works on the
    next one, so that the trainer is at most one step ahead of it there; tensorboard: also as TensorBoard events; plots:
    curves as a picture beside the metrics."""

    log_steps: Positive = 1
    tensorboard: bool = False
    wandb: WandbConfig = WandbConfig()
    plots: bool = True


class ProfileConfig(Strict):
    """torch's profiler on rank 0. enable: run it; start_step, end_step: steps that are recorded, end_step left out;
    trace_dir: null = output_dir/profile; record_shapes, profile_memory, with_stack: as of torch.profiler."""

    enable: bool = False
    start_step: NotNegative = 10
    end_step: Positive = 13
    trace_dir: str | None = None
    record_shapes: bool = False
    profile_memory: bool = False
    with_stack: bool = False

    @model_validator(mode="after")
    def _some_steps(self) -> ProfileConfig:
        if self.end_step <= self.start_step:
            raise ValueError(f"end_step {self.end_step} is not after start_step {self.start_step}")
        return self


class MemoryConfig(Strict):
    """When memory runs out. snapshot_on_error: write what held it to output_dir."""

    snapshot_on_error: bool = True
