"""Every Triton kernel once, forward and backward, at small odd shapes: what compute-sanitizer runs.

    python -m jobs.bench.kernel_sanitize [PART ...]     # all parts without one

Inputs are drawn on the host and copied, so that hardly any kernel but ours runs on the device. Each part prints its
seconds; results that are not finite end it with 1. Values are compared elsewhere (tests/train/ops). Off a GPU it runs
under Triton's interpreter (TRITON_INTERPRET=1).
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from itertools import product

import torch
from torch import Tensor

from train.ops.linear_cross_entropy import IGNORED
from train.ops.lora_types import ExpertLora
from train.ops.triton_adamw import adamw, adamw_many
from train.ops.triton_column_sum import column_sum
from train.ops.triton_layer_norm import layer_norm
from train.ops.triton_linear import linear, linear_gelu
from train.ops.triton_linear_cross_entropy import linear_cross_entropy
from train.ops.triton_moe import moe_experts
from train.ops.triton_muon import average, change, divide
from train.ops.triton_norm import rms_norm
from train.ops.triton_rope import qk_norm_rope
from train.ops.triton_router import router_statistics, topk_softmax
from train.ops.triton_swiglu import swiglu
from train.ops.triton_symmetric import gram_columns, symmetric
from train.ops.triton_vision_rope import vision_rope
from train.optim.adamw import AdamWNumbers, AdamWTensors
from train.optim.rounding import Draws, Place

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HALF, FULL = torch.bfloat16, torch.float32
Found = list[Tensor]


def draw(*shape: int, dtype: torch.dtype = HALF) -> Tensor:
    """Normal numbers with gradient."""
    return torch.randn(*shape).to(dtype).to(DEVICE).requires_grad_()


def backward(outputs: tuple[Tensor, ...], leaves: list[Tensor]) -> Found:
    """The outputs and the gradients of the leaves."""
    given = [torch.randn(y.shape).to(y.dtype).to(DEVICE) for y in outputs]
    return [*outputs, *torch.autograd.grad(outputs, leaves, given)]


def experts(
    tokens: int, number: int, k: int, hidden: int, width: int, dtype: torch.dtype = HALF, entries: int = 0
) -> Found:
    """Some slots without an expert; entries: of the adapters, 0 = none."""
    ids = torch.rand(tokens, number).topk(k).indices
    ids[torch.rand(tokens, k) < 0.1] = -1
    x, weights = draw(tokens, hidden, dtype=dtype), draw(tokens, k, dtype=FULL)
    gate_up, down = draw(number, 2 * width, hidden, dtype=dtype), draw(number, hidden, width, dtype=dtype)
    sizes = [(5, hidden), (width, 5)] * 2 + [(5, width), (hidden, 5)]
    factors = [draw(entries, *size, dtype=dtype) for size in sizes] if entries else []
    lora = None
    if entries:
        gate_a, gate_b, up_a, up_b, down_a, down_b = factors
        lora = ExpertLora(gate_a, gate_b, up_a, up_b, down_a, down_b, 0.5)
    out = moe_experts(x, ids.to(DEVICE), weights, gate_up, down, lora)
    return backward((out,), [x, weights, gate_up, down, *factors])


def moe() -> Found:
    """Few rows an expert; more of one than the large tile of the weight gradients wants; float32; no gradients kept."""
    many = 1600 if DEVICE == "cuda" else 40
    found = experts(37, 5, 2, 136, 72) + experts(many, 1, 1, 136, 72) + experts(9, 2, 1, 20, 12, FULL)
    with torch.no_grad():
        x, gate_up, down = draw(37, 136), draw(5, 144, 136), draw(5, 136, 72)
        ids = torch.randint(0, 5, (37, 2)).to(DEVICE)
        found.append(moe_experts(x, ids, draw(37, 2, dtype=FULL), gate_up, down))
    return found


def lora() -> Found:
    """An adapter for each expert, and one for all."""
    return experts(37, 3, 2, 136, 72, entries=3) + experts(37, 3, 2, 136, 72, entries=1)


def loss() -> Found:
    """A vocabulary of several blocks; rows without a label; both terms; a factor from above; a scale for each row."""
    vocabulary = 5003 if DEVICE == "cuda" else 203
    hidden, weight = draw(13, 24), draw(vocabulary, 24)
    labels = torch.randint(0, vocabulary, (13,))
    labels[::4] = IGNORED
    options = {"label_smoothing": 0.1, "z_loss": 1e-3}
    scale = torch.tensor(0.1, device=DEVICE)
    made = linear_cross_entropy(hidden, weight, labels.to(DEVICE), scale=scale, **options)
    found = [made.loss, made.token_loss, *torch.autograd.grad(made.loss * 3, (hidden, weight))]
    with torch.no_grad():
        found.append(linear_cross_entropy(hidden, weight, labels.to(DEVICE), scale=scale).loss)
    each = linear_cross_entropy(hidden, weight, labels.to(DEVICE), scale=torch.linspace(-1, 1, 13, device=DEVICE))
    return [*found, each.loss, *torch.autograd.grad(each.loss, (hidden, weight))]


def rms() -> Found:
    """With and without the sum, several rows a program and one, columns that are no power of two."""
    found: Found = []
    for rows, width in ((37, 2048), (11, 1999), (70, 72)):
        x, residual, weight = draw(rows, width), draw(rows, width), draw(width)
        found += backward(rms_norm(x, weight, 1e-6)[:1], [x, weight])
        found += backward(rms_norm(x, weight, 1e-6, residual), [x, residual, weight])
    return found


def layer() -> Found:
    """LayerNorm likewise; rows of one part, and of two with a tail that is full and one that is not."""
    found: Found = []
    for rows, width in ((37, 1152), (11, 1999), (70, 72), (70, 20)):
        x, residual, weight, bias = draw(rows, width), draw(rows, width), draw(width), draw(width)
        found += backward(layer_norm(x, weight, bias, 1e-6)[:1], [x, weight, bias])
        found += backward(layer_norm(x, weight, bias, 1e-6, residual), [x, residual, weight, bias])
    return found


def tower() -> Found:
    """Linear layers of the towers: sums of one stage and of two, GELU both ways, gradients whose rows lie apart, and
    those of frozen biases."""
    found: Found = []
    for rows, inner, width in ((5, 8, 20), (301 if DEVICE == "cuda" else 37, 24, 136), (150, 8, 33)):
        x, weight, bias = draw(rows, inner), draw(width, inner), draw(width)
        found += backward((linear(x, weight, bias),), [x, weight, bias])
        for kind in ("none", "tanh"):
            found += backward((linear_gelu(x, weight, bias, kind),), [x, weight, bias])
            found += backward((linear_gelu(x, weight, bias.detach(), kind)[:, 1:],), [x, weight])
        joint = draw(rows, width + 3, dtype=FULL).detach()
        found += [column_sum(joint[:, 1:-2]), column_sum(joint.t())]
    return found


def rotary() -> Found:
    """With both norms, with one and with a rest of the head that is not turned; the towers' on views."""
    found: Found = []
    for (heads, kv_heads, dim, pairs), normed in product(((32, 4, 128, 64), (6, 2, 72, 20)), (2, 1)):
        q, k, weight = draw(7, heads, dim), draw(7, kv_heads, dim), draw(dim)
        cos, sin = (torch.rand(7, pairs).to(DEVICE) for _ in range(2))
        out = qk_norm_rope(q, k, weight, weight if normed == 2 else None, cos, sin, 1e-6)
        found += backward(out, [q, k, weight])
    both = draw(9, 3, 16, 72)
    cos, sin = (torch.rand(9, 36).to(DEVICE) for _ in range(2))
    return found + backward(vision_rope(both[:, 0], both[:, 1], cos, sin), [both])


