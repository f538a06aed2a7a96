"""What is frozen, and that only the rest gets gradients."""

from __future__ import annotations

import pytest

from schemas.errors import ConfigError
from tests.train.models import media
from tests.train.models.families import make_ours, run_ours
from tests.train.models.test_text import packed
from train.data.model_inputs import model_inputs
from train.models.freeze import freeze


def test_the_towers_without_what_joins_them_to_the_text_model() -> None:
    assets = media.omni_assets()
    model = make_ours("omni")
    batch = media.batch_of(assets, [media.everything_mix()])
    _, before = run_ours(model, model_inputs(batch, assets))
    frozen = freeze(model, vit=True, audio_tower=True)
    _, gradients = run_ours(model, model_inputs(batch, assets))
    names = [name for name, _ in model.named_parameters()]
    towers = [name for name in names if name.startswith(("visual.", "audio_tower."))]
    joints = ("visual.merger.", "visual.merger_list.", "audio_tower.proj1.", "audio_tower.proj2.")
    assert list(frozen) == [name for name in towers if not name.startswith(joints)]
    assert "audio_tower.ln_post.weight" in frozen and "visual.pos_embed.weight" in frozen
    assert gradients.keys() == before.keys() - set(frozen)
    assert {"visual.merger.ln_q.bias", "visual.merger_list.1.mlp.0.weight"} <= gradients.keys()


def test_the_vision_tower_of_vl() -> None:
    model = make_ours("vl")
    frozen = freeze(model, vit=True)
    assert frozen and all(name.startswith("model.visual.") and "merger" not in name for name in frozen)
    kept = [name for name, p in model.named_parameters() if p.requires_grad and name.startswith("model.visual.")]
    assert {name.split(".")[2] for name in kept} == {"merger", "deepstack_merger_list"}


@pytest.mark.parametrize(
    ("pattern", "count"),
    [
        ("model.layers.1", 11),
        ("model.layers.*.mlp.gate", 3),
        ("model.layers.*.mlp.experts.down_proj", 3),
        ("lm_head", 1),
        ("*.self_attn.*_norm", 6),
        ("model.embed_tokens.weight", 1),
    ],
)
def test_modules_by_pattern(pattern: str, count: int) -> None:
    model = make_ours("moe")
    frozen = freeze(model, modules=[pattern])
    assert len(frozen) == count
    _, gradients = run_ours(model, packed((9, 5)))
    assert gradients.keys() == dict(model.named_parameters()).keys() - set(frozen)


def test_what_cannot_be_frozen() -> None:
    with pytest.raises(ConfigError, match=r"freeze_vit: a qwen3 has no such tower"):
        freeze(make_ours("dense"), vit=True)
    with pytest.raises(ConfigError, match=r"freeze_audio_tower: a qwen3_vl has no such tower"):
        freeze(make_ours("vl"), audio_tower=True)
    with pytest.raises(ConfigError, match=r"'model\.layer\.1' matches no .*did you mean 'model\.layers\.1'.*lm_head"):
        freeze(make_ours("dense"), modules=["lm_head", "model.layer.1"])
    with pytest.raises(ConfigError, match="nothing is left to train"):
        freeze(make_ours("dense"), modules=["model", "lm_head"])
