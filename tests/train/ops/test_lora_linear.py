"""A linear layer with an adapter, in one node: values and gradients of the formula, whatever is trained."""

from __future__ import annotations

from itertools import product

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from tests.train.ops.computed import Computed
from tests.train.ops.triton_cases import relative_error
from train.ops.lora_linear import lora_linear
from train.ops.recorded import Recording

SCALE = 0.7


def draw(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def tensors(lead: tuple[int, ...], size_in: int = 6, size_out: int = 10, rank: int = 3) -> list[Tensor]:
    """x, what the update reads, weight, bias, a, b."""
    shapes = [(*lead, size_in)] * 2 + [(size_out, size_in), (size_out,), (rank, size_in), (size_out, rank)]
    return [draw(*shape, seed=n) for n, shape in enumerate(shapes)]


def plainly(x: Tensor, dropped: Tensor | None, weight: Tensor, bias: Tensor | None, a: Tensor, b: Tensor) -> Tensor:
    return F.linear(x, weight, bias) + SCALE * F.linear(F.linear(x if dropped is None else dropped, a), b)


def ours(x: Tensor, dropped: Tensor | None, weight: Tensor, bias: Tensor | None, a: Tensor, b: Tensor) -> Tensor:
    return lora_linear(x, weight, bias, a, b, SCALE, dropped=dropped, kind="projection")


@pytest.mark.parametrize("lead", [(5,), (2, 3), (), (0,)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("apart", "biased"), list(product((False, True), repeat=2)))
def test_values_and_gradients(lead: tuple[int, ...], dtype: torch.dtype, apart: bool, biased: bool) -> None:
    found = [t.to(dtype).requires_grad_() for t in tensors(lead)]
    exact = [t.detach().double().requires_grad_() for t in found]
    outs = []
    for run, given in ((ours, found), (plainly, exact)):
        x, dropped, weight, bias, a, b = given
        outs.append(run(x, dropped if apart else None, weight, bias if biased else None, a, b))
        outs[-1].backward(draw(*lead, 10, seed=9).to(outs[-1].dtype))
    used = [apart or n != 1 for n in range(6)]
    used[3] = biased
    pairs = [(outs[0], outs[1])]
    for one, other, is_used in zip(found, exact, used, strict=True):
        assert (one.grad is not None) == (other.grad is not None) == is_used
        pairs += [(one.grad, other.grad)] if one.grad is not None and other.grad is not None else []
    errors = [relative_error(one, other) for one, other in pairs]
    assert max(errors) < {torch.float32: 1e-6, torch.bfloat16: 6e-3}[dtype], errors


@pytest.mark.parametrize("trained", list(product((False, True), repeat=4))[1:])
def test_only_what_is_trained_gets_a_gradient(trained: tuple[bool, ...]) -> None:
    """Of x, weight with bias, a and b."""
    of_x, of_weight, of_a, of_b = trained
    which = [of_x, False, of_weight, of_weight, of_a, of_b]
    given = [t.requires_grad_(on) for t, on in zip(tensors((4,)), which, strict=True)]
    given[1] = None  # type: ignore[call-overload]
    plainly(*given).sum().backward()
    wanted = [None if t is None else t.grad for t in given]
    for t in given:
        if t is not None:
            t.grad = None
    ours(*given).sum().backward()
    for t, want in zip(given, wanted, strict=True):
        found = None if t is None else t.grad
        assert (found is None) == (want is None)
        assert found is None or want is None or torch.allclose(found, want, atol=1e-5)


@pytest.mark.parametrize("apart", [False, True])
def test_a_kept_result_saves_all_products_but_the_first_of_the_update(apart: bool) -> None:
    """In the second run; the backward pass has five products, of which one is added to another's result."""
    x, dropped, weight, _, a, b = (t.requires_grad_() for t in tensors((5,)))
    given = x, dropped if apart else None, weight, None, a, b
    counts, gradients = [], []
    for kinds in ((), ("projection",)):
        with Computed() as computed:
            out = checkpoint(ours, *given, use_reentrant=False, context_fn=Recording(kinds).contexts)
            gradients.append(torch.autograd.grad(out.square().sum(), [t for t in given if t is not None]))
        counts.append(computed.counts["aten::mm"] + computed.counts["aten::addmm_"])
    assert counts == [2 * 3 + 6, 3 + 1 + 6]
    assert all(torch.equal(one, other) for one, other in zip(*gradients, strict=True))


def test_the_sum_is_rounded_once() -> None:
    """Of a base and an update that are both far from what the sum is rounded to."""
    x = torch.ones(1, 2, dtype=torch.bfloat16)
    weight = torch.tensor([[256.0, 0.0]], dtype=torch.bfloat16)
    a, b = torch.tensor([[1.0, 0.0]]).bfloat16(), torch.tensor([[1.0]]).bfloat16()
    # 256 + 1.5 is nearer to 258 than to 256, where bfloat16 has no number between; 1.5 is an exact update
    assert lora_linear(x, weight, None, a, b, 1.5).item() == 258.0


def test_autocast_casts_as_it_does_for_a_linear_layer() -> None:
    given = [t.requires_grad_() for t in tensors((5,))]
    x, dropped, weight, bias, a, b = given
    with torch.autocast("cpu", torch.bfloat16):
        found = ours(x, dropped, weight, bias, a, b)
        wanted = plainly(x, dropped, weight, bias, a, b)
    assert found.dtype == wanted.dtype == torch.bfloat16 and relative_error(found, wanted) < 1e-2
    found.sum().backward()
    assert all(t.grad is not None and t.grad.dtype == torch.float32 for t in given)


def test_second_derivatives_are_refused() -> None:
    x, _, weight, bias, a, b = (t.requires_grad_() for t in tensors((5,)))
    out = ours(x, None, weight, bias, a, b)
    (dx,) = torch.autograd.grad(out.square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiate twice"):
        dx.sum().backward()
