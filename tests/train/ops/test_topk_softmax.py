"""The router's choice of experts: every backend against float64, ties, numbers that are not finite."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from schemas.errors import ConfigError
from tests.train.ops.triton_cases import DEVICE, ON_GPU, gpu, kernels_can_run, relative_error
from train.ops import router, triton_router
from train.ops.device import describe_device
from train.ops.registry import OPS

setup_module = kernels_can_run

VALUES = 1e-6
# one rounding; the interpreter cuts float32 to bfloat16 instead
GRADIENT = {torch.float32: 2e-6, torch.bfloat16: 2**-8 if ON_GPU else 2**-7, torch.float16: 2**-10}
SHAPES = [
    pytest.param(rows, experts, k, id=f"{rows}-{experts}-{k}")
    for rows, experts, k in [
        *(
            (rows, experts, k)
            for rows in (1, 33)
            for experts in (4, 8, 60, 128, 512)
            for k in (1, 2, 8)
            if k <= experts
        ),
        *((5, experts, experts) for experts in (1, 3, 16)),
        (5, 60, 5),
    ]
]
NAN, INF = float("nan"), float("inf")


def draw(rows: int, experts: int, dtype: torch.dtype) -> Tensor:
    """Rows without ties in either dtype, in random order: steps of 1/32, which bfloat16 holds below 8."""
    generator = torch.Generator().manual_seed(rows + experts)
    order = torch.rand(rows, experts, generator=generator).argsort(-1) - experts // 2
    return (order / 32).to(DEVICE, dtype)


def float64(logits: Tensor, k: int, normalize: bool) -> tuple[Tensor, Tensor]:
    """By sorting, and by the definition of softmax."""
    wide = logits.double()
    powers = torch.exp(wide - wide.detach().amax(-1, keepdim=True))
    ids = wide.detach().sort(dim=-1, descending=True, stable=True).indices[:, :k]
    chosen = powers.gather(-1, ids)
    return chosen / (chosen if normalize else powers).sum(-1, keepdim=True), ids


def compare(function: object, logits: Tensor, k: int, normalize: bool) -> None:
    """Values, ids and the gradient."""
    ours, exact = logits.detach().clone().requires_grad_(), logits.detach().double().requires_grad_()
    (weights, ids), (expected, wanted) = function(ours, k, normalize), float64(exact, k, normalize)  # type: ignore[operator]
    assert weights.dtype == torch.float32 and ids.dtype == torch.int64 and not ids.requires_grad
    assert torch.equal(ids, wanted)
    assert relative_error(weights, expected) <= VALUES
    given = torch.randn(weights.shape, generator=torch.Generator().manual_seed(3)).to(weights.device)
    weights.backward(given)
    expected.backward(given.double())
    assert ours.grad is not None and exact.grad is not None and ours.grad.dtype == logits.dtype
    if k == 1 and normalize:  # the weight is 1 whatever the logits
        assert ours.grad.abs().max() <= VALUES
    else:
        assert relative_error(ours.grad, exact.grad) <= GRADIENT[logits.dtype]


@pytest.mark.parametrize("dtype", GRADIENT, ids=str)
@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize(("rows", "experts", "k"), [*SHAPES, gpu(16384, 128, 8), gpu(16385, 60, 4), gpu(4099, 512, 10)])
def test_against_float64(rows: int, experts: int, k: int, normalize: bool, dtype: torch.dtype) -> None:
    logits = draw(rows, experts, dtype)
    compare(triton_router.topk_softmax, logits, k, normalize)
    compare(router.topk_softmax, logits, k, normalize)


@pytest.mark.gpu
@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("name", OPS["topk_softmax"].backends)
def test_on_a_gpu(name: str, normalize: bool) -> None:
    """As a model calls it: random logits in bfloat16, many of them equal, and the same bits at every run."""
    try:
        OPS["topk_softmax"].resolve(name, describe_device("cuda"), "bfloat16")
    except ConfigError as error:
        pytest.skip(str(error))
    function = OPS["topk_softmax"].backends[name].load()
    logits = torch.randn(16384, 128, device="cuda").bfloat16().requires_grad_()
    weights, ids = function(logits, 8, normalize)
    assert (ids.sort(-1).values.diff(dim=-1) > 0).all()
    expected, _ = float64(logits, 8, normalize)
    assert relative_error(weights, expected) <= VALUES
    given = torch.randn_like(weights)
    (gradient,) = torch.autograd.grad(weights, logits, given)
    p = torch.softmax(logits.detach().double(), -1)  # by the ids that were taken, as ties are open
    taken = torch.zeros_like(p).scatter_(-1, ids, 1.0)
    if normalize:
        p = p * taken / (p * taken).sum(-1, keepdim=True)
    d = torch.zeros_like(p).scatter_(-1, ids, given.double())
    assert relative_error(gradient, p * (d - (p * d).sum(-1, keepdim=True))) <= GRADIENT[torch.bfloat16]
    again, same = function(logits, 8, normalize)
    assert torch.equal(again, weights) and torch.equal(same, ids)


def test_random_logits_of_every_size() -> None:
    """The softmax is of all experts, and holds where exp overflows or vanishes."""
    for scale in (1e-3, 1.0, 30.0, 1e4):
        logits = scale * torch.randn(33, 60, generator=torch.Generator().manual_seed(5)).to(DEVICE)
        for normalize in (True, False):
            compare(triton_router.topk_softmax, logits, 4, normalize)


@pytest.mark.parametrize("normalize", [True, False])
def test_no_rows(normalize: bool) -> None:
    for function in (triton_router.topk_softmax, router.topk_softmax):
        logits = torch.empty(0, 60, device=DEVICE, dtype=torch.bfloat16, requires_grad=True)
        weights, ids = function(logits, 8, normalize)
        assert weights.shape == ids.shape == (0, 8)
        weights.sum().backward()
        assert logits.grad is not None and logits.grad.shape == (0, 60)


def test_the_lower_expert_of_equal_ones() -> None:
    logits = torch.tensor([[0.0] * 6, [1, 2, 2, 1, 2, 0], [-0.0, 0, -0.0, -1, 0, 0], [-INF, -INF, 3, -INF, -INF, 3]])
    _, ids = triton_router.topk_softmax(logits.to(DEVICE), 4, True)
    assert ids.tolist() == [[0, 1, 2, 3], [1, 2, 4, 0], [0, 1, 2, 4], [2, 5, 0, 1]]
    many = torch.randint(-3, 3, (33, 60), generator=torch.Generator().manual_seed(1)).to(DEVICE, torch.bfloat16)
    compare(triton_router.topk_softmax, many, 8, True)
    compare(triton_router.topk_softmax, many, 8, False)


@pytest.mark.parametrize("normalize", [True, False])
def test_views_of_logits_and_of_gradients(normalize: bool) -> None:
    base = draw(12, 40, torch.float32)
    for view in (base.t(), base[::2, 3:30], base[:1].expand(5, -1)):
        compare(triton_router.topk_softmax, view, 3, normalize)
        logits = view.detach().requires_grad_()
        weights, _ = triton_router.topk_softmax(logits, 3, normalize)
        given = draw(3, len(view), torch.float32)
        (weights.t() * given).sum().backward()  # the gradient of weights is a transposed view
        exact = view.detach().double().requires_grad_()
        (float64(exact, 3, normalize)[0].t() * given).sum().backward()
        assert logits.grad is not None and exact.grad is not None
        assert relative_error(logits.grad, exact.grad) <= GRADIENT[torch.float32]


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # numpy's, of the interpreter
@pytest.mark.parametrize("normalize", [True, False])
def test_numbers_that_are_not_finite(normalize: bool) -> None:
    """Rows as torch has them: a NaN or an infinity spoils its row and no other, -inf is never taken before a number."""
    logits = draw(7, 6, torch.float32)
    logits[0, 3] = NAN
    logits[1] = NAN
    logits[2, 4] = INF
    logits[3] = -INF
    logits[4, 1] = logits[4, 2] = -INF
    logits[5, :4] = -INF
    ours, theirs = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    weights, ids = triton_router.topk_softmax(ours, 3, normalize)
    expected, wanted = router.topk_softmax(theirs, 3, normalize)
    torch.testing.assert_close(weights, expected, equal_nan=True)
    assert torch.equal(weights.isnan().all(-1), weights.isnan().any(-1))
    assert torch.equal(ids[[4, 6]], wanted[[4, 6]])
    assert set(ids[5, :2].tolist()) == {4, 5}
    assert ((ids >= 0) & (ids < 6)).all() and (ids.sort(-1).values.diff(dim=-1) > 0).all()
    assert (ids[0, 0], ids[2, 0]) == (3, 4)
    weights.sum(-1).square().sum().backward()
    expected.sum(-1).square().sum().backward()
    assert ours.grad is not None and theirs.grad is not None
    assert ours.grad[:4].isnan().any(-1).all()
    torch.testing.assert_close(ours.grad[4:], theirs.grad[4:], atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("k", [0, 7])
def test_refuses_a_choice_that_cannot_be_made(k: int) -> None:
    with pytest.raises(ValueError, match=f"{k} of 6 experts cannot be chosen"):
        triton_router.topk_softmax(torch.zeros(3, 6, device=DEVICE), k, True)
