"""Muon and AdamW on any number of ranks and any sharding, against float64 on whole matrices."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import distribute_tensor

from schemas.strict import check_config
from tests import dist as processes
from tests.train.optim.muon_reference import Reference, share_off
from tests.train.parallel.steps import FP32, fill, meta_model, whole
from tests.train.tiny_training import checkpointer, equal
from train.config import TrainConfig
from train.config_optimizer import OptimizerConfig
from train.config_trainer import AcceleratorConfig
from train.mesh import Mesh
from train.models.omni_thinker import OmniThinker
from train.models.spec import fsdp_blocks
from train.optim import muon_plan
from train.optim.build import ModelOptimizer, make_optimizer
from train.optim.groups import learning_rates, parameter_groups
from train.parallel.apply import apply_parallel
from train.parallel.fsdp import needs_wrapping
from train.parallel.loading import give_memory, local_box, local_part

LR, STEPS = 0.02, 3
DDP = {"fsdp_config": {**FP32, "fsdp_mode": "ddp"}}
LAYOUTS: dict[int, list[dict[str, Any]]] = {
    1: [{}],
    2: [{}, DDP, {"ulysses_size": 2, "ep_size": 2}],
    4: [{}, {"dp_replicate_size": 2}, {"ep_size": 2}, {"dp_replicate_size": 2, "ep_size": 2}, {"ep_size": 4}],
}
MUON = {"type": "muon", "lr": LR, "muon_weight_decay": 0.1, "weight_decay": 0.1}
SPLIT = {"muon_head_group_size": 1, "muon_head_split_modules": ["q_proj", "k_proj", "v_proj"]}
# keys, allowed share of the change; in 16 bits that of gradients of low rank is compared in their directions alone:
# rounding fills the others, which the steps enlarge 500 times
CASES: dict[str, tuple[dict[str, Any], float]] = {
    "fp32": ({"muon_ns_dtype": "fp32"}, 1e-4),
    "fp16": ({}, 2e-2),
    "bf16": ({"muon_ns_dtype": "bf16"}, 6e-2),
    "split, original, plain momentum": (
        {"muon_ns_dtype": "fp32", "muon_adjust_lr_fn": "original", "muon_nesterov": False, "muon_lr": LR} | SPLIT,
        1e-4,
    ),
}


def gradient(name: str, shape: torch.Size, step: int) -> Tensor:
    """Of full rank; of rank 3 in the second text layer."""
    generator = torch.Generator().manual_seed(sum(map(ord, name)) + 1000 * step)
    if len(shape) > 1 and deficient(name):
        low = torch.randn(*shape[:-1], 3, generator=generator) @ torch.randn(
            *shape[:-2], 3, shape[-1], generator=generator
        )
        return low / 100
    return torch.randn(shape, generator=generator) / 100


def in_directions_of(want: Tensor, got: Tensor) -> tuple[Tensor, Tensor]:
    """Both, got and wanted change, within the row and column space of what is wanted, without its decay."""
    u, s, vh = torch.linalg.svd(want, full_matrices=False)
    rank = int((s > 0.3 * s[0]).sum())
    u, vh = u[:, :rank], vh[:rank]
    return u.mT @ got @ vh.mT, u.mT @ want @ vh.mT


def deficient(name: str) -> bool:
    return ".layers.1." in name and "experts" not in name


def build(
    layout: dict[str, Any], optimizer: dict[str, Any], *, offload: bool = False, **train: Any
) -> tuple[OmniThinker, ModelOptimizer]:
    """The vision tower is frozen."""
    accelerator = check_config({"fsdp_config": FP32} | layout, AcceleratorConfig)
    config = check_config({"optimizer": optimizer} | train, TrainConfig)
    world, rank = (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)
    mesh = Mesh.make(accelerator, world, rank, torch.device("cpu"))
    model = meta_model()
    model.visual.requires_grad_(False)
    if needs_wrapping(mesh, accelerator.fsdp_config):
        apply_parallel(model, fsdp_blocks(model), mesh, accelerator.fsdp_config)
    give_memory(model, mesh.device)
    fill(model)
    if optimizer.get("master_dtype") == "bf16":
        model.to(torch.bfloat16)
    groups = parameter_groups(
        model, config.optimizer, learning_rates(config, {"vit": "visual.", "audio": "audio_tower."})
    )
    made = make_optimizer(model, groups, config.optimizer, seed=config.seed, offload=offload)
    assert isinstance(made, ModelOptimizer)
    return model, made


def give_gradients(model: torch.nn.Module, step: int) -> None:
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            box = tuple(slice(*bounds) for bounds in local_box(parameter))
            parameter.grad = torch.zeros_like(parameter)
            local_part(parameter.grad).copy_(gradient(name, parameter.shape, step)[box])


def changes(layout: dict[str, Any], optimizer: dict[str, Any], **train: Any) -> dict[str, list[Tensor]]:
    """Of every trained parameter at each step, and before it its first value."""
    model, made = build(layout, optimizer, **train)
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    values = {name: [whole(p).clone()] for name, p in trained.items()}
    frozen = whole(model.get_parameter("visual.blocks.0.attn.qkv.weight")).clone()
    for step in range(STEPS):
        give_gradients(model, step)
        made.step()
        for name, parameter in trained.items():
            values[name].append(whole(parameter).clone())
    assert torch.equal(whole(model.get_parameter("visual.blocks.0.attn.qkv.weight")), frozen)
    return values


HALF = {"state_dtype": "bf16", "master_dtype": "bf16"}


def _elementwise(layouts: list[dict[str, Any]]) -> list[dict[str, Tensor]]:
    """What AdamW does to all parameters, and Muon to its averages, with rounding at random."""
    found = []
    for layout in layouts:
        model, made = build(layout, {"type": "adamw", "lr": LR} | HALF)
        values = {}
        for step in range(2):
            give_gradients(model, step)
            made.step()
        values |= {name: whole(p).clone() for name, p in model.named_parameters()}
        model, made = build(layout, MUON | HALF)
        give_gradients(model, 0)
        made.step()
        for name, parameter in model.named_parameters():
            if "momentum_buffer" in made.state.get(parameter, {}):
                values[f"{name}.momentum_buffer"] = whole(made.state[parameter]["momentum_buffer"]).clone()
                values[f"{name}.muon"] = whole(parameter).clone()
        found.append(values)
    return found if not dist.is_initialized() or dist.get_rank() == 0 else []


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_rounding_does_not_depend_on_the_sharding(ranks: int) -> None:
    """Bit for bit, but for Muon's parameters, whose directions differ in their last bits between shardings."""
    (expected,) = _elementwise([{}])
    layouts = LAYOUTS[ranks] if ranks == 2 else LAYOUTS[4][1:4]
    for found in processes.run(ranks, _elementwise, layouts)[0]:
        assert found.keys() == expected.keys()
        for name, want in expected.items():
            assert want.dtype == torch.bfloat16
            if name.endswith(".muon"):
                assert float((found[name] != want).float().mean()) < 0.03, name
            else:
                assert torch.equal(found[name], want), name


