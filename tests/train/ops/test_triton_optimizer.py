"""The optimizers' kernels against plain torch and float64; the same random bits as on the CPU."""

from __future__ import annotations

import pytest
import torch

from tests.train.ops.triton_cases import DEVICE, ON_GPU, gpu, kernels_can_run, relative_error
from train.ops import triton_adamw, triton_muon, triton_scale, triton_symmetric
from train.ops.triton_tiles import pick_tile
from train.optim.adamw import AdamWNumbers, AdamWTensors, _update
from train.optim.rounding import Draws, Place, round_to

F32, BF16 = torch.float32, torch.bfloat16
EXACT = {F32: 2e-6, torch.float16: 1e-3, BF16: 5e-3 if ON_GPU else 8e-3}
PLACES = [Place(0, 700, 700), Place(5_000_000_123, 100, 300), Place(12, 35, 7 * 35)]


def setup_module() -> None:
    kernels_can_run()


def mirrored(found: torch.Tensor, edge: int) -> bool:
    """Squares of `edge` off the diagonal are copies. Those on it are products, whose sums a CPU's BLAS may take in
    another order above the diagonal than below; a GPU does not."""
    band = torch.arange(found.shape[-1], device=found.device) // edge
    copied = torch.ones_like(found, dtype=torch.bool) if ON_GPU else band[:, None] != band
    return bool(((found == found.mT) | ~copied).all())


