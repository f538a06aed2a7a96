"""Averages in CPU memory: the same steps and checkpoints bit by bit, and buffers that are few."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from convert.dcp_index import StoredTensor
from convert.tensors import TensorInfo
from schemas.errors import UnsupportedError
from schemas.strict import check_config
from tests import dist as processes
from tests.train.models.families import MOE
from tests.train.optim.test_optimizers_in_the_trainer import HALF, MUON, Watch
from tests.train.parallel.test_muon import DDP, build, everything, give_gradients
from tests.train.tiny import omni_config, write_data
from tests.train.tiny_training import checkpointer, equal
from train.checkpoint_state import optimizer_tensors, state_templates
from train.config_optimizer import OptimizerConfig
from train.optim import build as build_module
from train.optim import muon_plan, offload
from train.optim.adamw_pieces import adamw_portions
from train.optim.build import ModelOptimizer, make_optimizer
from train.optim.groups import parameter_groups
from train.optim.offload import HostMemory, OffloadedAverages
from train.optim.rounding import Draws, Place
from train.parallel.loading import local_part
from train.trainer import make_trainer

CPU = torch.device("cpu")
CASES: dict[str, dict[str, Any]] = {
    "muon": {"type": "muon"},
    "muon, bf16": {"type": "muon"} | HALF,
    "muon, bf16 averages": {"type": "muon", "state_dtype": "bf16"},
    "adamw": {"type": "adamw"},
    "adamw, bf16": {"type": "adamw"} | HALF,
}
LAYOUTS: dict[int, list[dict[str, Any]]] = {
    1: [{}],
    2: [{}, DDP, {"ulysses_size": 2, "ep_size": 2}],
}


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(muon_plan, "PORTION", 3000)
    monkeypatch.setattr(build_module, "ADAMW_PORTION", 700)


def _small_here() -> None:
    """Of a process of its own."""
    muon_plan.PORTION, build_module.ADAMW_PORTION = 3000, 700


class Parts(nn.Module):
    """Matrices both ways, a stack, an embedding that is cut into pieces, vectors, a scalar, nothing."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(301, 24)
        self.weights = nn.ParameterList(torch.randn(shape) for shape in [(40, 64), (64, 40), (5, 24, 32), (37, 53)])
        self.small = nn.ParameterList(torch.randn(shape) for shape in [(7,), (), (0,), (900,)])
        self.to(dtype)


def optimizer(model: nn.Module, keys: dict[str, Any], *, on_cpu: bool) -> ModelOptimizer:
    config = check_config({"lr": 0.02, "weight_decay": 0.1} | keys, OptimizerConfig)
    found = ModelOptimizer(model, parameter_groups(model, config), config, seed=3, offload=on_cpu)
    return found


def train(model: nn.Module, made: torch.optim.Optimizer, steps: range) -> dict[str, Tensor]:
    """Parameters and states after each step."""
    found = {}
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        for parameter in model.parameters():
            parameter.grad = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
        made.step()
        for name, parameter in model.named_parameters():
            found[f"{step}.{name}"] = parameter.detach().clone()
            found |= {f"{step}.{name}.{key}": value.clone() for key, value in made.state[parameter].items()}
    return found


@pytest.mark.parametrize("name", CASES)
def test_steps_are_the_same_bit_by_bit(name: str) -> None:
    keys = CASES[name]
    dtype = torch.bfloat16 if "master_dtype" in keys else torch.float32
    found = []
    for on_cpu in (False, True):
        model = Parts(dtype)
        made = optimizer(model, keys, on_cpu=on_cpu)
        found.append(train(model, made, range(4)))
    assert len(made._portions) + len(made._muon.portions) > 2 * offload.BUFFERS
    assert any(pieces[0].start for _, pieces in made._portions)
    assert found[0].keys() == found[1].keys()
    for key, value in found[0].items():
        assert torch.equal(found[1][key], value), key


