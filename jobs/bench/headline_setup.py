"""What the parts of the headline benchmark share: the model's config.json, documents of the data, a run's description
and its configuration."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Any

import yaml

from schemas.geometry import audio_tokens, video_tokens
from schemas.strict import check_config
from train.config import OmniConfig

ASSETS = Path(str(files("jobs"))) / "assets"
REPEATS = 200  # of each row in an epoch: few documents, but an epoch of many steps
FPS = 2.0  # pictures per second
SAMPLE_RATE = 16000
TOP_LAYERS = 48  # of the released model
MOST_EP = 4  # ranks that divide the experts: with 8 of them for a row, up to so many gather rows


@dataclass(frozen=True)
class Document:
    """A clip with sound and a short chat. tokens: of the whole document, reached with words; frames, height, width: of
    its pictures; count: how many are packed."""

    tokens: int
    frames: int
    height: int
    width: int
    count: int

    @property
    def seconds(self) -> float:
        return self.frames / FPS

    @property
    def media_tokens(self) -> int:
        return video_tokens(self.frames, self.height, self.width) + audio_tokens(int(self.seconds * SAMPLE_RATE))


# real sizes: the model takes 128 to 768 tokens of a picture
DOCUMENTS = {
    "4k": Document(4096, 52, 288, 480, 256),
    "4k half": Document(4096, 26, 288, 480, 256),
    "32k": Document(32768, 224, 480, 576, 8),
    "64k": Document(65536, 320, 544, 736, 4),
    "160k": Document(163840, 768, 544, 768, 4),
}
QUICK_DOCUMENTS = {
    "4k": Document(400, 4, 96, 160, 16),
    "4k half": Document(400, 2, 96, 160, 16),
    "32k": Document(600, 4, 160, 192, 4),
    "64k": Document(800, 4, 192, 224, 4),
    "160k": Document(2048, 16, 224, 224, 4),
}


@dataclass(frozen=True)
class Phase:
    """Steps of one trainer. name: in the claims; documents: key of `DOCUMENTS`; tokens: of a micro-batch; micro: of
    them on each rank in a step; warm, steps: that are left out, and measured; watched: a step under the profiler
    follows."""

    name: str
    documents: str
    tokens: int
    micro: int
    warm: int
    steps: int
    watched: bool = False


@dataclass(frozen=True)
class Run:
    """What the ranks of a part do, as JSON. kind: which function of `headline_rank`; layers: of the text model; out:
    folder for files; data: of the packed datasets; sp: ranks of a sequence; train, model: dotted keys of the
    configuration that differ; options: of a kind's own."""

    part: str
    kind: str
    quick: bool
    nproc: int
    layers: int
    out: str
    data: str
    sp: int = 1
    phases: tuple[Phase, ...] = ()
    settings: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Run:
        values = json.loads(text)
        values["phases"] = tuple(Phase(**phase) for phase in values["phases"])
        return cls(**values)

    @property
    def documents(self) -> dict[str, Document]:
        return QUICK_DOCUMENTS if self.quick else DOCUMENTS


def model_values(layers: int, *, quick: bool) -> dict[str, Any]:
    """config.json of the Qwen3-Omni-30B-A3B thinker as released, but for the special tokens, which are those of the
    tokenizer in jobs/assets (the released one is not among them), and the depth. quick: the tiny one."""
    values: dict[str, Any] = json.loads((ASSETS / "tiny_qwen3_omni/config.json").read_text())
    values["text_config"]["num_hidden_layers"] = layers
    if quick:
        return values
    values["text_config"] |= {
        "vocab_size": 152064, "hidden_size": 2048, "intermediate_size": 768, "num_attention_heads": 32,
        "num_key_value_heads": 4, "head_dim": 128, "max_position_embeddings": 1 << 18, "moe_intermediate_size": 768,
        "num_experts": 128, "num_experts_per_tok": 8,
    }  # fmt: skip
    values["text_config"]["rope_parameters"]["mrope_section"] = [24, 20, 20]
    values["vision_config"] |= {
        "depth": 27, "hidden_size": 1152, "intermediate_size": 4304, "num_heads": 16, "out_hidden_size": 2048,
        "deepstack_visual_indexes": [8, 16, 24],
    }  # fmt: skip
    values["audio_config"] |= {
        "encoder_layers": 32, "encoder_attention_heads": 20, "encoder_ffn_dim": 5120, "d_model": 1280,
        "downsample_hidden_size": 480, "output_dim": 2048,
    }  # fmt: skip
    return values


def write_model(folder: Path, layers: int, *, quick: bool) -> Path:
    """The folder, with a config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(model_values(layers, quick=quick)))
    return folder


def run_config(run: Run, phase: Phase) -> OmniConfig:
    """Full fine-tune with Muon, all parameters and states in bfloat16, every block computed again; then the run's own
    settings."""
    groups = run.nproc // run.sp
    values: dict[str, Any] = {
        "model": {"config_path": str(write_model(Path(run.out) / "model", run.layers, quick=run.quick))},
        "data": {
            "sources": [{"path": str(Path(run.data) / phase.documents), "name": phase.documents, "weight": REPEATS}],
            "processor_path": str(ASSETS / "tokenizer"),
            "max_seq_len": phase.tokens,
            "lanes": groups,
            "cache": {"dir": str(Path(run.out) / "cache")},
            "dataloader": {"num_workers": 0 if run.quick else 2},
        },
        "train": {
            "global_batch_size": groups * phase.micro,
            "micro_batch_size": 1,
            "max_steps": 100_000,
            "optimizer": {
                "type": "muon", "lr": 1e-5, "lr_decay_style": "constant", "weight_decay": 0.01,
                "master_dtype": "bf16", "state_dtype": "bf16", "stochastic_rounding": True,
            },
            "accelerator": {
                "ulysses_size": run.sp,
                "ep_size": min(run.nproc, MOST_EP),
                "fsdp_config": {"mixed_precision": {"reduce_dtype": "bfloat16"}},
            },
            "gradient_checkpointing": {"enable": True},
            "checkpoint": {
                "output_dir": str(Path(run.out) / "output"), "save_steps": 0, "save_hf_weights": False,
                "load_path": None,
            },
            "logging": {"plots": False, "log_steps": 10},
            "memory": {"snapshot_on_error": False},
        },
    }  # fmt: skip
    for key, value in run.settings.items():
        set_key(values, key, value)
    return check_config(values, OmniConfig)


def set_key(values: dict[str, Any], key: str, value: Any) -> None:
    """A dotted key."""
    *path, last = key.split(".")
    for name in path:
        values = values.setdefault(name, {})
    values[last] = value


def parse_setting(text: str) -> tuple[str, Any]:
    """'train.accelerator.ep_size=2'."""
    key, separator, value = text.partition("=")
    if not separator:
        raise ValueError(f"{text!r} is no KEY=VALUE")
    return key, yaml.safe_load(value)
