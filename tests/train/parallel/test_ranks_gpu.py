"""Two GPUs over NCCL, and two processes over gloo: optimizer states that are saved and loaded, parameters and inputs of
blocks in CPU memory, adapters that are exported, and one rank that fails."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor, nn

from schemas.strict import check_config
from tests import dist as processes
from tests.train.models.checkpoints import write
from tests.train.parallel.steps import (
    FP32,
    LR,
    Outcome,
    batches_of,
    global_loss,
    make_parts,
    meta_model,
    outcome,
    whole,
)
from tests.train.test_defaults_gpu import GPUS, aligned_config, values_of
from tests.train.test_device_memory_gpu import ENDS_S, OUT_OF_MEMORY, Failing, own_context
from tests.train.test_step_gpu import on_device
from train.checkpoint import Checkpointer
from train.config import CheckpointConfig, ModelConfig, OmniConfig, TrainConfig
from train.config_trainer import GradientCheckpointingConfig, OffloadConfig, OptimizerConfig
from train.data.batch import Batch
from train.model_build import checkpoint_policy, choose_ops
from train.models.checkpointing import CheckpointPolicy
from train.models.spec import build_foundation_model
from train.ops.registry import Ops, eager_ops
from train.optim.build import make_optimizer
from train.optim.groups import parameter_groups
from train.optim.schedule import LrScheduler, Schedule
from train.parallel.loading import local_part
from train.step import StepParts, train_step
from train.trainer import make_trainer
from train.trainer_build import seed_everything

why = f"needs two CUDA devices, there are {GPUS}"
DEVICES = [
    pytest.param("cpu", marks=pytest.mark.slow),
    pytest.param("cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(GPUS < 2, reason=why)]),
]
BACKENDS = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl"}
LAYOUTS: dict[str, dict[str, Any]] = {"fsdp=2": {}, "ep=2": {"ep_size": 2}}
ADAMW = OptimizerConfig(lr=1e-3, lr_decay_style="constant", weight_decay=0.1)
SAVED, FINAL, STEPS = 3, 4, 6  # the first save goes on in the background
MAX_GRAD_NORM = 1.0


@dataclass
class Course:
    """Six steps with AdamW. parameters: after them, by how often it was loaded: not at all, nor saved (`at one go`),
    saved on the way (`saved`), and from the checkpoints behind two of the steps."""

    fused: bool | None
    losses: dict[str, list[float]] = field(default_factory=dict)
    parameters: dict[str, dict[str, Tensor]] = field(default_factory=dict)


@dataclass
class Found:
    """Of a rank. courses: by layout; clipped: with parameters on the device and in CPU memory; blocks: whose inputs
    stay on the device, or leave it, which `left` counts."""

    courses: dict[str, Course] = field(default_factory=dict)
    clipped: dict[str, Outcome] = field(default_factory=dict)
    blocks: dict[str, Outcome] = field(default_factory=dict)
    left: int = 0


def device_of(kind: str) -> torch.device:
    return torch.device("cuda", dist.get_rank()) if kind == "cuda" else torch.device("cpu")


def repeatable(device: torch.device) -> Ops:
    """The fastest that give the same at every run."""
    return choose_ops(ModelConfig(config_path="unused"), TrainConfig(deterministic=True), device)


def parts_of(device: torch.device, accelerator: dict[str, Any], **keys: Any) -> StepParts:
    """In mixed precision, as by default."""
    model = meta_model(ops=repeatable(device), aligned=True)
    return make_parts({"fsdp_config": {}} | accelerator, model, device=device, **keys)


def with_adamw(device: torch.device, accelerator: dict[str, Any]) -> StepParts:
    """As the trainer makes it."""
    parts = parts_of(device, accelerator, checkpointing=True, max_grad_norm=MAX_GRAD_NORM)
    made = make_optimizer(parts.model, parameter_groups(parts.model, ADAMW), ADAMW, device=device)
    return replace(parts, optimizer=made, scheduler=LrScheduler(made, Schedule.of(ADAMW, STEPS)))


def take(parts: StepParts, batches: Sequence[Batch], count: int) -> list[float]:
    """So many steps, each on the same batches; their losses."""
    return [global_loss(train_step(parts, list(batches)))[0] for _ in range(count)]


@contextmanager
@torch.no_grad()
def spoilt(model: nn.Module) -> Iterator[None]:
    """Without its values, which whoever writes them must have copied."""
    values = [
        (local_part(parameter.detach()), local_part(parameter.detach()).clone()) for parameter in model.parameters()
    ]
    for value, _ in values:
        value.zero_()
    yield
    for value, before in values:
        value.copy_(before)


def course(batches: Sequence[Batch], device: torch.device, accelerator: dict[str, Any], folder: Path) -> Course:
    """Loaded from a checkpoint that was written in the background, and from one that was waited for; of a single
    process that at one go alone."""

    def going_on(name: str, parts: StepParts, losses: list[float]) -> None:
        """To the last step."""
        found.losses[name] = losses + take(parts, batches, STEPS - len(losses))
        found.parameters[name] = {key: whole(value).clone() for key, value in parts.model.named_parameters()}

    parts = with_adamw(device, accelerator)
    found = Course(parts.optimizer.defaults.get("fused"))
    going_on("at one go", parts, [])
    if dist.get_world_size() == 1:
        return found
    config = CheckpointConfig(output_dir=str(folder))
    rank, size = dist.get_rank(), dist.get_world_size()
    keeper = Checkpointer(config, rank=rank, world_size=size, family="qwen3_omni_moe_thinker", device=device)
    parts = with_adamw(device, accelerator)
    losses = take(parts, batches, SAVED)
    keeper.save(SAVED, parts.model, parts.optimizer, {})
    with spoilt(parts.model):
        keeper.wait()
    losses += take(parts, batches, FINAL - SAVED)
    keeper.save(FINAL, parts.model, parts.optimizer, {}, final=True)
    going_on("saved", parts, losses)
    for step in (SAVED, FINAL):
        again = with_adamw(device, accelerator)
        keeper.load(folder / f"step_{step}", again.model, again.optimizer)
        going_on(f"from step {step}", again, losses[:step])
    return found


class Counting:
    """For `CheckpointPolicy.carry`: how often it was used."""

    def __init__(self, carry: Callable[..., Any]) -> None:
        self.carry, self.count = carry, 0

    def __call__(self, *inputs: Any) -> Any:
        self.count += 1
        return self.carry(*inputs)


def policy_of(device: torch.device, **offload: Any) -> CheckpointPolicy:
    """Of gradient checkpointing as by default."""
    config = check_config(offload, OffloadConfig)
    found = checkpoint_policy(GradientCheckpointingConfig(), repeatable(device), config)
    assert found is not None and (found.carry is not None) == config.enable_activation
    return found


def clipped(batches: Sequence[Batch], device: torch.device, *, offload: bool) -> Outcome:
    """Two steps with the references of all operations, in float32."""
    accelerator = {"fsdp_config": FP32 | {"offload": offload}}
    model = meta_model(ops=eager_ops(device.type), aligned=True)
    return outcome(make_parts(accelerator, model, max_grad_norm=MAX_GRAD_NORM, device=device), batches, 2)


def _of_a_rank(kind: str, folder: Path) -> Found | None:
    """Of one process the course alone."""
    device, found, size = device_of(kind), Found(), dist.get_world_size()
    seed_everything(1, deterministic=True)
    batches = on_device(batches_of(dist.get_rank(), size), device)
    for number, (name, layout) in enumerate(LAYOUTS.items()):
        if size > 1 or not layout:
            found.courses[name] = course(batches, device, layout, folder / str(number))
    if size > 1:
        policy = policy_of(device, enable_activation=True)
        assert policy.carry is not None
        counting = Counting(policy.carry)
        for name, how in (("here", policy_of(device)), ("on the CPU", replace(policy, carry=counting))):
            found.blocks[name] = outcome(parts_of(device, {}, checkpointing=how), batches, 1)
        found.left = counting.count
        torch.use_deterministic_algorithms(False)
        found.clipped = {
            name: clipped(batches, device, offload=name == "on the CPU") for name in ("here", "on the CPU")
        }
    return found if dist.get_rank() == 0 else None


@pytest.fixture(scope="module", params=DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def failing(device: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Failing]:
    found = Failing(device, tmp_path_factory.mktemp("failing"))
    yield found
    found.process.kill()
    found.process.wait()


@pytest.fixture(scope="module")
def both(device: str, failing: Failing, tmp_path_factory: pytest.TempPathFactory) -> Found:
    folder = tmp_path_factory.mktemp("both")
    found: Found = processes.run(2, _of_a_rank, device, folder, backend=BACKENDS[device])[0]
    return found


@pytest.fixture(scope="module")
def alone(device: str, tmp_path_factory: pytest.TempPathFactory) -> Course:
    folder = tmp_path_factory.mktemp("alone")
    (found,) = processes.run(1, _of_a_rank, device, folder, backend=BACKENDS[device])
    made: Course = found.courses["fsdp=2"]
    return made


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """Bit by bit."""
    assert found.keys() == expected.keys()
    other = [name for name, value in expected.items() if not torch.equal(found[name], value)]
    assert not other, f"{len(other)} of {len(expected)} differ: {other[:5]}"


@pytest.mark.parametrize("layout", LAYOUTS)
def test_adamw_goes_on_bit_by_bit_from_checkpoints(device: str, both: Found, alone: Course, layout: str) -> None:
    found = both.courses[layout]
    assert found.fused is (True if device == "cuda" else None)
    losses = found.losses["at one go"]
    assert list(found.parameters) == ["at one go", "saved", "from step 3", "from step 4"]
    for name, parameters in found.parameters.items():
        assert found.losses[name] == losses, name
        assert_same(parameters, found.parameters["at one go"])
    assert len(losses) == STEPS and losses[-1] < 0.8 * losses[0]
    assert losses == pytest.approx(alone.losses["at one go"], rel=2e-2)


def test_parameters_in_cpu_memory_are_clipped_and_moved_as_on_the_device(both: Found) -> None:
    here, there = both.clipped["here"], both.clipped["on the CPU"]
    assert here.norms[0] > 2 * MAX_GRAD_NORM
    assert there.norms == pytest.approx(here.norms, rel=1e-4)
    assert there.losses == pytest.approx(here.losses, rel=1e-5)
    assert there.gradients.keys() == here.gradients.keys()
    largest = max(value.norm() for value in here.gradients.values())
    for name, want in here.gradients.items():
        limit = 1e-3 * max(want.norm(), 1e-2 * largest)
        assert (there.gradients[name] - want).norm() <= limit, name
        moved = there.parameters[name] - here.parameters[name]
        assert moved.norm() <= 2 * LR * limit + 1e-6 * here.parameters[name].norm(), name


def test_gradients_of_blocks_whose_inputs_leave_the_device(both: Found) -> None:
    here, there = both.blocks["here"], both.blocks["on the CPU"]
    assert both.left > 0
    assert there.losses == here.losses and there.norms == here.norms
    assert_same(there.gradients, here.gradients)


def adapters_config(folder: Path, base: Path, ranks: int) -> OmniConfig:
    """Two steps, in float32. Experts are divided among ranks."""
    values = values_of(
        folder,
        max_steps=2,
        accelerator={"ep_size": ranks, "fsdp_config": FP32},
        optimizer={"lr": 1e-3, "lr_decay_style": "constant"},
        evaluation={},
    )
    values["model"] = {
        "model_path": str(base),
        "ops_implementation": {"attn_implementation": "sdpa"},
        "lora_config": {
            "r": 3,
            "lora_alpha": 6.0,
            "target_modules": ["q_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "linear_fc1"],
            "modules_to_save": ["visual.merger"],
        },
    }
    values["data"]["dataloader"] = {"num_workers": 0}
    return check_config(values, OmniConfig)


def _train(config: OmniConfig) -> str:
    trainer = make_trainer(config)
    trainer.train()
    return trainer.mesh.device.type


def adapters_below(folder: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """What was exported: tensors and settings."""
    found = folder / "output" / "hf" / "step_2"
    return load_file(found / "adapter_model.safetensors"), json.loads((found / "adapter_config.json").read_text())


def test_adapters_of_two_ranks_are_those_of_one(device: str, tmp_path: Path) -> None:
    if device == "cpu" and torch.cuda.is_available():
        pytest.skip("a training takes the GPU that is there")
    base = aligned_config(tmp_path / "base", coef=0.0)
    model = build_foundation_model(base, eager_ops(), init="random", seed=0)
    write(base, {name: parameter.detach() for name, parameter in model.named_parameters()})
    assert _train(adapters_config(tmp_path / "one", base, 1)) == device
    two = adapters_config(tmp_path / "two", base, 2)
    assert processes.run(2, _train, two, backend=BACKENDS[device]) == [device] * 2
    expected, settings = adapters_below(tmp_path / "one")
    found, other = adapters_below(tmp_path / "two")
    assert other == settings
    assert {name: (it.dtype, it.shape) for name, it in found.items()} == {
        name: (it.dtype, it.shape) for name, it in expected.items()
    }
    moved = [name for name, value in expected.items() if "lora_B" in name and value.abs().max() > 0]
    assert any("experts" in name for name in moved) and any("q_proj" in name for name in moved)
    for name, want in expected.items():
        assert (found[name] - want).norm() <= 2e-2 * want.norm(), name


def test_one_rank_that_fails_ends_all_and_is_named(device: str, failing: Failing) -> None:
    ended = failing.end()
    failed = float((failing.folder / "failed").read_text())
    assert 0 < ended["time"] - failed < ENDS_S
    ranks = [json.loads((failing.folder / f"rank_{rank}.json").read_text()) for rank in range(2)]
    assert not [rank["pid"] for rank in ranks if psutil.pid_exists(rank["pid"])]
    said = ended["said"]
    assert said.startswith(f"OutOfMemoryError: {OUT_OF_MEMORY}") and said.endswith(" (rank 1)"), said
    assert not (failing.folder / "output" / "LATEST").exists()
    snapshots = [path.name for path in (failing.folder / "output").glob("memory/*.pickle")]
    assert snapshots == (["rank_1.pickle"] if device == "cuda" else [])


def test_ranks_with_workers_open_no_context_on_the_gpu_of_another(device: str, failing: Failing) -> None:
    failing.end()
    for rank in range(2):
        seen = json.loads((failing.folder / f"rank_{rank}.json").read_text())["contexts"]
        assert seen == own_context(rank, device), f"rank {rank}"
