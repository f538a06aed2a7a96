"""Gradient checkpointing changes no number, whatever it keeps."""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy as Choice
from torch.utils.checkpoint import create_selective_checkpoint_contexts

from schemas.errors import ConfigError
from schemas.strict import check_config
from tests.train.lora.adapted import DENSE, adapted
from tests.train.models import media
from tests.train.models.families import make_ours, run_ours
from tests.train.ops.computed import Computed
from tests.train.ops.triton_cases import ON_GPU, kernels_can_run
from train.config_trainer import GradientCheckpointingConfig, OffloadConfig
from train.data.processor import ProcessorAssets
from train.model_build import checkpoint_policy
from train.models.audio import AudioBlock
from train.models.checkpointing import (
    BlockStack,
    CheckpointPolicy,
    Keep,
    keep_attention,
    keep_mlp,
    keep_projections,
    keeps,
    set_checkpointing,
)
from train.models.foundation import FoundationModel
from train.models.inputs import text_inputs
from train.models.moe import Experts
from train.models.text import TextBlock
from train.models.vision import VisionBlock
from train.ops import triton_moe_first
from train.ops.registry import Device, bind_ops, eager_ops
from train.ops.triton_moe import moe_experts
from train.parallel.offload import ActivationOffload

ATTENTION = "aten::_scaled_dot_product_flash_attention_for_cpu"
BLOCKS = {TextBlock: 3, VisionBlock: 3, AudioBlock: 2}


@pytest.fixture(scope="module")
def thinker() -> FoundationModel:
    return make_ours("omni")


@pytest.fixture(scope="module")
def assets() -> ProcessorAssets:
    return media.omni_assets()


def _keep_products(_: Any, op: Any, *args: Any, **kwargs: Any) -> Choice:
    return Choice.MUST_SAVE if op == torch.ops.aten.mm.default else Choice.PREFER_RECOMPUTE


POLICIES: dict[str, CheckpointPolicy] = {
    "inputs": CheckpointPolicy(),
    "products": CheckpointPolicy(partial(create_selective_checkpoint_contexts, _keep_products)),
    "attention": CheckpointPolicy(keep_attention),
    "projections": CheckpointPolicy(keep_projections),
    "mlp": CheckpointPolicy(keep_mlp),
    "half": CheckpointPolicy(share=0.5),
    "the sound tower keeps everything, half of the vision tower": CheckpointPolicy(
        shares={"audio": 0.0, "vision": 0.5}
    ),
    "elsewhere": CheckpointPolicy(carry=ActivationOffload()),
    "some elsewhere": CheckpointPolicy(carry=ActivationOffload(30_000)),
    "attention, elsewhere, two thirds": CheckpointPolicy(keep_attention, 0.67, carry=ActivationOffload()),
    "projections, elsewhere, two thirds": CheckpointPolicy(keep_projections, 0.67, carry=ActivationOffload()),
}


@pytest.mark.parametrize("name", POLICIES)
def test_gradients_are_the_same_bit_for_bit(thinker: FoundationModel, assets: ProcessorAssets, name: str) -> None:
    inputs = media.case_of(assets, [media.everything_mix()]).inputs
    off, gradients = run_ours(thinker, inputs)
    set_checkpointing(thinker, POLICIES[name])
    for _ in range(2):  # what a policy keeps of one pass must not meet the next
        output, others = run_ours(thinker, inputs)
        assert output.loss is not None and off.loss is not None and torch.equal(output.loss, off.loss)
        assert gradients.keys() == others.keys()
        assert all(torch.equal(others[name], value) for name, value in gradients.items())
    set_checkpointing(thinker, None)


