"""Attention over slices of a sequence against attention over the whole of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from transformers import Gemma2Config, LlamaConfig

from schemas.errors import ConfigError, UnsupportedError
from tests import dist as processes
from train.models.hub_model import HubModel, build_hub_model
from train.models.inputs import ModelInputs
from train.ops.attention import eager
from train.ops.registry import eager_ops
from train.ops.segments import Segments
from train.parallel.ulysses import UlyssesAttention, apply_ulysses

LENGTHS = (5, 1, 11, 7)
ROWS = sum(LENGTHS)
# query heads, key/value heads, head size, value head size, options
CASES: dict[str, tuple[int, int, int, int, dict[str, Any]]] = {
    "as many key heads": (8, 8, 6, 6, {}),
    "grouped heads": (8, 4, 6, 6, {}),
    "fewer key heads than ranks": (8, 1, 6, 6, {}),
    "two key heads": (4, 2, 6, 6, {"scale": 0.3}),
    "other values": (4, 4, 6, 10, {}),
    "window": (4, 2, 6, 6, {"window": 3}),
    "both options": (4, 4, 6, 6, {"window": 4, "softcap": 2.0}),
    "not causal": (4, 4, 6, 6, {"causal": False}),
}


def tensors(case: str) -> tuple[list[Tensor], Tensor, dict[str, Any]]:
    """float64 q, k, v of the whole sequence, a gradient of the output, options."""
    heads, kv_heads, size, value_size, options = CASES[case]
    generator = torch.Generator().manual_seed(1)
    shapes = [(ROWS, heads, size), (ROWS, kv_heads, size), (ROWS, kv_heads, value_size), (ROWS, heads, value_size)]
    q, k, v, gradient = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)
    return [q, k, v], gradient, {"causal": True} | options


def attend(attention: Any, inputs: list[Tensor], gradient: Tensor, options: dict[str, Any]) -> list[Tensor]:
    """Output and gradients of q, k, v."""
    leaves = [x.clone().requires_grad_() for x in inputs]
    out = attention(*leaves, Segments.from_lengths(LENGTHS, "cpu"), **options)
    out.backward(gradient)
    return [out.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)]


def _slices() -> dict[str, list[Tensor]]:
    """This rank's slices; strided, as models give them."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    own = slice(rank * ROWS // ranks, (rank + 1) * ROWS // ranks)
    found = {}
    for case in CASES:
        inputs, gradient, options = tensors(case)
        parts = [x[own].transpose(0, 1).contiguous().transpose(0, 1) for x in inputs]
        found[case] = attend(UlyssesAttention(eager, dist.group.WORLD), parts, gradient[own], options)
    q, k, v = tensors("as many key heads")[0]
    for heads, kv_heads, said in ((3, 1, "does not divide 3 att"), (4 * ranks, 3, "neither divides 3 key/value heads")):
        with pytest.raises(ConfigError, match=f"ulysses_size {ranks} {said}"):
            one = UlyssesAttention(eager, dist.group.WORLD)
            given = q.repeat(1, 2, 1)[own, :heads], k[own, :kv_heads], v[own, :kv_heads]
            one(*given, Segments.from_lengths(LENGTHS, "cpu"), causal=True)
    return found


@pytest.mark.parametrize("ranks", [2, 4])
def test_slices_equal_the_whole(ranks: int) -> None:
    found = processes.run(ranks, _slices)
    for case in CASES:
        expected = attend(eager, *tensors(case))
        for number, want in enumerate(expected):
            got = torch.cat([rank[case][number] for rank in found])
            assert torch.allclose(got, want, rtol=1e-12, atol=1e-12), (case, number)


def hub_configs() -> dict[str, Any]:
    """Grouped heads; windows in every other layer with capped scores."""
    sizes: dict[str, Any] = {
        "vocab_size": 97,
        "hidden_size": 32,
        "intermediate_size": 40,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
    }
    return {
        "llama": LlamaConfig(**sizes),
        "gemma2": Gemma2Config(**sizes, sliding_window=4, attn_logit_softcapping=5.0, final_logit_softcapping=7.0),
    }


def hub_model(folder: str) -> HubModel:
    model = build_hub_model(folder, eager_ops())
    model.initialize(3)
    model.attention = eager  # the one that knows every option
    return model


def hub_inputs(rank: int, ranks: int) -> ModelInputs:
    generator = torch.Generator().manual_seed(2)
    ids = torch.randint(0, 97, (ROWS,), generator=generator)
    positions = torch.cat([torch.arange(length) for length in LENGTHS]).expand(3, -1)
    own = slice(rank * ROWS // ranks, (rank + 1) * ROWS // ranks)
    return ModelInputs(
        ids=ids[own],
        position_ids=positions[:, own],
        segments=Segments.from_lengths(LENGTHS, "cpu"),
        num_valid=ROWS // ranks,
        labels=ids.roll(-1)[own],
        loss_scale=torch.tensor(1 / ROWS),
    )


def run_hub(model: HubModel, inputs: ModelInputs) -> dict[str, Tensor]:
    """Loss and gradients."""
    loss = model(inputs).loss
    assert loss is not None
    loss.backward()
    return {"loss": loss.detach()} | {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def _hub(folders: list[str]) -> list[dict[str, Tensor]]:
    found = []
    for folder in folders:
        model = hub_model(folder)
        apply_ulysses(model, dist.group.WORLD)
        values = run_hub(model, hub_inputs(dist.get_rank(), dist.get_world_size()))
        for value in values.values():
            dist.all_reduce(value)
        found.append(values)
    return found


def test_models_of_transformers(tmp_path: Any) -> None:
    folders = []
    for name, config in hub_configs().items():
        config.save_pretrained(tmp_path / name)
        folders.append(str(tmp_path / name))
    for folder, got in zip(folders, processes.run(4, _hub, folders)[0], strict=True):
        expected = run_hub(hub_model(folder), hub_inputs(0, 1))
        greatest = max(value.abs().max() for value in expected.values())
        for name, want in expected.items():
            assert (got[name] - want).abs().max() <= 1e-5 * want.abs().max() + 1e-7 * greatest, (folder, name)


def test_positions_that_need_the_whole_sequence_are_refused(tmp_path: Any) -> None:
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    config = hub_configs()["llama"]
    LlamaConfig(**(config.to_dict() | {"rope_parameters": rope})).save_pretrained(tmp_path)
    model = build_hub_model(str(tmp_path), eager_ops())
    with pytest.raises(UnsupportedError, match="rope_type dynamic depends on the length"):
        apply_ulysses(model, dist.group.WORLD)  # no collective
    assert not isinstance(model.attention, UlyssesAttention)
