"""A packed sample -> the prompt that the trainer lays out for it: the same code, cut at the end of the last assistant
header."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from convert.families import read_config
from jobs.rollout.config import RolloutsConfig
from schemas.conversation import Turn
from schemas.rollouts import prompt_digest
from schemas.sample import PackedSample, SampleMeta
from train.data.processor import ProcessorAssets, load_assets
from train.data.sample import IGNORE, TrainSample
from train.data.sideband import find_sideband
from train.data.transform import SampleTransform
from train.model_assets import media_of, vocab_size_of


@dataclass(frozen=True)
class Prompt:
    """What a model is asked. turns: the conversation without the last answer; layout: ids, positions and media of it,
    up to the end of the reply's header; sample: the packed row, with its bytes."""

    turns: list[Turn]
    layout: TrainSample
    sample: PackedSample

    @property
    def meta(self) -> SampleMeta:
        return self.sample.meta

    @property
    def ids(self) -> np.ndarray:
        return self.layout.ids

    @property
    def digest(self) -> str:
        return prompt_digest(self.ids)


def prompt_assets(config: RolloutsConfig) -> ProcessorAssets:
    """As the trainer reads them for the same folders. ConfigError: no processor there, or one of another family."""
    folder = Path(config.model_path)
    values = read_config(folder)
    return load_assets(
        config.processor_path or config.model_path,
        use_audio_in_video=config.layout.use_audio_in_video,
        wrap_video=config.layout.wrap_video,
        system=config.layout.system,
        media=media_of(values, sound_beside=False),
        sideband=find_sideband("auto", folder),
        vocab_size=vocab_size_of(folder),
    )


def make_prompt(sample: PackedSample, transform: SampleTransform) -> Prompt:
    """The conversation without its last answer, when it ends with one, and the header of a reply. RowError,
    UnsupportedError: a row that the model cannot take."""
    turns = sample.meta.conversation
    asked = list(turns[:-1] if turns[-1][0] == "assistant" else turns)
    reply: Turn = ["assistant"]
    open_ended = replace(sample, meta=sample.meta.model_copy(update={"conversation": [*asked, reply]}))
    laid_out = transform.packed(open_ended, sample.meta.source)
    stop = int(np.flatnonzero(laid_out.labels != IGNORE)[-1])  # the end of the empty reply, its only label
    layout = replace(
        laid_out,
        ids=laid_out.ids[:stop],
        labels=np.full(stop, IGNORE),
        position_ids=laid_out.position_ids[:, :stop],
        num_label_tokens=0,
        num_text=laid_out.num_text - (len(laid_out) - stop),
    )
    return Prompt(asked, layout, sample)
