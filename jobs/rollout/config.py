"""The configuration of `omniloom rollouts`: every key, its default and its unit."""

from __future__ import annotations

from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, model_validator

Positive = Annotated[int, Field(gt=0)]
PositiveFloat = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class Strict(BaseModel):
    """Base: no unknown key, frozen."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())


class SamplingConfig(Strict):
    """How answers are drawn. group_size: answers per sample; temperature: of the softmax; top_p: share of the
    probability that is drawn from; max_new_tokens: an answer that reaches it ends with `finish: length`; seed: of the
    draws. Log-probabilities are those of temperature 1 without top_p, whatever is set here (docs/rewards.md)."""

    group_size: Positive = 8
    temperature: PositiveFloat = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    max_new_tokens: Positive = 512
    seed: int = 0

    @property
    def is_plain(self) -> bool:
        """Drawn from the very distribution that the log-probabilities are of."""
        return self.temperature == 1.0 and self.top_p == 1.0


class LayoutConfig(Strict):
    """How a prompt is laid out; the same values as the trainer's `data.mm_configs`. use_audio_in_video: a clip with
    sound gives it beside its pictures; wrap_video: Qwen3-VL: keep the template's markers around all grids of a video;
    system: system prompt for conversations that bring none."""

    use_audio_in_video: bool = True
    wrap_video: bool = True
    system: str | None = None


class LocalConfig(Strict):
    """Models in this process: the engine `transformers`, and the reference. device: auto, cpu, cuda or cuda:N; dtype:
    of the weights; attn_implementation, experts_implementation: names of transformers, null = its own choice;
    batch_size: answers at a time, null = all of a row."""

    device: str = "auto"
    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    attn_implementation: str | None = "sdpa"
    experts_implementation: str | None = None
    batch_size: Positive | None = None


class ServerConfig(Strict):
    """The engines `openai` and `sglang`. url: of the server, such as http://127.0.0.1:30000; model: the name that the
    server knows the model by; api: of `openai`: completions (token ids; rows without media), chat, or auto = by row;
    api_key_variable: environment variable with a bearer token; concurrency: requests at a time; timeout_s: of one
    request; retries: of a request that is not answered; raw_logprobs: the server's log-probabilities are those of the
    model's own logits at any temperature and top_p (vLLM: logprobs_mode raw_logprobs), needed when sampling is not at
    temperature 1 and top_p 1; video_format: how the stored frames of a clip travel, `avi` = one Motion-JPEG file,
    `jpeg` = a data URL video/jpeg with the frames one after the other (vLLM); extra_body: more keys of every
    request."""

    url: str | None = None
    model: str | None = None
    api: Literal["auto", "completions", "chat"] = "auto"
    api_key_variable: str | None = None
    concurrency: Positive = 16
    timeout_s: PositiveFloat = 600
    retries: Annotated[int, Field(ge=0)] = 4
    raw_logprobs: bool = False
    video_format: Literal["avi", "jpeg"] = "avi"
    extra_body: dict[str, Any] = {}


class RolloutsConfig(Strict):
    """A rollouts job. dataset: an output of `omniloom pack`; model_path: checkpoint directory of the model that
    answers, of which server engines only need config.json, tokenizer and preprocessor; out: folder for the rollouts;
    engine: transformers (in this process), openai (any server with that API that gives token ids, such as vLLM), sglang
    (its native /generate); processor_path: folder of tokenizer and preprocessor, null = model_path; reference_path:
    checkpoint of a model whose log-probabilities of the answers are noted, too, for train.objective.kl_coef, null =
    none; scorer: name of a scorer, `auto` = by the scoring kind that packing kept with each row; imports: modules that
    register scorers; limit: only the first rows, null = all; sources: only rows of these sources, null = all;
    part_rows: rows per part, the unit of resuming; workers: processes that share the parts of one `out`, the last of
    which to end writes the card; worker: number of this one, from 0; max_bad_ratio: share of rows that cannot be asked
    or scored over which the job ends with exit code 3."""

    dataset: str
    model_path: str
    out: str
    engine: Literal["transformers", "openai", "sglang"] = "transformers"
    processor_path: str | None = None
    reference_path: str | None = None
    scorer: str = "auto"
    imports: list[str] = []
    limit: Positive | None = None
    sources: list[str] | None = None
    part_rows: Positive = 256
    workers: Positive = 1
    worker: Annotated[int, Field(ge=0)] = 0
    max_bad_ratio: Annotated[float, Field(ge=0, le=1)] = 0.05
    sampling: SamplingConfig = SamplingConfig()
    layout: LayoutConfig = LayoutConfig()
    local: LocalConfig = LocalConfig()
    server: ServerConfig = ServerConfig()

    @model_validator(mode="after")
    def _fits_the_engine(self) -> RolloutsConfig:
        if self.worker >= self.workers:
            raise ValueError(f"worker is {self.worker}; {self.workers} workers are numbered 0 to {self.workers - 1}")
        if self.engine == "transformers":
            return self
        url = self.server.url
        if url is None or urlsplit(url).scheme not in ("http", "https") or not urlsplit(url).netloc:
            raise ValueError(f"server.url is {url!r}; engine {self.engine} needs one like http://127.0.0.1:30000")
        if self.engine == "openai" and self.server.model is None:
            raise ValueError("server.model: engine openai needs the name that the server knows the model by")
        if not self.sampling.is_plain and not self.server.raw_logprobs:
            raise ValueError(
                f"sampling.temperature {self.sampling.temperature} and top_p {self.sampling.top_p}: a server may then "
                "give log-probabilities of another distribution than the trainer's; set both to 1.0, or "
                "server.raw_logprobs to true if this server gives those of the model's own logits"
            )
        return self


class RolloutsFile(Strict):
    """The YAML file: one key, `rollouts`."""

    rollouts: RolloutsConfig
