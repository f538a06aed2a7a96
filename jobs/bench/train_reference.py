"""A plain training loop around transformers' own Qwen3-Omni thinker, on the batches of our loader.

`python -m jobs.bench.train_reference CONFIG OUTPUT` trains the model of a configuration and writes its losses and the
samples of each step as JSON.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.optim import AdamW
from transformers import Qwen3OmniMoeThinkerForConditionalGeneration, get_cosine_schedule_with_warmup
from transformers.utils.logging import disable_progress_bar

from jobs.bench.train_setup import MAX_NORM
from schemas.strict import load_config
from train.config import OmniConfig, OptimizerConfig
from train.data.batch import Batch
from train.trainer import VLMTrainer

COMPUTE = torch.bfloat16


def write_weights(config_folder: Path, folder: Path, seed: int) -> Path:
    """A model directory with transformers' own random initialisation."""
    config_class: Any = Qwen3OmniMoeThinkerForConditionalGeneration.config_class
    torch.manual_seed(seed)
    model = Qwen3OmniMoeThinkerForConditionalGeneration._from_config(
        config_class.from_pretrained(config_folder), dtype=torch.float32
    )
    model.save_pretrained(folder)
    return folder


def load_reference(folder: Path, dtype: torch.dtype, device: torch.device) -> Any:
    """The model, to train. Loaded in its dtype, not cast, so that the frequencies of rotary embeddings stay float32."""
    model: Any = Qwen3OmniMoeThinkerForConditionalGeneration.from_pretrained(
        folder, dtype=dtype, attn_implementation="sdpa", experts_implementation="grouped_mm"
    )
    return model.to(device).train()


class PlainLoop:
    """Parameters, gradients and AdamW in float32, forward and backward pass of a bfloat16 copy: what mixed precision is
    when written out. Loss: cross-entropy over the labels of the step, plus the router's auxiliary loss as a mean over
    micro-batches."""

    def __init__(self, folder: Path, config: OptimizerConfig, steps: int, device: torch.device) -> None:
        self.model = load_reference(folder, COMPUTE, device)
        self.aux_coef: float = self.model.config.get_text_config().router_aux_loss_coef
        self.copies = list(self.model.parameters())
        exact = load_reference(folder, torch.float32, device)
        self.masters = [parameter.detach().requires_grad_() for parameter in exact.parameters()]
        beta1, beta2 = config.betas
        self.optimizer = AdamW(
            self.masters, lr=config.lr, betas=(beta1, beta2), eps=config.eps, weight_decay=config.weight_decay
        )
        assert config.lr_warmup_steps is not None
        self.scheduler = get_cosine_schedule_with_warmup(self.optimizer, config.lr_warmup_steps, steps)

    def step(self, batches: list[Batch]) -> Tensor:
        """The mean loss of the step's labels before the step, float32 [], on the device."""
        labels = sum(int(batch.label_tokens.sum()) for batch in batches)
        total = torch.zeros((), device=self.copies[0].device)
        for batch in batches:
            rows = batch.length - batch.num_pad
            found = self.model(**arguments(batch, COMPUTE), use_cache=False, output_router_logits=True)
            targets = batch.labels[0, :rows]
            loss = F.cross_entropy(found.logits[0].float(), targets, ignore_index=-100, reduction="sum") / labels
            (loss + self.aux_coef / len(batches) * found.aux_loss).backward()
            total += loss.detach()
            self._collect()
        torch.nn.utils.clip_grad_norm_(self.masters, MAX_NORM)
        self.optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad(set_to_none=True)
        with torch.no_grad():
            torch._foreach_copy_(self.copies, self.masters)
        return total

    def _collect(self) -> None:
        """Gradients of the copy are added up in float32."""
        for copy, master in zip(self.copies, self.masters, strict=True):
            if copy.grad is not None:
                gradient = copy.grad.float()
                master.grad = gradient if master.grad is None else master.grad.add_(gradient)
                copy.grad = None


def arguments(batch: Batch, dtype: torch.dtype) -> dict[str, Tensor]:
    """What transformers takes for one packed sequence. Documents are told apart by text positions that start again,
    given as the first of four axes, and by no attention mask."""
    rows = batch.length - batch.num_pad
    device, lengths = batch.ids.device, batch.sample_tokens.tolist()
    given = batch.position_ids[:, 0, :rows]
    restart = torch.cat([torch.arange(length) for length in lengths]).to(device, given.dtype)
    return {
        "input_ids": batch.ids[:, :rows],
        "position_ids": torch.cat([restart[None], given])[:, None],
        **_media(batch, dtype),
    }


def _media(batch: Batch, dtype: torch.dtype) -> dict[str, Tensor]:
    features, device = batch.features, batch.ids.device
    assert features is not None, "the loader makes them"
    found: dict[str, Tensor] = {}
    parts = features.patches.to(dtype).split([t * h * w for t, h, w in features.grids])
    for is_image, name, grid in (
        (True, "pixel_values", "image_grid_thw"),
        (False, "pixel_values_videos", "video_grid_thw"),
    ):
        chosen = [n for n, pixels in enumerate(batch.vision) if pixels.is_image == is_image]
        if chosen:
            found[name] = torch.cat([parts[n] for n in chosen])
            found[grid] = torch.tensor([features.grids[n] for n in chosen], device=device)
    if features.mel_lengths:
        pieces = features.mel.to(dtype).split(features.mel_lengths, 1)
        found["input_features"] = pad_sequence([piece.T for piece in pieces], batch_first=True).transpose(1, 2)
        frames = torch.arange(max(features.mel_lengths))
        mask = (frames < torch.tensor(features.mel_lengths)[:, None]).long()
        found["feature_attention_mask"] = mask.to(device)
    return found


def rows_of(batches: list[Batch]) -> list[list[str]]:
    """Keys of the samples of each micro-batch."""
    return [list(batch.keys) for batch in batches]


def main() -> int:
    disable_progress_bar()
    config_file, output = map(Path, sys.argv[1:])
    config = load_config(config_file, [], OmniConfig)
    assert config.model.model_path is not None and config.train.max_steps is not None
    feeder = VLMTrainer(config)  # for its loader alone
    for build in (feeder.build_distributed, feeder.build_model, feeder.build_assets, feeder.build_dataset):
        build()
    feeder.build_collate()
    feeder.build_loader()
    steps = config.train.max_steps
    loop = PlainLoop(Path(config.model.model_path), config.train.optimizer, steps, feeder.mesh.device)
    losses: list[float] = []
    rows: list[list[list[str]]] = []
    began = time.monotonic()
    for n, batches in enumerate(feeder.train_dataloader, 1):
        rows.append(rows_of(batches.micro_batches))
        losses.append(loop.step(batches.micro_batches).item())
        if n % 50 == 0 or n == steps:
            said = f"step {n} of {steps}, loss {losses[-1]:.4f}, {time.monotonic() - began:.1f} s"
            print(f"transformers, {output.stem}: {said}", flush=True)
    output.write_text(json.dumps({"losses": losses, "rows": rows}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
