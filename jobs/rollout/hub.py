"""The engine `transformers`: `generate` in this process, with the trainer's own ids, positions and pixels.

One prompt at a time, its answers as a batch. What is drawn depends on the seed and the prompt alone, not on the rows
before it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList

from convert.patterns import some
from jobs.rollout.config import LocalConfig, SamplingConfig
from jobs.rollout.engine import Answer
from jobs.rollout.prompts import Prompt
from schemas.errors import ConfigError, VerificationError
from train.data.batch import BatchPlace
from train.data.collate import Collator
from train.data.device import make_features
from train.data.processor import ProcessorAssets
from train.data.reader import position_dtype
from train.logprob_reference import SampleRow, hear_whole_seconds, sample_rows
from train.models.spec import read_model


class HubEngine:
    """Answers of a model of transformers. model: already on its device, in eval mode; its own generation settings
    (top_k, repetition_penalty of released checkpoints) are taken off, as nobody asked for them here."""

    concurrency = 1

    def __init__(
        self, model: Any, assets: ProcessorAssets, sampling: SamplingConfig, batch_size: int | None = None
    ) -> None:
        self.model, self.assets, self.sampling = model, assets, sampling
        self.batch_size = batch_size or sampling.group_size
        self.ends = [assets.tokens.im_end, assets.tokens.pad]
        self._sees = hasattr(model.config, "vision_config")
        self._one_at_a_time = threading.Lock()  # the generator of torch is the process's own
        model.generation_config = GenerationConfig()

    def answers(self, prompt: Prompt, seed: int) -> list[Answer]:
        """See `Engine`. DecodeError: a medium is not what its sample says."""
        arguments = self._arguments(prompt)
        device = self.model.device
        with self._one_at_a_time, torch.random.fork_rng([device] if device.type == "cuda" else []):
            torch.manual_seed(seed)
            found: list[Answer] = []
            while len(found) < self.sampling.group_size:
                found += self._batch(arguments, min(self.batch_size, self.sampling.group_size - len(found)))
        return found

    def _arguments(self, prompt: Prompt) -> dict[str, Tensor]:
        """Of the forward call for one prompt, on the device."""
        collate = Collator(
            pad_multiple=1,
            temporal_patch=self.assets.video.temporal_patch,
            position_dtype=position_dtype(self.assets),
        )
        batch = collate([prompt.layout], BatchPlace(0, 0, 0)).to(self.model.device)
        (row,) = sample_rows(batch, make_features(batch, self.assets))
        return forward_arguments(row, sees=self._sees)

    @torch.inference_mode()
    def _batch(self, arguments: dict[str, Tensor], count: int) -> list[Answer]:
        sampling = self.sampling
        config = GenerationConfig(
            do_sample=True,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=0,
            max_new_tokens=sampling.max_new_tokens,
            eos_token_id=self.ends,
            pad_token_id=self.assets.tokens.pad,
        )
        taken = _TakenLogprobs()
        given = repeated(arguments, count)
        mask = torch.ones_like(given["input_ids"])
        ids = self.model.generate(
            **given, attention_mask=mask, generation_config=config, logits_processor=LogitsProcessorList([taken])
        )
        new = ids[:, given["input_ids"].shape[1] :]
        logprobs = taken.finish(ids)
        return [self._answer(*pair) for pair in zip(new.cpu().numpy(), logprobs.cpu().numpy(), strict=True)]

    def _answer(self, ids: np.ndarray, logprobs: np.ndarray) -> Answer:
        """Up to the first end token; what stands behind it fills the batch."""
        ended = np.flatnonzero(np.isin(ids, self.ends))
        stop = int(ended[0]) + 1 if len(ended) else len(ids)
        return Answer(ids[:stop].tolist(), logprobs[:stop].tolist(), "stop" if len(ended) else "length")


class _TakenLogprobs(LogitsProcessor):
    """Keeps the log-probability of each token that is drawn, from the model's own logits: it stands before temperature
    and top_p. Holds the distribution of one step only, so that memory does not grow with the vocabulary times the
    length."""

    def __init__(self) -> None:
        self._last: Tensor | None = None
        self._taken: list[Tensor] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self._take(input_ids)
        self._last = scores.float().log_softmax(-1)
        return scores

    def _take(self, ids: Tensor) -> None:
        if self._last is not None:
            self._taken.append(self._last.gather(1, ids[:, -1:]))

    def finish(self, ids: Tensor) -> Tensor:
        """float32 [answers, new tokens]."""
        self._take(ids)
        return torch.cat(self._taken, 1)


def forward_arguments(row: SampleRow, *, sees: bool) -> dict[str, Tensor]:
    """One row of a batch. sees: the model takes a first axis of text positions before time, height and width."""
    device = row.ids.device
    steps = torch.arange(len(row.ids), device=device)
    found = {"input_ids": row.ids[None], "position_ids": steps[None]}
    if sees:
        found["position_ids"] = torch.cat([steps[None].to(row.position_ids.dtype), row.position_ids])[:, None]
    for kind, suffix, pictures in (("image", "", row.images), ("video", "_videos", row.videos)):
        if pictures:
            found[f"pixel_values{suffix}"] = torch.cat([patches for patches, _ in pictures])
            found[f"{kind}_grid_thw"] = torch.tensor([grid for _, grid in pictures], device=device)
    if row.sounds:
        lengths = torch.tensor([sound.shape[1] for sound in row.sounds])
        found["input_features"] = pad_sequence([sound.T for sound in row.sounds], batch_first=True).transpose(1, 2)
        found["feature_attention_mask"] = (torch.arange(int(lengths.max())) < lengths[:, None]).long().to(device)
    return found


def repeated(arguments: dict[str, Tensor], count: int) -> dict[str, Tensor]:
    """The arguments of a batch of `count` equal rows, media row after row."""
    found = {}
    for name, value in arguments.items():
        if name == "position_ids" and value.ndim == 3:  # [4, rows, tokens]
            found[name] = value.repeat(1, count, 1)
        else:
            found[name] = value.repeat(count, *[1] * (value.ndim - 1))
    return found


def load_model(folder: Path, config: LocalConfig) -> Any:
    """The model of a directory. ConfigError: no such device; VerificationError: transformers misses a tensor."""
    source = read_model(folder)
    load: Callable[..., Any] = getattr(transformers, source.spec.reference).from_pretrained
    names = ("attn_implementation", "experts_implementation")
    chosen = {name: getattr(config, name) for name in names if getattr(config, name) is not None}
    model, info = load(
        source.path.parent,
        config=deepcopy(source.config),
        dtype=getattr(torch, config.dtype),
        output_loading_info=True,
        local_files_only=True,
        **chosen,
    )
    if missing := sorted(info["missing_keys"]) + sorted(map(str, info.get("mismatched_keys") or ())):
        raise VerificationError(f"transformers loads {source.path.parent} without {some(missing)}")
    for name, module in model.named_modules():
        if name.rpartition(".")[2] == "audio_tower":
            hear_whole_seconds(module)
    return model.to(find_device(config.device)).eval()


def find_device(name: str) -> torch.device:
    """ConfigError for a device that is not here."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"rollouts.local.device: {name!r} is none of auto, cpu, cuda, cuda:N") from error
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ConfigError(f"rollouts.local.device: {name}, but there are {torch.cuda.device_count()} GPUs here")
    return device
