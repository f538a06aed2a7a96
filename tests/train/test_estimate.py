from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from schemas.errors import ConfigError
from schemas.strict import check_config
from tests.train.data.loading import Setup, data_config
from tests.train.models import families, media
from tests.train.tiny import write_data
from train.config import BatchConfig, TrainConfig
from train.data.device import make_features
from train.estimate import estimate_memory, estimate_steps, shard_numel
from train.mesh import Degrees
from train.models.omni_thinker import OmniThinker
from train.models.spec import SPECS
from train.ops.registry import eager_ops
from train.optim.muon_parameters import muon_names


def model() -> OmniThinker:
    with torch.device("meta"):
        return OmniThinker(families.omni(), eager_ops())


def train(**keys: Any) -> TrainConfig:
    return check_config(keys, TrainConfig)


def test_states_are_counted_exactly() -> None:
    found = model()
    total = sum(parameter.numel() for parameter in found.parameters())
    made = estimate_memory(found, Degrees(), train(), 512)
    assert (made.parameters, made.gradients, made.optimizer) == (4 * total, 4 * total, 8 * total)
    assert made.gpu == 16 * total + made.gathered + made.activations + made.media + made.workspace
    assert made.cpu == 0
    found.visual.requires_grad_(False)
    trained = total - sum(parameter.numel() for parameter in found.visual.parameters())
    made = estimate_memory(found, Degrees(), train(), 512)
    assert (made.parameters, made.gradients, made.optimizer) == (4 * total, 4 * trained, 8 * trained)


def test_dtypes_and_muon_are_counted() -> None:
    with torch.device("meta"):
        found = OmniThinker(families.omni(), eager_ops())
    sizes = {name: parameter.numel() for name, parameter in found.named_parameters()}
    total, matrices = sum(sizes.values()), sum(sizes[name] for name in muon_names(found))
    assert 0.2 * total < matrices < total
    made = estimate_memory(found, Degrees(), train(optimizer={"type": "muon"}), 512)
    assert made.optimizer == 8 * total - 4 * matrices
    half = {"type": "muon", "state_dtype": "bf16", "master_dtype": "bf16"}
    made = estimate_memory(found.to(torch.bfloat16), Degrees(), train(optimizer=half), 512)
    assert (made.parameters, made.gradients, made.optimizer) == (2 * total, 2 * total, 4 * total - 2 * matrices)
    assert made.gathered == 0  # the model computes with its parameters


def test_shards_are_those_of_torch() -> None:
    for shape in ((7, 3), (1, 5), (8,), (2, 3, 4)):
        tensor = torch.zeros(shape)
        for ranks in (1, 2, 3, 4):
            assert shard_numel(tensor, ranks) == tensor.chunk(ranks)[0].numel()


def test_more_shards_take_less_and_replicas_the_same() -> None:
    one, four, replicas = (
        estimate_memory(model(), degrees, train(), 512) for degrees in (Degrees(), Degrees(1, 4), Degrees(4, 1))
    )
    assert four.parameters < 0.27 * one.parameters and replicas.parameters == one.parameters
    moved = estimate_memory(model(), Degrees(1, 4), train(accelerator={"fsdp_config": {"offload": True}}), 512)
    assert moved.cpu == four.parameters + four.gradients + four.optimizer
    assert moved.gpu == four.gpu - moved.cpu
    assert moved.lines()[0].endswith("(CPU)") and moved.lines()[-1].startswith("memory of each GPU")
    averages: dict[str, Any] = {"offload_config": {"enable_optimizer": True}}
    moved = estimate_memory(model(), Degrees(1, 4), train(accelerator=averages), 512)
    assert (moved.cpu, moved.gpu) == (four.optimizer, four.gpu - four.optimizer)
    assert [line.endswith("(CPU)") for line in moved.lines()[:4]] == [False, False, True, False]
    both = estimate_memory(
        model(), Degrees(1, 4), train(accelerator=averages | {"fsdp_config": {"offload": True}}), 512
    )
    assert both.cpu == four.parameters + four.gradients + four.optimizer