@pytest.mark.parametrize(
    ("name", "again"),
    [("inputs", 8), ("attention", 8), ("projections", 8), ("elsewhere", 8), ("half", 3), ("some elsewhere", 8)],
)
def test_blocks_run_again(thinker: FoundationModel, assets: ProcessorAssets, name: str, again: int) -> None:
    inputs = media.case_of(assets, [media.everything_mix()]).inputs
    blocks = [module for module in thinker.modules() if isinstance(module, tuple(BLOCKS))]
    assert len(blocks) == sum(BLOCKS.values())
    runs: Counter[nn.Module] = Counter()
    handles = [block.register_forward_pre_hook(lambda module, _: runs.update([module])) for block in blocks]
    set_checkpointing(thinker, POLICIES[name])
    run_ours(thinker, inputs)
    assert sorted(runs.values()) == [1] * (len(blocks) - again) + [2] * again
    runs.clear()
    with torch.no_grad():
        thinker(inputs)
    assert set(runs.values()) == {1}  # nothing to recompute for
    set_checkpointing(thinker, None)
    for handle in handles:
        handle.remove()


def test_what_is_kept_is_not_computed_again(thinker: FoundationModel, assets: ProcessorAssets) -> None:
    """Attention of 8 blocks; four projections of 3 text blocks, which have no bias, and one of 3 of the vision tower,
    which has."""
    inputs = media.case_of(assets, [media.everything_mix()]).inputs
    found = {}
    for name in ("everything", "inputs", "attention", "projections"):
        set_checkpointing(thinker, POLICIES.get(name))
        with Computed() as computed:
            run_ours(thinker, inputs)
        found[name] = computed.counts
    set_checkpointing(thinker, None)
    once = found["everything"][ATTENTION]
    assert once > 0 and found["inputs"][ATTENTION] == 2 * once
    assert found["attention"][ATTENTION] == found["projections"][ATTENTION] == once
    for product, fewer in (("aten::mm", 4 * 3), ("aten::addmm", 3)):
        assert found["attention"][product] == found["inputs"][product] > found["everything"][product]
        assert found["projections"][product] == found["inputs"][product] - fewer


@pytest.mark.parametrize("trained", ["text", "visual.blocks.2.mlp", "layers.1.mlp"])
@pytest.mark.parametrize("name", ["attention", "projections"])
def test_frozen_parts(thinker: FoundationModel, assets: ProcessorAssets, name: str, trained: str) -> None:
    """Blocks that ask for few gradients, or for none."""
    inputs = media.case_of(assets, [media.everything_mix()]).inputs
    towers = ("visual", "audio_tower")
    for path, parameter in thinker.named_parameters():
        parameter.requires_grad_(trained in path if trained != "text" else not path.startswith(towers))
    _, gradients = run_ours(thinker, inputs)
    set_checkpointing(thinker, POLICIES[name])
    _, others = run_ours(thinker, inputs)
    set_checkpointing(thinker, None)
    thinker.requires_grad_(True)
    assert gradients and gradients.keys() == others.keys()
    assert all(torch.equal(others[path], value) for path, value in gradients.items())


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_adapters_around_a_kept_projection(dropout: float) -> None:
    """The sum of the base and what the adapter adds is kept: one product is computed again for each of four
    projections, and not three."""
    model, _ = adapted("moe", lora_modules=DENSE, lora_dropout=dropout)
    parts = [torch.randint(0, 200, (n,), generator=torch.Generator().manual_seed(n)) for n in (11, 6)]
    inputs, found = text_inputs(parts, parts), {}
    for name in ("everything", "inputs", "projections"):
        set_checkpointing(model.train(), POLICIES.get(name))
        torch.manual_seed(3)
        with Computed() as computed:
            _, gradients = run_ours(model, inputs)
        found[name] = gradients, computed.counts["aten::mm"] + computed.counts["aten::addmm_"]
    wanted, _ = found["everything"]
    for name in ("inputs", "projections"):
        assert wanted and all(torch.equal(found[name][0][path], value) for path, value in wanted.items())
    assert found["projections"][1] == found["inputs"][1] - 2 * 4 * 3


@pytest.mark.parametrize("adapters", [False, True])
def test_mlps_are_not_computed_again(adapters: bool) -> None:
    """Two products more for each of three layers, with adapters or without."""
    model = adapted("dense", lora_modules=[*DENSE, "gate_proj"])[0] if adapters else make_ours("dense")
    parts = [torch.randint(0, 200, (n,), generator=torch.Generator().manual_seed(n)) for n in (11, 6)]
    inputs, found = text_inputs(parts, parts), {}
    for name in ("everything", "projections", "mlp"):
        set_checkpointing(model, POLICIES.get(name))
        with Computed() as computed:
            _, gradients = run_ours(model, inputs)
        found[name] = gradients, computed.counts["aten::mm"]
    wanted, _ = found["everything"]
    assert wanted and all(torch.equal(found["mlp"][0][path], value) for path, value in wanted.items())
    assert found["mlp"][1] == found["projections"][1] - 2 * 3


