"""A block that runs twice and takes chosen results from its first run: the same numbers, nothing computed twice, and
nothing held longer than needed."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from functools import partial
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from schemas.errors import ConfigError, UnsupportedError
from tests.train.ops.computed import Computed
from train.ops import attention_fused, attention_varlen
from train.ops.attention import sdpa
from train.ops.attention_varlen import varlen_operators, varlen_options, with_known_arguments
from train.ops.device import describe_device
from train.ops.recorded import AttentionOperators, Kind, Recording, linear, recorded_attention, recording_of
from train.ops.registry import OPS
from train.ops.segments import Segments

BOTH: tuple[Kind, Kind] = ("attention", "projection")
FORWARDS = {
    "aten::_scaled_dot_product_flash_attention_for_cpu",
    "aten::_scaled_dot_product_flash_attention",
    "aten::_scaled_dot_product_efficient_attention",
    "aten::_scaled_dot_product_cudnn_attention",
    "torch_attn::_varlen_attn",
}


class Recordings:
    """A `context_fn` that remembers, weakly, what it made and what that kept."""

    def __init__(self, *kinds: Kind) -> None:
        self.kinds = kinds
        self.made: list[weakref.ref[Recording]] = []

    def __call__(self) -> Any:
        recording = Recording(self.kinds)
        self.made.append(weakref.ref(recording))
        return recording.contexts()

    def kept(self) -> list[weakref.ref[Tensor]]:
        """Tensors that are held now."""
        alive = [recording for made in self.made if (recording := made()) is not None]
        return [weakref.ref(t) for one in alive for kept in one._kept for t in kept.tensors if t is not None]


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def leaves(*tensors: Tensor) -> list[Tensor]:
    return [t.detach().clone().requires_grad_() for t in tensors]


def runs(block: Callable[..., Tensor], tensors: list[Tensor], *kinds: Kind, twice: bool = True) -> list[Tensor]:
    """The output and all gradients, of a block that is computed again, or with twice=False is not."""
    made = [t.detach().clone().requires_grad_(t.requires_grad) for t in tensors]
    out = checkpoint(block, *made, use_reentrant=False, context_fn=Recordings(*kinds)) if twice else block(*made)
    out.backward(draw(*out.shape, seed=9).to(out))
    return [out.detach(), *(t.grad for t in made if t.grad is not None)]


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "plain"])
@pytest.mark.parametrize("shape", [(7, 6), (2, 5, 6), (0, 6), (1, 6)], ids=str)
def test_a_linear_layer_is_torch_s_own(shape: tuple[int, ...], bias: bool) -> None:
    """Bit for bit, whichever gradients are asked for; what follows it needs its result again."""
    tensors = [draw(*shape), draw(5, 6, seed=1), *([draw(5, seed=2)] if bias else [])]

    def block(*given: Tensor) -> Tensor:
        return linear(*given).sin().cos()

    for needs in product([True, False], repeat=len(tensors)):
        if any(needs):
            given = [t.detach().requires_grad_(need) for t, need in zip(tensors, needs, strict=True)]
            wanted, found = runs(block, given, twice=False), runs(block, given, *BOTH)
            assert len(found) == 1 + sum(needs)
            assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True)), needs


def test_a_linear_layer_has_second_derivatives() -> None:
    x, weight = (t.double().requires_grad_() for t in (draw(4, 3), draw(2, 3, seed=1)))
    with Recording(BOTH).contexts()[0]:
        assert torch.autograd.gradgradcheck(linear, (x, weight))


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize("heads", [(2, 2), (4, 2), (6, 1)], ids=str)
@pytest.mark.parametrize("lengths", [[17], [4, 4, 4, 7, 7, 2], [1, 5, 1, 1, 9, 3]], ids=str)
def test_attention_is_the_plain_one(lengths: list[int], heads: tuple[int, int], causal: bool) -> None:
    segments, (queries, others) = Segments.from_lengths(lengths), heads
    rows = segments.total
    tensors = leaves(draw(rows, queries, 8), draw(rows, others, 8, seed=1), draw(rows, others, 8, seed=2))

    def block(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return sdpa(q, k, v, segments, causal=causal, scale=0.3).sin()

    wanted, found = runs(block, tensors, twice=False), runs(block, tensors, *BOTH)
    assert len(found) == 4 and all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


def small_block(x: Tensor, weight: Tensor, segments: Segments) -> Tensor:
    """Four projections, attention, and something after them."""
    q, k, v = (linear(x, part).unflatten(-1, (2, 8)) for part in weight[:48].split(16))
    mixed = sdpa(q.sin(), k.sin(), v, segments, causal=True).flatten(-2)
    return linear(mixed, weight[48:]).sin().cos()


@pytest.mark.parametrize(
    ("kinds", "products", "attentions"), [((), 8, 4), (("attention",), 8, 2), (("projection",), 4, 4), (BOTH, 4, 2)]
)
def test_what_is_kept_is_not_computed_again(kinds: tuple[Kind, ...], products: int, attentions: int) -> None:
    """Of 4 products and 2 calls of attention, besides 8 products of their gradients."""
    segments = Segments.from_lengths([5, 9])
    tensors = leaves(draw(14, 16), draw(64, 16, seed=1))
    with Computed() as computed:
        found = runs(lambda x, w: small_block(x, w, segments), tensors, *kinds)
    assert computed.counts["aten::mm"] == products + 8
    assert computed.counts["aten::_scaled_dot_product_flash_attention_for_cpu"] == attentions
    wanted = runs(lambda x, w: small_block(x, w, segments), tensors, twice=False)
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


def test_nothing_is_held_longer_than_needed() -> None:
    segments = Segments.from_lengths([5, 9])
    x, weight = leaves(draw(14, 16), draw(64, 16, seed=1))
    recordings = Recordings(*BOTH)
    gc.disable()  # what goes must go by itself, without a search for cycles
    try:
        out = x
        for _ in range(2):
            out = checkpoint(small_block, out, weight, segments, use_reentrant=False, context_fn=recordings)
        kept = recordings.kept()
        assert len(kept) == 2 * (4 + 2 * 2) and all(t() is not None for t in kept)  # out and logsumexp of attention
        out.sum().backward()
        assert not any(t() is not None for t in kept)
        del out
        assert not any(made() is not None for made in recordings.made)

        abandoned = checkpoint(small_block, x, weight, segments, use_reentrant=False, context_fn=recordings)
        kept = recordings.kept()
        assert kept
        del abandoned  # no backward pass comes
        assert not any(t() is not None for t in kept)

        checkpoint(small_block, *(t.detach() for t in (x, weight)), segments, use_reentrant=False,
                   context_fn=recordings)  # fmt: skip
        assert not any(made() is not None for made in recordings.made)  # frozen: nobody comes back for it
        with torch.no_grad():
            checkpoint(small_block, x, weight, segments, use_reentrant=False, context_fn=recordings)
        assert not any(made() is not None for made in recordings.made)
    finally:
        gc.enable()


def test_results_leave_one_by_one() -> None:
    """While the second run goes on, what it has taken and nobody saves is gone."""
    left: list[int] = []
    recordings = Recordings(*BOTH)

    def block(x: Tensor, weight: Tensor) -> Tensor:
        for _ in range(3):
            x = linear(x, weight).sin()
            left.append(len(recordings.kept()))
        return x.cos()

    x, weight = leaves(draw(3, 4), draw(4, 4, seed=1))
    checkpoint(block, x, weight, use_reentrant=False, context_fn=recordings).sum().backward()
    assert left == [1, 2, 3, 2, 1, 0]


def test_early_stop_leaves_nothing_behind() -> None:
    """The last product's result is wanted by nobody in the second run, which stops before it."""
    recordings = Recordings(*BOTH)
    x, first, second = leaves(draw(3, 4), draw(4, 4, seed=1), draw(4, 4, seed=2))
    out = checkpoint(
        lambda x, a, b: linear(linear(x, a).sin(), b), x, first, second, use_reentrant=False, context_fn=recordings
    )
    kept = recordings.kept()
    out.sum().backward()
    assert len(kept) == 2 and not any(t() is not None for t in kept)


