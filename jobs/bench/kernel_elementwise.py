"""Norms, rotary embeddings and SwiGLU: forward passes as a share of the copy rate of the same run; LayerNorm, GELU,
sums for biases and the router's choice of experts beside torch's operations, too."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from jobs.bench.claims import Claim, at_least
from jobs.bench.kernel_peers import find
from jobs.bench.kernel_timing import Run, copy_rate, milliseconds
from train.ops import layer_norm, linear, router, triton_layer_norm, triton_linear, triton_router
from train.ops.triton_column_sum import column_sum
from train.ops.triton_gelu import gelu_backward, gelu_forward
from train.ops.triton_norm import rms_norm
from train.ops.triton_rope import qk_norm_rope
from train.ops.triton_swiglu import swiglu
from train.ops.triton_vision_rope import vision_rope

TOKENS, HIDDEN, EPS = 32768, 2048, 1e-6
NORM_SHARE, SWIGLU_SHARE, ROPE_SHARE, OVER_APART = 85.0, 97.0, 88.0, 1.7
PATCHES, WIDTH, INNER = 56160, 1152, 4304  # of a vision tower
ROWS, EXPERTS, CHOSEN = 16384, 128, 8  # of a router


def claims(quick: bool) -> list[Claim]:
    """All claims; quick changes nothing, it is a second's work."""
    found = [Claim("copy rate", round(copy_rate(), 3), "TB/s", "", None, "2 GiB, bytes read and written")]
    with torch.no_grad():
        found += [*norm_claims(), *rope_claims(), *swiglu_claims()]
    return [*found, *backward_claims(), *layer_norm_claims(), *bias_claims(), *gelu_claims(), *router_claims()]


def draw(*shape: int) -> Tensor:
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)


def share(name: str, run: Run, moved: int, bound: float | None) -> tuple[Claim, float]:
    """moved: bytes that must be read or written."""
    time = milliseconds(run, graph=True)
    rate = moved / time / 1e9
    said = f"{time:.3f} ms, {rate:.2f} TB/s"
    value = rate / copy_rate() * 100
    if bound is None:
        return Claim(name, round(value, 1), "%", "", None, said), time
    return at_least(name, value, bound, "%", said), time


def norm_claims() -> list[Claim]:
    x, residual, weight = draw(TOKENS, HIDDEN), draw(TOKENS, HIDDEN), draw(HIDDEN)
    size = 2 * x.numel()
    first, time = share(
        "RMSNorm [32768, 2048], of the copy rate", lambda: rms_norm(x, weight, EPS), 2 * size, NORM_SHARE
    )
    summed, _ = share("with the residual sum", lambda: rms_norm(x, weight, EPS, residual), 4 * size, NORM_SHARE)
    found = [first, summed]
    if liger := find("liger_kernel.transformers.functional", "liger_rms_norm"):
        theirs = milliseconds(lambda: liger(x, weight, EPS, in_place=False), graph=True)
        found.append(Claim("RMSNorm: liger / ours", round(theirs / time, 2), "x", "", None, f"{theirs:.3f} ms"))
    return found


def rope_claims() -> list[Claim]:
    q, k, weight = draw(TOKENS, 32, 128), draw(TOKENS, 4, 128), draw(128)
    cos, sin = (torch.rand(TOKENS, 64, device="cuda") for _ in range(2))
    moved = 4 * (q.numel() + k.numel()) + 8 * cos.numel()
    joint, time = share(
        "q/k norm and rope in one kernel, 32 + 4 heads of 128, of the copy rate",
        lambda: qk_norm_rope(q, k, weight, weight, cos, sin, EPS),
        moved,
        ROPE_SHARE,
    )
    plain, _ = share(
        "rope alone, of the copy rate", lambda: qk_norm_rope(q, k, None, None, cos, sin, EPS), moved, ROPE_SHARE
    )

    def apart() -> tuple[Tensor, Tensor]:
        return qk_norm_rope(rms_norm(q, weight, EPS)[0], rms_norm(k, weight, EPS)[0], None, None, cos, sin, EPS)

    ratio = milliseconds(apart, graph=True) / time
    found = [
        joint,
        plain,
        at_least("norms, then rope / both in one kernel", ratio, OVER_APART, "x", "the same kernels apart"),
    ]
    vision = [draw(TOKENS, 16, 72) for _ in range(2)]
    angles = [torch.rand(TOKENS, 36, device="cuda") for _ in range(2)]
    moved = 4 * sum(x.numel() for x in vision) + 8 * angles[0].numel()
    name = "vision rope, 16 heads of 72, of the copy rate"
    found.append(share(name, lambda: vision_rope(*vision, *angles), moved, ROPE_SHARE)[0])
    return found


