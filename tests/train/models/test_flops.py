"""Counted operations against those that torch counts while a model runs."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import LlamaConfig, LlamaForCausalLM

from tests.train.models import media
from tests.train.models.families import MOE, SOUND, TEXT, VISION, make_ours
from tests.train.models.test_text import packed
from train.data.model_inputs import model_inputs
from train.models.checkpointing import CheckpointPolicy, set_checkpointing
from train.models.flops import Flops, MicroBatch, ModelFlops
from train.models.foundation import FoundationModel
from train.models.freeze import freeze
from train.models.hub_model import HubModel
from train.models.inputs import ModelInputs
from train.models.spec import build_foundation_model
from train.ops.attention import eager
from train.ops.registry import eager_ops


class DenseFlops(ModelFlops):
    """Counts attention as the reference computes it: of all rows with all rows, masked afterwards."""

    def units(self, batch: MicroBatch) -> dict[str, int]:
        units = super().units(batch)
        dense = {"pairs": "rows", "patch_pairs": "patches", "audio_pairs": "audio"}
        return units | {pairs: units[rows] ** 2 for pairs, rows in dense.items()}


def _use_dense_attention(model: FoundationModel) -> None:
    for module in model.modules():
        if hasattr(module, "attention"):
            module.attention = eager


def _measured(model: FoundationModel, inputs: ModelInputs) -> tuple[int, int]:
    """(forward, backward) as torch counts them."""
    with FlopCounterMode(display=False) as forward:
        loss = model(inputs).loss
    with FlopCounterMode(display=False) as backward:
        loss.backward()
    return forward.get_total_flops(), backward.get_total_flops()


def _stretching(inputs: ModelInputs) -> int:
    """Operations of the two products that stretch the square of positions over each size of picture."""
    side, width = int(VISION["num_position_embeddings"] ** 0.5), VISION["hidden_size"]
    sizes = {(h, w) for _, h, w in inputs.grids}
    return sum(2 * width * (h * side * side + w * side * h) for h, w in sizes)


def _counted(model: FoundationModel, inputs: ModelInputs, **how: bool) -> Flops:
    labels = None if inputs.label_rows is None else len(inputs.label_rows)
    batch = MicroBatch([inputs.num_valid], inputs.grids, inputs.mel_lengths, labels)
    return DenseFlops(model).count(batch, **how)


@dataclass(frozen=True)
class Setting:
    name: str
    vit: bool = False
    audio_tower: bool = False
    modules: tuple[str, ...] = ()


SETTINGS = [
    Setting("omni"),
    Setting("omni", vit=True, audio_tower=True),
    Setting("omni", modules=("audio_tower", "visual.blocks.0", "visual.patch_embed", "visual.pos_embed")),
    Setting("omni", modules=("visual", "audio_tower", "model.embed_tokens", "model.layers.0", "lm_head")),
    Setting("omni", modules=("*.mlp.experts", "audio_tower.conv*", "model.layers.1.self_attn")),
]


@pytest.mark.parametrize("setting", SETTINGS)
def test_products_are_those_that_run(setting: Setting) -> None:
    assets = media.omni_assets()
    model = make_ours(setting.name)
    _use_dense_attention(model)
    if setting.vit or setting.modules:
        freeze(model, vit=setting.vit, audio_tower=setting.audio_tower, modules=setting.modules)
    inputs = model_inputs(media.batch_of(assets, [media.everything_mix()], pad_multiple=1), assets)
    assert sum(inputs.segments.lengths) == inputs.num_valid
    forward, backward = _measured(model, inputs)
    counted = _counted(model, inputs)
    stretch = _stretching(inputs)
    stretch_back = stretch * model.visual.pos_embed.weight.requires_grad
    assert sum(counted.forward.values()) + stretch == forward
    assert counted.backward + stretch_back == backward
    assert all(counted.forward.values())


@pytest.mark.parametrize("name", ["dense", "tied", "mixed_moe"])
@pytest.mark.parametrize("modules", [(), ("model.embed_tokens",), ("model.layers.*",)])
def test_text_models(name: str, modules: tuple[str, ...]) -> None:
    model, inputs = make_ours(name), packed((13, 20))
    _use_dense_attention(model)
    freeze(model, modules=modules)
    forward, backward = _measured(model, inputs)
    counted = DenseFlops(model).count(MicroBatch([33]))
    assert sum(counted.forward.values()) == forward and counted.backward == backward


def test_vl() -> None:
    model = make_ours("vl_tied")
    _use_dense_attention(model)
    inputs = ModelInputs(
        ids=torch.arange(30),
        position_ids=torch.arange(30).expand(3, 30),
        segments=packed((30,)).segments,
        num_valid=30,
        labels=torch.arange(30),
        patches=torch.randn(2 * 4 * 6, 3 * 2 * 16 * 16),
        grids=[(2, 4, 6)],
        vision_rows=torch.arange(5, 17),
    )
    forward, backward = _measured(model, inputs)
    counted, stretch = _counted(model, inputs), _stretching(inputs)
    assert sum(counted.forward.values()) + stretch == forward and counted.backward + stretch == backward


def test_checkpointing_runs_the_blocks_once_more() -> None:
    model, inputs = make_ours("moe"), packed((40,))
    _use_dense_attention(model)
    set_checkpointing(model, CheckpointPolicy())
    forward, backward = _measured(model, inputs)
    counted = _counted(model, inputs, checkpointing=True)
    assert counted.recompute == counted.forward["text"]
    # torch stops a second run at the last tensor that the gradients need: the experts' second product, of the layer
    assert 0 <= counted.hardware - forward - backward < 0.1 * counted.recompute
    assert _counted(model, inputs).hardware == counted.model


def test_attention_by_hand() -> None:
    """Lower triangles of documents, whole grids, whole windows."""
    model = make_ours("omni")
    batch = MicroBatch([5, 1, 7], [(2, 4, 6), (1, 2, 2)], [231, 40])
    units = ModelFlops(model).units(batch)
    assert units["rows"] == 13 and units["pairs"] == 15 + 1 + 28
    assert units["patches"] == 52 and units["merged"] == 13 and units["patch_pairs"] == 2 * 24**2 + 4**2
    assert units["seconds"] == 4 and units["frames"] == 52
    assert units["audio"] == 30 + 5 and units["audio_pairs"] == 26**2 + 4**2 + 5**2  # windows of 26 rows
    plain, dense = ModelFlops(model).count(batch), DenseFlops(model).count(batch)
    width = TEXT["num_attention_heads"] * TEXT["head_dim"]
    assert dense.forward["text"] - plain.forward["text"] == 3 * 4 * width * (13**2 - 44)
    assert dense.forward["audio"] - plain.forward["audio"] == 2 * 4 * SOUND["d_model"] * (35**2 - 717)
    experts = 3 * 2 * 3 * MOE["num_experts_per_tok"] * MOE["moe_intermediate_size"] * TEXT["hidden_size"]
    chosen = [p for p in ModelFlops(model).products if p.parameter and ".experts." in p.parameter]
    assert sum(p.per_unit for p in chosen) == experts
    some = ModelFlops(model).count(MicroBatch(batch.documents, batch.grids, batch.mel_lengths, labels=4))
    assert some.forward["head"] == plain.forward["head"] * 4 / 13
    assert {k: v for k, v in some.forward.items() if k != "head"} == {
        k: v for k, v in plain.forward.items() if k != "head"
    }


def test_gradients_flow_through_adapted_weights() -> None:
    """Frozen weights with adapters: the gradient of every input behind the first adapter, of no weight."""
    model = make_ours("moe")
    model.requires_grad_(False)
    adapted = [name for name, _ in model.named_parameters() if name.endswith(("q_proj.weight", "down_proj"))]
    batch = MicroBatch([10])
    assert ModelFlops(model).count(batch).backward == 0
    counted, first = ModelFlops(model, adapted).count(batch), model.model.layers[0].self_attn
    unused = sum(2 * 10 * part.weight.numel() for part in (first.q_proj, first.k_proj, first.v_proj))
    attention = 3 * 4 * 64 * 55
    assert counted.backward == sum(counted.forward.values()) - unused + attention


def test_a_model_of_transformers(tmp_path: object) -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 4}
    LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=211, num_key_value_heads=2)).save_pretrained(tmp_path)
    model = build_foundation_model(str(tmp_path), eager_ops(), backend="transformers")
    assert isinstance(model, HubModel)
    model.attention = eager
    forward, backward = _measured(model, packed((20,)))  # type: ignore[arg-type]
    counted = DenseFlops(model).count(MicroBatch([20]))
    rotations = 2 * 20 * 4  # whose angles transformers 5.17 makes by a product of matrices
    assert forward - sum(counted.forward.values()) in (0, rotations) and counted.backward == backward
