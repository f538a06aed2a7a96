"""Stochastic rounding of float32 values to bfloat16: up or down at random, right on average.

A change below half a unit in the last place of a bfloat16 value is lost when the sum is rounded to the nearest one, at
every step anew; rounded at random it is made with the right probability (Zamirai et al., arXiv:2010.06192). The random
bits of an element are a hash of a key and the element's place in its whole parameter; the key is a hash of the run's
seed, the step, the parameter's name and the tensor that is rounded. So the same bits are drawn after a resume, under
any sharding, and by the kernels of `train.ops.triton_rounding`, without any generator's state.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import xxhash
from torch import Tensor

from train.parallel.loading import local_box

WORD = 0xFFFFFFFF
HALF = 0xFFFF  # bits that bfloat16 cuts off float32
MULTIPLIERS = (0x7FEB352D, 0x846CA68B)  # of lowbias32 (Wellons 2018), a mixing function of 32 bits
HIGH_WORD = 0x9E3779B9  # spreads the upper half of an index over its lower half


@dataclass(frozen=True)
class Place:
    """Where the elements of this rank's part lie in the whole tensor, both flat: element i of the part is element
    base + i // inner * stride + i % inner."""

    base: int
    inner: int
    stride: int

    @classmethod
    def of(cls, parameter: Tensor) -> Place:
        """For parts along the first two dimensions, which FSDP and expert parallelism cut."""
        box, shape = local_box(parameter), parameter.shape
        if any((low, high) != (0, size) for (low, high), size in zip(box[2:], shape[2:], strict=True)):
            raise ValueError(f"a parameter {tuple(shape)} of which a rank holds {box}")
        stride, within = math.prod(shape[1:]), math.prod(shape[2:])
        first, second = (box[0][0] if box else 0), (box[1][0] if len(box) > 1 else 0)
        inner = math.prod(high - low for low, high in box[1:])
        return cls(first * stride + second * within, max(inner, 1), stride)

    def after(self, start: int) -> Place:
        """Of what follows the first `start` elements of the part, a multiple of inner."""
        return Place(self.base + start // self.inner * self.stride, self.inner, self.stride)


@dataclass(frozen=True)
class Draws:
    """Random bits for the elements of one tensor at one step. words: the key, as signed 32-bit numbers."""

    words: tuple[int, int]
    place: Place

    @classmethod
    def of(cls, seed: int, step: int, name: str, what: str, place: Place) -> Draws:
        """name: of the parameter; what: which of its tensors is rounded."""
        key = xxhash.xxh3_64_intdigest(f"{seed}:{step}:{name}:{what}".encode())
        return cls((_signed(key & WORD), _signed(key >> 32)), place)

    def bits(self, start: int, stop: int, device: torch.device) -> Tensor:
        """int64 [stop - start] in [0, 2^32), of these elements of the part."""
        i = torch.arange(start, stop, device=device)
        place = self.place
        index = i.div(place.inner, rounding_mode="floor").mul_(place.stride).add_(i.remainder(place.inner))
        index += place.base
        low, high = index & WORD, index >> 32
        mixed = _mix(low ^ (self.words[0] & WORD))
        return _mix(mixed ^ ((high * HIGH_WORD) & WORD) ^ (self.words[1] & WORD))


def round_to(to: Tensor, value: Tensor, noise: Tensor | None) -> None:
    """Writes float32 values into a tensor of either dtype. noise: 32 random bits of each, of which the lower 16 are
    used; None: to the nearest value."""
    if noise is None or to.dtype != torch.bfloat16:
        to.copy_(value)
        return
    bits = value.contiguous().view(torch.int32)
    up = (bits + (noise & HALF).to(torch.int32).view_as(bits)) & ~HALF
    to.copy_(torch.where(value.isnan(), value, up.view(torch.float32)))


def _mix(x: Tensor) -> Tensor:
    """A permutation of [0, 2^32); a product of two such numbers keeps its lower 32 bits right when it overflows."""
    x = x ^ (x >> 16)
    x = (x * MULTIPLIERS[0]) & WORD
    x ^= x >> 15
    x = (x * MULTIPLIERS[1]) & WORD
    return x ^ (x >> 16)


def _signed(word: int) -> int:
    return word - (1 << 32) if word >> 31 else word
