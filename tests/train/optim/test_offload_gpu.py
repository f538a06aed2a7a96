"""Averages in pinned memory on a GPU: bit by bit those that stay there, however late copies or kernels are."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from schemas.strict import check_config
from tests import dist as processes
from tests.train.optim.test_offload import CASES
from train.checkpoint import Checkpointer
from train.checkpoint_state import optimizer_tensors
from train.config import CheckpointConfig
from train.config_optimizer import OptimizerConfig
from train.optim import build as build_module
from train.optim import muon_plan, offload
from train.optim.build import ModelOptimizer
from train.optim.groups import parameter_groups
from train.parallel.loading import local_part

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
STEPS = 8
LATE = 30_000_000  # cycles: 15 ms or more, in which whole steps pass
PORTION_HERE = 1 << 21


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(muon_plan, "PORTION", PORTION_HERE)
    monkeypatch.setattr(build_module, "ADAMW_PORTION", PORTION_HERE // 2)


class Parts(nn.Module):
    """22 M elements: matrices, stacks and an embedding of several portions, odd shapes, vectors, a scalar, nothing."""

    def __init__(self, dtype: torch.dtype, small: tuple[tuple[int, ...], ...] = ((77,), (), (0,), (2048,))) -> None:
        super().__init__()
        shapes = [(12, 512, 1024), (1024, 512), (16, 1024, 512), (373, 531), (768, 768), (1024, 2048)]
        generator = torch.Generator().manual_seed(1)
        self.embed = nn.Embedding(4003, 768)
        nn.init.normal_(self.embed.weight, generator=generator)
        self.weights = nn.ParameterList(torch.randn(shape, generator=generator) for shape in shapes)
        self.small = nn.ParameterList(torch.randn(shape, generator=generator) for shape in small)
        self.to("cuda", dtype)


def made_of(model: nn.Module, keys: dict[str, Any], *, on_cpu: bool) -> ModelOptimizer:
    config = check_config({"lr": 0.02, "weight_decay": 0.1, "muon_weight_decay": 0.1} | keys, OptimizerConfig)
    return ModelOptimizer(model, parameter_groups(model, config), config, seed=5, offload=on_cpu)


def gradients(model: nn.Module, step: int) -> None:
    """Nothing waits for the device."""
    generator = torch.Generator("cuda").manual_seed(step)
    for parameter in model.parameters():
        local = local_part(parameter.detach())
        parameter.grad = torch.zeros_like(parameter)
        local_part(parameter.grad).copy_(torch.randn(local.shape, generator=generator, device="cuda"))


def train(model: nn.Module, made: ModelOptimizer, steps: range, late: str = "") -> None:
    """One step after the other; late: kernels of this kind begin after a while."""
    inside = made._offload
    for step in steps:
        if late == "computation":
            torch.cuda._sleep(LATE)
        elif late and inside is not None:
            stream = (inside._inward if late == "fetching" else inside._outward).stream
            with torch.cuda.stream(stream):
                torch.cuda._sleep(LATE)
        gradients(model, step)
        if step:  # pinned memory is allocated, kernels are compiled
            torch.cuda.set_sync_debug_mode("error")
        try:
            made.step()
        finally:
            torch.cuda.set_sync_debug_mode("default")


def values(model: nn.Module, made: ModelOptimizer) -> dict[str, Tensor]:
    """As the host reads them, at once."""
    states = {name: local_part(value).detach().cpu().clone() for name, value in optimizer_tensors(model, made).items()}
    return states | {name: local_part(p.detach()).cpu() for name, p in model.named_parameters()}


def dtype_of(keys: dict[str, Any]) -> torch.dtype:
    return torch.bfloat16 if "master_dtype" in keys else torch.float32


def assert_equal(found: dict[str, Tensor], want: dict[str, Tensor]) -> None:
    assert found.keys() == want.keys()
    for name, value in want.items():
        assert found[name].dtype == value.dtype
        assert torch.equal(found[name], value), name


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("late", ["", "computation", "fetching", "writing back"])
def test_steps_are_the_same_bit_by_bit(name: str, late: str) -> None:
    keys, found = CASES[name], []
    for on_cpu in (False, True):
        model = Parts(dtype_of(keys))
        made = made_of(model, keys, on_cpu=on_cpu)
        train(model, made, range(STEPS), late)
        found.append(values(model, made))
    assert len(made._portions) + len(made._muon.portions) > 2 * offload.BUFFERS
    assert_equal(found[1], found[0])


def test_portions_as_they_are_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 268 M elements, of one parameter and of parts of it, one step hard after the other."""
    monkeypatch.undo()
    found = []
    for on_cpu in (False, True):
        model = nn.Module()
        generator = torch.Generator("cuda").manual_seed(1)
        shapes = [(150, 2048, 1024), (300, 1024, 1024), (128, 1024, 2048)]
        parts = [torch.randn(s, generator=generator, device="cuda", dtype=torch.bfloat16) for s in shapes]
        model.weights = nn.ParameterList(parts)
        made = made_of(model, CASES["muon, bf16"], on_cpu=on_cpu)
        for step in range(4):
            gradients(model, step)
            made.step()
        found.append(values(model, made))
        del model, made, parts
    assert_equal(found[1], found[0])