def swiglu_claims() -> list[Claim]:
    gate, up = draw(262144, 768), draw(262144, 768)
    first, time = share(
        "SwiGLU [262144, 768], of the copy rate", lambda: swiglu(gate, up), 6 * gate.numel(), SWIGLU_SHARE
    )
    found = [first]
    if liger := find("liger_kernel.transformers.functional", "liger_swiglu"):
        theirs = milliseconds(lambda: liger(gate, up), graph=True)
        found.append(Claim("SwiGLU: liger / ours", round(theirs / time, 2), "x", "", None, f"{theirs:.3f} ms"))
    return found


def backward_claims() -> list[Claim]:
    """Forward and backward together, in a CUDA graph so that the host's gaps are left out."""
    x, residual, weight = draw(TOKENS, HIDDEN), draw(TOKENS, HIDDEN), draw(HIDDEN)
    q, k, head = draw(TOKENS, 32, 128), draw(TOKENS, 4, 128), draw(128)
    cos, sin = (torch.rand(TOKENS, 64, device="cuda") for _ in range(2))
    gate, up = draw(262144, 768), draw(262144, 768)
    angles = 16 * cos.numel()
    cases: list[tuple[str, Callable[..., tuple[Tensor, ...]], list[Tensor], int]] = [
        (
            "RMSNorm with the residual sum",
            lambda *t: rms_norm(t[0], t[1], EPS, t[2]),
            [x, weight, residual],
            16 * x.numel(),
        ),
        (
            "q/k norm and rope",
            lambda *t: qk_norm_rope(t[0], t[1], t[2], t[2], cos, sin, EPS),
            [q, k, head],
            10 * (q.numel() + k.numel()) + angles,
        ),
        ("SwiGLU", lambda *t: (swiglu(*t),), [gate, up], 16 * gate.numel()),
    ]
    found = []
    for name, run, leaves, moved in cases:
        for leaf in leaves:
            leaf.requires_grad_()
        gradients = [torch.randn_like(y) for y in run(*leaves)]

        def both(run=run, leaves=leaves, gradients=gradients) -> tuple[Tensor, ...]:  # type: ignore[no-untyped-def]
            return torch.autograd.grad(run(*leaves), leaves, gradients)

        found.append(share(f"{name}, forward + backward, of the copy rate", both, moved, None)[0])
    return found


def layer_norm_claims() -> list[Claim]:
    """Of a tower: each way with and without the residual sum, beside torch's LayerNorm and addition."""
    leaves = [draw(*shape).requires_grad_() for shape in ((PATCHES, WIDTH), (WIDTH,), (WIDTH,), (PATCHES, WIDTH))]
    given = [draw(PATCHES, WIDTH) for _ in range(2)]
    size = 2 * leaves[0].numel()  # bytes of a tensor

    def forward(norm: Callable[..., tuple[Tensor, Tensor]], residual: bool) -> Run:
        flat = [leaf.detach() for leaf in leaves]
        return lambda: norm(*flat[:3], EPS, flat[3] if residual else None)

    def both(norm: Callable[..., tuple[Tensor, Tensor]], residual: bool) -> Run:
        wanted = leaves if residual else leaves[:3]
        return lambda: torch.autograd.grad(norm(*leaves[:3], EPS, leaves[3] if residual else None), wanted, given)

    found = []
    for residual in (False, True):
        name = f"LayerNorm [{PATCHES}, {WIDTH}]{' with the residual sum' if residual else ''}"
        # what one kernel each way has to read and write: x (residual), y (sum); sum, both gradients, dx
        forward_moved = (4 if residual else 2) * size
        for case, way, moved in (
            (forward, "forward", forward_moved),
            (both, "forward + backward", forward_moved + 4 * size),
        ):
            claim, ours = share(
                f"{name}, {way}, of the copy rate", case(triton_layer_norm.layer_norm, residual), moved, None
            )
            eager = milliseconds(case(layer_norm.layer_norm, residual), graph=True)
            said = f"{ours:.3f} ms, torch {eager:.3f} ms"
            found += [claim, Claim(f"{name}, {way}: torch / ours", round(eager / ours, 2), "x", "", None, said)]
    return found


