"""Two GPUs against one over NCCL: shards, sequence and expert parallelism, on text, audio and video, and both mixed."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests import dist as processes
from tests.train.models import media
from tests.train.parallel.steps import FP32, Outcome, fill, make_parts, meta_model, outcome
from tests.train.parallel.test_equal_to_serial import TAKEN, degrees_of
from tests.train.parallel.test_equal_to_serial import batches_of as cpu_batches
from train.data.batch import Batch
from train.data.device import make_features
from train.models.foundation import FoundationModel
from train.ops.device import describe_device
from train.ops.registry import Ops, bind_ops, eager_ops, resolve

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]
LAYOUTS: dict[str, dict[str, Any]] = {
    "fsdp=2": {},
    "two replicas": {"dp_replicate_size": 2},
    "sp=2": {"ulysses_size": 2},
    "ep=2": {"ep_size": 2},
    "sp=2 ep=2": {"ulysses_size": 2, "ep_size": 2},
    "ep=2, rows gathered": {"ep_size": 2, "expert_dispatch": "all_gather"},
    "sp=2 ep=2, rows gathered": {"ulysses_size": 2, "ep_size": 2, "expert_dispatch": "all_gather"},
}


@dataclass(frozen=True)
class Way:
    """attention: None = plain operations in float32; else a backend, with the fastest of the others, in bfloat16."""

    attention: str | None
    layouts: tuple[str, ...] = tuple(LAYOUTS)

    def ops(self, device: torch.device) -> Ops:
        if self.attention is None:
            return eager_ops(device.type)
        place = describe_device(device)
        return bind_ops(resolve({"attn_implementation": self.attention}, place, "bfloat16"), place, "bfloat16")


EXACT = "float32"
WAYS = {
    EXACT: Way(None),
    "bfloat16": Way("auto"),
    # whose inputs are views with strides after an all-to-all
    "bfloat16, cudnn": Way("cudnn", ("sp=2", "sp=2 ep=2")),
}
LOSS, GRADIENT = 1e-5, 1e-3  # in float32, relative: losses and norms; each gradient, by the norm of the difference
# in bfloat16, where rows choose other experts when sums are rounded in another order: losses, relative; the error of
# all gradients together to those of one GPU in float32, over that of one GPU in bfloat16
ROUNDED_LOSS, NOISE = 2e-2, 1.5
CHANCE = 0.2  # which a single row's other choice may make of them, in so small a model


def batches_of(kind: str, layout: dict[str, Any], device: torch.device) -> list[Batch]:
    moved = [b.to(device) for b in cpu_batches(kind, dist.get_rank(), degrees_of(dist.get_world_size(), layout))]
    return [replace(batch, features=make_features(batch, media.omni_assets())) for batch in moved]


def outcomes(way: Way, layouts: Iterable[str], device: torch.device) -> dict[tuple[str, str], Outcome]:
    """By layout and kind of batch; every second layout computes its blocks again in the backward pass."""
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    found = {}
    for number, name in enumerate(layouts):
        layout = LAYOUTS[name]
        keys: dict[str, Any] = layout | {"fsdp_config": FP32 if way.attention is None else {}}
        model = meta_model(ops=way.ops(device), aligned=True)
        parts = make_parts(keys, model, device=device, checkpointing=number % 2 == 1)
        assert isinstance(parts.model, FoundationModel)
        for kind, steps in TAKEN.items():
            fill(parts.model)
            found[name, kind] = outcome(parts, batches_of(kind, layout, device), steps)
    return found


def _all_ways(alone: bool) -> dict[str, dict[tuple[str, str], Outcome]] | None:
    """alone: of one process."""
    device = torch.device("cuda", dist.get_rank())
    found = {name: outcomes(way, ["fsdp=2"] if alone else way.layouts, device) for name, way in WAYS.items()}
    return found if dist.get_rank() == 0 else None


def share(difference: dict[str, Tensor], whole: dict[str, Tensor]) -> float:
    """Norm of all gradients together over that of others."""
    return float(_norm(difference) / _norm(whole))


def _norm(gradients: dict[str, Tensor]) -> Tensor:
    return torch.stack([gradient.norm() for gradient in gradients.values()]).norm()


def difference(got: Outcome, want: Outcome) -> dict[str, Tensor]:
    return {name: got.gradients[name] - gradient for name, gradient in want.gradients.items()}


def compare_exact(got: Outcome, want: Outcome) -> list[str]:
    """What is further apart than it may be."""
    apart = {name: max(_apart(getattr(got, name), getattr(want, name))) for name in ("losses", "norms")}
    wrong = [f"{name}: {value:.3g}" for name, value in apart.items() if not value <= LOSS]
    largest = max(gradient.norm() for gradient in want.gradients.values())
    for name, value in difference(got, want).items():
        norm = want.gradients[name].norm()
        if norm > 1e-2 * largest and not value.norm() <= GRADIENT * norm:
            wrong.append(f"{name}: {value.norm() / norm:.3g}")
    return wrong


def compare_rounded(got: Outcome, alone: Outcome, exact: Outcome) -> list[str]:
    """alone, exact: of one GPU, in bfloat16 and in float32."""
    apart = max(_apart(got.losses, alone.losses))
    wrong = [] if apart <= ROUNDED_LOSS else [f"losses: {apart:.3g}"]
    errors = [share(difference(found, exact), exact.gradients) for found in (got, alone)]
    if not errors[0] <= max(NOISE * errors[1], CHANCE):
        wrong.append(f"gradients: {errors[0]:.3g} from float32, one GPU {errors[1]:.3g}")
    return wrong


def _apart(got: list[float], want: list[float]) -> list[float]:
    return [abs(a - b) / abs(b) for a, b in zip(got, want, strict=True)]


def test_two_gpus_equal_one() -> None:
    backend = "cpu:gloo,cuda:nccl"
    alone = processes.run(1, _all_ways, True, backend=backend)[0]
    both = processes.run(2, _all_ways, False, backend=backend)[0]
    wrong = []
    for name, way in WAYS.items():
        assert set(both[name]) == {(layout, kind) for layout in way.layouts for kind in TAKEN}
        for (layout, kind), got in both[name].items():
            exact = alone[EXACT]["fsdp=2", kind]
            rounded = alone[name]["fsdp=2", kind]
            said = compare_exact(got, exact) if name == EXACT else compare_rounded(got, rounded, exact)
            wrong += [f"{name}, {layout}, {kind}: {what}" for what in said]
    assert not wrong, "\n".join(wrong)