@pytest.mark.parametrize("dtype", [F32, torch.float16, BF16])
@pytest.mark.parametrize(
    "shape",
    [(2, 16, 8), (1, 72, 40), (3, 40, 72), (2, 48, 16), gpu((4, 1536, 2048)), gpu((4, 2048, 768)), gpu((3, 520, 1000))],
    ids=str,
)
def test_symmetric_products(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    x = (torch.randn(shape, device=DEVICE) / shape[2] ** 0.5).to(dtype)
    for found, exact in (
        (triton_symmetric.symmetric(x, x), x.double() @ x.double().mT),
        (triton_symmetric.gram_columns(x), x.double().mT @ x.double()),
    ):
        assert relative_error(found, exact) < EXACT[dtype]
        assert mirrored(found, pick_tile(triton_symmetric.PRODUCTS, x).m)
    gram = triton_symmetric.symmetric(x, x)
    wide = gram.double()
    made = triton_symmetric.symmetric(gram, gram, 2.5, gram, -4.0)
    assert relative_error(made, 2.5 * wide @ wide - 4.0 * wide) < EXACT[dtype]
    assert relative_error(triton_symmetric.symmetric(gram, made, 1.0), wide @ made.double()) < 2 * EXACT[dtype]


@pytest.mark.parametrize("place", PLACES, ids=str)
@pytest.mark.parametrize("dtypes", [(BF16, BF16), (F32, BF16), (BF16, F32), (F32, F32)], ids=str)
@pytest.mark.parametrize("random", [True, False])
def test_adamw(place: Place, dtypes: tuple[torch.dtype, torch.dtype], random: bool) -> None:
    size, (kept, state) = 700, dtypes
    generator = torch.Generator().manual_seed(1)
    values = [torch.randn(size, generator=generator) for _ in range(4)]
    values[3] = values[3].square() * 1e-2
    numbers = AdamWNumbers(1e-2, 0.9, 0.99, 1e-8, 0.1, 7)
    draws = (Draws.of(1, 7, "w", "parameter", place), Draws.of(1, 7, "w", "exp_avg_sq", place)) if random else None
    tensors = [v.to(t) for v, t in zip(values, (kept, kept, state, state), strict=True)]
    ours, plain = (AdamWTensors(*(t.clone().to(where) for t in tensors)) for where in (DEVICE, "cpu"))
    triton_adamw.adamw(ours, numbers, draws)
    _update(plain, numbers, draws, 0)
    for name in ("parameter", "exp_avg", "exp_avg_sq"):
        got, want = getattr(ours, name).cpu(), getattr(plain, name)
        if got.dtype == BF16 and (random or ON_GPU):  # but where the last bit of float32 decides
            assert (got == want).float().mean() > 0.995, name
        assert torch.allclose(got.float(), want.float(), rtol=8e-3 if got.dtype == BF16 else 1e-5, atol=1e-7), name


def many_updates(sizes: list[int], random: bool) -> list[tuple[AdamWTensors, AdamWNumbers, tuple[Draws, Draws] | None]]:
    """Of several dtypes, steps and places, also in the middle of a tensor, where addresses are odd."""
    generator, found = torch.Generator().manual_seed(1), []
    for number, size in enumerate(sizes):
        shift = number % 3
        parts = [torch.randn(size + shift, generator=generator)[shift:] for _ in range(4)]
        parts[3] = parts[3].square() * 1e-2
        dtypes = [(BF16, BF16), (F32, BF16), (BF16, F32), (BF16, BF16)][number % 4]
        kept, state = dtypes
        there = [v.to(DEVICE, t) for v, t in zip(parts, (kept, kept, state, state), strict=True)]
        if shift:  # as parts of longer ones
            there = [torch.cat([v.new_zeros(shift), v])[shift:] for v in there]
        step, place = 7 + number % 2, PLACES[number % 3]
        numbers = AdamWNumbers(1e-2, 0.9, 0.99, 1e-8, 0.1, step)
        draws = tuple(Draws.of(number, step, f"w{number}", what, place) for what in ("parameter", "exp_avg_sq"))
        found.append((AdamWTensors(*there), numbers, (draws[0], draws[1]) if random else None))
    return found


@pytest.mark.parametrize("random", [True, False])
@pytest.mark.parametrize(
    "sizes",
    [[16, 1024, 700, 1, 2100, 0, 4096, 33, 16, 3000, 1025, 64], [5], [], gpu([1152, 620928, 3, 2**20 + 5, 2**20] * 40)],
    ids=len,
)  # fmt: skip
def test_adamw_of_many_is_that_of_one_at_a_time(
    sizes: list[int], random: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bit for bit, with several blocks for each program."""
    if not ON_GPU:
        monkeypatch.setattr(triton_adamw, "BLOCK", 256)
        monkeypatch.setattr(triton_adamw, "PROGRAMS", 3)
        monkeypatch.setattr(triton_adamw, "SMALL", 2500)
    single, many = (many_updates(sizes, random) for _ in range(2))
    for tensors, numbers, draws in single:
        if tensors.parameter.numel():
            triton_adamw.adamw(tensors, numbers, draws)
    triton_adamw.adamw_many(many)
    for (one, _, _), (other, _, _) in zip(single, many, strict=True):
        for name in ("parameter", "exp_avg", "exp_avg_sq"):
            assert torch.equal(getattr(one, name), getattr(other, name)), (name, one.parameter.shape)


def test_few_launches_for_many(monkeypatch: pytest.MonkeyPatch) -> None:
    launches: list[int] = []
    monkeypatch.setattr(triton_adamw._Alike, "launch", lambda _, lines, device: launches.append(len(lines)))
    alike = [update for number in range(3) for update in many_updates([64, 64, 64, 64, 33], True)[::4]]
    triton_adamw.adamw_many(alike)
    assert sorted(launches) == [3, 3]  # 64 and 33 elements


@pytest.mark.parametrize("place", PLACES, ids=str)
@pytest.mark.parametrize("start", [0, 2100])
def test_rounding_draws_the_same_bits(place: Place, start: int) -> None:
    """Bit for bit: values that float32 holds exactly leave the rounding alone."""
    size = 700
    parameter = torch.randn(size).to(BF16)
    direction = torch.randn(size).to(torch.float16)
    draws = Draws.of(3, 2, "layer.weight", "parameter", place)
    got = parameter.clone().to(DEVICE)
    triton_muon.change(got, direction.to(DEVICE), 1.0, 0.25, draws, start)
    want = parameter.clone()
    exact = parameter.float() - 0.25 * direction.float()
    round_to(want, exact, draws.bits(start, start + size, torch.device("cpu")))
    assert torch.equal(got.cpu(), want)
    nearest = exact.to(BF16)
    assert 0.2 < float((want != nearest).float().mean()) < 0.6
    special = torch.tensor([float("nan"), float("inf"), -float("inf"), 0.0], dtype=F32).to(BF16).to(DEVICE)
    triton_muon.change(special, torch.zeros(4, device=DEVICE), 1.0, 0.0, draws, 0)
    assert special.isnan().tolist() == [True, False, False, False]
    assert special[1:].tolist() == [float("inf"), -float("inf"), 0.0]


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("dtypes", [(F32, F32, BF16), (BF16, BF16, BF16), (F32, BF16, F32)], ids=str)
def test_average(dtypes: tuple[torch.dtype, ...], nesterov: bool) -> None:
    size, momentum = 3000, 0.9
    gradient, buffer = torch.randn(size).to(dtypes[0]), torch.randn(size).to(dtypes[1])
    out = torch.empty(size, dtype=dtypes[2], device=DEVICE)
    draws = Draws.of(3, 2, "w", "momentum_buffer", PLACES[1])
    got = buffer.clone().to(DEVICE)
    triton_muon.average(gradient.to(DEVICE), got, out, momentum, nesterov, draws, 0)
    updated = buffer.double().lerp(gradient.double(), 1 - momentum)
    mixed = gradient.double().lerp(updated, momentum) if nesterov else updated
    limits = {F32: 1e-6, BF16: 4e-3 if ON_GPU else 8e-3}
    assert relative_error(out.cpu(), mixed) < limits[dtypes[2]]
    want = torch.empty_like(buffer)
    round_to(want, updated.float(), draws.bits(0, size, torch.device("cpu")))
    assert (got.cpu() == want).float().mean() > (0.99 if dtypes[1] == BF16 else 0.0)
    assert relative_error(got.cpu(), updated) < (1e-6 if dtypes[1] == F32 else 8e-3)


@pytest.mark.parametrize("dtypes", [(F32, F32), (BF16, torch.float16), (BF16, BF16), (F32, torch.float16)], ids=str)
@pytest.mark.parametrize("shape", [(3, 50, 43), (1, 1, 1), (2, 64, 64), (0, 4, 4), gpu((128, 768, 2048))], ids=str)
def test_divide(shape: tuple[int, int, int], dtypes: tuple[torch.dtype, torch.dtype]) -> None:
    kept, wanted = dtypes
    matrices = torch.randn(shape, generator=torch.Generator().manual_seed(4)).to(DEVICE, kept)
    norms = torch.rand(shape[0], 1, 1, generator=torch.Generator().manual_seed(5)).to(DEVICE) + 0.5
    out = torch.empty(shape, dtype=wanted, device=DEVICE)
    triton_muon.divide(matrices, norms, out)
    exact = matrices.double() / norms.double()
    assert out.dtype == wanted
    if matrices.numel():
        assert relative_error(out, exact) < EXACT[wanted]


@pytest.mark.parametrize("dtype", [F32, BF16, torch.float16])
@pytest.mark.parametrize("shape", [(1,), (33, 130), (0,), (64, 128), gpu((4097, 3001))], ids=str)
def test_scale(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    values = torch.randn(shape, generator=torch.Generator().manual_seed(6)).to(dtype)
    for factor in (0.3, 1.0):
        found = values.to(DEVICE, copy=True)
        triton_scale.scale(found, torch.tensor(factor, device=DEVICE))
        exact = (values.float() * torch.tensor(factor)).to(dtype)
        if ON_GPU or dtype != BF16:  # the interpreter cuts digits of bfloat16 off
            assert torch.equal(found.cpu(), exact)
        elif values.numel():
            assert relative_error(found, exact) < EXACT[dtype]
