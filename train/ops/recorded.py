"""Results that a block which is computed again takes over from its first run.

Under gradient checkpointing a block runs twice. In the first run chosen operations leave their results in a
`Recording`; in the second one they take them from there, in the same order, and compute nothing. Each of them is a node
of autograd, so that the second run saves what the backward pass needs. An operation costs the host what one such node
costs; nothing watches the others. Outside of a recording every function here is the plain operation.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager
from contextvars import ContextVar, Token
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Literal

import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from schemas.errors import UnsupportedError
from train.ops.recorded_room import Room

Kind = Literal["attention", "projection", "mlp"]
Results = tuple[Tensor | None, ...]

_current: ContextVar[Recording | None] = ContextVar("recording", default=None)


class Recording:
    """What one block keeps between its two runs. kinds: of operations that leave their results; the others are computed
    again; room: shared with other blocks, None = there is enough; first: whether this one comes first in it. In a block
    what surrounds attention comes before its MLP. Ranks may keep different results: none of these operations has a part
    in a collective call."""

    def __init__(self, kinds: Collection[Kind], room: Room | None = None, *, first: bool = True) -> None:
        self.kinds, self.first = frozenset(kinds), first
        self.room = room or Room()
        self._kept: deque[_Kept] = deque()
        self._again = self._spent = False

    def __del__(self) -> None:
        self._clear()  # a block without a backward pass

    def contexts(self) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        """Of the block's first run and of its second, as a `context_fn` of torch's checkpoint returns them.
        UnsupportedError where a block is computed a third time: what the second run took is gone."""
        return _Run(self, again=False), _Run(self, again=True)

    @property
    def again(self) -> bool:
        """Whether this is the second run."""
        return self._again

    def results(self, kind: Kind, compute: Callable[[], Results]) -> Results:
        """Those of `compute` in the first run, and the same tensors in the second, where it is not called. For the
        forward of an autograd function, where gradients are off. RuntimeError: the runs differ, or something changed a
        result in place."""
        if not self._again:
            found = compute()
            fits = self.room.take(_nbytes(found), 2 * (not self.first) + (kind == "mlp"))
            self._kept.append(_Kept.of(kind, found if fits else None))
            return found
        if not self._kept or self._kept[0].kind != kind:
            there = self._kept[0].kind if self._kept else "nothing"
            raise RuntimeError(f"the second run of a block asks for a result of {kind}, the first one left {there}")
        kept = self._kept.popleft()
        self.room.give_back(_nbytes(kept.tensors))
        return compute() if kept.tensors is None else kept.taken()

    def begin(self, *, again: bool) -> None:
        """Of a run."""
        if self._spent:
            raise UnsupportedError(
                "a block whose results are kept is computed again for a second backward pass, and the first one took "
                "them; set train.gradient_checkpointing.keep to inputs, or call backward once"
            )
        self._again = self._spent = again

    def end(self) -> None:
        """Of a run; the second one may stop before it has taken everything."""
        if self._again:
            self._clear()

    def _clear(self) -> None:
        while self._kept:
            self.room.give_back(_nbytes(self._kept.popleft().tensors))


class _Run(AbstractContextManager[None]):
    def __init__(self, recording: Recording, *, again: bool) -> None:
        self.recording, self.again = recording, again
        self.token: Token[Recording | None] | None = None

    def __enter__(self) -> None:
        self.recording.begin(again=self.again)
        # of this thread alone: autograd runs the second one in a thread of its own
        self.token = _current.set(self.recording)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        assert self.token is not None
        _current.reset(self.token)
        self.recording.end()


@dataclass(frozen=True)
class _Kept:
    """tensors: None where there was no room; versions: how often each had been changed in place when it was kept."""

    kind: Kind
    tensors: Results | None
    versions: tuple[int, ...]

    @classmethod
    def of(cls, kind: Kind, results: Results | None) -> _Kept:
        if results is None:
            return cls(kind, None, ())
        # the originals become outputs of the first run, whose graph nobody should hold
        tensors = tuple(None if result is None else result.detach() for result in results)
        return cls(kind, tensors, _versions(tensors))

    def taken(self) -> Results:
        assert self.tensors is not None
        if _versions(self.tensors) != self.versions:
            raise RuntimeError(f"a result of {self.kind} that a block keeps was changed in place")
        return self.tensors


def _versions(tensors: Results) -> tuple[int, ...]:
    return tuple(0 if tensor is None else tensor._version for tensor in tensors)


def _nbytes(tensors: Results | None) -> int:
    return sum(tensor.nbytes for tensor in tensors or () if tensor is not None)


def recording_of(kind: Kind) -> Recording | None:
    """The recording of the block that runs, if it keeps such results."""
    recording = _current.get()
    return recording if recording is not None and kind in recording.kinds else None


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    column_sum: Callable[[Tensor], Tensor] | None = None,
    *,
    kind: Kind | None = "projection",
) -> Tensor:
    """x @ weight.T + bias, whose result a block may keep. x: [..., in]; weight: [out, in]; bias: [out]; column_sum: of
    [N, out], makes the gradient of the bias, None = torch's; kind: of result, None = one that no block keeps."""
    recording = None if kind is None else recording_of(kind)
    if recording is None and column_sum is None:
        return F.linear(x, weight, bias)
    out: Tensor = _Linear.apply(recording, kind, column_sum, x, weight, bias)
    return out


