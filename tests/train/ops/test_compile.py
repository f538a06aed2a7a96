"""What a GPU compiles goes through torch's compiler as one graph each, whatever the number of rows, and computes the
same. The graphs run uncompiled here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from train.ops import chunk_loss, layer_norm, moe_grouped_mm, norm, rope, router, swiglu
from train.ops.compiled import compiled

ROWS = [7, 9, 33]


def same(function: Callable[..., Any], arguments: Callable[[int], tuple[Any, ...]]) -> None:
    """Values and gradients of the traced function, for several numbers of rows, without a graph each."""
    torch.compiler.reset()
    graphs = 0

    def count(module: torch.fx.GraphModule, _: list[Tensor]) -> Callable[..., Any]:
        nonlocal graphs
        graphs += 1
        return module.forward

    traced = torch.compile(function, backend=count, fullgraph=True)
    for rows in ROWS:
        given = arguments(rows)
        results = []
        for run in (traced, function):
            leaves = [x.clone().requires_grad_() if _floating(x) else x for x in given]
            out = run(*(x.clone() if _floating(x) else x for x in leaves))
            outputs = [out] if isinstance(out, Tensor) else [x for x in out if x.requires_grad]
            wanted = [x for x in leaves if _floating(x)]
            results.append((out, torch.autograd.grad([x.sum() for x in outputs], wanted, allow_unused=True)))
        torch.testing.assert_close(results[0], results[1], atol=0, rtol=0, equal_nan=True)
    assert graphs <= 2  # the first number of rows, then any


def _floating(x: Any) -> bool:
    return isinstance(x, Tensor) and x.is_floating_point()


def random(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=dtype)


@pytest.mark.parametrize("lora", [False, True])
def test_experts(lora: bool) -> None:
    shapes = [(5, 4, 16), (5, 8, 4), (1, 4, 16), (1, 8, 4), (5, 4, 8), (1, 16, 4)] if lora else []

    def experts(x: Tensor, ids: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor, *pairs: Tensor) -> Tensor:
        return moe_grouped_mm._experts(x, ids, weights, gate_up, down, pairs, 0.5)

    def arguments(rows: int) -> tuple[Any, ...]:
        ids = torch.randint(-1, 5, (rows, 2), generator=torch.Generator().manual_seed(rows))
        half = [random(*shape, dtype=torch.bfloat16) for shape in ((rows, 16), (5, 16, 16), (5, 16, 8), *shapes)]
        return half[0], ids, random(rows, 2), *half[1:]

    same(experts, arguments)


def test_rows_and_gradient_of_the_loss() -> None:
    def arguments(rows: int) -> tuple[Any, ...]:
        labels = torch.where(torch.arange(rows) % 3 == 0, -100, torch.arange(rows))
        return random(rows, 37), labels

    def step(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            found = chunk_loss.rows_and_gradient(logits, labels, torch.tensor(0.3), 0.1, 1e-3, torch.bfloat16)
        return found[0] + 0 * logits.sum(), found[1]

    same(step, arguments)


def test_each_key_has_compilations_of_its_own() -> None:
    one, again, other = (compiled(norm.rms_norm, key) for key in ("one", "one", "other"))
    assert one is again
    assert one is not other
    with torch.no_grad():
        assert compiled(norm.rms_norm, "one") is not one
    codes = [made._torchdynamo_orig_callable.__code__ for made in (one, other)]  # type: ignore[attr-defined]
    assert codes[0] != codes[1]


POINTWISE: dict[str, tuple[Callable[..., Any], Callable[[int], tuple[Any, ...]]]] = {
    "rms_norm": (norm.rms_norm, lambda n: (random(n, 8), random(8), 1e-6, random(n, 8) * 2)),
    "layer_norm": (
        layer_norm.layer_norm,
        lambda n: (random(n, 8), random(8), random(8) * 2, 1e-6, random(n, 8) * 2),
    ),
    "qk_norm_rope": (
        rope.qk_norm_rope,
        lambda n: (random(n, 4, 8), random(n, 2, 8), random(8), random(8) * 2, random(n, 4), random(n, 4) * 2, 1e-6),
    ),
    "vision_rope": (rope.vision_rope, lambda n: (random(n, 4, 8), random(n, 4, 8) * 2, random(n, 4), random(n, 4) * 2)),
    "swiglu": (swiglu.swiglu, lambda n: (random(n, 8), random(n, 8) * 2)),
    "topk_softmax": (
        lambda logits: router.topk_softmax(logits, 2, True)[0],
        lambda n: (random(n, 5),),
    ),
    "router": (router.all_rows, lambda n: (random(n, 5), random(n, 5).topk(2).indices)),
}


@pytest.mark.parametrize("name", POINTWISE)
def test_pointwise(name: str) -> None:
    same(*POINTWISE[name])
