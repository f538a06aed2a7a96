"""Nothing is lost and nothing is made twice: the account of a conversion, and the recipes that it allows.

Every source tensor must be used whole by exactly one rule or be dropped with a reason; every target must be made
exactly once, in the shape that is expected of it.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass

import torch

from convert.engine import Resolution
from convert.patterns import SHOWN, some
from convert.pieces import Piece, usage
from convert.quantised import is_code
from convert.tensors import TensorInfo, dtype_name
from schemas.errors import IncompleteSourceError, UnsupportedError


@dataclass(frozen=True)
class Recipe:
    """How one target tensor is made: `pieces` tile it; a value is cast to `info.dtype` on its way."""

    target: str
    info: TensorInfo
    pieces: tuple[Piece, ...]


def check_ledger(
    resolution: Resolution, tensors: Mapping[str, TensorInfo], expected: Mapping[str, tuple[int, ...]]
) -> None:
    """Every source used once, whole; every expected target made once, in its shape; nothing else made.

    expected: name -> shape of the targets that rules must make. IncompleteSourceError for targets that nothing makes,
    UnsupportedError for targets that nobody expects, UnsupportedError for wrong shapes.
    """
    missing = expected.keys() - resolution.made.keys()
    if missing:
        raise IncompleteSourceError(
            f"{len(missing)} of {len(expected)} target tensors are made by no source tensor: {some(missing)}"
        )
    surplus = resolution.made.keys() - expected.keys()
    if surplus:
        raise UnsupportedError(f"{len(surplus)} tensors have no place in the target model: {some(surplus)}")
    wrong = [
        f"{name} would be {list(resolution.made[name].shape)}, config.json says {list(shape)}"
        for name, shape in expected.items()
        if resolution.made[name].shape != tuple(shape)
    ]
    if wrong:
        raise UnsupportedError(
            f"{len(wrong)} tensors have another shape than config.json says: {'; '.join(wrong[:SHOWN])}"
        )
    _check_use(resolution, tensors)


def _check_use(resolution: Resolution, tensors: Mapping[str, TensorInfo]) -> None:
    """Counts elements: sources against what was used and sliced away, targets against what their pieces fill."""
    used: dict[str, int] = {}
    for target, assembly in resolution.made.items():
        if sum(piece.numel for piece in assembly.pieces) != math.prod(assembly.shape):
            raise UnsupportedError(f"{target} {list(assembly.shape)} is not filled exactly once by its sources")
        if target in resolution.repeated:
            continue
        for source, elements in usage(assembly.pieces).items():
            used[source] = used.get(source, 0) + elements
    for name, info in tensors.items():
        sliced = resolution.sliced.get(name, (0, ""))[0]
        if name in resolution.dropped:
            if name in used:
                raise UnsupportedError(f"{name} is both used and dropped ({resolution.dropped[name]})")
        elif used.get(name, 0) + sliced != info.numel:
            raise UnsupportedError(
                f"{name}: {used.get(name, 0)} of {info.numel} elements are used, {sliced} sliced away"
            )


def recipes(
    resolution: Resolution,
    tensors: Mapping[str, TensorInfo],
    dtypes: Mapping[str, torch.dtype],
    override: torch.dtype | None = None,
    whole_numbers: Collection[str] = (),
) -> list[Recipe]:
    """One recipe per target, its dtype: `override` for floating point, else that of `dtypes`, else the sources' own.

    whole_numbers: targets that may hold integers. UnsupportedError for any other that does, or is to be made of some:
    a weight that is quantised means something else than its numbers.
    """
    made = []
    for name, assembly in resolution.made.items():
        own = {tensors[source].dtype for source in usage(assembly.pieces)}
        dtype = dtypes.get(name)
        if dtype is None and override is not None and all(each.is_floating_point for each in own):
            dtype = override
        if dtype is None and len(own) > 1:
            found = ", ".join(sorted(map(dtype_name, own)))
            raise UnsupportedError(
                f"{name} would mix the types {found} of {some(usage(assembly.pieces))}; give --dtype"
            )
        dtype = dtype or own.pop()
        if override is not None and dtype.is_floating_point:
            dtype = override
        _check_kind(name, dtype, {source: tensors[source] for source in usage(assembly.pieces)}, whole_numbers)
        pieces = tuple(sorted(assembly.pieces, key=lambda piece: piece.at))
        made.append(Recipe(name, TensorInfo(assembly.shape, dtype), pieces))
    return made


def _check_kind(
    target: str, dtype: torch.dtype, sources: Mapping[str, TensorInfo], whole_numbers: Collection[str]
) -> None:
    for source, info in sources.items():
        if is_code(info):
            raise UnsupportedError(
                f"{source} is {info}: such numbers mean nothing without their scales; is it quantised?"
            )
        if info.dtype.is_floating_point and dtype.is_floating_point:
            continue
        if info.dtype != dtype or target not in whole_numbers:
            raise UnsupportedError(
                f"{source} is {info} and would become {target} of {dtype_name(dtype)}: whole numbers are no weights of "
                "these families; is the model quantised?"
            )