def test_averages_are_pieces_of_slabs() -> None:
    """Which were allocated once."""
    model = Parts(torch.float32)
    made = optimizer(model, CASES["muon"], on_cpu=True)
    train(model, made, range(1))
    averages = [v for state in made.state.values() for key, v in state.items() if key != "step"]
    before = [average.data_ptr() for average in averages]
    slabs = {average.untyped_storage().data_ptr(): average.untyped_storage().nbytes() for average in averages}
    bytes_of_all = sum(average.nbytes for average in averages)
    assert len(slabs) < len(averages) / 2
    assert bytes_of_all <= sum(slabs.values()) < 1.6 * bytes_of_all
    train(model, made, range(1, 3))
    assert [v.data_ptr() for state in made.state.values() for key, v in state.items() if key != "step"] == before


def test_memory_is_handed_out_once() -> None:
    memory = HostMemory(5000, pinned=False)
    taken = [memory.take(shape, dtype) for shape in ((7, 30), (3,), (), (0,), (40, 50), (900,)) for dtype in
             (torch.float32, torch.bfloat16)]  # fmt: skip
    for number, tensor in enumerate(taken):
        assert not tensor.any() and tensor.is_contiguous() and tensor.data_ptr() % 2 == 0
        tensor.fill_(number + 1)
    for number, tensor in enumerate(taken):
        assert (tensor == number + 1).all()


def test_a_portion_is_elsewhere_until_it_is_left() -> None:
    portions = [[torch.full((size,), float(size)), torch.full((3,), 0.5).bfloat16()] for size in (100, 7, 0, 300, 1, 9)]
    places: set[int] = set()
    with OffloadedAverages(CPU, 0).visits(portions) as visit:
        for portion in portions:
            with visit() as (one, other):
                assert torch.equal(one, portion[0]) and torch.equal(other, portion[1])
                one += 1
                other += 1
                assert (portion[0] == len(portion[0])).all() and (portion[1] == 0.5).all()
                places.add(other.untyped_storage().data_ptr())
            assert (portion[0] == len(portion[0]) + 1).all() and (portion[1] == 1.5).all()
    assert len(places) == offload.BUFFERS


def test_pieces_are_all_of_a_part_with_its_random_bits() -> None:
    class Sharded:
        """Columns 4 to 10 of rows 2 to 39 of [50, 16]."""

        place = Place(2 * 16 + 4, 6, 16)

    parameters = [torch.zeros(37, 6), torch.zeros(0, 6), torch.zeros(200, 6), torch.zeros(3), torch.zeros(2, 500)]
    places = {parameter: Place(0, max(parameter[:1].numel(), 1), 0) for parameter in parameters}
    places[parameters[0]] = Sharded.place
    portions = adamw_portions(parameters, places, 200)
    for parameter in parameters:
        pieces = [piece for portion in portions for piece in portion if piece.parameter is parameter]
        assert [piece.start for piece in pieces] == [0, *(piece.stop for piece in pieces[:-1])]
        assert pieces[-1].stop == parameter.numel()
    assert all(sum(piece.size for piece in portion) <= 200 or len(portion) == 1 for portion in portions)
    draws = Draws.of(1, 2, "name", "what", Sharded.place)
    pieces = [piece for portion in portions for piece in portion if piece.parameter is parameters[0]]
    assert len(pieces) > 1
    bits = [(piece.draws((draws, draws)) or (draws,))[0].bits(0, piece.size, CPU) for piece in pieces]
    assert torch.equal(torch.cat(bits), draws.bits(0, 37 * 6, CPU))


def test_who_reads_the_states_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Parts(torch.float32)
    made = optimizer(model, CASES["adamw"], on_cpu=True)
    train(model, made, range(1))
    waited: list[int] = []
    monkeypatch.setattr(OffloadedAverages, "wait", lambda _: waited.append(1))
    optimizer_tensors(model, made)
    assert len(waited) == 1
    made.state_dict()
    assert len(waited) == 2
    train(model, made, range(1, 2))
    assert len(waited) == 2


