"""Logits and gradients of adapters against the weights that they stand for."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.train.lora.adapted import DENSE, EXPERTS, adapted, base_of, merged
from tests.train.models import families
from tests.train.ops.triton_cases import kernels_can_run
from train.lora.apply import adapter_names
from train.lora.layers import LoraLinear
from train.models.checkpointing import CheckpointPolicy, set_checkpointing
from train.models.foundation import FoundationModel
from train.models.inputs import ModelInputs, text_inputs
from train.models.moe import Experts
from train.ops.chunk_loss import chunk_loss
from train.ops.moe_grouped_mm import grouped_mm
from train.ops.registry import eager_ops
from train.ops.triton_linear_cross_entropy import linear_cross_entropy as fused_loss
from train.ops.triton_moe import moe_experts

setup_module = kernels_can_run

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "dense": ("dense", {"lora_modules": [*DENSE, *EXPERTS]}),
    "biases": ("tied", {"lora_modules": DENSE}),
    "head": ("dense", {"lora_modules": ["q_proj", "lm_head"]}),
    "independent": ("moe", {"lora_modules": [*DENSE, *EXPERTS]}),
    "shared": ("moe", {"lora_modules": EXPERTS, "share_expert_lora": True, "rank": 5}),
    "rslora": ("moe", {"lora_modules": [*EXPERTS, "k_proj"], "use_rslora": True}),
    "only gate": ("moe", {"lora_modules": ["gate_proj"]}),
    "only down": ("moe", {"target_parameters": ["experts.down_proj"], "share_expert_lora": True}),
    "ranks and scales of their own": (
        "moe",
        {
            "lora_modules": [*DENSE, *EXPERTS],
            "rank_pattern": {"up_proj": 7, "layers.1.self_attn.q_proj": 1},
            "alpha_pattern": {"down_proj": 9.0, "layers.1.mlp.experts.gate_proj": 2.0},
        },
    ),
    "layers with and without experts": ("mixed_moe", {"lora_modules": EXPERTS}),
    "towers": ("omni", {"lora_modules": "all-linear"}),
}


def documents(seed: int = 3) -> ModelInputs:
    generator = torch.Generator().manual_seed(seed)
    parts = [torch.randint(0, 200, (length,), generator=generator) for length in (11, 6, 9)]
    return text_inputs(parts, parts)


def plain(name: str, weights: dict[str, Tensor]) -> FoundationModel:
    model = families.FAMILIES[name].ours(families.FAMILIES[name].make_config(), eager_ops())
    model.load_state_dict(weights, strict=True)
    return model


@pytest.mark.parametrize("case", CASES)
def test_logits_are_those_of_the_merged_weights(case: str) -> None:
    name, keys = CASES[case]
    model, plan = adapted(name, **keys)
    whole = plain(name, merged(model, plan))
    inputs = documents()
    with torch.no_grad():
        ours, theirs = model(inputs, logits=True), whole(inputs, logits=True)
        base = base_of(name)(inputs, logits=True)
    assert (ours.logits - theirs.logits).abs().max() < 1e-5
    assert torch.allclose(ours.loss, theirs.loss, rtol=1e-6)
    assert (ours.logits - base.logits).abs().max() > 1e-2


def gradients(model: FoundationModel, inputs: ModelInputs) -> dict[str, Tensor]:
    model.zero_grad(set_to_none=True)
    model(inputs).loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("case", [case for case in CASES if case != "towers"])
def test_gradients_follow_from_those_of_the_merged_weights(case: str) -> None:
    """dA = scale * B^T dW and dB = scale * dW A^T; and nothing else has a gradient."""
    name, keys = CASES[case]
    model, plan = adapted(name, **keys)
    whole = plain(name, merged(model, plan))
    inputs = documents()
    found, of_weights = gradients(model, inputs), gradients(whole, inputs)
    assert list(found) == adapter_names(model)
    values = {n: p.detach() for n, p in model.named_parameters()}
    expected: dict[str, Tensor] = {}
    for path, pair in plan.targets.linears.items():
        put(expected, values, path, of_weights[f"{path}.weight"], pair.scale)
    for path, pairs in plan.targets.experts.items():
        inner = values[f"{path}.down_proj"].shape[2]
        gate_up = of_weights[f"{path}.gate_up_proj"]
        halves = {"gate_proj": gate_up[:, :inner], "up_proj": gate_up[:, inner:]}
        for projection, pair in pairs.items():
            weight = halves.get(projection, of_weights[f"{path}.down_proj"])
            put(expected, values, path.removesuffix("experts") + f"expert_lora.{projection}", weight, pair.scale)
    families.assert_equal_gradients(found, expected)


def put(expected: dict[str, Tensor], values: dict[str, Tensor], at: str, weight: Tensor, scale: float) -> None:
    a, b = values[f"{at}.lora_A.weight"], values[f"{at}.lora_B.weight"]
    if len(a) == 1 and weight.ndim == 3:
        weight = weight.sum(0, keepdim=True)
    expected[f"{at}.lora_A.weight"] = scale * (b.mT @ weight)
    expected[f"{at}.lora_B.weight"] = scale * (weight @ a.mT)


@pytest.mark.parametrize(
    ("backend", "case"),
    [
        *(("grouped_mm", case) for case in ("independent", "shared", "ranks and scales of their own", "only down")),
        ("fused_triton", "shared"),
        ("fused_triton", "ranks and scales of their own"),
    ],
)
def test_kernels_of_experts_give_the_same_through_the_model(backend: str, case: str) -> None:
    name, keys = CASES[case]
    inputs = documents()
    expected = gradients(adapted(name, **keys)[0], inputs)
    model, _ = adapted(name, **keys)
    for module in model.modules():
        if isinstance(module, Experts):
            module.compute = {"grouped_mm": grouped_mm, "fused_triton": moe_experts}[backend]
    families.assert_equal_gradients(gradients(model, inputs), expected)


@pytest.mark.parametrize("backend", ["chunk_loss", "fused_triton"])
def test_kernels_of_the_head_give_the_same_through_the_model(backend: str) -> None:
    inputs, keys = documents(), {"lora_modules": ["lm_head", "q_proj"]}
    expected = gradients(adapted("dense", **keys)[0], inputs)
    model, _ = adapted("dense", **keys)
    model.cross_entropy = {"chunk_loss": chunk_loss, "fused_triton": fused_loss}[backend]
    families.assert_equal_gradients(gradients(model, inputs), expected)


def test_dropout_acts_in_training_only_and_has_the_right_mean() -> None:
    torch.manual_seed(0)
    model, _ = adapted("dense", lora_modules=["q_proj"], lora_dropout=0.4)
    layer = model.model.layers[0].self_attn.q_proj
    assert isinstance(layer, LoraLinear)
    x = torch.randn(5, 48)
    model.eval()
    still = layer(x)
    assert torch.equal(still, layer(x))
    model.train()
    runs = torch.stack([layer(x).detach() for _ in range(4000)])
    assert not torch.equal(runs[0], runs[1])
    spread = runs.std(0) / 4000**0.5
    assert ((runs.mean(0) - still).abs() < 6 * spread + 1e-6).all()
    low = torch.nn.functional.linear(x, layer.lora_A.weight)
    assert torch.allclose(
        still, torch.nn.functional.linear(x, layer.weight) + low @ layer.lora_B.weight.T * (5.0 / 3), atol=1e-5
    )


def test_dropout_of_a_block_that_runs_again_is_the_same() -> None:
    """The states of generators are kept for it, and only for it."""
    found = []
    for checkpointed in (False, True):
        model, _ = adapted("dense", lora_modules=["q_proj"], lora_dropout=0.4)
        set_checkpointing(model, CheckpointPolicy() if checkpointed else None)
        torch.manual_seed(1)
        found.append(gradients(model.train(), documents()))
    assert all(torch.equal(value, found[1][name]) for name, value in found[0].items())
    assert model.model.run_block.draws
    without, _ = adapted("dense", lora_modules=["q_proj"])
    set_checkpointing(without, CheckpointPolicy())
    assert not without.model.run_block.draws
