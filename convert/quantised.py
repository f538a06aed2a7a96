"""Models whose numbers are codes of a quantiser: refused before anything is computed with them.

Three things tell them: a `quantization_config` in config.json, scales beside the weights, and elements of one byte.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from convert.patterns import some
from convert.tensors import TensorInfo
from schemas.errors import UnsupportedError

KEYS = ("quantization_config", "compression_config")
# what quantisers store beside, or in the place of, a weight: fp8 and compressed-tensors, GPTQ, AWQ, bitsandbytes
_NAMES = re.compile(
    r".*(_scale|_scale_inv|_scales|\.scales|_scale_2|_zero_point|\.qweight|\.qzeros|\.g_idx|\.weight_packed|\.weight_shape"
    r"|\.absmax|\.quant_map|\.nested_absmax|\.nested_quant_map|\.quant_state(\..*)?|_blocks|\.SCB)"
)


def refuse_quantised(where: str, config: Mapping[str, Any], tensors: Mapping[str, TensorInfo]) -> None:
    """where: the directory, for messages. UnsupportedError with the keys or names that tell."""
    stated = list(_statements(config, ""))
    if stated:
        raise _error(f"{where}: config.json has {some(stated)}")
    scales = [name for name in tensors if _NAMES.fullmatch(name)]
    if scales:
        raise _error(f"{where}: holds {len(scales)} tensors that only quantised models have: {some(scales)}")
    codes = [name for name, info in tensors.items() if is_code(info)]
    if codes:
        raise _error(f"{where}: {len(codes)} tensors are of {tensors[codes[0]].dtype}: {some(codes)}")


def is_code(info: TensorInfo) -> bool:
    """True for floating point of one byte, which means nothing without a scale."""
    return info.dtype.is_floating_point and info.dtype.itemsize < 2


def _error(found: str) -> UnsupportedError:
    return UnsupportedError(f"{found}; the model is quantised, its numbers are no weights: give the unquantised one")


def _statements(values: Mapping[str, Any], at: str) -> Iterator[str]:
    for key, value in values.items():
        if key in KEYS and value:
            yield at + key
        elif isinstance(value, dict):
            yield from _statements(value, f"{at}{key}.")