def test_torchs_adamw_is_not_taken() -> None:
    model = nn.Linear(4, 3)
    config = check_config({"type": "adamw"}, OptimizerConfig)
    found = [make_optimizer(model, parameter_groups(model, config), config, offload=on) for on in (False, True)]
    assert [type(made) for made in found] == [torch.optim.AdamW, ModelOptimizer]


def test_averages_of_another_dtype_or_place_are_brought_in() -> None:
    model = Parts(torch.float32)
    made = optimizer(model, CASES["muon"], on_cpu=True)
    train(model, made, range(1))
    before = {parameter: dict(state) for parameter, state in made.state.items()}
    made.load_state_dict(made.state_dict())
    for state in made.state.values():
        for key in state.keys() - {"step"}:
            state[key] = state[key].to(torch.bfloat16)
    made.state[model.weights[0]]["momentum_buffer"] = before[model.weights[0]]["momentum_buffer"].clone()
    stepped = train(model, made, range(1, 2))
    assert {v.dtype for state in made.state.values() for v in state.values()} == {torch.float32}
    other = Parts(torch.float32)
    want = train(other, optimizer(other, CASES["muon"], on_cpu=False), range(2))
    assert torch.equal(stepped["1.weights.0"], want["1.weights.0"])


# over ranks


def _stepped(layouts: list[dict[str, Any]], cases: list[str]) -> list[list[dict[str, Tensor]]]:
    """Without and with."""
    if dist.is_initialized():
        _small_here()
    found = []
    for layout in layouts:
        for case in cases:
            pair = []
            for on_cpu in (False, True):
                model, made = build(layout, MUON | CASES[case], offload=on_cpu)
                for step in range(3):
                    give_gradients(model, step)
                    made.step()
                pair.append(everything(model, made))
                for parameter, state in made.state.items():
                    for key, value in state.items():
                        assert key == "step" or isinstance(value, DTensor) == isinstance(parameter, DTensor)
                        if isinstance(value, DTensor):
                            assert isinstance(parameter, DTensor) and value.placements == parameter.placements
            found.append(pair)
    return found if not dist.is_initialized() or dist.get_rank() == 0 else []


@pytest.mark.parametrize("ranks", [1, 2])
def test_any_sharding_steps_the_same(ranks: int) -> None:
    cases = ["muon", "muon, bf16", "adamw, bf16"]
    found = _stepped(LAYOUTS[1], cases) if ranks == 1 else processes.run(2, _stepped, LAYOUTS[2], cases)[0]
    assert len(found) == len(LAYOUTS[ranks]) * len(cases)
    for without, having in found:
        assert equal(without, having)


def _resumed(folder: Path, layouts: list[dict[str, Any]]) -> list[list[dict[str, Tensor]]]:
    """Of each layout: two steps more, and the same after a checkpoint, from and to either place."""
    rank, ranks = 0, 1
    if dist.is_initialized():
        _small_here()
        rank, ranks = dist.get_rank(), dist.get_world_size()
    keys, found = MUON | HALF, []
    for number, layout in enumerate(layouts):
        results = []
        for before in (False, True):
            model, made = build(layout, keys, offload=before)
            for step in range(2):
                give_gradients(model, step)
                made.step()
            keeper = checkpointer(folder / f"{ranks}_{number}_{before}", rank, ranks)
            keeper.save(2, model, made, {})  # in the background
            give_gradients(model, 2)
            made.step()
            keeper.wait()
            results.append(everything(model, made))
            for after in (False, True):
                again, other = build(layout, keys, offload=after)
                keeper.load(keeper.find() or Path(), again, other)
                give_gradients(again, 2)
                other.step()
                results.append(everything(again, other))
        found.append(results)
    return found if rank == 0 else []


