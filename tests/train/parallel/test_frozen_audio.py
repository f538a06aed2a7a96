"""A frozen audio tower beside a text model, and beside Qwen3-VL: every layout of ranks has the losses, gradients and
parameters of one process, with ranks that have no sound, none but sound, or rows without labels."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from schemas.strict import check_config
from tests import dist as processes
from tests.train.data.mixes import Mix
from tests.train.models import checkpoints, families, media
from tests.train.parallel.steps import FP32, Outcome, assert_equal, long_text, make_parts, outcome
from train.config_trainer import AcceleratorConfig
from train.data.batch import Batch
from train.mesh import Degrees
from train.models.foundation import FoundationModel
from train.models.frozen_audio import FrozenAudioTower, add_audio_tower
from train.ops.registry import eager_ops

Maker = Callable[[], Mix]


def speech_mix() -> Mix:
    return Mix(turns=media._turns("audio", "audio"), sounds=[media.sound(21, 3.3), media.sound(22, 0.6)])


# family -> micro-step -> rows of a quarter of the ranks
BATCHES: dict[str, list[list[list[Maker]]]] = {
    "moe": [
        [[media.text_mix], [media.audio_mix], [speech_mix, long_text], [media.text_mix]],
        [[media.audio_mix], [long_text], [media.text_mix], [media.text_mix]],
        [[media.text_mix], [long_text], [media.text_mix], [long_text]],
    ],
    "vl_moe": [[[media.text_mix], [media.clip_with_sound_mix], [media.everything_mix], [media.audio_mix]]],
}
COMBINATIONS: dict[int, list[dict[str, int]]] = {
    2: [{}, {"ulysses_size": 2}, {"ep_size": 2}, {"ulysses_size": 2, "ep_size": 2}],
    4: [{"ulysses_size": 2, "ep_size": 2}, {"ulysses_size": 4}, {"ulysses_size": 4, "ep_size": 4}, {"ep_size": 2}],
}
STEPS = 2


def batches_of(family: str, rank: int, degrees: Degrees) -> list[Batch]:
    """Of one rank; all together have the same rows in each micro-step, however many there are."""
    share, (dp_rank, sp_rank) = 4 // degrees.dp, divmod(rank, degrees.ulysses)
    return [
        _batch(tuple(make for part in micro[dp_rank * share :][:share] for make in part), sp_rank, degrees.ulysses)
        for micro in BATCHES[family]
    ]


@cache
def _batch(makers: tuple[Maker, ...], sp_rank: int, sp_size: int) -> Batch:
    return media.batch_of(media.omni_assets(), [make() for make in makers], sp_rank=sp_rank, sp_size=sp_size)


def course(family: str, keys: dict[str, int], folder: Path, *, checkpointing: bool = False) -> Outcome:
    with torch.device("meta"):
        model = families.FAMILIES[family].ours(families.FAMILIES[family].make_config(), eager_ops())
    add_audio_tower(model, folder, eager_ops(), torch.float32)
    parts = make_parts(keys, model, checkpointing=checkpointing)
    assert isinstance(parts.model, FoundationModel)
    tower = parts.model.frozen_audio
    assert isinstance(tower, FrozenAudioTower) and not tower.loaded
    found = outcome(parts, batches_of(family, parts.mesh.rank, parts.mesh.degrees), STEPS)
    assert not [name for name in parts.model.state_dict() if "audio" in name]
    held = [parameter for group in parts.optimizer.param_groups for parameter in group["params"]]
    assert len(held) == len(list(parts.model.parameters()))
    return found


def degrees_of(world_size: int, keys: dict[str, int]) -> Degrees:
    return Degrees.of(check_config({"fsdp_config": FP32} | keys, AcceleratorConfig), world_size)


def _all(folder: Path, world_size: int) -> list[dict[str, Outcome]] | None:
    found = [
        {family: course(family, keys, folder, checkpointing=number % 2 == 1) for family in BATCHES}
        for number, keys in enumerate(COMBINATIONS[world_size])
    ]
    return found if dist.get_rank() == 0 else None


@pytest.fixture(scope="module")
def omni(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("omni")
    checkpoints.save_model("omni", folder, "per-expert")
    return folder


@pytest.fixture(scope="module")
def alone(omni: Path) -> dict[str, Outcome]:
    return {family: course(family, {}, omni) for family in BATCHES}


@pytest.mark.parametrize("world_size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_ranks_equal_one_process(omni: Path, alone: dict[str, Outcome], world_size: int) -> None:
    found: list[dict[str, Outcome]] = processes.run(world_size, _all, omni, world_size)[0]
    for keys, by_family in zip(COMBINATIONS[world_size], found, strict=True):
        for family, got in by_family.items():
            try:
                assert_equal(got, alone[family])
                for loss, want in zip(got.losses, alone[family].losses, strict=True):
                    assert abs(loss - want) <= 1e-6 * max(1.0, abs(want))
            except AssertionError as error:
                raise AssertionError(f"{world_size} ranks, {keys}, {family}: {error}") from error


def test_what_is_heard_matters(omni: Path, alone: dict[str, Outcome]) -> None:
    """The loss without the tower's rows is another."""
    with torch.device("meta"):
        model = families.FAMILIES["moe"].ours(families.FAMILIES["moe"].make_config(), eager_ops())
    add_audio_tower(model, omni, eager_ops(), torch.float32)
    parts = make_parts({}, model)
    assert isinstance(parts.model, FoundationModel)
    tower = parts.model.frozen_audio
    assert tower is not None
    parts.model.hear = lambda inputs, found: found  # type: ignore[method-assign]
    deaf = outcome(parts, batches_of("moe", 0, Degrees()), 1)
    assert abs(deaf.losses[0] - alone["moe"].losses[0]) > 1e-3