class _Linear(Function):
    """Saves what the gradients that are asked for need, as torch's own does."""

    @staticmethod
    def forward(
        ctx: Any,
        recording: Recording | None,
        kind: Kind,
        column_sum: Callable[[Tensor], Tensor] | None,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
    ) -> Tensor | None:
        *_, of_x, of_weight, _ = ctx.needs_input_grad
        ctx.save_for_backward(x if of_weight else None, weight if of_x else None)
        ctx.column_sum = column_sum
        if recording is None:
            return F.linear(x, weight, bias)
        return recording.results(kind, lambda: (F.linear(x, weight, bias),))[0]

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        rows = dout.flatten(0, -2)
        dx = None if weight is None else dout @ weight
        dweight = None if x is None else rows.t() @ x.flatten(0, -2)
        dbias = None
        if ctx.needs_input_grad[5]:
            dbias = rows.sum(0) if ctx.column_sum is None else ctx.column_sum(rows)
        return None, None, None, dx, dweight, dbias


@dataclass(frozen=True)
class AttentionOperators:
    """A backend's attention in two halves, so that a block can keep its results.

    forward(q, k, v) gives the output and then whatever the backward pass needs of it: tensors, or None. backward(dout,
    q, k, v, *all that forward gave) gives the gradients of q, k and v. Neither is seen by autograd, and neither may
    hold q, k or v: they live as long as the backward pass is due. Constants (scale, document boundaries) are theirs.
    A backend whose every call goes through `recorded_attention` is registered as recorded (`train.ops.catalogue`).
    """

    forward: Callable[..., Results]
    backward: Callable[..., tuple[Tensor, Tensor, Tensor]]


def recorded_attention(operators: AttentionOperators, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The output, which the block that runs may keep; q, k, v as the operators take them."""
    out: Tensor = _Attention.apply(recording_of("attention"), operators, q, k, v)
    return out


class _Attention(Function):
    @staticmethod
    def forward(
        ctx: Any, recording: Recording | None, operators: AttentionOperators, q: Tensor, k: Tensor, v: Tensor
    ) -> Tensor | None:
        if recording is None:
            results = operators.forward(q, k, v)
        else:
            results = recording.results("attention", lambda: operators.forward(q, k, v))
        ctx.compute_gradients = operators.backward
        ctx.save_for_backward(q, k, v, *results)
        return results[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, *ctx.compute_gradients(dout, *ctx.saved_tensors)
