"""A PEFT LoRA adapter directory: which parameters it changes, and by which low-rank products.

Keys are `base_model.model.<module>.lora_A.weight` and `.lora_B.weight`. On fused experts PEFT wraps the module once per
parameter, so its keys do not say which parameter they mean; the shapes do. A [r*E, in] holds the experts' rows one
after the other, B [out, r*E] has the expert as its fastest column index. An adapter that all experts of a layer share
has A [r, in] and B [out, r].
"""

from __future__ import annotations

import math
import re
import threading
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from convert.adapter_config import read_adapter_config
from convert.quantised import is_code
from convert.safetensors_io import SafetensorsReader
from convert.tensors import Box, TensorInfo
from schemas.errors import IncompleteSourceError, UnsupportedError

WEIGHTS_FILE = "adapter_model.safetensors"
ROOT = "base_model.model."
CACHED = 16  # factors in memory at a time
_KEY = re.compile(r"base_model\.model\.(.+?)((?:\.base_layer)*)\.lora_(embedding_)?([AB])(?:\.weight|\.default)?")


@dataclass(frozen=True)
class LowRank:
    """delta = scale * left @ right. a, b: keys of the two factors. orientation: which way round they stand.

    kind: "dense" (left = B [out, r], right = A [r, in]); "embedding" (left = A^T, right = B^T); "experts" and
    "experts transposed" (the latter as PEFT made them before it knew that the output dimension comes first);
    "shared" (one product for all experts). alpha: that the settings state for it.
    """

    a: str
    b: str
    scale: float
    rank: int
    kind: str
    alpha: float


