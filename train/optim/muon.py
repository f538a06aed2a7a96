"""Muon (Jordan et al. 2024): steps along the orthogonalised average of the gradients, of whole matrices.

The matrices of a portion go three ways one after the other: their averages are mixed with the gradients and, where a
rank has some rows alone, sent to the owners (`_start`); the owners orthogonalise them and send the rows back
(`_orthogonalise`); each rank changes its rows of the parameters (`_finish`). While a portion is orthogonalised, the
next one is under way to its owners and the last one on its way back.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

import torch
import torch.distributed as dist
from torch import Tensor

from train.optim.kernels import kernel
from train.optim.muon_layout import Matrices
from train.optim.muon_plan import Entry, Portion, begun_before, make_portions
from train.optim.newton_schulz import NewtonSchulz
from train.optim.offload import Visit
from train.optim.rounding import Draws, round_to
from train.parallel.loading import local_part

RMS_OF_ADAMW = 0.2  # of its updates, on average (Liu et al. 2025, arXiv:2502.16982, section 2.2)


@dataclass(frozen=True, eq=False)
class MuonState:
    """Of one parameter at one step: the average, placed as the parameter, and the bits that it and the parameter are
    rounded with, None to the nearest."""

    momentum_buffer: Tensor
    draws: tuple[Draws, Draws] | None = None


@dataclass(eq=False)
class Flow:
    """A portion under way. sent: [n, rows here, K] for the owners; arrived: what came for this rank; result: as sent,
    orthogonalised; work: the exchange at hand."""

    portion: Portion
    sent: Tensor | None
    arrived: Tensor | None = None
    result: Tensor | None = None
    work: dist.Work | None = None

    def wait(self) -> None:
        """On a GPU its stream waits, not the host."""
        if self.work is not None:
            self.work.wait()
            self.work = None


class Muon:
    """The step for all parameters of Muon. device: that computes, where parameters may not be."""

    def __init__(self, parameters: Sequence[Matrices], ns: NewtonSchulz, device: torch.device) -> None:
        self.ns, self.device = ns, device
        self.portions = make_portions(parameters)
        self.begins = begun_before(self.portions)

    def averages(self, state_of: Callable[[Matrices], MuonState]) -> Iterator[list[Tensor]]:
        """Of each portion, in the order in which they begin, those of its entries: flat, where they live."""
        for number in chain.from_iterable(self.begins):
            entries = self.portions[number].entries
            yield [_flat(entry, state_of(entry.matrices).momentum_buffer) for entry in entries]

    def step(self, state_of: Callable[[Matrices], MuonState], visit: Visit) -> None:
        """In place: averages and parameters. visit: entered once for each of `averages`, which are where it is computed
        until it is left."""
        last: Flow | None = None
        under_way: dict[int, Flow] = {}
        for number, begins in enumerate(self.begins):
            for other in begins:
                under_way[other] = self._start(self.portions[other], state_of, visit)
            flow = under_way.pop(number)
            self._orthogonalise(flow)
            if last is not None:
                self._finish(last, state_of)
            last = flow
        if last is not None:
            self._finish(last, state_of)

    def _start(self, portion: Portion, state_of: Callable[[Matrices], MuonState], visit: Visit) -> Flow:
        like = portion.like
        rows, columns = like.held[like.rank], like.columns
        total = sum(entry.count for entry in portion.entries)
        sent = torch.empty(total, rows, columns, dtype=self.ns.exchanged, device=self.device)
        at = 0
        with visit() as averages:
            for entry, buffer in zip(portion.entries, averages, strict=True):
                average(entry, state_of(entry.matrices), buffer, sent[at : at + entry.count])
                at += entry.count
        flow = Flow(portion, sent)
        if portion.shared:
            counts = portion.counts()
            to = [count * rows * columns for count in counts]
            flow.arrived, flow.work = self._exchange(sent, self._arriving(portion), to, portion)
        return flow

    def _orthogonalise(self, flow: Flow) -> None:
        like, shape = flow.portion.like, flow.portion.like.block_shape
        if not flow.portion.shared:
            assert flow.sent is not None
            flow.result, flow.sent = self.ns(flow.sent), None
            return
        flow.wait()
        assert flow.arrived is not None
        assert flow.sent is not None
        sizes = self._arriving(flow.portion)
        mine = flow.portion.counts()[like.rank]
        parts = flow.arrived.split(sizes)
        whole = torch.cat([part.view(mine, held, like.columns) for part, held in zip(parts, like.held, strict=True)], 1)
        flow.arrived = None
        made = self.ns(whole.view(mine * like.blocks, *shape)).view(whole.shape) if mine else whole.to(self.ns.dtype)
        back = torch.cat([part.reshape(-1) for part in made.split(like.held, 1)])
        to = [count * like.held[like.rank] * like.columns for count in flow.portion.counts()]
        result, flow.work = self._exchange(back, to, sizes, flow.portion)
        flow.result, flow.arrived, flow.sent = result.view(flow.sent.shape), back, None

    def _finish(self, flow: Flow, state_of: Callable[[Matrices], MuonState]) -> None:
        flow.wait()
        assert flow.result is not None
        at = 0
        for entry in flow.portion.entries:
            change(entry, state_of(entry.matrices), flow.result[at : at + entry.count])
            at += entry.count
        flow.result = flow.arrived = None

    def _arriving(self, portion: Portion) -> list[int]:
        """Elements that come to this rank from each."""
        like = portion.like
        mine = portion.counts()[like.rank]
        return [mine * held * like.columns for held in like.held]

    def _exchange(
        self, sent: Tensor, arriving: list[int], leaving: list[int], portion: Portion
    ) -> tuple[Tensor, dist.Work | None]:
        out = sent.new_empty(sum(arriving))
        group = portion.like.group
        return out, dist.all_to_all_single(out, sent.view(-1), arriving, leaving, group=group, async_op=True)


def average(entry: Entry, state: MuonState, buffer: Tensor, out: Tensor) -> None:
    """The average of the gradients, buffer, takes the new one in; out [n, rows, columns] is what is orthogonalised: the
    average, or with Nesterov's momentum the gradient mixed with it."""
    parameter = entry.matrices.parameter
    assert parameter.grad is not None
    gradient = _flat(entry, parameter.grad)
    momentum, nesterov = float(entry.matrices.options["momentum"]), bool(entry.matrices.options["nesterov"])
    draws = None if state.draws is None else state.draws[0]
    start = _start_of(entry)
    if not buffer.numel():
        return
    if buffer.is_cuda:
        kernel("triton_muon:average")(gradient, buffer, out, momentum, nesterov, draws, start)
        return
    wide = torch.promote_types(torch.promote_types(gradient.dtype, buffer.dtype), torch.float32)
    gradient = gradient.to(wide)
    updated = buffer.to(wide).lerp(gradient, 1 - momentum)
    mixed = gradient.lerp(updated, momentum) if nesterov else updated
    out.copy_(mixed.view(out.shape))
    round_to(buffer, updated, _noise(draws, start, buffer))


