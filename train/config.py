"""The configuration of `omniloom train`: every key, its default and its unit. Names are VeOmni's where the meaning is
the same. This file holds the data part; the trainer's sections join it."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

Positive = Annotated[int, Field(gt=0)]
NotNegative = Annotated[int, Field(ge=0)]
PositiveFloat = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class Strict(BaseModel):
    """Base: no unknown key, frozen."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class DataSourceConfig(Strict):
    """One source of rows. path: a packed dataset (folder or s3://, gs:// URL), or text: a JSONL or Parquet file or a
    folder of them; name: in metrics and messages (null = the last part of the path); weight: how often each row is used
    per epoch: 1 = once, 2 = twice, 0.5 = in every second epoch; source_name: the preprocessor of a text source, which
    a packed dataset already went through; source_args: passed to it."""

    path: Annotated[str, Field(min_length=1)]
    name: str | None = None
    weight: PositiveFloat = 1.0
    source_name: str | None = None
    source_args: dict[str, str | int | float | bool | None] = {}

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
    each worker makes ahead; device_prefetch: micro-batches that are copied to the device ahead; pin_memory: null = when
    there is a GPU; start_method: of the workers; timeout_s: without a micro-batch for so long is an error, 0 = wait for
    ever."""

    num_workers: NotNegative = 2
    prefetch_factor: Positive = 2
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
    """What is trained on. processor_path: tokenizer and preprocessor files (null = model.model_path); max_seq_len:
    tokens of a packed sequence, longer rows are left out and counted; lanes: into how many parts the shards are dealt;
    each is read by one rank, so it must be a multiple of the data-parallel size to keep downloads apart; window_rows:
    rows of a lane that are shuffled and packed together; attention_len: length of a sample, in tokens, whose attention
    costs as much as all the rest, for balancing; dead_samples: a sample that cannot be read ends the run, or `mask`
    trains on zeros without labels in its place and counts it; imports: modules that register preprocessors."""

    sources: Annotated[list[DataSourceConfig], Field(min_length=1)]
    processor_path: str | None = None
    max_seq_len: Positive = 16384
    lanes: Positive = 64
    window_rows: Positive = 2048
    attention_len: Positive = 15_500
    dead_samples: Literal["fail", "mask"] = "fail"
    imports: list[str] = []
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
