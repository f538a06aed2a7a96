"""Rows with pictures and sound, through the real data path, as our inputs and as transformers' arguments."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from tests.train.data import hub
from tests.train.data.mixes import Mix
from tests.train.data.packed import Clip
from tests.train.models.families import AUDIO, IMAGE, SOUND, VIDEO
from train.data.batch import Batch, BatchPlace
from train.data.collate import Collator
from train.data.device import make_features
from train.data.model_inputs import model_inputs
from train.data.processor import ProcessorAssets, load_assets
from train.data.route import RouteSpec
from train.data.sample import TrainSample
from train.data.transform import SampleTransform
from train.models.inputs import ModelInputs

ROUTE = RouteSpec(sound_window=SOUND["n_window_infer"])


def omni_assets() -> ProcessorAssets:
    return load_assets(hub.TOKENIZER)


def vl_assets(folder: Path) -> ProcessorAssets:
    """folder: an empty one, for the processor's files."""
    hub.vl_processor().save_pretrained(folder)
    return load_assets(folder)


def pictures(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (*shape, 3), dtype=np.uint8)


def sound(seed: int, seconds: float) -> np.ndarray:
    noise = np.random.default_rng(seed).standard_normal(round(seconds * 16000)) * 3000
    return noise.clip(-32768, 32767).astype(np.int16)


def _turns(*kinds: str) -> list[Any]:
    parts = [part for kind in kinds for part in ((kind, None), ("text", "and then"))]
    return [["user", *parts, ("text", "what happens?")], ["assistant", ("text", "A dog runs, and it barks.")]]


def text_mix() -> Mix:
    return Mix(turns=_turns())


def image_mix() -> Mix:
    return Mix(turns=_turns("image", "image"), images=[pictures(1, 64, 96), pictures(2, 128, 32)])


def video_mix() -> Mix:
    clips = [Clip(pictures(3, 5, 64, 96), 2.0), Clip(pictures(4, 2, 96, 64), 1.7)]
    return Mix(turns=_turns("video", "video"), clips=clips)


def audio_mix() -> Mix:
    """Of several windows, of one second exactly, and of less."""
    return Mix(turns=_turns("audio", "audio", "audio"), sounds=[sound(5, 5.13), sound(6, 1.0), sound(7, 0.37)])


def clip_with_sound_mix() -> Mix:
    return Mix(turns=_turns("video"), clips=[Clip(pictures(8, 6, 64, 64), 2.0, sound(8, 3.0))])


def everything_mix() -> Mix:
    """A clip with sound beside one without, an image and a sound of its own."""
    clips = [Clip(pictures(9, 4, 64, 32), 2.0, sound(9, 2.2)), Clip(pictures(10, 3, 32, 96), 3.0)]
    return Mix(
        turns=_turns("image", "video", "audio", "video"),
        clips=clips,
        images=[pictures(11, 96, 96)],
        sounds=[sound(12, 0.8)],
    )


def samples_of(assets: ProcessorAssets, mixes: list[Mix]) -> list[TrainSample]:
    """With ids of the tiny models' vocabulary."""
    transform = SampleTransform(assets)
    return [small(transform.packed(mix.sample(str(n)), "made"), assets) for n, mix in enumerate(mixes)]


def small(sample: TrainSample, assets: ProcessorAssets) -> TrainSample:
    ids = sample.ids % 200
    for old, new in ((assets.tokens.image, IMAGE), (assets.tokens.video, VIDEO), (assets.tokens.audio, AUDIO)):
        ids[sample.ids == old] = new
    return replace(sample, ids=ids, labels=np.where(sample.labels == -100, -100, ids))


@dataclass(frozen=True)
class Case:
    """The same rows for ours and, as arguments, for transformers."""

    batch: Batch
    inputs: ModelInputs
    media: dict[str, Tensor]


def batch_of(assets: ProcessorAssets, mixes: list[Mix], **how: Any) -> Batch:
    """how: of the collator, e.g. sp_rank and sp_size."""
    return collate(samples_of(assets, mixes), **how)


def collate(samples: list[TrainSample], **how: Any) -> Batch:
    position_dtype: Any = str(samples[0].position_ids.dtype)
    collator = Collator(position_dtype=position_dtype, route_spec=ROUTE, **how)
    return collator(samples, BatchPlace(0, 0, 0))


def empty_batch() -> Batch:
    """Nothing but padding."""
    return Collator()([], BatchPlace(0, 0, 0))


def case_of(assets: ProcessorAssets, mixes: list[Mix]) -> Case:
    batch = batch_of(assets, mixes)
    return Case(batch, model_inputs(batch, assets), _media(batch, assets))


def _media(batch: Batch, assets: ProcessorAssets) -> dict[str, Tensor]:
    features = make_features(batch, assets)
    found: dict[str, Tensor] = {}
    parts = features.patches.split([t * h * w for t, h, w in features.grids])
    for is_image, name, grid_name in (
        (True, "pixel_values", "image_grid_thw"),
        (False, "pixel_values_videos", "video_grid_thw"),
    ):
        chosen = [n for n, pixels in enumerate(batch.vision) if pixels.is_image == is_image]
        if chosen:
            found[name] = torch.cat([parts[n] for n in chosen])
            found[grid_name] = torch.tensor([features.grids[n] for n in chosen])
    if features.mel_lengths:
        pieces = features.mel.split(features.mel_lengths, 1)
        found["input_features"] = pad_sequence([piece.T for piece in pieces], batch_first=True).transpose(1, 2)
        steps = torch.arange(max(features.mel_lengths))
        found["feature_attention_mask"] = (steps < torch.tensor(features.mel_lengths)[:, None]).long()
    return found