def requested(kind: str) -> int:
    """Bytes that were asked for; what the allocator counts besides is up to 1 MB a block that it did not split."""
    return int(torch.cuda.memory_stats()[f"requested_bytes.all.{kind}"])


def test_averages_are_pinned_and_take_no_memory_of_the_gpu() -> None:
    keys, peaks, held = CASES["muon, bf16"], [], []
    torch.zeros(1, device="cuda")
    for on_cpu in (False, True):
        gc.collect()  # of earlier tests
        before = requested("current")
        model = Parts(torch.bfloat16)
        made = made_of(model, keys, on_cpu=on_cpu)
        train(model, made, range(2))
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        held.append(requested("current") - before)
        train(model, made, range(2, 5))
        torch.cuda.synchronize()
        peaks.append(requested("peak") - before)
        averages = [v for state in made.state.values() for key, v in state.items() if key != "step"]
        nbytes = sum(average.nbytes for average in averages)
        if on_cpu:
            assert all(average.is_pinned() for average in averages if average.numel())
        del model, made, averages
    assert held[1] < held[0] - 0.99 * nbytes
    buffers = offload.BUFFERS * 2 * PORTION_HERE
    assert peaks[1] < peaks[0] - nbytes + 1.1 * buffers


@pytest.mark.parametrize("on_cpu", [False, True])
def test_a_checkpoint_has_what_the_last_step_left(tmp_path: Path, on_cpu: bool) -> None:
    """Although it is still on its way back; loaded to either place."""
    keys, device = CASES["muon, bf16"], torch.device("cuda", torch.cuda.current_device())
    model = Parts(torch.bfloat16)
    made = made_of(model, keys, on_cpu=on_cpu)
    config = CheckpointConfig(output_dir=str(tmp_path))
    keeper = Checkpointer(config, rank=0, world_size=1, family="qwen3", device=device)
    train(model, made, range(2))
    train(model, made, range(2, 4), "writing back")
    keeper.save(4, model, made, {})
    train(model, made, range(4, 6))  # while it is written
    keeper.wait()
    want = values(model, made)
    for to_cpu in (False, True):
        again = Parts(torch.bfloat16)
        other = made_of(again, keys, on_cpu=to_cpu)
        keeper.load(tmp_path / "step_4", again, other)
        kinds = {local_part(v).device.type for state in other.state.values() for k, v in state.items() if k != "step"}
        assert kinds == {"cpu" if to_cpu else "cuda"}
        train(again, other, range(4, 6))
        assert_equal(values(again, other), want)


def _sharded() -> list[dict[str, Tensor]]:
    muon_plan.PORTION, build_module.ADAMW_PORTION = PORTION_HERE, PORTION_HERE // 2
    mesh, found = init_device_mesh("cuda", (torch.distributed.get_world_size(),)), []
    for on_cpu in (False, True):
        model = Parts(torch.bfloat16, ((77,), (2048,)))  # FSDP shards no scalars
        fully_shard(model, mesh=mesh)
        made = made_of(model, CASES["muon, bf16"], on_cpu=on_cpu)
        train(model, made, range(4))
        found.append(values(model, made))
        for parameter, state in made.state.items():
            for key in state.keys() - {"step"}:
                average = state[key]
                assert isinstance(average, DTensor) and isinstance(parameter, DTensor)
                assert average.placements == parameter.placements and average.device_mesh == parameter.device_mesh
                assert average.to_local().device.type == ("cpu" if on_cpu else "cuda")
    return found


def test_sharded_parameters() -> None:
    """On as many GPUs as there are, up to two."""
    for without, having in processes.run(min(torch.cuda.device_count(), 2), _sharded, backend="nccl"):
        assert_equal(having, without)
