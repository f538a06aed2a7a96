"""Stochastic rounding: right on average, the same wherever an element lies; AdamW in bfloat16."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from schemas.strict import check_config
from train.config_optimizer import OptimizerConfig
from train.optim.build import ModelOptimizer, make_optimizer
from train.optim.groups import parameter_groups
from train.optim.rounding import Draws, Place, round_to

CPU = torch.device("cpu")


def whole(shape: tuple[int, ...]) -> Place:
    return Place.of(torch.empty(shape))


def test_the_mean_of_many_draws_is_the_value() -> None:
    values = torch.tensor([1.0, 1.0 + 2**-9, -3.3, 1e-3, 7e30, 1e-42, 0.0])
    total = torch.zeros(len(values), dtype=torch.float64)
    draws = 4000
    for step in range(draws):
        out = torch.empty(len(values), dtype=torch.bfloat16)
        round_to(out, values, Draws.of(0, step, "w", "parameter", whole((len(values),))).bits(0, len(values), CPU))
        assert ((out.float() - values).abs() <= values.abs() * 2**-7 + 1e-40).all()
        total += out.double()
    exact = values.double()
    assert torch.allclose(total[:5] / draws, exact[:5], rtol=5 * 2**-8 / draws**0.5, atol=0)
    assert total[0] == draws  # what bfloat16 holds stays
    assert total[-1] == 0


def test_bits_are_even_and_independent() -> None:
    bits = Draws.of(5, 1, "w", "parameter", whole((1 << 16,))).bits(0, 1 << 16, CPU)
    assert int(bits.min()) >= 0
    assert int(bits.max()) < 1 << 32
    for shift in range(32):
        ones = (bits >> shift & 1).double()
        assert abs(float(ones.mean()) - 0.5) < 0.01, shift
        neighbours = torch.corrcoef(torch.stack([ones[1:], ones[:-1]]))[0, 1]
        assert abs(float(neighbours)) < 0.02, shift
    low, high = (bits & 0xFFFF).double(), (bits >> 16).double()
    assert abs(float(torch.corrcoef(torch.stack([low, high]))[0, 1])) < 0.02
    others = [
        ("seed", (6, 1, "w", "parameter")),
        ("step", (5, 2, "w", "parameter")),
        ("name", (5, 1, "v", "parameter")),
    ]
    for what, key in [*others, ("tensor", (5, 1, "w", "exp_avg_sq"))]:
        other = Draws.of(*key, whole((1 << 16,))).bits(0, 1 << 16, CPU)  # type: ignore[arg-type]
        assert float((other == bits).double().mean()) < 1e-3, what


def test_an_element_has_its_bits_wherever_it_lies() -> None:
    shape = (6, 5, 7)
    size = 6 * 5 * 7
    all_bits = Draws.of(1, 2, "w", "parameter", whole(shape)).bits(0, size, CPU).view(shape)
    base, inner, stride = 2 * 35 + 1 * 7, 3 * 7, 35  # [2:5, 1:4]
    part = Draws.of(1, 2, "w", "parameter", Place(base, inner, stride)).bits(0, 3 * 21, CPU).view(3, 3, 7)
    assert torch.equal(part, all_bits[2:5, 1:4])
    later = Draws.of(1, 2, "w", "parameter", Place(base, inner, stride)).bits(21, 42, CPU).view(3, 7)
    assert torch.equal(later, part[1])


def net(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(30, 20), nn.Linear(20, 10)).to(dtype)


def optimizer(model: nn.Module, seed: int = 1, **keys: Any) -> ModelOptimizer:
    config = check_config({"lr": 1e-3} | keys, OptimizerConfig)
    found = make_optimizer(model, parameter_groups(model, config), config, seed=seed)
    assert isinstance(found, ModelOptimizer)
    return found


def train(model: nn.Module, made: torch.optim.Optimizer, steps: int, first: int = 0) -> list[Tensor]:
    for step in range(first, first + steps):
        for index, parameter in enumerate(model.parameters()):
            generator = torch.Generator().manual_seed(100 * step + index)
            parameter.grad = (0.3 + torch.randn(parameter.shape, generator=generator)).to(parameter.dtype)
        made.step()
    return [parameter.detach().clone() for parameter in model.parameters()]


def test_averages_in_bf16_stay_near_torchs_adamw() -> None:
    for beta2 in (0.95, 0.999):
        model, plain = net(), net()
        keys = {"betas": [0.9, beta2], "weight_decay": 0.1}
        found = train(model, made := optimizer(model, state_dtype="bf16", **keys), 300)
        assert all(s["exp_avg"].dtype == s["exp_avg_sq"].dtype == torch.bfloat16 for s in made.state.values())
        torchs = torch.optim.AdamW(plain.parameters(), lr=1e-3, betas=(0.9, beta2), weight_decay=0.1)
        want = train(plain, torchs, 300)
        for got, expected, start in zip(found, want, net().parameters(), strict=True):
            assert float((got - expected).norm() / (expected - start.detach()).norm()) < 0.02


def test_a_second_average_in_bf16_falls_only_when_rounded_at_random() -> None:
    """Gradients are large once and small from then on; beta2 is 0.999."""
    left = {}
    for random in (True, False):
        model = nn.Linear(40, 40, bias=False)
        made = optimizer(model, state_dtype="bf16", betas=[0.9, 0.999], stochastic_rounding=random)
        for step in range(1500):
            model.weight.grad = torch.full_like(model.weight, 1.0 if step == 0 else 1e-4)
            made.step()
        left[random] = float(made.state[model.weight]["exp_avg_sq"].float().mean()) / 1e-3
    assert left[False] > 0.9
    assert left[True] == pytest.approx(0.999**1499, rel=0.02)


def test_small_updates_of_bf16_parameters_add_up() -> None:
    """Of 1e-4 of the parameter's size, a twentieth of half a unit in its last place."""
    moved = {}
    for random in (True, False):
        model = nn.Linear(50, 50, bias=False).to(torch.bfloat16)
        nn.init.ones_(model.weight)
        made = optimizer(model, lr=1e-4, master_dtype="bf16", state_dtype="bf16", stochastic_rounding=random)
        for _ in range(100):
            model.weight.grad = torch.ones_like(model.weight)
            made.step()
        moved[random] = 1 - float(model.weight.detach().float().mean())
    assert moved[False] == 0
    assert moved[True] == pytest.approx(1e-2, rel=0.05)


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_the_same_seed_gives_the_same_steps(kind: str) -> None:
    keys = {"type": kind, "state_dtype": "bf16", "master_dtype": "bf16"}
    runs = []
    for seed in (1, 1, 2):
        model = net(torch.bfloat16)
        runs.append(train(model, optimizer(model, seed, **keys), 4))
    assert all(torch.equal(a, b) for a, b in zip(runs[0], runs[1], strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(runs[0], runs[2], strict=True))


def test_averages_of_another_dtype_are_brought_to_the_configured_one() -> None:
    model = net()
    made = optimizer(model, type="muon")
    train(model, made, 1)
    for state in made.state.values():
        for key in state.keys() - {"step"}:
            state[key] = state[key].to(torch.bfloat16)
    train(model, made, 1, first=1)
    assert {v.dtype for state in made.state.values() for v in state.values()} == {torch.float32}
