"""The optimizers on a GPU: nothing waits for it, and what comes out is what a CPU computes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from schemas.strict import check_config
from tests.train.optim.muon_reference import Reference, share_off
from train.config_optimizer import OptimizerConfig
from train.optim.build import ModelOptimizer
from train.optim.groups import parameter_groups

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
STEPS = 3


class Parts(nn.Module):
    """Matrices that the symmetric kernel takes, both ways and square, one that it does not, a stack, a vector."""

    def __init__(self) -> None:
        super().__init__()
        shapes = [(256, 512), (512, 256), (264, 264), (37, 53), (12, 192, 384), (6, 520, 136), (77,)]
        generator = torch.Generator().manual_seed(3)
        self.weights = nn.ParameterList(torch.randn(shape, generator=generator) for shape in shapes)


def gradient(parameter: Tensor, number: int, step: int) -> Tensor:
    return torch.randn(parameter.shape, generator=torch.Generator().manual_seed(100 * step + number)) / 100


def run(device: str, dtype: torch.dtype = torch.float32, **keys: Any) -> tuple[list[Tensor], ModelOptimizer]:
    """The parameters at the end, on the CPU."""
    config = check_config({"type": "muon", "lr": 0.02, "muon_weight_decay": 0.1} | keys, OptimizerConfig)
    model = Parts().to(device, dtype)
    made = ModelOptimizer(model, parameter_groups(model, config), config, seed=5)
    for step in range(STEPS):
        for number, parameter in enumerate(model.parameters()):
            parameter.grad = gradient(parameter, number, step).to(device, dtype)
        if device == "cuda" and step:
            torch.cuda.synchronize()
            torch.cuda.set_sync_debug_mode("error")
        try:
            made.step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return [parameter.detach().cpu() for parameter in model.parameters()], made


@pytest.mark.parametrize(("kind", "limit"), [("fp32", 1e-4), ("fp16", 1e-2), ("bf16", 5e-2)])
def test_muon_is_that_of_float64(kind: str, limit: float) -> None:
    found, made = run("cuda", muon_ns_dtype=kind)
    start = list(Parts().parameters())
    for number, (got, first) in enumerate(zip(found, start, strict=True)):
        if first.ndim == 1:
            continue
        reference = Reference(first.detach(), 0.02, 0.1)
        for step in range(STEPS):
            reference.step(gradient(first, number, step))
        want = reference.parameter - first.detach().double()
        assert share_off(got - first.detach(), want) < limit, tuple(first.shape)
    assert {state["step"].device.type for state in made.state.values()} == {"cpu"}


@pytest.mark.parametrize("kind", ["adamw", "muon"])
@pytest.mark.parametrize(
    ("dtype", "state"), [(torch.bfloat16, "bf16"), (torch.float32, "bf16"), (torch.float32, "fp32")], ids=str
)
def test_rounding_is_that_of_the_cpu(kind: str, dtype: torch.dtype, state: str) -> None:
    keys = {"type": kind, "state_dtype": state, "muon_ns_dtype": "fp32"}
    (found, gpu), (want, cpu) = run("cuda", dtype, **keys), run("cpu", dtype, **keys)
    for got, expected in zip(found, want, strict=True):
        if dtype == torch.bfloat16:  # but where the last bit of float32 decides, in some step
            assert float((got != expected).float().mean()) < 0.02
            apart = (got.float() - expected.float()).abs() / expected.float().abs().clamp(min=1e-2)
            assert float(apart.max()) < 2**-6, f"{float(apart.max()):.2e} of {tuple(got.shape)}"  # two last places
        else:
            assert torch.allclose(got, expected, rtol=1e-2, atol=1e-4)
    for one, other in zip(gpu.state.values(), cpu.state.values(), strict=True):
        for name, value in other.items():
            assert torch.allclose(one[name].cpu().float(), value.float(), rtol=1e-2, atol=1e-5), name


def test_runs_are_equal_bit_by_bit() -> None:
    first, second = (run("cuda", torch.bfloat16, state_dtype="bf16")[0] for _ in range(2))
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))