def test_checkpointing_and_shorter_slices_take_less() -> None:
    found = model()
    found.visual.requires_grad_(False)
    kept = estimate_memory(found, Degrees(), train(gradient_checkpointing={"enable": False}), 1 << 20)
    again = estimate_memory(found, Degrees(), train(), 1 << 20)
    assert again.activations < kept.activations
    config = found.config.get_text_config()
    inner = (config.num_attention_heads + 2 * config.num_key_value_heads) * config.head_dim
    out = config.num_attention_heads * config.head_dim
    policies = {keep: train(gradient_checkpointing={"keep": keep}) for keep in ("attention", "projections", "mlp")}
    made = {keep: estimate_memory(found, Degrees(), policy, 1 << 20) for keep, policy in policies.items()}
    a_row = config.num_hidden_layers << 20
    of_attention = (2 * out + 4 * config.num_attention_heads) * a_row  # bfloat16, and float32 of each softmax
    assert made["attention"].activations - again.activations == of_attention
    of_projections = 2 * (inner + config.hidden_size) * a_row
    assert made["projections"].activations - made["attention"].activations == of_projections
    of_mlp = 2 * 2 * config.num_experts_per_tok * config.moe_intermediate_size * a_row
    of_mlp += 2 * 2 * 63 * config.num_experts * config.moe_intermediate_size * config.num_hidden_layers
    assert made["mlp"].activations - made["projections"].activations == of_mlp
    sliced = estimate_memory(found, Degrees(ulysses=2), train(), 1 << 20)
    assert sliced.activations < again.activations


def test_a_vision_tower_that_is_trained_is_counted_beside_the_text() -> None:
    """With its own rows, merge_size ** 2 for each token, and its own blocks and share."""

    def of_tower(tokens: int, degrees: Degrees | None = None, **keys: Any) -> int:
        found, made = model(), []
        for trained in (True, False):
            found.visual.requires_grad_(trained)
            made.append(estimate_memory(found, degrees or Degrees(), train(**keys), tokens).activations)
        return made[0] - made[1]

    config = model().config.vision_config
    patches = 512 * config.spatial_merge_size**2
    a_block = 2 * config.hidden_size * patches  # bfloat16
    assert of_tower(512) == config.depth * a_block
    assert of_tower(512, Degrees(ulysses=2)) == config.depth * a_block // 2
    assert of_tower(512, micro_batch_size=2, global_batch_size=2) == 2 * config.depth * a_block
    of_softmax = 4 * config.num_heads * patches
    assert of_tower(512, gradient_checkpointing={"keep": "attention"}) == config.depth * (2 * a_block + of_softmax)
    assert of_tower(512, gradient_checkpointing={"keep": "mlp"}) == config.depth * (3 * a_block + of_softmax)
    assert of_tower(512, gradient_checkpointing={"keep": "mlp", "keep_gb": 0.0}) == config.depth * a_block
    assert of_tower(512, gradient_checkpointing={"vision_share": 0.0}) == config.depth * 16 * a_block
    assert of_tower(512, gradient_checkpointing={"enable": False}) == config.depth * 16 * a_block
    offload = {"offload_config": {"enable_activation": True, "activation_gpu_limit": 0.0}}
    assert of_tower(512, accelerator=offload) == 3 * max(
        0, a_block - 2 * model().config.get_text_config().hidden_size * 512
    )


def test_patches_of_a_step_are_counted() -> None:
    """As many bytes as the features of real pictures have for each token, for 4 micro-batches and the next one."""
    batch = media.batch_of(media.omni_assets(), [media.video_mix()])
    features = make_features(batch, media.omni_assets(), torch.bfloat16)
    a_token = features.patches.nbytes / batch.modality_tokens["video"]
    found = model()
    keys: dict[str, Any] = {"global_batch_size": 16, "micro_batch_size": 1}
    made = estimate_memory(found, Degrees(1, 2, ulysses=2), train(**keys), 512)
    assert made.media == (8 + 1) * 512 // 2 * a_token
    config = SPECS["qwen3_moe"].config_class(num_hidden_layers=1, num_experts=8)
    with torch.device("meta"):
        text = SPECS["qwen3_moe"].build(config, eager_ops())
    assert estimate_memory(text, Degrees(), train(**keys), 512).media == 0


def test_the_released_model_fits_where_it_is_known_to_fit() -> None:
    """Qwen3-30B-A3B in float32 with AdamW: 16 bytes of state for each of 30.5e9 parameters over 64 GPUs."""
    config = SPECS["qwen3_moe"].config_class(
        vocab_size=151936, hidden_size=2048, intermediate_size=6144, num_hidden_layers=48, num_attention_heads=32,
        num_key_value_heads=4, head_dim=128, num_experts=128, num_experts_per_tok=8, moe_intermediate_size=768,
    )  # fmt: skip
    with torch.device("meta"):
        found = SPECS["qwen3_moe"].build(config, eager_ops())
    assert sum(parameter.numel() for parameter in found.parameters()) == 30_532_122_624
    made = estimate_memory(found, Degrees(1, 64), train(), 16384)
    states = made.parameters + made.gradients + made.optimizer
    assert 1.0 <= states / (16 * 30_532_122_624 / 64) < 1.01
    assert made.gpu < 80e9


