"""Muon on one GPU: rates of Newton-Schulz, whole steps against the rate of plain products, peers, errors."""

from __future__ import annotations

from functools import cache, partial

import torch
from torch import nn

from jobs.bench.claims import Claim, at_least, at_most
from jobs.bench.kernel_peers import find
from jobs.bench.kernel_timing import extra_gib, milliseconds, relative_error
from schemas.strict import check_config
from train.config_optimizer import OptimizerConfig
from train.ops.triton_symmetric import symmetric
from train.ops.triton_tiles import Tile
from train.optim.build import ModelOptimizer
from train.optim.groups import parameter_groups
from train.optim.newton_schulz import NewtonSchulz

Shape = tuple[int, int, int]
STEPS = 5
MOST_OF_BOUND, OVER_VEOMNI = 1.15, 1.5
EXPERTS: dict[str, Shape] = {"gate_up": (128, 1536, 2048), "down": (128, 2048, 768)}
ATTENTION: dict[str, Shape] = {"q": (8, 4096, 2048), "k, v": (16, 512, 2048), "o": (8, 2048, 4096)}
MOST_ERROR = {"fp16": 1e-2, "bf16": 3e-2}
TILES = [Tile(128, 256, 64, 8, 3, 1), Tile(128, 256, 64, 8, 4, 1), Tile(128, 256, 64, 8, 3), Tile(64, 128, 64, 4, 4, 2)]
TILES += [Tile(64, 128, 64, 4, 4), Tile(128, 256, 32, 8, 4, 1)]


class Weights(nn.Module):
    """Parameters of these shapes, with gradients."""

    def __init__(self, shapes: list[Shape], dtype: torch.dtype, *, apart: bool = False) -> None:
        super().__init__()
        generator = torch.Generator("cuda").manual_seed(1)
        sizes = [size for shape in shapes for size in ([shape[1:]] * shape[0] if apart else [shape])]
        made = [torch.randn(size, generator=generator, device="cuda").mul_(0.02).to(dtype) for size in sizes]
        self.weights = nn.ParameterList(made)
        for parameter in self.weights:
            parameter.grad = torch.randn_like(parameter).mul_(1e-3)