@pytest.mark.skipif(ON_GPU, reason="tensors are on the CPU, which kernels take under the interpreter alone")
@pytest.mark.parametrize("adapters", [False, True])
def test_experts_are_not_computed_again(adapters: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    kernels_can_run()
    runs: list[int] = []
    products = triton_moe_first.gate_up_products
    monkeypatch.setattr(triton_moe_first, "gate_up_products", lambda *given: runs.append(1) or products(*given))
    model = adapted("moe", lora_modules=["q_proj", "up_proj", "down_proj"])[0] if adapters else make_ours("moe")
    experts = [module for module in model.modules() if isinstance(module, Experts)]
    for module in experts:
        module.compute = moe_experts
    parts = [torch.randint(0, 200, (n,), generator=torch.Generator().manual_seed(n)) for n in (11, 6)]
    inputs, found = text_inputs(parts, parts), {}
    for name, times in (("everything", 1), ("projections", 2), ("mlp", 1)):
        set_checkpointing(model, POLICIES.get(name))
        runs.clear()
        _, found[name] = run_ours(model, inputs)
        assert len(runs) == times * len(experts) > 0
    wanted = found["everything"]
    assert wanted and all(torch.equal(found["mlp"][path], value) for path, value in wanted.items())


def test_inputs_leave(thinker: FoundationModel, assets: ProcessorAssets) -> None:
    """Of the inputs of blocks only the last two are where they were when the backward pass begins; in it only that of
    the block which runs and that of the one before it."""
    inputs = media.case_of(assets, [media.everything_mix()]).inputs
    offload = ActivationOffload()
    records: list[Any] = []
    leave = offload._leave
    offload._leave = lambda hidden: records.append(leave(hidden)) or records[-1]  # type: ignore[method-assign, func-returns-value]
    set_checkpointing(thinker, CheckpointPolicy(carry=offload))
    loss = thinker(inputs).loss
    here = [record.here is not None for record in records]
    assert len(records) >= 6 and here == [False] * (len(records) - 2) + [True] * 2
    blocks = [module for module in thinker.modules() if isinstance(module, tuple(BLOCKS))]
    most: list[int] = []
    count = lambda *_: most.append(sum(record.here is not None for record in records))  # noqa: E731
    handles = [block.register_forward_pre_hook(count) for block in blocks]
    loss.backward()
    assert len(most) == len(records) and max(most[2:]) == 1
    assert not any(record.here is not None for record in records)
    for handle in handles:
        handle.remove()
    set_checkpointing(thinker, None)
    thinker.zero_grad(set_to_none=True)


def test_policy_of_a_configuration() -> None:
    ops, on = eager_ops(), OffloadConfig(enable_activation=True, activation_gpu_limit=0.5)
    off = OffloadConfig()

    def policy(offload: OffloadConfig = off, sparse: bool = False, **keys: Any) -> CheckpointPolicy | None:
        return checkpoint_policy(check_config(keys, GradientCheckpointingConfig), ops, offload, sparse=sparse)

    assert policy(enable=False) is None
    assert policy() == CheckpointPolicy()
    assert policy(keep="attention", share=0.5) == CheckpointPolicy(keep_attention, 0.5)
    assert policy(keep="projections") == CheckpointPolicy(keep_projections)
    assert policy(keep="mlp") == CheckpointPolicy(keep_mlp)
    with pytest.raises(ConfigError, match=r"keep: mlp, .* moe_implementation eager .* fused_triton or .* projections"):
        policy(keep="mlp", sparse=True)
    assert policy(share=0.5, audio_share=0.0) == CheckpointPolicy(share=0.5, shares={"audio": 0.0})
    within = policy(keep="projections", keep_gb=0.5).context_fn
    assert isinstance(within, Keep) and within.limit == within.room.left == 500_000_000
    names = ["inputs", "attention", "projections", "mlp"]
    for number, kind in enumerate(("attention", "projection", "mlp"), 1):
        for limit in (None, 0.5):
            found = [name for name in names[1:] if keeps(policy(keep=name, keep_gb=limit), kind)]
            assert found == names[number:] and not keeps(policy(), kind)
    with pytest.raises(ConfigError, match="keep_gb limits the results that keep names, which is inputs"):
        policy(keep_gb=0.5)
    found = policy(on)
    assert found is not None and isinstance(found.carry, ActivationOffload) and found.carry.gpu_bytes == 500_000_000
    with pytest.raises(ConfigError, match=r"enable_activation .* set train.gradient_checkpointing.enable to true"):
        policy(on, enable=False)
    names = {"attention": "eager"}
    eager = bind_ops({op.op: names.get(op.op, "eager") for op in vars(ops).values()}, Device("cpu"))
    for keep in ("attention", "projections"):
        said = rf"keep: {keep}, .* eager cannot be kept; choose cudnn, torch_varlen, triton, sdpa or keep: inputs"
        with pytest.raises(ConfigError, match=said):
            checkpoint_policy(check_config({"keep": keep}, GradientCheckpointingConfig), eager, off)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "name",
    ["elsewhere", "some elsewhere", "attention, elsewhere, two thirds", "projections, elsewhere, two thirds"],
)
def test_inputs_elsewhere_on_a_gpu(name: str) -> None:
    """Large enough for copies to be late if nothing waited for them."""
    from jobs.bench.parallel_model import TINY, fill, rows_of  # noqa: PLC0415
    from train.mesh import Degrees, Mesh  # noqa: PLC0415
    from train.models.text_lm import Qwen3LM  # noqa: PLC0415

    shape = TINY.__class__(layers=6, hidden=512, heads=8, kv_heads=4, head_dim=64, experts=8, top_k=2, inner=128,
                           vocab=1024, tokens=32768, document=2048)  # fmt: skip
    with torch.device("cuda"):
        model = Qwen3LM(shape.config(), eager_ops("cuda")).bfloat16()
    fill(model, 0)
    inputs = rows_of(shape, Mesh(Degrees(), 0, torch.device("cuda")))
    _, gradients = run_loss(model, inputs)
    set_checkpointing(model, POLICIES[name])
    for _ in range(3):
        _, others = run_loss(model, inputs)
        for key, value in gradients.items():
            assert (others[key] - value).float().norm() <= 2e-2 * value.float().norm(), key


