"""The norm over gradients that are whole, sharded, replicated, and on several meshes, against one process."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from tests import dist as processes
from train.optim.clip import LARGE, clip_gradients

CPU = torch.device("cpu")


def gradients() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator) for shape in ((7, 3), (1, 5), (6, 4, 2), (5,), (2, 3))]


def parameters(given: list[Tensor]) -> list[Tensor]:
    found = []
    for gradient in given:
        parameter = torch.zeros_like(gradient, requires_grad=True)
        parameter.grad = gradient
        found.append(parameter)
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_many_elements_are_summed_exactly(dtype: torch.dtype) -> None:
    gradient = (torch.randn(5_000_001, generator=torch.Generator().manual_seed(1)) * 1e-3).to(dtype)
    norm = clip_gradients(parameters([gradient, gradient[:7]]), 0.0, CPU)
    exact = (gradient.double().square().sum() + gradient[:7].double().square().sum()).sqrt()
    assert abs(float(norm) / float(exact) - 1) < 2e-7


def test_a_great_norm_is_no_infinite_one() -> None:
    parameter = torch.zeros(4, requires_grad=True)
    parameter.grad = torch.full((4,), 1e20)
    assert float(clip_gradients([parameter], 1.0, CPU)) == pytest.approx(2e20)
    assert torch.allclose(parameter.grad, torch.full((4,), 0.5))


@pytest.mark.parametrize("max_norm", [0.0, 0.5, 1e6])
def test_one_process_equals_torch(max_norm: float) -> None:
    ours, theirs = parameters(gradients()), parameters(gradients())
    norm = clip_gradients(ours, max_norm, CPU)
    expected = torch.nn.utils.clip_grad_norm_(theirs, max_norm or float("inf"))
    assert torch.allclose(norm, expected, rtol=1e-6)
    for got, want in zip(ours, theirs, strict=True):
        assert got.grad is not None and want.grad is not None
        assert torch.allclose(got.grad, want.grad, rtol=1e-6)


def test_no_gradient_at_all() -> None:
    assert clip_gradients([torch.zeros(3, requires_grad=True)], 1.0, CPU) == 0


def _clipped() -> tuple[float, list[Tensor]]:
    flat = init_device_mesh("cpu", (4,), mesh_dim_names=("fsdp",))
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    shard, replicate = Shard(0), Replicate()
    placed = [
        distribute_tensor(gradient, mesh, placements, src_data_rank=None)
        for gradient, mesh, placements in zip(
            gradients()[:4],
            (flat, flat, grid, grid),
            ([shard], [shard], [Shard(1), shard], [replicate, shard]),
            strict=True,
        )
    ]
    found = parameters([*placed, gradients()[4]])
    norm = clip_gradients(found, 0.5, CPU)
    whole = [p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad for p in found]
    assert dist.get_world_size() == 4
    return float(norm), [gradient for gradient in whole if gradient is not None]


def test_several_meshes_equal_one_process() -> None:
    expected = parameters(gradients())
    norm = float(torch.nn.utils.clip_grad_norm_(expected, 0.5))
    for found, clipped in processes.run(4, _clipped):
        assert found == pytest.approx(norm, rel=1e-6)
        for got, want in zip(clipped, expected, strict=True):
            assert want.grad is not None and torch.allclose(got, want.grad, rtol=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("size", [1000, LARGE, LARGE + 3])
def test_bfloat16_on_a_gpu_large_and_small(size: int) -> None:
    gradient = torch.randn(size, generator=torch.Generator().manual_seed(2)).bfloat16()
    parameter = torch.zeros_like(gradient, device="cuda", requires_grad=True)
    parameter.grad = gradient.cuda()
    norm = clip_gradients([parameter], 1.0, torch.device("cuda"))
    exact = gradient.double().norm()
    assert float(norm.cpu() / exact - 1) == pytest.approx(0, abs=1e-5)
    wanted = (gradient.float() * (1.0 / (norm.cpu() + 1e-6))).bfloat16()
    assert torch.equal(parameter.grad.cpu(), wanted)