def beside(name: str, run: Run, torchs: Run, moved: int) -> list[Claim]:
    """A kernel's share of the copy rate, and torch's time over its own."""
    claim, ours = share(f"{name}, of the copy rate", run, moved, None)
    eager = milliseconds(torchs, graph=True)
    said = f"{ours * 1000:.0f} us, torch {eager * 1000:.0f} us"
    return [claim, Claim(f"{name}: torch / ours", round(eager / ours, 2), "x", "", None, said)]


def bias_claims() -> list[Claim]:
    """Gradients of biases: of qkv, fc1, the rest of a vision block, and of the audio tower."""
    found = []
    for rows, width in ((PATCHES, INNER), (PATCHES, 3 * WIDTH), (PATCHES, WIDTH), (TOKENS, 1280)):
        x = draw(rows, width)
        name = f"sum over rows [{rows}, {width}]"
        found += beside(name, lambda x=x: column_sum(x), lambda x=x: x.sum(0), 2 * x.numel())  # type: ignore[misc]
    return found


def gelu_claims() -> list[Claim]:
    """GELU with the gradient of the bias before it, and then with the product."""
    found = []
    x, dout = draw(PATCHES, INNER), draw(PATCHES, INNER)
    size = 2 * x.numel()
    for kind in ("tanh", "none"):

        def torchs(kind: str = kind) -> tuple[Tensor, Tensor]:
            change = torch.ops.aten.gelu_backward(dout, x, approximate=kind)
            return change, change.sum(0)

        def backward(kind: str = kind) -> tuple[Tensor, Tensor | None]:
            return gelu_backward(x, dout, kind, sums=True)

        name = f"GELU ({kind}) [{PATCHES}, {INNER}], "
        forward: list[Run] = [
            lambda kind=kind: gelu_forward(x, kind),  # type: ignore[misc]
            lambda kind=kind: torch.nn.functional.gelu(x, approximate=kind),  # type: ignore[misc]
        ]
        found += beside(f"{name}forward", forward[0], forward[1], 2 * size)
        found += beside(f"{name}backward with the sum of its rows", backward, torchs, 3 * size)
    return [*found, *(layer_claim(rows, graph) for rows, graph in ((PATCHES, True), (PATCHES, False), (64, False)))]


def layer_claim(rows: int, graph: bool) -> Claim:
    """A linear layer with GELU, in a CUDA graph or as the host launches it, which is all there is of few rows."""
    leaves = [draw(*shape).requires_grad_() for shape in ((rows, WIDTH), (INNER, WIDTH), (INNER,))]
    given = draw(rows, INNER)

    def both(layer: Callable[..., Tensor]) -> Run:
        return lambda: torch.autograd.grad(layer(*leaves, "tanh"), leaves, given)

    ours, torchs = (milliseconds(both(module.linear_gelu), graph=graph) for module in (triton_linear, linear))
    title = (
        f"linear layer and GELU [{rows}, {WIDTH}] -> {INNER}, forward + backward{'' if graph else ', with launches'}"
    )
    said = f"{ours * 1000:.0f} us, torch {torchs * 1000:.0f} us"
    return Claim(f"{title}: torch / ours", round(torchs / ours, 2), "x", "", None, said)


def router_claims() -> list[Claim]:
    """The choice of experts, forward and with its backward pass: in a CUDA graph, and as the host launches it."""
    logits, given = draw(ROWS, EXPERTS).requires_grad_(), torch.randn(ROWS, CHOSEN, device="cuda")

    def forward(choose: Callable[..., tuple[Tensor, Tensor]]) -> Run:
        return lambda: choose(logits.detach(), CHOSEN, True)

    def both(choose: Callable[..., tuple[Tensor, Tensor]]) -> Run:
        return lambda: torch.autograd.grad(choose(logits, CHOSEN, True)[0], logits, given)

    found = []
    for name, case in (("forward", forward), ("forward + backward", both)):
        for graph in (True, False):
            ours, eager = (milliseconds(case(module.topk_softmax), graph=graph) for module in (triton_router, router))
            title = f"router's choice, {CHOSEN} of {EXPERTS}, {name}{'' if graph else ', with launches'}: eager / ours"
            said = f"{ROWS} rows in bfloat16: {ours * 1000:.0f} us, eager {eager * 1000:.0f} us"
            found.append(Claim(title, round(eager / ours, 2), "x", "", None, said))
    return found