def test_experts_over_the_ranks_are_gathered_no_more_but_rows_are() -> None:
    config = SPECS["qwen3_moe"].config_class(
        vocab_size=64, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
        num_experts=8, num_experts_per_tok=4, moe_intermediate_size=256,
    )  # fmt: skip
    with torch.device("meta"):
        found = SPECS["qwen3_moe"].build(config, eager_ops())
    muon: dict[str, Any] = {"optimizer": {"type": "muon", "master_dtype": "bf16", "state_dtype": "bf16"}}
    wrapped = estimate_memory(found, Degrees(1, 2, ep=2), train(), 4096)  # FSDP copies masters of float32
    found.bfloat16()
    sharded = estimate_memory(found, Degrees(1, 2), train(**muon), 4096)
    alone = estimate_memory(found, Degrees(1, 2, ep=2), train(**muon), 4096)
    assert alone.parameters == sharded.parameters and alone.optimizer == sharded.optimizer
    assert alone.gathered < wrapped.gathered < sharded.gathered
    routed = train(**muon, accelerator={"expert_dispatch": "all_to_all"})
    assert estimate_memory(found, Degrees(1, 2, ep=2), routed, 4096).activations == sharded.activations
    assert alone.activations > sharded.activations


def test_gradients_that_wait_for_the_last_micro_batch() -> None:
    """Whole ones of what FSDP gathers, in the dtype in which they are reduced."""
    config = SPECS["qwen3_moe"].config_class(num_hidden_layers=2, num_experts=8, moe_intermediate_size=256)
    with torch.device("meta"):
        found = SPECS["qwen3_moe"].build(config, eager_ops()).bfloat16()
    total = sum(parameter.numel() for parameter in found.parameters())
    experts = sum(parameter.numel() for name, parameter in found.named_parameters() if "experts" in name)
    assert 0 < experts < total

    def waiting(reduce: str, batch: int = 8, ep: int = 2, **precision: Any) -> int:
        gradients = []
        for every in (True, False):
            fsdp = {"mixed_precision": {"reduce_dtype": reduce} | precision, "sync_every_micro_batch": every}
            keys = train(accelerator={"fsdp_config": fsdp, "ep_size": ep}, global_batch_size=batch)
            gradients.append(estimate_memory(found, Degrees(1, 2, ep=ep), keys, 4096).gradients)
        return gradients[1] - gradients[0]

    assert waiting("bfloat16") == 2 * (total - experts)  # those of experts are added up where they stay
    assert waiting("float32") == 4 * (total - experts + experts // 2)
    assert waiting("bfloat16", ep=1) == 2 * total
    assert waiting("float32", ep=1, enable=False) == 2 * total  # in that of the parameters
    assert waiting("float32", batch=2) == 0  # the first micro-batch is the last


def test_steps_are_those_of_the_plan(tmp_path: Path) -> None:
    batch = BatchConfig(global_batch_size=4, num_train_epochs=3)
    setup = Setup(data_config(write_data(tmp_path), tmp_path / "cache"), batch)
    found = estimate_steps(setup.plans, batch, Degrees(dp_shard=2))
    loader = setup.loader()
    first = [step for step in loader if step.epoch == 0]
    assert (found.steps_per_epoch, found.total_steps, found.micro_steps) == (len(first), loader.total_steps(), 2)
    tokens = sum(int(b.sample_tokens.sum()) for step in first for b in step.micro_batches)
    assert found.tokens_per_step == tokens / len(first) and found.samples_per_step == 24 / len(first)
    assert found.filled == tokens / (len(first) * 4 * 512)
    assert found.lines()[0] == f"{len(first)} steps per epoch, {loader.total_steps()} in all"
    assert estimate_steps(setup.plans, BatchConfig(global_batch_size=4, max_steps=7), Degrees()).total_steps == 7
    with pytest.raises(ConfigError, match="2 sequences each, no multiple"):
        estimate_steps(setup.plans, BatchConfig(global_batch_size=4, micro_batch_size=4), Degrees(dp_shard=2))