@pytest.mark.parametrize("ranks", [1, 2])
def test_checkpoints_go_from_and_to_either_place(tmp_path: Path, ranks: int) -> None:
    layouts = [LAYOUTS[ranks][0], LAYOUTS[ranks][-1]] if ranks > 1 else LAYOUTS[1]
    found = _resumed(tmp_path, layouts) if ranks == 1 else processes.run(2, _resumed, tmp_path, layouts)[0]
    for results in found:
        assert len(results) == 6
        assert all(equal(results[0], other) for other in results[1:])
    sizes = [sum(f.stat().st_size for f in (tmp_path / f"{ranks}_0_{on}").rglob("*.distcp")) for on in (False, True)]
    assert sizes[1] == pytest.approx(sizes[0], rel=0.001)  # no slab is saved with a view of it


def test_templates_are_where_averages_live() -> None:
    """Of the dtype of the averages; others are brought there by the next step."""
    model = Parts(torch.float32)
    made = optimizer(model, {"type": "muon", "state_dtype": "bf16"}, on_cpu=True)
    for dtype, shared in ((torch.bfloat16, True), (torch.float32, False)):
        train(model, made, range(1))
        stored = {
            name: StoredTensor(TensorInfo(tuple(value.shape), value.dtype if name.endswith("step") else dtype), ())
            for name, value in optimizer_tensors(model, made).items()
        }
        templates = [v for name, v in state_templates(model, made, stored).items() if not name.endswith("step")]
        assert {template.dtype for template in templates} == {dtype}
        slabs = {template.untyped_storage().data_ptr() for template in templates if template.numel()}
        assert (len(slabs) < len(templates) / 2) == shared
    train(model, made, range(1))
    assert {v.dtype for s in made.state.values() for k, v in s.items() if k != "step"} == {torch.bfloat16}


# the trainer


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return write_data(tmp_path_factory.mktemp("data"))


def _run(folder: Path, sources: list[dict[str, Any]], keys: dict[str, Any], on: bool, steps: int) -> list[float]:
    watch = Watch()
    accelerator = {"offload_config": {"enable_optimizer": on}}
    config = omni_config(folder, sources, max_steps=steps, optimizer=keys, accelerator=accelerator)
    trainer = make_trainer(config, callbacks=[watch])
    trainer.train()
    assert isinstance(trainer.optimizer, ModelOptimizer) == (on or keys["type"] == "muon")
    slabs = {local_part(v).untyped_storage().data_ptr() for s in trainer.optimizer.state.values() for v in s.values()}
    assert (len(slabs) < 1.5 * len(trainer.optimizer.state)) == on  # each has a step, besides
    return watch.losses


def test_a_training_with_the_key(tmp_path: Path, sources: list[dict[str, Any]], monkeypatch: Any) -> None:
    monkeypatch.setitem(MOE, "moe_intermediate_size", 24)
    keys = MUON | {"state_dtype": "bf16", "lr_decay_style": "constant"}
    assert _run(tmp_path / "on", sources, keys, True, 3) == _run(tmp_path / "off", sources, keys, False, 3)
    keys = {"type": "adamw", "lr": 1e-3, "lr_decay_style": "constant"}
    whole = _run(tmp_path / "torch", sources, keys, False, 4)
    first = _run(tmp_path / "parts", sources, keys, False, 1)
    second = _run(tmp_path / "parts", sources, keys, True, 3)  # goes on with the averages of torch's AdamW
    third = _run(tmp_path / "parts", sources, keys, False, 4)
    assert first + second + third == pytest.approx(whole, rel=1e-4)


def test_no_group_comes_later() -> None:
    """It would have no place among the averages, and never change."""
    net = nn.ParameterList([torch.randn(4, 3)])
    config = check_config({"type": "muon"}, OptimizerConfig)
    groups = parameter_groups(net, config)
    late = {**groups[0], "params": [nn.Parameter(torch.randn(4, 3))]}
    make_optimizer(net, parameter_groups(net, config), config, offload=False).add_param_group(dict(late))
    with pytest.raises(UnsupportedError, match="takes no more parameters; make another"):
        make_optimizer(net, groups, config, offload=True).add_param_group(dict(late))