def change(entry: Entry, state: MuonState, direction: Tensor) -> None:
    """The parameter decays and goes against the direction [n, rows, columns]."""
    matrices = entry.matrices
    parameter = _flat(entry, matrices.parameter)
    lr, decay = float(matrices.options["lr"]), float(matrices.options["weight_decay"])
    size = lr * adjusted(matrices.block_shape, matrices.options["adjust_lr_fn"])
    draws = None if state.draws is None else state.draws[1]
    start = _start_of(entry)
    if not parameter.numel():
        return
    if parameter.is_cuda:
        kernel("triton_muon:change")(parameter, direction, 1 - lr * decay, size, draws, start)
        return
    wide = torch.promote_types(parameter.dtype, torch.float32)
    direction = direction.to(parameter.device, wide).view(-1)
    updated = (parameter.to(wide) * (1 - lr * decay)).sub_(direction, alpha=size)
    round_to(parameter, updated, _noise(draws, start, parameter))


def adjusted(shape: tuple[int, int], how: str) -> float:
    """Factor of the learning rate for matrices of a shape. original: sqrt(max(1, M / K)); match_rms_adamw:
    0.2 sqrt(max(M, K)), which gives the update AdamW's root mean square."""
    rows, columns = shape
    if how == "original":
        return math.sqrt(max(1.0, rows / columns))
    return RMS_OF_ADAMW * math.sqrt(max(rows, columns))


def _flat(entry: Entry, tensor: Tensor) -> Tensor:
    """The entry's elements of a tensor that is placed as the parameter, which shares its memory."""
    start = _start_of(entry)
    stop = start + entry.count * entry.matrices.held[entry.matrices.rank] * entry.matrices.columns
    return local_part(tensor).view(-1)[start:stop]


def _start_of(entry: Entry) -> int:
    """Elements of this rank's part before the entry."""
    return entry.first * entry.matrices.held[entry.matrices.rank] * entry.matrices.columns


def _noise(draws: Draws | None, start: int, tensor: Tensor) -> Tensor | None:
    if draws is None or tensor.dtype != torch.bfloat16:
        return None
    return draws.bits(start, start + tensor.numel(), tensor.device)
