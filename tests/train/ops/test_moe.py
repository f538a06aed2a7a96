"""Expert backends against float64, one row and one expert at a time, with and without LoRA."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from schemas.errors import ConfigError
from tests.train.ops import float64
from train.ops.device import describe_device
from train.ops.lora_types import ExpertLora
from train.ops.moe_grouped_mm import route
from train.ops.registry import OPS

ROUTINGS = ["random", "one expert", "some rows skipped", "all skipped", "one choice of a buffer"]
NAMES = ["eager", "grouped_mm"]
PARTS = ["gate_a", "gate_b", "up_a", "up_b", "down_a", "down_b"]


def expert_ids(routing: str, rows: int, experts: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(3)
    ids = torch.rand(rows, experts, generator=generator).argsort(dim=1)[:, :2]
    if routing == "one expert":
        ids = torch.full((rows, 1), experts - 2)
    elif routing == "some rows skipped":
        ids[::3] = -1
        ids[1::4, 0] = experts + 5
    elif routing == "all skipped":
        ids[:] = -1
    elif routing == "one choice of a buffer":
        ids = ids[:, :1].clone()
        ids[rows // 2 :] = -1
    return ids


def inputs(routing: str, rows: int, experts: int, hidden: int, width: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(rows)

    def random(*shape: int, size: float = 1.0) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64) * size

    ids = expert_ids(routing, rows, experts)
    return {
        "x": random(rows, hidden),
        "expert_ids": ids,
        "weights": random(*ids.shape).abs(),
        "gate_up": random(experts, 2 * width, hidden, size=hidden**-0.5),
        "down": random(experts, hidden, width, size=width**-0.5),
    }


def lora_inputs(experts: int, hidden: int, width: int, rank: int, shared: str) -> dict[str, torch.Tensor]:
    """shared: letters of the factors that all experts share."""
    generator = torch.Generator().manual_seed(5)
    shapes = {}
    for name, size_in, size_out in (("gate", hidden, width), ("up", hidden, width), ("down", width, hidden)):
        shapes[f"{name}_a"] = (1 if "a" in shared else experts, rank, size_in)
        shapes[f"{name}_b"] = (1 if "b" in shared else experts, size_out, rank)
    return {name: torch.randn(shapes[name], generator=generator, dtype=torch.float64) * 0.3 for name in PARTS}


def check(name: str, tensors: dict[str, torch.Tensor], scale: float = 1.0, **options: Any) -> None:
    function = OPS["moe_experts"].backends[name].load()

    def ours(**given: torch.Tensor) -> torch.Tensor:
        parts = {part: given.pop(part) for part in PARTS if part in given}
        result: torch.Tensor = function(**given, lora=ExpertLora(**parts, scale=scale) if parts else None)
        return result

    def theirs(**given: torch.Tensor) -> torch.Tensor:
        parts = {part: given.pop(part) for part in PARTS if part in given}
        return float64.moe_experts(**given, lora=parts or None, scale=scale)

    float64.compare(ours, theirs, tensors, keep=("weights", *options.pop("keep", ())), **options)


@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize("name", NAMES)
def test_values_and_gradients(name: str, routing: str) -> None:
    check(name, inputs(routing, rows=13, experts=5, hidden=16, width=8))


@pytest.mark.parametrize("shared", ["", "ab", "a", "b"], ids=["own", "shared", "shared a", "shared b"])
@pytest.mark.parametrize("routing", ["random", "some rows skipped", "all skipped"])
@pytest.mark.parametrize("name", NAMES)
def test_lora(name: str, routing: str, shared: str) -> None:
    tensors = inputs(routing, rows=11, experts=5, hidden=16, width=8) | lora_inputs(5, 16, 8, 4, shared)
    check(name, tensors, scale=0.5)


@pytest.mark.parametrize("name", NAMES)
def test_no_rows_one_expert_and_bfloat16(name: str) -> None:
    check(name, inputs("random", rows=0, experts=3, hidden=8, width=8))
    check(name, inputs("one choice of a buffer", rows=9, experts=1, hidden=8, width=8) | lora_inputs(1, 8, 8, 4, ""))
    check(name, inputs("some rows skipped", rows=21, experts=4, hidden=16, width=8), dtype=torch.bfloat16)


@pytest.mark.parametrize("name", NAMES)
def test_lora_in_float32_beside_bfloat16(name: str) -> None:
    tensors = inputs("random", rows=11, experts=5, hidden=16, width=8) | lora_inputs(5, 16, 8, 4, "a")
    check(name, tensors, scale=0.5, dtype=torch.bfloat16, keep=PARTS)


@pytest.mark.parametrize("name", NAMES)
def test_only_lora_learns(name: str) -> None:
    """Frozen experts get no gradient and the others the same as before."""
    function = OPS["moe_experts"].backends[name].load()
    tensors = {k: v.float() if v.is_floating_point() else v for k, v in inputs("random", 7, 3, 8, 8).items()}
    parts = {k: v.float().requires_grad_() for k, v in lora_inputs(3, 8, 8, 4, "").items()}
    function(**tensors, lora=ExpertLora(**parts, scale=2.0)).sum().backward()
    assert all(tensor.grad is None for tensor in tensors.values())
    assert all(part.grad is not None and bool(part.grad.abs().sum() > 0) for part in parts.values())


def test_sorted_rows() -> None:
    routing = route(torch.tensor([[2, 0], [-1, 2], [0, 7]]), experts=3)
    assert routing.rows.tolist() == [0, 2, 0, 1, 1, 2]
    assert routing.place.tolist() == [[2, 0], [4, 3], [1, 5]]
    assert routing.live[:, 0].tolist() == [True] * 4 + [False] * 2
    assert routing.chosen.tolist() == [[True, True], [False, True], [True, False]]
    assert routing.ends.tolist() == [2, 2, 4]
    assert routing.ends.dtype == torch.int32


@pytest.mark.gpu
@pytest.mark.parametrize("shared", [None, "", "ab", "a", "b"], ids=str)
@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize("name", list(OPS["moe_experts"].backends))
def test_on_a_gpu(name: str, routing: str, shared: str | None) -> None:
    try:
        OPS["moe_experts"].resolve(name, describe_device("cuda"), "bfloat16")
    except ConfigError as error:
        pytest.skip(str(error))
    tensors = inputs(routing, rows=203, experts=6, hidden=64, width=32)
    if shared is not None:
        tensors |= lora_inputs(6, 64, 32, 4, shared)
    check(name, tensors, scale=0.5, dtype=torch.bfloat16, device="cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("name", list(OPS["moe_experts"].backends))
def test_rows_without_a_token_on_a_gpu(name: str) -> None:
    try:
        OPS["moe_experts"].resolve(name, describe_device("cuda"), "bfloat16")
    except ConfigError as error:
        pytest.skip(str(error))
    empty = inputs("random", rows=0, experts=3, hidden=64, width=32)
    check(name, empty, dtype=torch.bfloat16, device="cuda")


@pytest.mark.gpu
def test_grouped_mm_waits_for_nothing() -> None:
    tensors = {k: v.cuda() for k, v in inputs("some rows skipped", 64, 6, 64, 32).items()}
    tensors = {k: v.bfloat16().requires_grad_() if v.is_floating_point() else v for k, v in tensors.items()}
    tensors["weights"] = tensors["weights"].detach().float().requires_grad_()
    function = OPS["moe_experts"].backends["grouped_mm"].load()
    function(**tensors).sum().backward()
    try:
        torch.cuda.set_sync_debug_mode("error")
        function(**tensors).sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
