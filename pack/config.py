"""The configuration of `omniloom pack`: every key, its default and its unit."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

Positive = Annotated[int, Field(gt=0)]
PositiveFloat = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class Strict(BaseModel):
    """Base: no unknown key, frozen."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class ExecutorConfig(Strict):
    """Where partitions are written. kind: `ray`, or `local` processes without Ray; workers: null = all cores; address:
    a Ray cluster (else RAY_ADDRESS, else a local Ray without dashboard)."""

    kind: Literal["ray", "local"] = "ray"
    workers: Positive | None = None
    address: str | None = None


class VideoConfig(Strict):
    """Frames. fps: frames per second asked for; sampling: `time_grid` = frame k at k / fps on the clip's clock, `qwen`
    = the frame indices and sizes of qwen-omni-utils; resize: `model` = bicubic with antialias as the model's processor
    does, `fast` = libswscale area, `none` = keep; factor: the model's patch x merge in pixels; min_pixels, max_pixels:
    of one frame (null = the model's own: 128 and 768 x factor^2); total_pixels: of all frames of a clip, per temporal
    pair (null = 128000 x 0.9 x factor^2); min_frames: a shorter clip raises fps up to the source's own; max_frames: a
    longer clip lowers fps; codec: of the stored frames; quality: of JPEG; max_tokens: upper bound for the video tokens
    of a clip, first fps and then size are lowered for it; split_s: cut longer clips into spans of this length, in
    seconds, one sample each."""

    fps: PositiveFloat = 2.0
    sampling: Literal["time_grid", "qwen"] = "time_grid"
    resize: Literal["model", "fast", "none"] = "model"
    factor: Positive = 32
    min_pixels: Positive | None = None
    max_pixels: Positive | None = None
    total_pixels: Positive | None = None
    min_frames: Positive = 4
    max_frames: Positive = 768
    codec: Literal["jpeg", "png"] = "jpeg"
    quality: Annotated[int, Field(ge=1, le=100)] = 95
    max_tokens: Positive | None = None
    split_s: PositiveFloat | None = None

    @model_validator(mode="after")
    def _ordered(self) -> VideoConfig:
        if self.min_frames > self.max_frames:
            raise ValueError(f"min_frames {self.min_frames} is over max_frames {self.max_frames}")
        if self.min_pixels and self.max_pixels and self.min_pixels > self.max_pixels:
            raise ValueError(f"min_pixels {self.min_pixels} is over max_pixels {self.max_pixels}")
        return self


class AudioConfig(Strict):
    """Sound, always stored as one channel of 16-bit PCM. sample_rate: in Hz; codec: `flac` takes about half the bytes
    of `wav`, without loss."""

    sample_rate: Positive = 16000
    codec: Literal["wav", "flac"] = "wav"


class ImageConfig(Strict):
    """Standalone images. resize: `none` = keep, `model` = bicubic with antialias to a multiple of video.factor;
    min_pixels, max_pixels: of one image (null = the model's own: 4 and 16384 x factor^2); codec: of the stored images;
    quality: of JPEG."""

    resize: Literal["model", "none"] = "none"
    min_pixels: Positive | None = None
    max_pixels: Positive | None = None
    codec: Literal["jpeg", "png"] = "jpeg"
    quality: Annotated[int, Field(ge=1, le=100)] = 95


class RowsConfig(Strict):
    """What becomes of difficult rows. missing_audio: of a video without sound; truncated: of a file that ends before
    its header says, `keep` flags it; max_bad_ratio: share of rejected rows, without those that a filter left out, over
    which the job ends with exit code 3; timeout_s: wall time of one row; max_memory_gb: resident memory of its worker;
    allowed_roots: folders or URL prefixes media must lie in (empty = anywhere)."""

    missing_audio: Literal["keep", "reject"] = "keep"
    truncated: Literal["keep", "reject"] = "keep"
    max_bad_ratio: Annotated[float, Field(ge=0, le=1)] = 0.05
    timeout_s: PositiveFloat = 600
    max_memory_gb: PositiveFloat = 3
    allowed_roots: list[str] = []


class PartitionConfig(Strict):
    """The unit of work, retry and commit. target_mb: expected output of one partition."""

    target_mb: PositiveFloat = 512


class ShardConfig(Strict):
    """MDS files. size_mb: upper bound of one shard file; hash: the hash that the index records for it."""

    size_mb: Annotated[float, Field(gt=0, lt=4096)] = 128
    hash: Literal["xxh3_64", "sha1", "sha256"] = "xxh3_64"


class PreviewConfig(Strict):
    """The preview page. samples: how many samples it shows; max_frames: how many frames of one."""

    samples: Positive = 24
    max_frames: Positive = 16


class PackConfig(Strict):
    """A packing job. manifest: jsonl, parquet or datasets folder, or a list of them; output: a folder or s3://, gs://;
    source_name: the preprocessor; imports: modules that register preprocessors; preprocessor_args: passed to it; seed:
    of the random numbers that a preprocessor gets."""

    manifest: str | Annotated[list[str], Field(min_length=1)]
    output: str
    source_name: str = "qwen_omni_offline_av"
    imports: list[str] = []
    preprocessor_args: dict[str, str | int | float | bool | list[str] | None] = {}
    seed: int = 0
    executor: ExecutorConfig = ExecutorConfig()
    video: VideoConfig = VideoConfig()
    audio: AudioConfig = AudioConfig()
    image: ImageConfig = ImageConfig()
    rows: RowsConfig = RowsConfig()
    partition: PartitionConfig = PartitionConfig()
    shard: ShardConfig = ShardConfig()
    preview: PreviewConfig = PreviewConfig()


class PackFile(Strict):
    """The YAML file: one key, `pack`."""

    pack: PackConfig
