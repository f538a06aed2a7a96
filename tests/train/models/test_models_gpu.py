"""The models on a GPU: the numbers of the CPU, and no step that waits for the device."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, replace

import pytest
import torch
from torch import Tensor

from tests.train.models import media
from tests.train.models.families import FAMILIES, make_ours, run_ours
from train.models.inputs import ModelInputs
from train.ops.registry import Device, bind_ops, eager_ops, resolve

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.fixture(autouse=True)
def exact_products() -> Iterator[None]:
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before


def on_gpu(inputs: ModelInputs) -> ModelInputs:
    moved = {f.name: getattr(inputs, f.name) for f in fields(inputs)}
    tensors = {name: value.cuda() for name, value in moved.items() if isinstance(value, Tensor)}
    segments = type(inputs.segments).from_lengths(inputs.segments.lengths, "cuda")
    return replace(inputs, **tensors, segments=segments)


def test_a_gpu_gives_the_numbers_of_the_cpu() -> None:
    inputs = media.case_of(media.omni_assets(), [media.everything_mix(), media.text_mix()]).inputs
    model = make_ours("omni")
    expected, gradients = run_ours(model, inputs)
    other = FAMILIES["omni"].ours(FAMILIES["omni"].make_config(), eager_ops("cuda")).cuda()
    other.load_state_dict(model.state_dict())
    found, others = run_ours(other, on_gpu(inputs))
    assert found.logits is not None and expected.logits is not None
    assert (found.logits.cpu() - expected.logits).abs().max() < 1e-4
    greatest = max(value.abs().max() for value in gradients.values())
    for name, value in gradients.items():
        limit = 1e-4 * value.abs().max() + 1e-6 * greatest
        assert (others[name].cpu() - value).abs().max() <= limit, name


def test_nothing_waits_for_the_device() -> None:
    inputs = on_gpu(media.case_of(media.omni_assets(), [media.everything_mix(), media.text_mix()]).inputs)
    device = Device("cuda", torch.cuda.get_device_capability())
    ops = bind_ops(resolve({}, device, "bfloat16"), device, "bfloat16")
    model = FAMILIES["omni"].ours(FAMILIES["omni"].make_config(), ops)
    model.load_state_dict(make_ours("omni").state_dict())
    model.cuda().bfloat16()

    def step() -> None:
        loss = model(inputs).loss
        assert loss is not None
        loss.backward()

    step()  # compiles
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
