"""Building: names, the meta device, random weights, hooks, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from schemas.errors import ConfigError, UnsupportedError
from tests.train.models import families
from tests.train.models.families import FAMILIES, hub_names, make_ours, omni, run_ours
from tests.train.models.test_text import packed
from train.models.foundation import merge_media
from train.models.initialize import initialize, initializers
from train.models.rope import RopeSpec, text_table
from train.ops.registry import eager_ops


@pytest.mark.parametrize("name", FAMILIES)
def test_a_model_leaves_the_meta_device_with_the_same_weights_and_results(name: str) -> None:
    family, expected = FAMILIES[name], make_ours(name)
    with torch.device("meta"):
        model = family.ours(family.make_config(), eager_ops())
    assert not list(model.buffers())  # nothing but parameters that someone must fill
    assert all(parameter.is_meta for parameter in model.parameters())
    model.to_empty(device="cpu")
    model.load_state_dict(expected.state_dict())
    with torch.no_grad():
        found, wanted = (one(packed((9, 4)), logits=True).logits for one in (model, expected))
    assert torch.equal(found, wanted)


@pytest.mark.parametrize("name", ["tied", "mixed_moe", "vl_moe", "omni"])
def test_random_weights_are_distributed_as_in_transformers(name: str) -> None:
    family = FAMILIES[name]
    config = family.make_config()
    for part, std in (("text_config", 0.03), ("vision_config", 0.05), ("audio_config", 0.07)):
        if hasattr(config, part):
            getattr(config, part).initializer_range = std
    config.get_text_config().pad_token_id = 17
    torch.manual_seed(0)
    expected = hub_names(family.reference(config))
    model = family.ours(config, eager_ops())
    initialize(model, seed=3)
    found = dict(model.named_parameters())
    assert found.keys() == expected.keys()
    for path, values in expected.items():
        if values.std() < 1e-6:  # a constant
            assert torch.equal(found[path].detach(), values), path
        else:
            tolerance = 5 * values.numel() ** -0.5
            assert abs(found[path].std() / values.std() - 1) < tolerance, path
            assert torch.equal((found[path] == 0).all(-1), (values == 0).all(-1)), path  # the padding row


def test_random_weights_follow_from_seed_and_name() -> None:
    model = make_ours("moe")
    one = initializers(model)["model.layers.1.mlp.experts.down_proj"]
    assert torch.equal(one.make(5), one.make(5))
    assert not torch.equal(one.make(5), one.make(6))
    other = initializers(model)["model.layers.2.mlp.experts.down_proj"]
    assert other.shape == one.shape and not torch.equal(one.make(5), other.make(5))
    initialize(model, 5)
    assert torch.equal(model.get_parameter(one.name).detach(), one.make(5))


def test_hooks_replace_what_parallel_code_replaces() -> None:
    model = make_ours("moe")
    plain, _ = run_ours(model, packed((11, 6)))
    calls = []

    def merge(*given: Any) -> Any:
        calls.append("merge")
        return merge_media(*given)

    def reduce_router(counts: Any, prob_sums: Any, tokens: Any) -> Any:
        calls.append("reduce")
        assert counts.shape == prob_sums.shape == (3, 8) and tokens == 17
        return counts * 2, prob_sums * 2, tokens * 2  # another rank with the same rows

    model.merge, model.reduce_router = merge, reduce_router
    hooked, _ = run_ours(model, packed((11, 6)))
    assert calls == ["merge", "reduce"]
    assert torch.equal(hooked.loss, plain.loss)  # type: ignore[arg-type]
    model.reduce_router = lambda counts, prob_sums, tokens: (counts, prob_sums, tokens * 2)
    halved, _ = run_ours(model, packed((11, 6)))
    assert halved.aux_loss is not None and plain.aux_loss is not None
    assert torch.allclose(halved.aux_loss * 4, plain.aux_loss)


def test_the_scales_of_both_losses() -> None:
    model = make_ours("moe")
    inputs = packed((20,))
    plain, _ = run_ours(model, inputs)
    scaled, _ = run_ours(model, replace(inputs, loss_scale=torch.tensor(0.125), aux_scale=0.5))
    assert plain.token_loss is not None and scaled.ce_loss is not None and scaled.aux_loss is not None
    assert torch.allclose(scaled.ce_loss, plain.token_loss.sum() / 8)
    assert torch.allclose(scaled.loss, scaled.ce_loss + 0.05 * 0.5 * scaled.aux_loss)  # type: ignore[arg-type]
    assert model(replace(inputs, labels=None)).loss is None


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}}, "rope_type 'yarn'"),
        ({"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}}, "rope_type 'linear'"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"attention_dropout": 0.1}, "attention_dropout"),
        ({"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1}, "sliding_window"),
    ],
)
def test_what_the_text_model_does_not_compute_is_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(UnsupportedError, match=said):
        FAMILIES["dense"].ours(families.dense(**changes), eager_ops())


def test_windows_that_no_layer_has_are_not_refused() -> None:
    unused = {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 3}
    FAMILIES["dense"].ours(families.dense(**unused), eager_ops())
    FAMILIES["moe"].ours(families.sparse(use_sliding_window=False, sliding_window=16), eager_ops())
    with pytest.raises(UnsupportedError, match="sliding_window"):
        FAMILIES["moe"].ours(families.sparse(use_sliding_window=True, sliding_window=16), eager_ops())


def _thinker_with(part: str, **changes: Any) -> None:
    parts = {"vision_config": families.VISION, "audio_config": families.SOUND}
    FAMILIES["omni"].ours(omni(**{part: {**parts[part], **changes}}), eager_ops())


@pytest.mark.parametrize(
    ("part", "changes", "said"),
    [
        ("audio_config", {"n_window": 25}, "n_window 25"),
        ("audio_config", {"n_window_infer": 250}, "n_window_infer 250"),
        ("audio_config", {"activation_function": "relu"}, "activation 'relu'"),
        ("vision_config", {"hidden_act": "quick_gelu"}, "activation 'quick_gelu'"),
        ("vision_config", {"patch_size": [16, 16]}, "patches must be squares"),
        ("vision_config", {"num_position_embeddings": 50}, "is no square"),
        ("vision_config", {"deepstack_visual_indexes": [1, 3]}, "of a tower of depth 3"),
    ],
)
def test_what_the_towers_do_not_compute_is_refused(part: str, changes: dict[str, Any], said: str) -> None:
    with pytest.raises((UnsupportedError, ConfigError), match=said):
        _thinker_with(part, **changes)


def _config(**values: Any) -> Any:
    return SimpleNamespace(model_type="qwen3", head_dim=16, hidden_size=48, num_attention_heads=4, **values)


def test_both_forms_of_rope_settings() -> None:
    section = {"mrope_section": [4, 2, 2], "mrope_interleaved": True}
    new = _config(rope_parameters={"rope_type": "default", "rope_theta": 5e6, **section})
    old = _config(rope_theta=5e6, rope_scaling={"type": "mrope", **section})
    named = _config(rope_theta=5e6, rope_scaling={"rope_type": "default", "mrope_section": [4, 2, 2]})
    found = [RopeSpec.of_text(config, multimodal=True) for config in (new, old, named)]
    assert found == [RopeSpec(5e6, 16, (4, 2, 2))] * 3
    assert RopeSpec.of_text(_config(rope_theta=1e4), multimodal=False) == RopeSpec(1e4, 16)
    with pytest.raises(UnsupportedError, match="mrope_interleaved is false"):
        RopeSpec.of_text(_config(rope_parameters={"rope_theta": 1.0, "mrope_interleaved": False}), multimodal=True)
    with pytest.raises(UnsupportedError, match="per layer type"):
        RopeSpec.of_text(_config(rope_parameters={"full_attention": {"rope_theta": 1.0}}), multimodal=False)
    with pytest.raises(ConfigError, match="rope_theta"):
        RopeSpec.of_text(_config(), multimodal=False)


def test_interleaved_sections_by_hand() -> None:
    """Frequencies 0..7 turn with t h w t h w t t for sections (4, 2, 2)."""
    positions = torch.tensor([[3.5], [7.0], [11.0]])
    table = text_table(positions, RopeSpec(10000.0, 16, (4, 2, 2)))
    axes = [0, 1, 2, 0, 1, 2, 0, 0]
    angles = torch.tensor([positions[axis, 0] * 10000.0 ** (-i / 8) for i, axis in enumerate(axes)])
    assert torch.allclose(table.cos[0], angles.cos(), atol=1e-6)
    assert torch.allclose(table.sin[0], angles.sin(), atol=1e-6)
