"""Every combination of sequence, expert and data parallelism gives the losses, gradients and parameters of one
process. The table of combinations in docs/parallelism.md is made from the results."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from schemas.strict import check_config
from tests import dist as processes
from tests.train.data.mixes import Mix
from tests.train.models import media
from tests.train.parallel.steps import (
    FP32,
    STEPS,
    Outcome,
    assert_equal,
    fill,
    long_text,
    make_parts,
    meta_model,
    outcome,
)
from train.config_trainer import AcceleratorConfig
from train.data.batch import Batch
from train.mesh import Degrees
from train.models.foundation import FoundationModel

PAGE = Path(__file__).parents[3] / "docs" / "parallelism.md"
WRITE = "WRITE_DOCS"  # in the environment: writes the page instead of comparing

Maker = Callable[[], Mix]
# kind -> micro-step -> rows of a quarter of the ranks
BATCHES: dict[str, list[list[list[Maker]]]] = {
    "text": [[[media.text_mix], [long_text], [long_text, media.text_mix], [media.text_mix]]],
    "audio and video": [
        [[media.clip_with_sound_mix], [media.video_mix], [media.audio_mix], [media.clip_with_sound_mix]]
    ],
    "mixed": [
        [[media.text_mix], [long_text], [media.clip_with_sound_mix], [media.everything_mix]],
        [[media.image_mix, long_text], [media.audio_mix], [media.text_mix], [long_text, media.text_mix]],
    ],
}
MAX_GRAD_NORM = 0.5  # which every step is clipped to
TAKEN = {"text": 1, "audio and video": 1, "mixed": STEPS}
# keys of train.accelerator, dp_shard_size being what is left
COMBINATIONS: dict[int, list[dict[str, int]]] = {
    2: [
        {},
        {"dp_replicate_size": 2},
        {"ulysses_size": 2},
        {"ep_size": 2},
        {"ulysses_size": 2, "ep_size": 2},
    ],
    4: [
        {},
        {"dp_replicate_size": 2},
        {"ulysses_size": 2},
        {"ulysses_size": 4},
        {"ep_size": 2},
        {"ep_size": 4},
        {"ulysses_size": 2, "ep_size": 2},
        {"ulysses_size": 2, "ep_size": 4},
        {"ulysses_size": 4, "ep_size": 2},
        {"ulysses_size": 4, "ep_size": 4},
        {"dp_replicate_size": 2, "ulysses_size": 2},
        {"dp_replicate_size": 2, "ep_size": 2},
        {"dp_replicate_size": 2, "ulysses_size": 2, "ep_size": 2},
    ],
}

# of four processes, on mixed batches
OPTIONS: list[dict[str, Any]] = [
    {"dp_replicate_size": 2, "ulysses_size": 2, "ep_size": 2, "fsdp_config": {**FP32, "sync_every_micro_batch": False}},
    {"ulysses_size": 2, "fsdp_config": {**FP32, "tower_units": "blocks"}},
    {"ep_size": 2, "fsdp_config": {**FP32, "offload": True}},
    {
        "ulysses_size": 2,
        "ep_size": 2,
        "fsdp_config": {
            **FP32,
            "sync_every_micro_batch": False,
            "reshard_after_forward": False,
            "reshard_after_backward": False,
            "forward_prefetch": False,
        },
    },
    {"ulysses_size": 2, "fsdp_config": {**FP32, "fsdp_mode": "ddp"}},
    {"ep_size": 4, "expert_dispatch": "all_gather"},
    {"ulysses_size": 2, "ep_size": 2, "expert_dispatch": "all_gather"},
    {"dp_replicate_size": 2, "ep_size": 2, "expert_dispatch": "all_gather"},
]


def degrees_of(world_size: int, keys: dict[str, int]) -> Degrees:
    return Degrees.of(check_config({"fsdp_config": FP32} | keys, AcceleratorConfig), world_size)


def batches_of(kind: str, rank: int, degrees: Degrees) -> list[Batch]:
    """Of one rank; all together have the same rows in each micro-step, however many there are."""
    share, (dp_rank, sp_rank) = 4 // degrees.dp, divmod(rank, degrees.ulysses)
    return [
        _batch(tuple(make for part in micro[dp_rank * share :][:share] for make in part), sp_rank, degrees.ulysses)
        for micro in BATCHES[kind]
    ]


@cache
def _batch(makers: tuple[Maker, ...], sp_rank: int, sp_size: int) -> Batch:
    return media.batch_of(media.omni_assets(), [make() for make in makers], sp_rank=sp_rank, sp_size=sp_size)


@cache
def one_process(kind: str) -> Outcome:
    parts = make_parts({}, meta_model(), max_grad_norm=MAX_GRAD_NORM)
    found = outcome(parts, batches_of(kind, 0, Degrees()), TAKEN[kind])
    assert min(found.norms) > MAX_GRAD_NORM
    return found


def outcomes(keys: dict[str, int], number: int = 0) -> dict[str, Outcome]:
    """By kind of batch. number: odd ones recompute their blocks in the backward pass."""
    parts = make_parts(dict(keys), meta_model(), checkpointing=number % 2 == 1, max_grad_norm=MAX_GRAD_NORM)
    assert isinstance(parts.model, FoundationModel)
    found = {}
    for kind, steps in TAKEN.items():
        fill(parts.model)
        found[kind] = outcome(parts, batches_of(kind, parts.mesh.rank, parts.mesh.degrees), steps)
    return found


def _all(world_size: int) -> list[dict[str, Outcome]] | None:
    found = [outcomes(keys, number) for number, keys in enumerate(COMBINATIONS[world_size])]
    return found if dist.get_rank() == 0 else None


def table(world_size: int, verdicts: list[dict[str, str]]) -> str:
    """One line per combination."""
    lines = [
        "| replicas | shards | `ulysses_size` | `ep_size` | ranks of an expert | " + " | ".join(TAKEN) + " |",
        "| --- " * (5 + len(TAKEN)) + "|",
    ]
    for keys, verdict in zip(COMBINATIONS[world_size], verdicts, strict=True):
        d = degrees_of(world_size, keys)
        cells = [d.dp_replicate, d.dp_shard, d.ulysses, d.ep, f"{d.world // d.ep} of {d.world}", *verdict.values()]
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines)


def compare_page(world_size: int, made: str) -> None:
    """Against what stands between two comments of the page; writes it when asked to."""
    begin, end = f"<!-- {world_size} processes -->\n", f"\n<!-- end of {world_size} processes -->"
    before, _, rest = PAGE.read_text().partition(begin)
    shown, _, after = rest.partition(end)
    if os.environ.get(WRITE):
        PAGE.write_text(before + begin + made + end + after)
        return
    assert shown == made, f"{PAGE.name} is out of date; run this test with {WRITE}=1 in the environment"


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("world_size", COMBINATIONS)
def test_ranks_equal_one_process(world_size: int) -> None:
    found: list[dict[str, Outcome]] = processes.run(world_size, _all, world_size, timeout_s=540.0)[0]
    verdicts: list[dict[str, str]] = []
    wrong = []
    for keys, by_kind in zip(COMBINATIONS[world_size], found, strict=True):
        verdicts.append({kind: "equal" for kind in by_kind})
        for kind, got in by_kind.items():
            if (said := difference(got, one_process(kind))) is not None:
                wrong.append(f"{world_size} ranks, {keys}, {kind}: {said}")
                verdicts[-1][kind] = "differs"
    assert not wrong, "\n".join(wrong)
    compare_page(world_size, table(world_size, verdicts))


def _options() -> list[Outcome] | None:
    found = []
    for keys in OPTIONS:
        parts = make_parts(keys, meta_model(), checkpointing=True, max_grad_norm=MAX_GRAD_NORM)
        found.append(outcome(parts, batches_of("mixed", parts.mesh.rank, parts.mesh.degrees)))
    return found if dist.get_rank() == 0 else None


@pytest.mark.slow
def test_options_of_fsdp() -> None:
    found: list[Outcome] = processes.run(4, _options)[0]
    said = {str(keys): difference(got, one_process("mixed")) for keys, got in zip(OPTIONS, found, strict=True)}
    assert not any(said.values()), said


def difference(found: Outcome, expected: Outcome) -> str | None:
    """What is not equal."""
    try:
        assert_equal(found, expected)
        for got, want in zip(found.losses, expected.losses, strict=True):
            assert abs(got - want) <= 1e-6 * max(1.0, abs(want)), f"losses: {found.losses} {expected.losses}"
    except AssertionError as error:
        return str(error)
    return None