def everything(model: torch.nn.Module, made: ModelOptimizer) -> dict[str, Tensor]:
    """A collective call."""
    found = {name: whole(parameter).clone() for name, parameter in model.named_parameters()}
    for name, parameter in model.named_parameters():
        found |= {f"{name}.{key}": whole(value).clone() for key, value in made.state.get(parameter, {}).items()}
    return found


def _go_on(folder: Path, layouts: list[dict[str, Any]], keys: dict[str, Any]) -> list[list[dict[str, Tensor]]]:
    """For each layout what was loaded from `folder/one`, and the step after it."""
    rank, ranks, found = (dist.get_rank(), dist.get_world_size(), [])
    for layout in layouts:
        model, made = build(layout, keys)
        keeper = checkpointer(folder / "one", rank, ranks)
        keeper.load(keeper.find() or Path(), model, made)
        loaded = everything(model, made)
        give_gradients(model, 2)
        made.step()
        found.append([loaded, everything(model, made)])
    return found if rank == 0 else []


def test_checkpoints_of_muon_go_to_any_sharding(tmp_path: Path) -> None:
    """States in bfloat16, rounded at random; the next step is the same, too."""
    keys = MUON | HALF | {"master_dtype": "fp32", "muon_ns_dtype": "fp32"}
    model, made = build({}, keys)
    for step in range(2):
        give_gradients(model, step)
        made.step()
    checkpointer(tmp_path / "one").save(2, model, made, {}, final=True)
    saved = everything(model, made)
    assert {value.dtype for name, value in saved.items() if "momentum_buffer" in name} == {torch.bfloat16}
    give_gradients(model, 2)
    made.step()
    after = everything(model, made)
    again, optimizer = build({}, keys)
    keeper = checkpointer(tmp_path / "one")
    keeper.load(keeper.find() or Path(), again, optimizer)
    give_gradients(again, 2)
    optimizer.step()
    assert equal(everything(again, optimizer), after)
    for loaded, stepped in processes.run(2, _go_on, tmp_path, LAYOUTS[2], keys)[0]:
        assert equal(loaded, saved)
        assert stepped.keys() == after.keys()
        for name, value in after.items():
            if "momentum" in name or "exp_avg" in name:
                assert torch.equal(stepped[name], value), name
            else:
                assert torch.allclose(stepped[name], value, rtol=1e-5, atol=1e-5), name


