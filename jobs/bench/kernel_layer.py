"""A whole text layer of Qwen3-Omni-30B-A3B, forward and backward, ours and VeOmni's generated Qwen3-MoE model.

Models of two depths with the same weights; their difference is the time of a layer, without embedding, head and loss.
48 layers with these are extrapolated. VeOmni runs its Triton experts, Liger's norms and rotary embedding, its
chunk_loss, and attention by torch's flash attention; ours runs with the same attention and with the one that `auto`
takes. Both compute the same loss, which is checked with the gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Qwen3MoeConfig

from jobs.bench import kernel_veomni
from jobs.bench.claims import Claim, at_least, at_most
from jobs.bench.kernel_peers import find
from jobs.bench.kernel_timing import PEAK_TFLOPS, extra_gib, milliseconds
from train.models.checkpointing import CheckpointPolicy, set_checkpointing
from train.models.inputs import ModelInputs, text_inputs
from train.models.text_lm import Qwen3LM
from train.ops.registry import AUTO, Device, bind_ops, resolve

LENGTHS = (4096,) * 4
DEPTHS = (2, 6)
WHOLE = 48  # layers of the model
ATTENTION = "torch_varlen"  # of both
VEOMNI, SAME, OURS = f"veomni, {ATTENTION}", f"ours, {ATTENTION}", "ours, auto"
OVER_VEOMNI = 1.4
LOSS_DIFFERENCE, GRADIENT_DIFFERENCE = 1e-3, 0.15  # transformers' bfloat16 gradients are 0.07 from float32's
FLOPS = 6 * 2048 * (2 * 32 * 128 + 2 * 4 * 128 + 128 + 8 * 3 * 768)  # of a layer's products for a token
HEAD_FLOPS = 6 * 2048 * 151_936
ATTENTION_FLOPS = 6 * 32 * 128  # for each token of the context, causal

Step = Callable[[], Tensor]


@dataclass(frozen=True)
class Subject:
    """A model, its loss with all gradients, and the switch that computes its blocks again in the backward pass."""

    model: nn.Module
    step: Step
    recompute: Callable[[bool], None]


def configuration(layers: int, **changes: Any) -> Qwen3MoeConfig:
    """Of the text model, as a language model of its own."""
    values: dict[str, Any] = {
        "vocab_size": 151_936, "hidden_size": 2048, "intermediate_size": 768, "moe_intermediate_size": 768,
        "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "num_experts": 128,
        "num_experts_per_tok": 8, "norm_topk_prob": True, "decoder_sparse_step": 1, "max_position_embeddings": 65536,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}, "tie_word_embeddings": False,
        "architectures": ["Qwen3MoeForCausalLM"],
    }  # fmt: skip
    return Qwen3MoeConfig(num_hidden_layers=layers, **(values | changes))


def draw(lengths: Sequence[int], vocabulary: int, device: str) -> ModelInputs:
    """Packed documents of random tokens, every next token a label."""
    generator = torch.Generator().manual_seed(0)
    documents = [torch.randint(0, vocabulary, (length,), generator=generator) for length in lengths]
    return text_inputs(documents, documents, device)


def with_gradients(model: nn.Module, loss_of: Step) -> Step:
    """The loss, after a backward pass into fresh gradients."""

    def step() -> Tensor:
        model.zero_grad(set_to_none=True)
        loss = loss_of()
        loss.backward()
        return loss.detach()

    return step


def ours(
    config: Qwen3MoeConfig, weights: dict[str, Tensor], inputs: ModelInputs, attention: str, dtype: str
) -> Subject:
    """Our model with these weights; attention: a backend or `auto`, all else `auto`."""
    kind = inputs.ids.device.type
    device = Device(kind, torch.cuda.get_device_capability() if kind == "cuda" else None)
    ops = bind_ops(resolve({"attn_implementation": attention}, device, dtype), device, dtype)
    with inputs.ids.device:
        model = Qwen3LM(config, ops).to(getattr(torch, dtype))
    model.load_state_dict(weights)

    def loss_of() -> Tensor:
        loss = model(inputs).ce_loss  # the router's statistics are made, its loss is left out, as VeOmni does
        assert loss is not None
        return loss

    def recompute(on: bool) -> None:
        set_checkpointing(model, CheckpointPolicy() if on else None)

    return Subject(model, with_gradients(model, loss_of), recompute)


def theirs(config: Qwen3MoeConfig, inputs: ModelInputs, attention: str, dtype: str) -> Subject:
    """VeOmni's model with random weights."""
    torch.manual_seed(0)
    model = kernel_veomni.build(config, attention, inputs.segments, dtype, inputs.ids.device.type)
    positions = inputs.position_ids[0]

    def recompute(on: bool) -> None:
        kernel_veomni.recompute_blocks(model, on)

    step = with_gradients(model, lambda: kernel_veomni.loss_of(model, inputs.ids, positions, inputs.segments))
    return Subject(model, step, recompute)