def test_a_second_backward_pass_is_refused() -> None:
    x, weight = leaves(draw(3, 4), draw(4, 4, seed=1))
    out = checkpoint(
        lambda x, w: linear(x, w).sin(), x, weight, use_reentrant=False, context_fn=Recordings(*BOTH)
    ).sum()
    out.backward(retain_graph=True)
    with pytest.raises(UnsupportedError, match="keep to inputs, or call backward once"):
        out.backward()
    assert recording_of("projection") is None


def test_runs_that_differ_are_an_error() -> None:
    x, weight = leaves(draw(3, 4), draw(4, 4, seed=1))
    operators = AttentionOperators(lambda q, k, v: (q,), lambda dout, *rest: (dout, dout, dout))
    recording = Recording(BOTH)
    first, second = recording.contexts()
    with first:
        linear(x, weight)
    with second, pytest.raises(RuntimeError, match="asks for a result of attention, the first one left projection"):
        recorded_attention(operators, x, x, x)
    recording = Recording(BOTH)
    with recording.contexts()[0]:
        pass
    with recording.contexts()[1], pytest.raises(RuntimeError, match="of projection, the first one left nothing"):
        linear(x, weight)


def test_a_result_that_was_changed_in_place_is_an_error() -> None:
    x, weight = leaves(draw(3, 4), draw(4, 4, seed=1))

    def block(x: Tensor, weight: Tensor) -> Tensor:
        out = linear(x, weight)
        saved = out.sin()
        with torch.no_grad():
            out.detach().mul_(2)
        return saved.cos()

    out = checkpoint(block, x, weight, use_reentrant=False, context_fn=Recordings("projection"))
    with pytest.raises(RuntimeError, match="a result of projection that a block keeps was changed in place"):
        out.sum().backward()


