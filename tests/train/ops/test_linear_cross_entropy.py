"""Backends of the head and its loss against float64, row by row."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from schemas.errors import ConfigError
from tests.train.ops import float64
from train.ops import chunk_loss
from train.ops.device import describe_device
from train.ops.registry import OPS

NAMES = ["eager", "chunk_loss"]
LABELS = {
    "all": lambda rows, vocabulary: torch.arange(rows) % vocabulary,
    "some": lambda rows, vocabulary: torch.where(torch.arange(rows) % 3 == 0, -100, torch.arange(rows) % vocabulary),
    "none": lambda rows, vocabulary: torch.full((rows,), -100),
}


def inputs(rows: int, hidden: int, vocabulary: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(rows)
    return {
        "hidden": torch.randn(rows, hidden, generator=generator, dtype=torch.float64),
        "weight": torch.randn(vocabulary, hidden, generator=generator, dtype=torch.float64) * 0.3,
    }


def check(
    name: str,
    tensors: dict[str, torch.Tensor],
    labels: torch.Tensor,
    smoothing: float = 0.0,
    z_loss: float = 0.0,
    scale: torch.Tensor | None = None,
    **options: Any,
) -> None:
    function = OPS["linear_cross_entropy"].backends[name].load()
    device = options.get("device", "cpu")
    scale = torch.tensor(0.37) if scale is None else scale

    def ours(hidden: torch.Tensor, weight: torch.Tensor) -> Any:
        found = function(
            hidden,
            weight,
            labels.to(device),
            scale=scale.to(device),
            label_smoothing=smoothing,
            z_loss=z_loss,
        )
        assert not found.token_loss.requires_grad
        assert found.token_loss.dtype == torch.float32
        return found.loss, found.token_loss

    reference = partial(float64.cross_entropy, labels=labels, scale=scale.double(), smoothing=smoothing, z_loss=z_loss)
    float64.compare(ours, reference, tensors, **options)


@pytest.mark.parametrize(("smoothing", "z_loss"), [(0.0, 0.0), (0.1, 0.0), (0.0, 1e-2), (0.2, 1e-2)])
@pytest.mark.parametrize("labels", LABELS)
@pytest.mark.parametrize("name", NAMES)
def test_values_and_gradients(
    name: str, labels: str, smoothing: float, z_loss: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(chunk_loss.CHUNK_BYTES, "cpu", 4 * 37 * 5)  # five rows: chunks, the last one shorter
    check(name, inputs(23, 8, 37), LABELS[labels](23, 37), smoothing, z_loss)


def row_scales(rows: int) -> torch.Tensor:
    """Of either sign, some 0, one large."""
    scales = torch.randn(rows, generator=torch.Generator().manual_seed(3))
    scales[::5], scales[1:2] = 0.0, 40.0
    return scales


@pytest.mark.parametrize(("smoothing", "z_loss"), [(0.0, 0.0), (0.2, 1e-2)])
@pytest.mark.parametrize("labels", LABELS)
@pytest.mark.parametrize("name", NAMES)
def test_a_scale_for_each_row(
    name: str, labels: str, smoothing: float, z_loss: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(chunk_loss.CHUNK_BYTES, "cpu", 4 * 37 * 5)
    check(name, inputs(23, 8, 37), LABELS[labels](23, 37), smoothing, z_loss, row_scales(23))
    equal = [
        OPS["linear_cross_entropy"]
        .backends[name]
        .load()(*(x.float() for x in inputs(23, 8, 37).values()), LABELS[labels](23, 37), scale=scale)
        for scale in (torch.tensor(0.37), torch.full((23,), 0.37))
    ]
    torch.testing.assert_close(equal[0], equal[1])


@pytest.mark.parametrize("name", NAMES)
def test_no_rows_and_dtypes(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(chunk_loss.CHUNK_BYTES, "cpu", 4 * 64 * 7)
    check(name, inputs(0, 8, 64), torch.empty(0).long())
    check(name, inputs(0, 8, 64), torch.empty(0).long(), scale=torch.empty(0))
    check(name, inputs(33, 16, 64), LABELS["some"](33, 64), 0.1, 1e-3, dtype=torch.bfloat16)


@pytest.mark.parametrize("name", NAMES)
def test_large_logits_stay_finite(name: str) -> None:
    tensors = inputs(5, 8, 16)
    tensors["hidden"] *= 3000
    check(name, tensors, torch.tensor([3, -100, 1, 0, 15]))


def test_only_what_learns_gets_a_gradient() -> None:
    hidden, weight = (x.float() for x in inputs(9, 8, 16).values())
    labels, scale = torch.arange(9), torch.tensor(0.5)
    loss = chunk_loss.chunk_loss(hidden.requires_grad_(), weight, labels, scale=scale).loss
    (loss * 3).backward()
    assert weight.grad is None
    wanted = torch.autograd.grad(
        torch.nn.functional.cross_entropy(hidden @ weight.T, labels, reduction="sum") * 1.5, hidden
    )[0]
    assert hidden.grad is not None
    torch.testing.assert_close(hidden.grad, wanted)
    with torch.no_grad():
        assert not chunk_loss.chunk_loss(hidden, weight, labels, scale=scale).loss.requires_grad


def test_backward_twice_gives_twice_the_gradient() -> None:
    hidden, weight = (x.float().requires_grad_() for x in inputs(9, 8, 16).values())
    loss = chunk_loss.chunk_loss(hidden, weight, torch.arange(9), scale=torch.tensor(1.0)).loss
    loss.backward(retain_graph=True)
    assert hidden.grad is not None and weight.grad is not None
    once = hidden.grad.clone(), weight.grad.clone()
    loss.backward()
    torch.testing.assert_close((hidden.grad, weight.grad), (2 * once[0], 2 * once[1]))


def test_chunks_fit_their_bytes() -> None:
    assert chunk_loss.rows_per_chunk(151_936, chunk_loss.CHUNK_BYTES["cuda"]) == 2560
    assert chunk_loss.rows_per_chunk(1000, 4000 * 5 + 3) == 5
    assert chunk_loss.rows_per_chunk(1000, 3) == 1


@pytest.mark.gpu
@pytest.mark.parametrize(("smoothing", "z_loss"), [(0.0, 0.0), (0.1, 1e-3)])
@pytest.mark.parametrize("labels", LABELS)
@pytest.mark.parametrize("name", list(OPS["linear_cross_entropy"].backends))
def test_on_a_gpu(name: str, labels: str, smoothing: float, z_loss: float, monkeypatch: pytest.MonkeyPatch) -> None:
    try:
        OPS["linear_cross_entropy"].resolve(name, describe_device("cuda"), "bfloat16")
    except ConfigError as error:
        pytest.skip(str(error))
    monkeypatch.setitem(chunk_loss.CHUNK_BYTES, "cuda", 4 * 1003 * 128)
    options: dict[str, Any] = {"dtype": torch.bfloat16, "device": "cuda"}
    check(name, inputs(333, 64, 1003), LABELS[labels](333, 1003), smoothing, z_loss, **options)
    check(name, inputs(333, 64, 1003), LABELS[labels](333, 1003), smoothing, z_loss, row_scales(333), **options)


@pytest.mark.gpu
def test_chunk_loss_waits_for_nothing() -> None:
    hidden, weight = (x.cuda().bfloat16().requires_grad_() for x in inputs(64, 64, 1000).values())
    labels, scale = LABELS["some"](64, 1000).cuda(), torch.tensor(0.5, device="cuda")
    chunk_loss.chunk_loss(hidden, weight, labels, scale=scale).loss.backward()
    try:
        torch.cuda.set_sync_debug_mode("error")
        chunk_loss.chunk_loss(hidden, weight, labels, scale=scale).loss.backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