class Adapter:
    """deltas: parameter -> its product; replaced: parameter -> the key of the value that takes its place."""

    def __init__(self, folder: Path, parameters: Mapping[str, TensorInfo], root: str) -> None:
        """parameters: those of the model in memory, names as in the adapter behind `root`."""
        self.config = read_adapter_config(folder)
        self.reader = adapter_reader(folder)
        self.deltas: dict[str, LowRank] = {}
        self.replaced: dict[str, str] = {}
        self._where = folder / WEIGHTS_FILE
        self._parameters, self._root = parameters, root
        self._cache: OrderedDict[str, torch.Tensor] = OrderedDict()
        self._lock = threading.Lock()
        for key in self.reader.tensors:
            self._sort_in(key)

    def delta(self, parameter: str, box: Box) -> torch.Tensor:
        """The change of a box of a parameter, float32."""
        product = self.deltas[parameter]
        a, b = self._factor(product.a), self._factor(product.b)
        (r0, r1), (c0, c1) = box[-2:]
        if product.kind == "dense":
            return product.scale * (b[r0:r1] @ a[:, c0:c1])
        if product.kind == "embedding":
            return product.scale * (a[:, r0:r1].T @ b[c0:c1].T)
        first, last = box[0]
        if product.kind == "shared":
            return (product.scale * (b[r0:r1] @ a[:, c0:c1])).expand(last - first, -1, -1)
        experts = self._parameters[parameter].shape[0]
        rows = a.view(experts, product.rank, -1)[first:last]
        columns = b.view(b.shape[0], product.rank, experts)[:, :, first:last].permute(2, 0, 1)
        if product.kind == "experts transposed":
            return product.scale * (rows[:, :, r0:r1].mT @ columns[:, c0:c1].mT)
        return product.scale * (columns[:, r0:r1] @ rows[:, :, c0:c1])

    def _factor(self, key: str) -> torch.Tensor:
        with self._lock:
            if key in self._cache:
                self._cache.move_to_end(key)
                return self._cache[key]
        tensor = self.reader.read(key).float()
        with self._lock:
            self._cache[key] = tensor
            while len(self._cache) > CACHED:
                self._cache.popitem(last=False)
        return tensor

    def _sort_in(self, key: str) -> None:
        """Notes what one tensor of the file is for."""
        if not self.reader.tensors[key].dtype.is_floating_point or is_code(self.reader.tensors[key]):
            raise UnsupportedError(f"{self._where}: {key} is {self.reader.tensors[key]}, which is no weight")
        match = _KEY.fullmatch(key)
        if match is None:
            parameter = key.removeprefix(ROOT).removeprefix(self._root).replace(".base_layer.", ".")
            if "lora_" in key or parameter not in self._parameters:
                raise UnsupportedError(f"{self._where}: {key} is neither a LoRA factor nor a tensor of the base")
            self._check_shape(key, self._parameters[parameter].shape)
            self.replaced[parameter] = key
            return
        if match[4] == "B":
            if _partner(key, match) not in self.reader.tensors:
                raise IncompleteSourceError(f"{self._where}: {key} has no {_partner(key, match)} beside it")
            return
        b = _partner(key, match)
        if b not in self.reader.tensors:
            raise IncompleteSourceError(f"{self._where}: {key} has no {b} beside it")
        module = match[1].removeprefix(self._root)
        parameter, product = self._product(module, key, b, bool(match[3]))
        if parameter in self.deltas:
            raise UnsupportedError(
                f"{self._where}: {parameter} is changed both by {self.deltas[parameter].a} and by {key}"
            )
        self.deltas[parameter] = product

    def _product(self, module: str, a: str, b: str, embedding: bool) -> tuple[str, LowRank]:
        """The parameter that a pair of factors is for, and how they multiply."""
        shapes = self.reader.tensors[a].shape, self.reader.tensors[b].shape
        if len(shapes[0]) != 2 or len(shapes[1]) != 2:
            raise UnsupportedError(f"{self._where}: {a} {list(shapes[0])} is no LoRA of a linear layer or embedding")
        (r_a, size_in), (size_out, r_b) = shapes
        weight = self._parameters.get(f"{module}.weight")
        if weight is not None:
            expected = (size_in, size_out) if embedding else (size_out, size_in)
            if weight.shape != expected or r_a != r_b:
                raise UnsupportedError(
                    f"{self._where}: {a} {list(shapes[0])} and its B {list(shapes[1])} do not fit {module}.weight "
                    f"{list(weight.shape)} of the base"
                )
            rank = self._setting("rank_pattern", "r", module)
            if r_a != rank:
                raise UnsupportedError(f"{self._where}: {a} {list(shapes[0])} has rank {r_a}, its settings say {rank}")
            kind = "embedding" if embedding else "dense"
            return f"{module}.weight", self._low_rank(a, b, module, r_a, kind)
        candidates = [
            (name, kind)
            for name in (module, f"{module}.gate_up_proj", f"{module}.down_proj")
            if name in self._parameters and len(self._parameters[name].shape) == 3
            for kind in self._expert_kinds(name, r_a, r_b, size_in, size_out)
        ]
        if len(candidates) != 1:
            said = "could be " + " or ".join(f"{n} ({k})" for n, k in candidates) if candidates else "fits nothing"
            raise UnsupportedError(f"{self._where}: {a} {list(shapes[0])} with B {list(shapes[1])} {said} in the base")
        name, kind = candidates[0]
        rank = r_a if kind == "shared" else r_a // self._parameters[name].shape[0]
        return name, self._low_rank(a, b, name, rank, kind)

    def _expert_kinds(self, name: str, r_a: int, r_b: int, size_in: int, size_out: int) -> list[str]:
        """How a pair of factors could belong to a fused parameter [E, out, in]; the rank of the configuration tells
        an adapter of every expert from one that they share."""
        experts, out, into = self._parameters[name].shape
        rank = self._setting("rank_pattern", "r", name)
        if r_a != r_b:
            return []
        kinds = []
        if r_a == rank * experts:
            if (size_out, size_in) == (out, into):
                kinds.append("experts")
            if (size_out, size_in) == (into, out):  # of a square one both fit
                kinds.append("experts transposed")
        elif r_a == rank and (size_out, size_in) == (out, into):
            kinds.append("shared")
        return kinds

    def _low_rank(self, a: str, b: str, name: str, rank: int, kind: str) -> LowRank:
        alpha = self._setting("alpha_pattern", "lora_alpha", name)
        scale = alpha / (math.sqrt(rank) if self.config.get("use_rslora") else rank)
        return LowRank(a, b, scale, rank, kind, alpha)

    def _setting(self, patterns: str, default: str, name: str) -> Any:
        """A number of the configuration for one module; the first pattern that its name ends with goes before."""
        for pattern, value in (self.config.get(patterns) or {}).items():
            if re.match(rf"(.*\.)?({pattern})$", self._root + name):
                return value
        return self.config[default]

    def _check_shape(self, key: str, shape: tuple[int, ...]) -> None:
        if self.reader.tensors[key].shape != shape:
            raise UnsupportedError(f"{self._where}: {key} is {self.reader.tensors[key]}, the base has {list(shape)}")


def adapter_reader(folder: Path) -> SafetensorsReader:
    """The adapter's tensors. UnsupportedError when there are only pickled ones."""
    if not (folder / WEIGHTS_FILE).exists():
        if (folder / "adapter_model.bin").exists():
            raise UnsupportedError(f"{folder}: has a pickled adapter_model.bin only; save it as safetensors")
        raise IncompleteSourceError(f"{folder / WEIGHTS_FILE}: no such file")
    return SafetensorsReader(folder, {WEIGHTS_FILE: None})


def adapted_modules(reader: SafetensorsReader) -> list[str]:
    """The module (or parameter) names of an adapter's keys, as the trained model called them."""
    names = []
    for key in reader.tensors:
        if not key.startswith(ROOT):
            raise UnsupportedError(f"{reader.folder / WEIGHTS_FILE}: {key} does not begin with {ROOT}")
        match = _KEY.fullmatch(key)
        names.append(match[1] if match else key.removeprefix(ROOT).replace(".base_layer.", "."))
    if not names:
        raise IncompleteSourceError(f"{reader.folder / WEIGHTS_FILE}: holds no tensors")
    return sorted(set(names))


def _partner(key: str, match: re.Match[str]) -> str:
    """The key of the other factor."""
    at, other = match.start(4), "B" if match[4] == "A" else "A"
    return key[:at] + other + key[at + 1 :]