def run_loss(model: nn.Module, inputs: Any) -> tuple[float, dict[str, torch.Tensor]]:
    model.zero_grad(set_to_none=True)
    loss = model(inputs).loss
    loss.backward()
    return float(loss), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def test_shares_of_towers() -> None:
    model = make_ours("omni")
    set_checkpointing(model, CheckpointPolicy(share=1.0, shares={"audio": 0.0}))
    stacks = {stack.part: stack for stack in model.modules() if isinstance(stack, BlockStack)}
    policies = {part: stack.run_block for part, stack in stacks.items()}
    assert all(isinstance(policy, CheckpointPolicy) for policy in policies.values())
    kept = {part: len(policy.whole) for part, policy in policies.items()}
    assert kept == {"text": 0, "vision": 0, "audio": len(stacks["audio"].layers)}


@pytest.mark.parametrize(("shares", "first"), [({}, {"text"}), ({"text": 0.0}, {"text", "vision", "audio"})])
def test_towers_come_first_where_the_text_model_keeps_everything(shares: dict[str, float], first: set[str]) -> None:
    model = make_ours("omni")
    set_checkpointing(model, CheckpointPolicy(Keep.within(frozenset({"attention"}), 10), shares=shares))
    found = {}
    for stack in model.modules():
        if isinstance(stack, BlockStack):
            assert isinstance(stack.run_block, CheckpointPolicy)
            assert isinstance(stack.run_block.context_fn, Keep)
            found[stack.part] = stack.run_block.context_fn.first
    assert {part for part, comes_first in found.items() if comes_first} == first