def test_a_window_and_a_composed_attention_are_computed_again() -> None:
    """Right values, although there is no operator whose results could be kept."""
    segments = Segments.from_lengths([5, 9])
    tensors = leaves(draw(14, 2, 8), draw(14, 2, 8, seed=1), draw(14, 2, 5, seed=2))
    for options in ({"window": 3, "causal": True}, {"causal": False}):

        def block(q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any] = options) -> Tensor:
            return sdpa(q, k, v, segments, **options).sin()

        wanted, found = runs(block, tensors, twice=False), runs(block, tensors, *BOTH)
        assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


def test_operators_outside_of_a_recording() -> None:
    """A backend may always go through its operators."""
    operators = attention_fused._flash_cpu(True, None)
    tensors = leaves(*(draw(2, 3, 7, 8, seed=n) for n in range(3)))
    found = runs(lambda q, k, v: recorded_attention(operators, q, k, v), tensors, twice=False)
    wanted = runs(partial(torch.nn.functional.scaled_dot_product_attention, is_causal=True), tensors, twice=False)
    assert len(found) == 4 and all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


@pytest.mark.parametrize("name", ["_flash", "_efficient", "cudnn_operators"])
def test_shapes_of_the_operators_of_a_gpu(name: str) -> None:
    """On the meta device: the installed torch takes the arguments. Efficient attention knows no grouped heads."""
    heads, dtype = (4, torch.float32) if name == "_efficient" else (2, torch.bfloat16)
    with torch.device("meta"):
        q, k, v = (torch.empty(2, n, 64, 16, dtype=dtype) for n in (4, heads, heads))
        operators: AttentionOperators = getattr(attention_fused, name)(True, 0.3)
        results = operators.forward(q, k, v)
        assert results[0] is not None and results[0].shape == q.shape
        gradients = operators.backward(torch.empty_like(q), q, k, v, *results)
    assert [g.shape for g in gradients] == [q.shape, k.shape, v.shape]