def _all(layouts: list[dict[str, Any]], cases: list[str]) -> dict[tuple[int, str], dict[str, list[Tensor]]]:
    found = {
        (number, case): changes(layout, MUON | CASES[case][0], audio_lr=LR / 2)
        for number, layout in enumerate(layouts)
        for case in cases
    }
    return found if not dist.is_initialized() or dist.get_rank() == 0 else {}


def assert_muon(found: dict[str, list[Tensor]], case: str) -> None:
    keys, limit = CASES[case]
    model, made = build({}, MUON | keys, audio_lr=LR / 2)
    kinds = {parameter: group for group in made.param_groups for parameter in group["params"]}
    config = model.config.text_config
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    heads["v_proj"] = heads["k_proj"]
    for name, parameter in model.named_parameters():
        group = kinds.get(parameter)
        if group is None or group["kind"] != "muon":
            continue
        assert group["lr"] == pytest.approx(LR / 2 if "audio" in name else LR)
        blocks = 1
        if "split" in case and (child := name.split(".")[-2]) in heads:
            blocks = model.config.audio_config.encoder_attention_heads if "audio" in name else heads[child]
        values = found[name]
        reference = Reference(
            values[0],
            group["lr"],
            group["weight_decay"],
            nesterov=group["nesterov"],
            how=group["adjust_lr_fn"],
            blocks=blocks,
        )
        for step in range(STEPS):
            want = reference.step(gradient(name, parameter.shape, step))
            got = values[step + 1].double() - values[step].double()
            off, allowed = share_off(got, want), limit * (10 if deficient(name) else 1)
            if deficient(name) and case in ("fp16", "bf16"):
                off = share_off(*in_directions_of(want, got))
            assert off < allowed, f"{case}, {name}, step {step}: {off:.2e}"


@pytest.mark.parametrize("ranks", [1, 2, pytest.param(4, marks=pytest.mark.slow)])
def test_each_change_is_that_of_whole_matrices(ranks: int) -> None:
    cases = list(CASES) if ranks < 4 else [case for case in CASES if case != "bf16"]
    found = _all(LAYOUTS[1], cases) if ranks == 1 else processes.run(ranks, _all, LAYOUTS[ranks], cases)[0]
    assert len(found) == len(LAYOUTS[ranks]) * len(cases)
    for (_, case), values in found.items():
        assert_muon(values, case)


def _uneven(world: int) -> list[Tensor]:
    """Matrices that are divided, and stacks of which ranks hold other numbers of whole ones; small portions."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(muon_plan, "PORTION", 64)
        torch.manual_seed(0)
        net = nn.ParameterList(torch.randn(shape) for shape in ((9, 7), (33, 12), (5, 2, 3), (5, 4, 3)))
        if world > 1:
            fully_shard(net, mesh=init_device_mesh("cpu", (world,)))
        config = check_config(MUON | {"muon_ns_dtype": "fp32"}, OptimizerConfig)
        optimizer = make_optimizer(net, parameter_groups(net, config), config, seed=3)
        for step in range(2):
            for number, parameter in enumerate(net):
                generator = torch.Generator().manual_seed(100 * step + number)
                drawn = torch.randn(parameter.shape, generator=generator)
                parameter.grad = parameter.detach().clone().copy_(drawn) if world == 1 else like(parameter, drawn)
            optimizer.step()
        return [whole(parameter).clone() for parameter in net]


def like(parameter: Any, value: Tensor) -> Tensor:
    return distribute_tensor(value, parameter.device_mesh, parameter.placements)


@pytest.mark.parametrize("ranks", [3, 4])
def test_ranks_with_other_numbers_of_whole_matrices(ranks: int) -> None:
    wanted = _uneven(1)
    for found in processes.run(ranks, _uneven, ranks):
        assert all(torch.allclose(a, b, rtol=1e-4, atol=1e-5) for a, b in zip(found, wanted, strict=True))
