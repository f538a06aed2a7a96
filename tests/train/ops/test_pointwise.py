"""Norms, rotary embedding, SwiGLU and router statistics against float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from schemas.errors import ConfigError
from tests.train.ops import float64
from train.ops.device import describe_device
from train.ops.registry import OPS


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape) + seed), dtype=torch.float64)


def angles(rows: int, pairs: int) -> dict[str, torch.Tensor]:
    found = random(rows, pairs) * 3
    return {"cos": found.cos(), "sin": found.sin()}


def check_rms_norm(name: str, shape: tuple[int, ...], residual: bool, **options: Any) -> None:
    function = OPS["rms_norm"].backends[name].load()
    tensors = {"x": random(*shape), "weight": 1 + 0.1 * random(shape[-1])}
    if residual:
        tensors["residual"] = random(*shape, seed=1)
    float64.compare(
        lambda **given: function(**given, eps=1e-6),
        lambda **given: float64.rms_norm(**given, eps=1e-6),
        tensors,
        **options,
    )


def check_layer_norm(name: str, shape: tuple[int, ...], residual: bool, **options: Any) -> None:
    function = OPS["layer_norm"].backends[name].load()
    width = shape[-1]
    tensors = {"x": random(*shape) + 2, "weight": 1 + 0.1 * random(width), "bias": random(width, seed=2)}
    if residual:
        tensors["residual"] = random(*shape, seed=1)
    float64.compare(
        lambda **given: function(**given, eps=1e-6),
        lambda **given: float64.layer_norm(**given, eps=1e-6),
        tensors,
        **options,
    )


def check_rope(name: str, heads: tuple[int, int], size: int, pairs: int, norm: bool, rows: int, **options: Any) -> None:
    function = OPS["qk_norm_rope"].backends[name].load()
    tensors = {"q": random(rows, heads[0], size), "k": random(rows, heads[1], size)} | angles(rows, pairs)
    if norm:
        tensors |= {"q_weight": 1 + 0.1 * random(size), "k_weight": 1 + 0.1 * random(size, seed=1)}

    def arguments(given: dict[str, torch.Tensor]) -> tuple[Any, ...]:
        cos, sin = given["cos"].detach(), given["sin"].detach()
        return given["q"], given["k"], given.get("q_weight"), given.get("k_weight"), cos, sin, 1e-6

    def theirs(**given: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        q, k, q_weight, k_weight, *rest = arguments(given)
        return float64.rope(q, q_weight, *rest), float64.rope(k, k_weight, *rest)

    float64.compare(lambda **given: function(*arguments(given)), theirs, tensors, keep=("cos", "sin"), **options)


def check_vision_rope(name: str, size: int, rows: int, **options: Any) -> None:
    function = OPS["vision_rope"].backends[name].load()
    tensors = {"q": random(rows, 3, size), "k": random(rows, 3, size, seed=1)} | angles(rows, size // 2)

    def ours(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> Any:
        return function(q, k, cos.detach(), sin.detach())

    def theirs(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> Any:
        cos, sin = cos.detach(), sin.detach()
        return float64.rope(q, None, cos, sin, 0.0), float64.rope(k, None, cos, sin, 0.0)

    float64.compare(ours, theirs, tensors, keep=("cos", "sin"), **options)


def check_swiglu(name: str, shape: tuple[int, ...], **options: Any) -> None:
    function = OPS["swiglu"].backends[name].load()
    tensors = {"gate": random(*shape) * 3, "up": random(*shape, seed=1)}
    float64.compare(
        lambda gate, up: function(gate, up), lambda gate, up: gate / (1 + torch.exp(-gate)) * up, tensors, **options
    )


def check_router(name: str, rows: int, valid: int, experts: int, **options: Any) -> None:
    function = OPS["router_statistics"].backends[name].load()
    tensors = {"logits": random(rows, experts)}
    ids = tensors["logits"].topk(2, dim=-1).indices

    def ours(logits: torch.Tensor) -> Any:
        counts, sums = function(logits, ids.to(logits.device), valid)
        assert counts.dtype == sums.dtype == torch.float32
        assert not counts.requires_grad
        return counts, sums

    def theirs(logits: torch.Tensor) -> Any:
        counts, sums = float64.router_statistics(logits, ids, valid)
        return counts, sums + 0 * logits.sum()

    float64.compare(ours, theirs, tensors, **options)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("shape", [(1, 7), (5, 24), (2, 3, 16), (0, 8)], ids=str)
def test_rms_norm(shape: tuple[int, ...], residual: bool, dtype: torch.dtype) -> None:
    check_rms_norm("eager", shape, residual, dtype=dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("shape", [(1, 7), (5, 24), (2, 3, 16), (0, 8)], ids=str)
def test_layer_norm(shape: tuple[int, ...], residual: bool, dtype: torch.dtype) -> None:
    check_layer_norm("eager", shape, residual, dtype=dtype)


def test_norms_without_a_residual_hand_their_input_on() -> None:
    x = random(3, 8)
    weight = torch.ones(8, dtype=torch.float64)
    assert OPS["layer_norm"].backends["eager"].load()(x, weight, weight, 1e-6)[1] is x
    assert OPS["rms_norm"].backends["eager"].load()(x, torch.ones(8), 1e-6)[1] is x


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize(("heads", "size", "pairs"), [((4, 2), 16, 8), ((3, 1), 10, 3)], ids=["whole", "part"])
def test_qk_norm_rope(heads: tuple[int, int], size: int, pairs: int, norm: bool, dtype: torch.dtype) -> None:
    check_rope("eager", heads, size, pairs, norm, rows=7, dtype=dtype)


def test_vision_rope_and_swiglu() -> None:
    check_vision_rope("eager", 18, rows=5)
    check_vision_rope("eager", 18, rows=5, dtype=torch.bfloat16)
    check_swiglu("eager", (3, 7))
    check_swiglu("eager", (2, 3, 8), dtype=torch.bfloat16)


@pytest.mark.parametrize("valid", [0, 1, 6, 9])
def test_router_statistics(valid: int) -> None:
    check_router("eager", 9, valid, 5)


ON_GPU = {
    "rms_norm": lambda name: [
        check_rms_norm(name, shape, residual, dtype=torch.bfloat16, device="cuda")
        for shape in ((1, 64), (77, 2048), (3, 5, 128))
        for residual in (False, True)
    ],
    "layer_norm": lambda name: [
        check_layer_norm(name, shape, residual, dtype=torch.bfloat16, device="cuda")
        for shape in ((1, 64), (77, 1152), (3, 5, 1280))
        for residual in (False, True)
    ],
    "qk_norm_rope": lambda name: [
        check_rope(name, (8, 2), 128, 64, norm, rows, dtype=torch.bfloat16, device="cuda")
        for rows in (1, 77, 128)
        for norm in (False, True)
    ],
    "vision_rope": lambda name: [
        check_vision_rope(name, 72, rows, dtype=torch.bfloat16, device="cuda") for rows in (1, 77, 256)
    ],
    "swiglu": lambda name: [
        check_swiglu(name, shape, dtype=torch.bfloat16, device="cuda") for shape in ((1, 768), (77, 1536), (256, 64))
    ],
    "router_statistics": lambda name: [
        check_router(name, rows, valid, 128, device="cuda") for rows, valid in ((1, 1), (77, 60), (256, 256), (9, 0))
    ],
}


@pytest.mark.gpu
@pytest.mark.parametrize(("op", "name"), [(op, name) for op in ON_GPU for name in OPS[op].backends])
def test_on_a_gpu(op: str, name: str) -> None:
    try:
        OPS[op].resolve(name, describe_device("cuda"), "bfloat16")
    except ConfigError as error:
        pytest.skip(str(error))
    ON_GPU[op](name)
