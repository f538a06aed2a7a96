"""The other families that answer: Qwen3-VL, a thinker converted to a pseudo Qwen3-VL, and a text model."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import Qwen3VLMoeForConditionalGeneration

from jobs.rollout.config import SamplingConfig
from jobs.rollout.hub import HubEngine, load_model
from jobs.rollout.prompts import make_prompt, prompt_assets
from pack.reader import PackedDataset
from schemas.errors import RowError, UnsupportedError
from tests.jobs.rollout.test_hub import trainer_logprobs
from tests.jobs.rollout.world import rollouts_config
from tests.train.data.hub import vl_processor
from tests.train.models.families import MOE, MROPE, TEXT, VISION, randomise, vl_sparse
from tests.train.pseudo import IDS, make_omni, make_pseudo, make_text
from tests.train.tiny import VOCAB
from train.data.transform import SampleTransform
from train.models.spec import build_foundation_model
from train.ops.registry import eager_ops

SEEN = ("clip0", "clip1", "image", "text1")


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    folder = tmp_path_factory.mktemp("families")
    omni = make_omni(folder / "omni")
    text = {**TEXT, **MOE, "norm_topk_prob": False, "vocab_size": VOCAB, "rope_parameters": MROPE}
    config = vl_sparse(text_config=text, vision_config=VISION, **{k: v for k, v in IDS.items() if "audio" not in k})
    model = Qwen3VLMoeForConditionalGeneration._from_config(config, dtype=torch.float32)
    randomise(model)
    model.save_pretrained(folder / "vl")
    vl_processor().save_pretrained(folder / "vl")
    return {
        "vl": (folder / "vl", folder / "vl"),
        "pseudo": (make_pseudo(omni, folder / "pseudo"), omni),
        "text": (make_text(omni, folder / "text"), omni),
    }


@pytest.mark.parametrize(
    ("family", "keys"), [("vl", SEEN), ("pseudo", SEEN), ("text", ("text0", "text2"))], ids=["vl", "pseudo", "text"]
)
def test_logprobs_are_those_of_the_trainer(family, keys, folders, world):
    """Whole numbers for positions, time marks and all, or positions on the clock: as the trainer lays them out."""
    path, processor = folders[family]
    config = rollouts_config(
        world, model_path=str(path), processor_path=str(processor), layout={"use_audio_in_video": False}
    )
    assets = prompt_assets(config)
    engine = HubEngine(load_model(path, config.local), assets, SamplingConfig(group_size=2, max_new_tokens=4))
    native = build_foundation_model(path, eager_ops()).eval()
    prompts = {s.meta.id: s for s in PackedDataset(config.dataset)}
    for key in keys:
        prompt = make_prompt(prompts[key], SampleTransform(assets))
        answers = engine.answers(prompt, seed=3)
        expected = trainer_logprobs(native, assets, prompt, answers)
        for answer, wanted in zip(answers, expected, strict=True):
            np.testing.assert_allclose(answer.logprobs, wanted, atol=1e-4)


@pytest.mark.parametrize(("family", "key"), [("vl", "sound"), ("text", "clip0"), ("pseudo", "sound")])
def test_media_that_a_family_does_not_take_are_refused(family, key, folders, world):
    path, processor = folders[family]
    layout = {"use_audio_in_video": False}
    config = rollouts_config(world, model_path=str(path), processor_path=str(processor), layout=layout)
    transform = SampleTransform(prompt_assets(config))
    sample = next(s for s in PackedDataset(config.dataset) if s.meta.id == key)
    with pytest.raises((RowError, UnsupportedError)):
        make_prompt(sample, transform)