def claims(quick: bool, tiles: bool) -> list[Claim]:
    """All claims; quick: an eighth of the experts."""
    experts = {name: (count // 8 if quick else count, m, k) for name, (count, m, k) in EXPERTS.items()}
    found = [Claim("machine", 1, "GPU", "", None, f"{torch.cuda.get_device_name()}, torch {torch.__version__}")]
    for name, shape in (experts | ATTENTION).items():
        found += rate_claims(name, shape)
        torch.cuda.empty_cache()
    found += [error_claim(kind) for kind in MOST_ERROR]
    found += layer_claims(experts)
    found += veomni_claims(experts)
    if not quick:
        found += torch_claims()
    if tiles:
        found += tile_claims()
    return found


def plain_flops(shape: Shape) -> float:
    """Of five standard steps, none of the products halved."""
    count, rows, columns = shape
    small, large = min(rows, columns), max(rows, columns)
    return STEPS * count * (4.0 * small * small * large + 2.0 * small**3)


@cache
def bmm_rate(shape: Shape) -> float:
    """TFLOP/s of the two kinds of products of a step, X X^T and A A, weighted as they occur there."""
    count, rows, columns = shape
    small, large = min(rows, columns), max(rows, columns)
    x = torch.randn(count, small, large, device="cuda", dtype=torch.bfloat16)
    a = torch.randn(count, small, small, device="cuda", dtype=torch.bfloat16)
    time = milliseconds(lambda: torch.bmm(x, x.mT)) + milliseconds(lambda: torch.bmm(a, x))
    time += milliseconds(lambda: torch.bmm(a, a))
    return plain_flops(shape) / STEPS / time / 1e9


def bound_ms(shape: Shape) -> float:
    """Milliseconds that the plain multiplications take at that rate."""
    return plain_flops(shape) / bmm_rate(shape) / 1e9


def newton_schulz(kind: str) -> NewtonSchulz:
    return NewtonSchulz.of(check_config({"muon_ns_dtype": kind}, OptimizerConfig))


def rate_claims(name: str, shape: Shape) -> list[Claim]:
    x = torch.randn(shape, device="cuda", dtype=torch.bfloat16)
    bound, found = bound_ms(shape), []
    for kind in ("fp16", "bf16"):
        time = milliseconds(partial(newton_schulz(kind), x))
        said = f"{list(shape)}; {time:.2f} ms, plain products at {bmm_rate(shape):.0f} TFLOP/s {bound:.2f} ms"
        claim = f"Newton-Schulz, {name}, {kind}: time / bound"
        found.append(Claim(claim, round(time / bound, 3), "x", "", None, said))
    return found


def optimizer(model: nn.Module, **keys: object) -> ModelOptimizer:
    config = check_config({"type": "muon", "muon_weight_decay": 0.1} | keys, OptimizerConfig)
    return ModelOptimizer(model, parameter_groups(model, config), config)


def layer_claims(experts: dict[str, Shape]) -> list[Claim]:
    """Whole steps: averages, Newton-Schulz, parameters."""
    found = []
    bound = sum(bound_ms(shape) for shape in experts.values())
    for name, dtype, keys in (
        ("fp32 parameters and averages", torch.float32, {}),
        ("bf16, rounded at random", torch.bfloat16, {"state_dtype": "bf16"}),
        ("fp32, Newton-Schulz in bf16", torch.float32, {"muon_ns_dtype": "bf16"}),
    ):
        made = optimizer(Weights(list(experts.values()), dtype), **keys)
        time = milliseconds(made.step)
        said = f"{[list(shape) for shape in experts.values()]}; {time:.2f} ms, bound {bound:.2f} ms, "
        said += f"{extra_gib(made.step):.2f} GiB beside states"
        found.append(
            at_most(f"step of a layer's experts, {name}: time / bound", time / bound, MOST_OF_BOUND, "x", said)
        )
        del made
        torch.cuda.empty_cache()
    return found


def veomni_claims(experts: dict[str, Shape]) -> list[Claim]:
    """Newton-Schulz alone, at the same shapes."""
    theirs = find("veomni.optim.muon", "run_newton_schulz")
    if theirs is None:
        return [Claim("Newton-Schulz: veomni / ours", 0.0, "x", f">= {OVER_VEOMNI}", None, "veomni is not installed")]
    found, ours = [], newton_schulz("fp16")
    for form in ("gram", "std"):
        times = [0.0, 0.0]
        for shape in experts.values():
            x = torch.randn(shape, device="cuda", dtype=torch.bfloat16)
            times[0] += milliseconds(partial(theirs, x, ns_steps=STEPS, ns_implementation=form), repeats=7)
            times[1] += milliseconds(partial(ours, x), repeats=7)
            torch.cuda.empty_cache()
        said = f"experts of a layer; {times[0]:.2f} ms against {times[1]:.2f} ms"
        claim = f"Newton-Schulz: veomni's {form} / ours"
        found.append(at_least(claim, times[0] / times[1], OVER_VEOMNI, "x", said))
    return found


def torch_claims() -> list[Claim]:
    """Whole steps of single matrices: four layers' attention."""
    shapes = [(count // 2, rows, columns) for count, rows, columns in ATTENTION.values()]
    ours = Weights(shapes, torch.float32, apart=True)
    theirs = torch.optim.Muon(Weights(shapes, torch.float32, apart=True).parameters(), lr=1e-5, weight_decay=0.1)
    times = [milliseconds(theirs.step), milliseconds(optimizer(ours).step)]
    said = f"{len(ours.weights)} matrices; {times[0]:.2f} ms against {times[1]:.2f} ms"
    return [at_least("step of attention: torch.optim.Muon / ours", times[0] / times[1], 1.0, "x", said)]


def error_claim(kind: str) -> Claim:
    """Against float64, by the singular values."""
    worst = 0.0
    for rows, columns in ((1536, 2048), (2048, 768), (1024, 1024)):
        x = torch.randn(2, rows, columns, device="cuda")
        u, s, vh = torch.linalg.svd(x.double(), full_matrices=False)
        s = s / s.norm(dim=-1, keepdim=True)
        ns = newton_schulz(kind)
        for a, b, c in ns.triples:
            s = a * s + b * s**3 + c * s**5
        worst = max(worst, relative_error(ns(x), u * s[:, None, :] @ vh))
    said = "full-rank matrices of experts, and square ones"
    return at_most(f"Newton-Schulz in {kind}: relative error to float64", worst, MOST_ERROR[kind], "", said)


def tile_claims() -> list[Claim]:
    """TFLOP/s of the symmetric kernel, counted without symmetry."""
    found = []
    for shape in ((32, 1536, 2048), (32, 1536, 1536), (64, 768, 768), (16, 2048, 2048)):
        x = torch.randn(shape, device="cuda", dtype=torch.float16)
        flops = 2.0 * shape[0] * shape[1] ** 2 * shape[2]
        plain = flops / milliseconds(partial(torch.bmm, x, x.mT)) / 1e9
        for tile in TILES:
            try:
                rate = flops / milliseconds(partial(symmetric, x, x, tile=tile)) / 1e9
            except RuntimeError as error:  # more shared memory than there is
                print(f"{tile}: {error}")
                continue
            said = f"{list(shape)}, {tile}; bmm {plain:.0f} TFLOP/s"
            found.append(Claim("symmetric product, as if whole", round(rate, 1), "TFLOP/s", "", None, said))
    return found
