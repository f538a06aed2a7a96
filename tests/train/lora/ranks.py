"""Training steps with adapters on any number of ranks."""

from __future__ import annotations

import pickle
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from tests.train.lora.adapted import DENSE, EXPERTS, adapter_value, add, lora_config
from tests.train.parallel.steps import Outcome, assert_equal, make_parts, meta_model, outcome, whole
from tests.train.parallel.test_equal_to_serial import batches_of
from train.lora.apply import adapter_names
from train.parallel.loading import local_box, local_part
from train.step import StepParts

TOWERS = ["qkv", "linear_fc1", "fc2", "proj1"]
CASES: dict[str, dict[str, Any]] = {
    "independent": {"lora_modules": [*DENSE, *EXPERTS, *TOWERS, "lm_head"], "rank": 3},
    "shared": {"lora_modules": EXPERTS, "share_expert_lora": True, "rank_pattern": {"down_proj": 5}},
    "saved": {"lora_modules": ["q_proj", "up_proj"], "modules_to_save": ["lm_head", "mlp.gate", "visual.merger"]},
}
MAX_GRAD_NORM = 0.5  # which every step is clipped to


def parts_of(accelerator: dict[str, Any], case: str, compute: torch.dtype = torch.float32) -> StepParts:
    """The base of all tests of parallelism, with adapters that do something."""
    model = meta_model()
    add(model, lora_config(**CASES[case]), compute)
    parts = make_parts(accelerator, model, max_grad_norm=MAX_GRAD_NORM, checkpointing=case == "independent")
    fill_adapters(parts.model)
    return parts


@torch.no_grad()
def fill_adapters(model: torch.nn.Module) -> None:
    parameters = dict(model.named_parameters())
    for name in adapter_names(model):
        value = adapter_value(name, tuple(parameters[name].shape))
        local_part(parameters[name]).copy_(value[tuple(slice(*bounds) for bounds in local_box(parameters[name]))])


def frozen_of(model: torch.nn.Module) -> dict[str, Tensor]:
    model.state_dict()
    return {name: whole(p).clone() for name, p in model.named_parameters() if not p.requires_grad}


def steps_of(parts: StepParts) -> Outcome:
    """Three steps; nothing but what is trained has gradients, states or another value afterwards."""
    before = frozen_of(parts.model)
    found = outcome(parts, batches_of("mixed", parts.mesh.rank, parts.mesh.degrees))
    after = frozen_of(parts.model)
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    trained = {name for name, p in parts.model.named_parameters() if p.requires_grad}
    assert found.gradients.keys() == trained
    held = {id(p) for group in parts.optimizer.param_groups for p in group["params"]}
    assert held == {id(p) for p in parts.model.parameters() if p.requires_grad}
    assert all(p.grad is None for p in parts.model.parameters() if not p.requires_grad)
    return found


def compare(case: str, accelerators: list[dict[str, Any]], alone: bytes) -> list[list[str]]:
    """On every rank: the placements of what is trained, for each combination that was equal. alone: a pickled outcome,
    as tensors among the arguments would each take a file descriptor."""
    expected: Outcome = pickle.loads(alone)
    seen = []
    for accelerator in accelerators:
        parts = parts_of(accelerator, case)
        found = steps_of(parts)
        try:
            assert_equal(found, expected)
        except AssertionError as error:
            raise AssertionError(f"{case} {accelerator}: {error}") from error
        seen.append([str(p.placements) for p in parts.model.parameters() if isinstance(p, DTensor) and p.requires_grad])
    return seen


def mixed_precision(alone: bytes) -> dict[str, str]:
    """A bfloat16 base and float32 adapters in the same groups: dtypes by kind; losses near those of float32."""
    expected: Outcome = pickle.loads(alone)
    precise = {"fsdp_config": {"mixed_precision": {"enable": True}}, "ep_size": 2}
    parts = parts_of(precise, "independent", torch.bfloat16)
    found = steps_of(parts)
    for got, want in zip(found.losses, expected.losses, strict=True):
        assert abs(got - want) < 0.02 * want, (found.losses, expected.losses)
    for name, want in expected.gradients.items():
        angle = torch.nn.functional.cosine_similarity(found.gradients[name].flatten(), want.flatten(), dim=0)
        assert angle > 0.8 or want.abs().max() < 1e-4, f"{name}: cosine {angle:.3f}"
    adapters = set(adapter_names(parts.model))
    return {
        "adapters": str({p.dtype for n, p in parts.model.named_parameters() if n in adapters}),
        "base": str({p.dtype for n, p in parts.model.named_parameters() if n not in adapters}),
        "gradients": str({g.dtype for g in found.gradients.values()}),
    }