@pytest.mark.parametrize("window", [None, 5])
def test_shapes_of_torch_varlen(window: int | None) -> None:
    segments = Segments.from_lengths([5, 9], "meta")
    with torch.device("meta"):
        q, k, v = (torch.empty(14, heads, 16, dtype=torch.bfloat16) for heads in (4, 2, 2))
        parameters = attention_varlen._parameters()
        options = varlen_options(parameters, causal=True, scale=None, window=window, grouped=True)
        operators = varlen_operators(segments, True, options)
        results = operators.forward(q, k, v)
        gradients = operators.backward(torch.empty_like(q), q, k, v, *results)
    assert results[0] is not None and results[0].shape == q.shape
    assert [g.shape for g in gradients] == [q.shape, k.shape, v.shape]


def test_arguments_of_each_release_s_operator() -> None:
    def operator(required: str, optional: str) -> Any:
        def argument(name: str, default: bool) -> Any:
            return SimpleNamespace(name=name, has_default_value=lambda: default)

        arguments = [argument(name, False) for name in required.split()]
        arguments += [argument(name, True) for name in optional.split()]

        class Fake:
            _schema = SimpleNamespace(arguments=arguments)

            def __call__(self, **given: Any) -> Any:
                return given

            def __repr__(self) -> str:
                return "torch_attn._varlen_attn"

        return Fake()

    given = {"query": 1, "is_causal": True, "window_size": [-1, 0], "enable_gqa": False}
    older = with_known_arguments(operator("query", "is_causal scale"), tuple(given))
    assert older(**given) == {"query": 1, "is_causal": True}
    later = with_known_arguments(operator("query is_causal", "window_size enable_gqa seqused_k"), tuple(given))
    assert later(**given) == given
    with pytest.raises(UnsupportedError, match="_varlen_attn wants page_table, which is unknown"):
        with_known_arguments(operator("query page_table", "is_causal"), tuple(given))


@pytest.mark.gpu
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize(("heads", "size"), [((8, 2), 128), ((4, 4), 72), ((2, 2), 20)], ids=["text", "vision", "tiny"])
@pytest.mark.parametrize(
    "lengths", [[1000, 24, 1, 777], [7, 2300, 40, 1, 2048, 2048, 300, 3001], [540] * 12], ids=["short", "long", "equal"]
)
@pytest.mark.parametrize("name", ["cudnn", "torch_varlen", "triton", "sdpa"])
def test_on_a_gpu(name: str, lengths: list[int], heads: tuple[int, int], size: int, causal: bool) -> None:
    """The same output; gradients up to the order in which the kernels add; attention computed once."""
    try:
        OPS["attention"].resolve(name, describe_device("cuda"), "bfloat16")
    except ConfigError as error:
        pytest.skip(str(error))
    function, segments = OPS["attention"].backends[name].load(), Segments.from_lengths(lengths, "cuda")
    shapes = [(segments.total, n, size) for n in (heads[0], heads[1], heads[1])]
    tensors = [draw(*shape, seed=i).cuda().bfloat16().requires_grad_() for i, shape in enumerate(shapes)]

    def block(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return function(q, k, v, segments, causal=causal).sin()

    found = {}
    for case, kinds, twice in (("once", (), False), ("again", (), True), ("kept", BOTH, True)):
        with Computed() as computed:
            results = runs(block, tensors, *kinds, twice=twice)
        found[case] = results, sum(computed.counts[op] for op in FORWARDS)
    wanted, once = found["once"]
    ours = name in ("cudnn", "triton") and not causal and heads[0] == heads[1]  # kernels that torch does not dispatch
    padded = name == "sdpa" and size % 8  # torch pads inside, which is no operator of ours
    assert ours or (once and found["again"][1] == 2 * once)
    assert ours or found["kept"][1] == (2 * once if padded else once)
    assert torch.equal(found["kept"][0][0], wanted[0])
    for other, value in zip(found["kept"][0], wanted, strict=True):
        assert (other - value).float().norm() <= 1e-2 * value.float().norm()
