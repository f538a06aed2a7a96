"""The configuration of `omniloom train`: every key, its default and its unit. Names are VeOmni's where the meaning is
the same. The sections of `train` stand in `train.config_trainer`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, ValidationInfo, field_validator, model_validator

from train.config_lora import LoraConfig
from train.config_objective import ObjectiveConfig
from train.config_trainer import (
    AcceleratorConfig,
    CheckpointConfig,
    FsdpConfig,
    GradientCheckpointingConfig,
    LoggingConfig,
    MemoryConfig,
    MixedPrecisionConfig,
    OptimizerConfig,
    ProfileConfig,
    WandbConfig,
)
from train.config_types import NotNegative, Positive, PositiveFloat, Strict
from train.ops.registry import AUTO, OPS
from train.veomni_keys import VEOMNI_KEYS, Instead

__all__ = [
    "AcceleratorConfig",
    "BatchConfig",
    "CacheConfig",
    "CheckpointConfig",
    "DataConfig",
    "DataSourceConfig",
    "DataloaderConfig",
    "EvaluationConfig",
    "FsdpConfig",
    "GradientCheckpointingConfig",
    "LoggingConfig",
    "LoraConfig",
    "MemoryConfig",
    "MixedPrecisionConfig",
    "ModelConfig",
    "MultimodalConfig",
    "ObjectiveConfig",
    "OmniConfig",
    "OpsImplementationConfig",
    "OptimizerConfig",
    "ProfileConfig",
    "TrainConfig",
    "WandbConfig",
]


class DataSourceConfig(Strict):
    """One source of rows. path: a packed dataset (folder or s3://, gs:// URL), or text: a JSONL or Parquet file or a
    folder of them; name: in metrics and messages (null = the last part of the path); weight: how often each row is used
    per epoch: 1 = once, 2 = twice, 0.5 = in every second epoch; source_name: the preprocessor of a text source, which
    a packed dataset already went through; source_args: arguments of that preprocessor; rollouts: folder of recorded
    responses to its rows, which take the place of their last answers, for train.objective.type grpo."""

    path: Annotated[str, Field(min_length=1)]
    name: str | None = None
    weight: PositiveFloat = 1.0
    source_name: str | None = None
    source_args: dict[str, str | int | float | bool | None] = Field(default={})
    rollouts: Annotated[str, Field(min_length=1)] | None = None

    @property
    def label(self) -> str:
        """The name of the source."""
        return self.name or self.path.rstrip("/").rsplit("/", 1)[-1]

    @model_validator(mode="after")
    def _arguments_need_a_preprocessor(self) -> DataSourceConfig:
        if self.source_args and self.source_name is None:
            raise ValueError("source_args are passed to a preprocessor; source_name is missing")
        return self


class MultimodalConfig(Strict):
    """How media are laid out. use_audio_in_video: interleave a clip's own sound with its pictures; false leaves the
    sound out; wrap_video: Qwen3-VL only, keep the markers around all grids of a video as transformers 5 does; system:
    system prompt of conversations that bring none."""

    use_audio_in_video: bool = True
    wrap_video: bool = True
    system: str | None = None


class DataloaderConfig(Strict):
    """Worker processes of each rank. num_workers: 0 = in the trainer's own process; prefetch_factor: micro-batches that
    each worker makes ahead, null = all workers together those of a step, and 2 at least; device_prefetch: micro-batches
    that are copied to the device ahead; pin_memory: null = when there is a GPU; start_method: of the workers;
    timeout_s: without a micro-batch for so long is an error, 0 = wait for ever."""

    num_workers: NotNegative = 2
    prefetch_factor: Positive | None = None
    device_prefetch: Positive = 1
    pin_memory: bool | None = None
    start_method: Literal["forkserver", "spawn"] = "forkserver"
    timeout_s: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0


class CacheConfig(Strict):
    """Where shards of remote datasets are kept, and lengths and plans of all. dir: null = ~/.cache/omniloom; limit_gb:
    of the shards of this node, in 10^9 bytes, null = no limit; only copies that were downloaded are ever removed;
    fetch_steps: how many global steps ahead shards are fetched; fetch_threads: downloads at a time per rank;
    retries: of one download."""

    dir: str | None = None
    limit_gb: PositiveFloat | None = None
    fetch_steps: Positive = 32
    fetch_threads: Positive = 4
    retries: NotNegative = 3


class DataConfig(Strict):
    """What is trained on. sources: packed datasets and text, mixed by their weights; processor_path: tokenizer and
    preprocessor files (null = model.audio_tower_path where that is given, else model.model_path); max_seq_len: tokens
    of a packed sequence, longer rows are left out and counted; lanes: into how many parts the shards are dealt; each is
    read by one rank, so it must be a multiple of the data-parallel size to keep downloads apart; window_rows: rows of a
    lane that are shuffled and packed together; attention_len: length of a sample, in tokens, whose attention costs as
    much as all the rest, for balancing; dead_samples: a sample that cannot be read ends the run, or `mask` trains on
    zeros without labels in its place and counts it (not with ulysses_size over 1); imports: modules that register
    preprocessors."""

    sources: Annotated[list[DataSourceConfig], Field(min_length=1)]
    processor_path: str | None = None
    max_seq_len: Positive = 16384
    lanes: Positive = 64
    window_rows: Positive = 2048
    attention_len: Positive = 15_500
    dead_samples: Literal["fail", "mask"] = "fail"
    imports: list[str] = Field(default=[])
    mm_configs: MultimodalConfig = MultimodalConfig()
    dataloader: DataloaderConfig = DataloaderConfig()
    cache: CacheConfig = CacheConfig()

    @field_validator("sources")
    @classmethod
    def _own_names(cls, sources: list[DataSourceConfig]) -> list[DataSourceConfig]:
        labels = [source.label for source in sources]
        if twice := sorted({label for label in labels if labels.count(label) > 1}):
            raise ValueError(f"several sources have the name {twice[0]!r}; give each its own (sources.N.name)")
        return sources


class BatchConfig(Strict):
    """How a step is made up. global_batch_size: packed sequences per optimizer step, over all ranks; micro_batch_size:
    packed sequences per forward pass of a rank; pad_multiple: sequences are padded to a multiple of this many tokens
    (times ulysses_size); num_train_epochs: passes over the data; max_steps: end after so many steps, null = after the
    epochs; seed: of the order of the rows and of everything random."""

    global_batch_size: Positive = 64
    micro_batch_size: Positive = 1
    pad_multiple: Positive = 8
    num_train_epochs: Positive = 1
    max_steps: Positive | None = None
    seed: NotNegative = 42


class OpsImplementationConfig(Strict):
    """Which implementation of each operation runs; auto = the fastest that is available, printed at the start.
    attn_implementation: flash_attention_4, flash_attention_3, flash_attention_2, cudnn, torch_varlen, triton (its own
    kernels in the towers, torch_varlen in the text model), flex_attention, sdpa or eager; moe_implementation: of the
    experts, fused_triton, grouped_mm or eager;
    cross_entropy_loss_implementation: of the head with its loss, fused_triton, chunk_loss or eager;
    rms_norm_implementation: triton, compile or eager; layer_norm_implementation: of the vision and audio towers,
    triton, compile or eager; linear_implementation: of the towers' linear layers, triton (products by
    torch, gradients of biases by a kernel) or eager, auto = eager; linear_gelu_implementation: of those before GELU,
    with it, triton or eager, auto = eager; rotary_pos_emb_implementation: with the norms of q and k, triton, compile or
    eager; rotary_pos_emb_vision_implementation: triton, compile or eager;
    swiglu_mlp_implementation: triton, compile or eager; load_balancing_loss_implementation: of the router's choice of
    experts and its statistics, triton, compile or eager."""

    attn_implementation: str = AUTO
    moe_implementation: str = AUTO
    cross_entropy_loss_implementation: str = AUTO
    rms_norm_implementation: str = AUTO
    layer_norm_implementation: str = AUTO
    linear_implementation: str = AUTO
    linear_gelu_implementation: str = AUTO
    rotary_pos_emb_implementation: str = AUTO
    rotary_pos_emb_vision_implementation: str = AUTO
    swiglu_mlp_implementation: str = AUTO
    load_balancing_loss_implementation: str = AUTO

    @field_validator("*")
    @classmethod
    def _known(cls, name: str, info: ValidationInfo) -> str:
        entry = next(entry for entry in OPS.values() if entry.key == info.field_name)
        if fault := entry.fault(name):
            raise ValueError(fault)
        return name


class ModelConfig(Strict):
    """The model. model_path: folder in the Hugging Face layout, with weights; config_path: folder or file of a
    config.json, whose model starts from random weights unless model_path is given, too; omni_sideband: train a
    Qwen3-VL-MoE that was converted from Qwen3-Omni on Qwen3-Omni's layout of tokens and positions: auto = if its
    config.json has an omni_sideband, true = it must have one, false = as Qwen3-VL all the same, or the folder of a
    config.json that has one; audio_tower_path: folder of a Qwen3-Omni whose audio tower, frozen, gives a model without
    one its sound; backend: native, or transformers for a dense text model that is not among ours; trust_remote_code:
    run code that comes with the checkpoint (transformers only)."""

    model_path: str | None = None
    config_path: str | None = None
    omni_sideband: bool | str = "auto"
    audio_tower_path: str | None = None
    backend: Literal["native", "transformers"] = "native"
    trust_remote_code: bool = False
    ops_implementation: OpsImplementationConfig = OpsImplementationConfig()
    lora_config: LoraConfig | None = None

    @model_validator(mode="after")
    def _has_a_source(self) -> ModelConfig:
        if self.model_path is None and self.config_path is None:
            raise ValueError("needs model_path, or config_path to start from random weights")
        if self.trust_remote_code and self.backend == "native":
            raise ValueError("trust_remote_code is of backend: transformers; native models run no code of a checkpoint")
        omni = self.audio_tower_path is not None or self.omni_sideband not in ("auto", False)
        if self.backend != "native" and omni:
            raise ValueError("omni_sideband and audio_tower_path are of backend: native")
        return self


class EvaluationConfig(Strict):
    """Loss on held-out data. sources: as data.sources; steps: every so many training steps, 0 = only at the end of the
    training, where they are evaluated in any case; max_batches: micro-batches of each rank at a time, null = all."""

    sources: list[DataSourceConfig] = Field(default=[])
    steps: NotNegative = 0
    max_batches: Positive | None = None

    @model_validator(mode="after")
    def _has_data(self) -> EvaluationConfig:
        if self.steps and not self.sources:
            raise ValueError(f"steps is {self.steps}, but there are no sources to evaluate on")
        if recorded := [source.label for source in self.sources if source.rollouts is not None]:
            raise ValueError(
                f"source {recorded[0]!r} has rollouts; an evaluation is the cross-entropy of the data's own answers"
            )
        return self


class TrainConfig(BatchConfig):
    """How it is trained. init_device: where the model is built: meta takes no memory and each rank then fills its own
    part; deterministic: the same results at every run on the same GPUs, slower; freeze_vit: the vision tower is not
    trained; freeze_audio_tower: the audio tower is not trained; freeze_modules: modules that are not trained, by path
    or pattern; module_lr: learning rate of parameters by path or pattern, later ones win; vit_lr: learning rate of the
    vision tower with its mergers, null = optimizer.lr; audio_lr: learning rate of the audio tower with its projections,
    null = optimizer.lr; moe_load_balance_monitor_interval: expert loads are recorded every so many steps, 0 = never;
    objective: what is minimised."""

    init_device: Literal["meta", "cpu", "cuda"] = "meta"
    deterministic: bool = False
    freeze_vit: bool = False
    freeze_audio_tower: bool = False
    freeze_modules: list[str] = Field(default=[])
    module_lr: dict[str, PositiveFloat] = Field(default={})
    vit_lr: PositiveFloat | None = None
    audio_lr: PositiveFloat | None = None
    optimizer: OptimizerConfig = OptimizerConfig()
    accelerator: AcceleratorConfig = AcceleratorConfig()
    gradient_checkpointing: GradientCheckpointingConfig = GradientCheckpointingConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    logging: LoggingConfig = LoggingConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    profile: ProfileConfig = ProfileConfig()
    memory: MemoryConfig = MemoryConfig()
    moe_load_balance_monitor_interval: NotNegative = 0
    objective: ObjectiveConfig = ObjectiveConfig()

    @model_validator(mode="after")
    def _masters_are_not_below_the_copies(self) -> Self:
        compute = self.accelerator.fsdp_config.mixed_precision.compute_dtype
        if self.optimizer.master_dtype == "bf16" and compute != "bfloat16":
            raise ValueError(
                f"optimizer.master_dtype bf16 needs mixed_precision.param_dtype bfloat16, but the model computes in "
                f"{compute}; write fp32, or enable mixed precision"
            )
        return self

    @model_validator(mode="after")
    def _no_rate_for_frozen_towers(self) -> Self:
        frozen = {"vit_lr": self.freeze_vit, "audio_lr": self.freeze_audio_tower}
        for key, is_frozen in frozen.items():
            if is_frozen and getattr(self, key) is not None:
                raise ValueError(f"{key} is given for a tower that is frozen")
        return self


class OmniConfig(Strict):
    """A training run. model: what is trained; data: on what; train: how."""

    foreign_keys: ClassVar[Mapping[str, Instead]] = VEOMNI_KEYS

    model: ModelConfig
    data: DataConfig
    train: TrainConfig = TrainConfig()

    @model_validator(mode="after")
    def _has_a_processor(self) -> OmniConfig:
        if not self.processor_folder:
            raise ValueError("data.processor_path is missing; without model.model_path there is no tokenizer to take")
        return self

    @model_validator(mode="after")
    def _rollouts_are_of_grpo(self) -> OmniConfig:
        wanted = self.train.objective.type == "grpo"
        for number, source in enumerate(self.data.sources):
            if wanted and source.rollouts is None:
                raise ValueError(
                    f"train.objective.type is grpo, but data.sources.{number} ({source.label}) has no rollouts; give "
                    "the folder that a rollouts job wrote, or remove the source"
                )
            if not wanted and source.rollouts is not None:
                raise ValueError(
                    f"data.sources.{number}.rollouts is {source.rollouts!r}, but train.objective.type is "
                    "cross_entropy; write grpo to train on them, or remove the key to train on the data's own answers"
                )
        return self

    @property
    def rows_per_rank(self) -> int:
        """The most tokens, padding included, that a rank has in a forward pass."""
        unit = self.train.pad_multiple
        slices = self.train.accelerator.ulysses_size * unit
        return -(-self.data.max_seq_len * self.train.micro_batch_size // slices) * unit

    @property
    def processor_folder(self) -> str:
        """Folder of the tokenizer and preprocessor files."""
        return self.data.processor_path or self.model.audio_tower_path or self.model.model_path or ""