def pointwise() -> Found:
    """SwiGLU of dense tensors and of halves; the router's choice and its statistics with rows that do not count."""
    gate, up, joint = draw(33, 769), draw(33, 769), draw(33, 2 * 72)
    found = backward((swiglu(gate, up),), [gate, up])
    found += backward((swiglu(*joint.chunk(2, -1)),), [joint])
    logits, ids = draw(301, 128), torch.rand(301, 128).topk(8).indices.to(DEVICE)
    for experts, k, normalize in ((128, 8, True), (128, 8, False), (60, 3, True)):
        some = draw(301, experts)
        weights, chosen = topk_softmax(some, k, normalize)
        found += [chosen, *backward((weights,), [some])]
    counts, sums = router_statistics(logits, ids, 290)
    return [*found, counts, *backward((sums,), [logits])]


def optimizers() -> Found:
    """AdamW and Muon with random rounding and without, and the symmetric products between."""
    found: Found = []
    place = Place(12, 35, 7 * 35)
    for random in (True, False):
        one, two, three, four = (draw(2345).detach() for _ in range(4))
        tensors = AdamWTensors(one, two, three, four.abs())
        draws = Draws.of(1, 7, "w", "parameter", place), Draws.of(1, 7, "w", "exp_avg_sq", place)
        adamw(tensors, AdamWNumbers(1e-2, 0.9, 0.99, 1e-8, 0.1, 7), draws if random else None)
        parts = [[draw(size).detach().abs()[start:] for _ in range(4)] for size in (7, 2048, 2345) for start in (0, 3)]
        adamw_many(
            [(AdamWTensors(*t), AdamWNumbers(1e-2, 0.9, 0.99, 1e-8, 0.1, 7), draws if random else None) for t in parts]
        )
        found += [t for four in parts for t in four]
        gradient, buffer = draw(2345).detach(), draw(2345).detach()
        out = torch.empty(2345, dtype=HALF, device=DEVICE)
        average(gradient, buffer, out, 0.9, True, draws[0] if random else None, 0)
        change(buffer, out, 0.9, 0.1, draws[0] if random else None, 0)
        found += [tensors.parameter, tensors.exp_avg, tensors.exp_avg_sq, out, buffer]
    x = draw(2, 136, 72).detach()
    gram = symmetric(x, x)
    divided = torch.empty(2, 136, 72, dtype=torch.float16, device=DEVICE)
    divide(x, draw(2, 1, 1, dtype=FULL).detach().abs() + 1, out=divided)
    return [*found, divided, gram, gram_columns(x), symmetric(gram, gram, 2.5, gram, -4.0)]


PARTS: dict[str, Callable[[], Found]] = {
    "rms": rms, "layer": layer, "tower": tower, "rotary": rotary, "pointwise": pointwise, "loss": loss, "moe": moe,
    "lora": lora, "optimizers": optimizers,
}  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", help=", ".join(PARTS))
    wanted = parser.parse_args().parts or list(PARTS)
    if unknown := set(wanted) - set(PARTS):
        parser.error(f"no part {', '.join(sorted(unknown))}; known: {', '.join(PARTS)}")
    faults = 0
    for name in wanted:
        torch.manual_seed(0)
        begin = time.perf_counter()
        found = [t.detach().float().cpu() for t in PARTS[name]()]
        right = all(bool(t.isfinite().all()) for t in found)
        faults += not right
        seconds = time.perf_counter() - begin
        print(f"{name}: {len(found)} results {'finite' if right else 'NOT FINITE'}, {seconds:.1f} s", flush=True)
    return min(1, faults)


if __name__ == "__main__":
    sys.exit(main())
