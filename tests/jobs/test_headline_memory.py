"""The estimate of `train validate` against what runs of the whole 30B took on two H200s (docs/performance.md)."""

from __future__ import annotations

from pathlib import Path

import pytest

from jobs.bench.headline_parts import FAST, LONGER, LONGEST
from jobs.bench.headline_setup import Phase, Run, run_config, write_model
from train.estimate import estimate_memory
from train.mesh import Degrees
from train.model_build import AnyModel
from train.models.spec import build_foundation_model
from train.ops.registry import Device, bind_ops, resolve

AVERAGES_ON_THE_GPU = FAST | {
    "train.accelerator.offload_config.enable_optimizer": False,
    "train.gradient_checkpointing.keep": "projections",
    "train.gradient_checkpointing.keep_gb": 18.3,
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> AnyModel:
    device = Device("cpu")
    folder = write_model(tmp_path_factory.mktemp("model"), 48, quick=False)
    ops = bind_ops(resolve({}, device, "bfloat16"), device, "bfloat16")
    return build_foundation_model(folder, ops, device="meta").bfloat16()


@pytest.mark.parametrize(
    ("settings", "phase", "measured"),
    [
        (FAST, Phase("full", "4k", 16384, 8, 1, 1), 133.8),
        (AVERAGES_ON_THE_GPU, Phase("full", "4k", 16384, 8, 1, 1), 137.5),
        (LONGER, Phase("32k", "4k", 32768, 4, 1, 1), 137.1),
        (LONGEST, Phase("160k", "160k", 163840, 1, 1, 1), 130.3),
    ],
    ids=["full", "averages on the GPU", "32k", "160k"],
)
def test_memory_is_what_was_measured(
    model: AnyModel, settings: dict[str, object], phase: Phase, measured: float, tmp_path: Path
) -> None:
    ranks_of_a_sequence = 2 if phase.name == "160k" else 1
    out = str(tmp_path)
    run = Run("full", "train", False, 2, 48, out, out, sp=ranks_of_a_sequence, settings=settings)
    config = run_config(run, phase)
    degrees = Degrees.of(config.train.accelerator, 2)
    assert degrees.ulysses == ranks_of_a_sequence
    found = estimate_memory(model, degrees, config.train, config.data.max_seq_len)
    assert found.gpu / 1e9 == pytest.approx(measured, rel=0.04)