def subjects(depth: int, inputs: ModelInputs) -> dict[str, Subject]:
    """All three, with one set of weights."""
    peer = theirs(configuration(depth), inputs, ATTENTION, "bfloat16")
    weights = peer.model.state_dict()
    kinds = {SAME: ATTENTION, OURS: AUTO}
    made = {kind: ours(configuration(depth), weights, inputs, name, "bfloat16") for kind, name in kinds.items()}
    return {VEOMNI: peer, **made}


def difference(found: Subject, expected: Subject) -> tuple[float, float]:
    """(of the losses, of all gradients together), both relative to what is expected."""
    losses = [float(subject.step()) for subject in (found, expected)]
    gradients = {name: p.grad for name, p in found.model.named_parameters()}
    apart = size = torch.zeros((), dtype=torch.float64, device=next(found.model.parameters()).device)
    for name, parameter in expected.model.named_parameters():
        one, other = gradients[name], parameter.grad
        assert one is not None and other is not None, f"{name} has no gradient"
        apart = apart + (one.float() - other.float()).norm().double() ** 2
        size = size + other.float().norm().double() ** 2
    for subject in (found, expected):
        subject.model.zero_grad(set_to_none=True)
    return abs(losses[0] / losses[1] - 1), float((apart / size).sqrt())


def measure(subject: Subject) -> tuple[float, float]:
    """(milliseconds of a step, GiB that it takes above the weights)."""
    time = milliseconds(subject.step, repeats=5)
    subject.model.zero_grad(set_to_none=True)
    memory = extra_gib(subject.step)
    subject.model.zero_grad(set_to_none=True)
    return time, memory


def claims(quick: bool) -> list[Claim]:
    """All claims; quick: without recompute alone."""
    if find("veomni.models.auto", "build_foundation_model") is None:
        return []
    inputs = draw(LENGTHS, 150_000, "cuda")
    found: list[Claim] = []
    seen: dict[tuple[str, int, bool], tuple[float, float]] = {}  # milliseconds and GiB
    for depth in DEPTHS:
        made = subjects(depth, inputs)
        if depth == DEPTHS[0]:
            found += [*same_claims(SAME, made), *same_claims(OURS, made)]
        for again in (False,) if quick else (False, True):
            for kind, subject in made.items():
                subject.recompute(again)
                seen[kind, depth, again] = measure(subject)
        del made
        torch.cuda.empty_cache()
    for again in (False,) if quick else (False, True):
        found += layer_claims({(kind, depth): v for (kind, depth, flag), v in seen.items() if flag == again}, again)
    return found


def same_claims(kind: str, made: dict[str, Subject]) -> list[Claim]:
    """That they compute the same function: in bfloat16, where some choices of experts differ."""
    loss, gradients = difference(made[kind], made[VEOMNI])
    said = f"{DEPTHS[0]} layers, the same weights, bf16"
    return [
        at_most(f"layer: {kind}: loss beside veomni's, relative", loss, LOSS_DIFFERENCE, "", said),
        at_most(f"layer: {kind}: all gradients beside veomni's, relative", gradients, GRADIENT_DIFFERENCE, "", said),
    ]


def layer_claims(seen: dict[tuple[str, int], tuple[float, float]], again: bool) -> list[Claim]:
    """From the times and the memory of both depths. seen: (kind, depth) -> (milliseconds, GiB above the weights)."""
    few, many = DEPTHS
    tokens = sum(LENGTHS)
    context = sum(length * length for length in LENGTHS) / tokens
    at = "layer, blocks recomputed" if again else "layer"
    layers, wholes, found = {}, {}, []
    for kind in (VEOMNI, SAME, OURS):
        (short, less), (long, more) = seen[kind, few], seen[kind, many]
        layer = layers[kind] = (long - short) / (many - few)
        whole = wholes[kind] = short + (WHOLE - few) * layer
        said = f"T={tokens}, documents of {LENGTHS[0]}; {few} layers {short:.1f} ms, {many} layers {long:.1f} ms"
        memory = f"; {(more - less) / (many - few):.2f} GiB of gradients and activations for a layer"
        found.append(Claim(f"{at}: {kind}", round(layer, 2), "ms", "", None, said + memory))
        flops = tokens * (WHOLE * (FLOPS + ATTENTION_FLOPS * context) + HEAD_FLOPS)
        share = flops / whole / 1e9 / PEAK_TFLOPS * 100
        said = f"extrapolated, with embedding, head and loss; {tokens / whole * 1000:,.0f} tokens/s, {share:.1f} % MFU"
        found.append(Claim(f"{at}: {kind}, {WHOLE} layers", round(whole, 0), "ms", "", None, said))
    over = layers[VEOMNI] / layers[OURS]
    found.append(at_least(f"{at}: veomni / ours, each with its attention", over, OVER_VEOMNI, "x", "time of a layer"))
    same = layers[VEOMNI] / layers[SAME]
    found.append(Claim(f"{at}: veomni / ours, the same attention", round(same, 3), "x", "", None, "time of a layer"))
    said = f"{WHOLE} layers with embedding, head and each its own loss"
    found.append(Claim(f"{at}: veomni / ours, whole", round(wholes[VEOMNI] / wholes[OURS], 3), "x", "", None, said))
    return found
