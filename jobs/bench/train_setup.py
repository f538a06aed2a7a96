"""What the parts of the trainer's benchmark share: sizes of the model, its files, the configuration of a run."""

from __future__ import annotations

import json
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch

from schemas.strict import check_config
from train.config import OmniConfig

ASSETS = Path(str(files("jobs"))) / "assets"
REPEATS = 100  # of each row in an epoch: a small dataset, but an epoch of many steps
WEIGHT_DECAY, BETAS, EPS, MAX_NORM = 0.1, (0.9, 0.95), 1e-8, 1.0


@dataclass(frozen=True)
class Size:
    """Of a model and of its steps. hidden, head_dim, inner (of an expert): widths; tower: width of both towers;
    sequence: tokens of a packed sequence at most; batch: sequences of a step."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    experts: int
    top_k: int
    inner: int
    tower: int
    sequence: int = 4096
    batch: int = 2

    def __str__(self) -> str:
        experts = f"{self.experts} experts of {self.inner}"
        return f"{self.layers} layers, hidden {self.hidden}, {experts}, steps of {self.batch} x {self.sequence} tokens"


SMALL = Size(512, 5, 8, 2, 64, 16, 4, 256, 256)
WIDE = Size(2048, 4, 16, 4, 128, 16, 8, 768, 512)
TINY = Size(64, 2, 2, 1, 32, 4, 2, 32, 32, sequence=1024, batch=2)


@dataclass(frozen=True)
class Bench:
    """data: a packed dataset; out: a folder for everything that is written; steps, lr: of the runs of `loss`; seeds:
    how many of our runs; workers: of each loader."""

    data: Path
    out: Path
    device: torch.device
    quick: bool
    steps: int
    lr: float
    workers: int
    seeds: int

    @property
    def size(self) -> Size:
        return TINY if self.quick else SMALL

    @property
    def place(self) -> str:
        """Where it was measured."""
        if self.device.type == "cuda":
            return f"{torch.cuda.get_device_name()}, torch {torch.__version__}, bfloat16"
        return f"CPU, torch {torch.__version__}, bfloat16"

    def wait(self) -> None:
        """Until the device has nothing left to do."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()


def write_model(folder: Path, size: Size) -> Path:
    """config.json of a Qwen3-Omni thinker for the tokenizer of jobs/assets."""
    values: dict[str, Any] = json.loads((ASSETS / "tiny_qwen3_omni/config.json").read_text())
    half = size.head_dim // 2
    rope = values["text_config"]["rope_parameters"]
    rope["mrope_section"] = [half - 2 * (half // 4), half // 4, half // 4]
    values["text_config"] |= {
        "hidden_size": size.hidden,
        "intermediate_size": size.inner,
        "num_hidden_layers": size.layers,
        "num_attention_heads": size.heads,
        "num_key_value_heads": size.kv_heads,
        "head_dim": size.head_dim,
        "num_experts": size.experts,
        "num_experts_per_tok": size.top_k,
        "moe_intermediate_size": size.inner,
    }
    heads = max(1, size.tower // 64)
    values["vision_config"] |= {
        "hidden_size": size.tower,
        "intermediate_size": 2 * size.tower,
        "num_heads": heads,
        "out_hidden_size": size.hidden,
    }
    values["audio_config"] |= {
        "d_model": size.tower,
        "encoder_attention_heads": heads,
        "encoder_ffn_dim": 2 * size.tower,
        "downsample_hidden_size": min(size.tower, 64),
        "output_dim": size.hidden,
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(values))
    return folder


def train_config(bench: Bench, size: Size, name: str, model: dict[str, str], steps: int, **train: Any) -> OmniConfig:
    """Of a run that writes to out/name. model: section `model`; train: keys of the section that differ."""
    optimizer = {
        "lr": bench.lr,
        "lr_warmup_steps": max(1, steps // 20),
        "lr_decay_style": "cosine",
        "weight_decay": WEIGHT_DECAY,
        "betas": list(BETAS),
        "eps": EPS,
        "max_grad_norm": MAX_NORM,
    }
    values = {
        "model": model,
        "data": {
            "sources": [{"path": str(bench.data), "name": "packed", "weight": REPEATS}],
            "processor_path": str(ASSETS / "tokenizer"),
            "max_seq_len": size.sequence,
            "lanes": 1,
            "cache": {"dir": str(bench.out / "cache")},
            "dataloader": {"num_workers": bench.workers, "prefetch_factor": 4, "device_prefetch": 2},
        },
        "train": {
            "global_batch_size": size.batch,
            "max_steps": steps,
            "optimizer": optimizer,
            "gradient_checkpointing": {"enable": False},
            "checkpoint": {"output_dir": str(bench.out / name), "save_steps": 0, "save_hf_weights": False},
            "logging": {"plots": False},
        }
        | train,
    }
    return check_config(values, OmniConfig)


def read_losses(folder: Path) -> dict[int, float]:
    """By step, from a run's metrics.jsonl."""
    lines = (json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines())
    return {int(line["step"]): float(line["loss"]) for line in lines if "loss" in line}
