"""The state of every random generator of a process as JSON: Python, numpy, torch on the CPU and on this rank's GPU.

Written as text and not as torch.save or pickle do it, so that reading it runs nothing.
"""

from __future__ import annotations

import base64
import binascii
import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import torch

from convert.output import write_atomic
from convert.small_files import read_object
from schemas.errors import IncompleteSourceError, UnsupportedError

RNG_VERSION = 1


def rng_state() -> dict[str, Any]:
    """JSON of all states; `cuda` is None where CUDA was not used."""
    version, internal, gauss_next = random.getstate()
    name, key, position, has_gauss, cached = np.random.get_state(legacy=True)
    cuda = torch.cuda.is_available() and torch.cuda.is_initialized()
    return {
        "version": RNG_VERSION,
        "python": {"version": version, "internal": list(internal), "gauss_next": gauss_next},
        "numpy": {
            "name": name,
            "key": _text(np.ascontiguousarray(key, dtype="<u4").tobytes()),
            "position": int(position),
            "has_gauss": int(has_gauss),
            "cached_gaussian": float(cached),
        },
        "torch": _text(torch.get_rng_state().numpy().tobytes()),
        "cuda": _text(torch.cuda.get_rng_state().numpy().tobytes()) if cuda else None,
    }


def set_rng_state(state: dict[str, Any], where: object = "random state") -> None:
    """Sets all generators. where: for messages. UnsupportedError for another version, IncompleteSourceError for what
    is no state; then no generator is touched, but for the one that refuses."""
    if state.get("version") != RNG_VERSION:
        raise UnsupportedError(f"{where}: has version {state.get('version')}; this omniloom reads {RNG_VERSION}")
    try:
        python, legacy = state["python"], state["numpy"]
        internal = (int(python["version"]), tuple(map(int, python["internal"])), python["gauss_next"])
        words = np.frombuffer(_bytes(legacy["key"]), dtype="<u4").astype(np.uint32)
        numpy_state = (
            str(legacy["name"]),
            words,
            int(legacy["position"]),
            int(legacy["has_gauss"]),
            float(legacy["cached_gaussian"]),
        )
        cpu = _tensor(state["torch"])
        cuda = None if state["cuda"] is None else _tensor(state["cuda"])
        random.setstate(internal)
        np.random.set_state(numpy_state)
        torch.set_rng_state(cpu)
        if cuda is not None and torch.cuda.is_available():
            torch.cuda.set_rng_state(cuda)
    except (KeyError, TypeError, ValueError, RuntimeError, binascii.Error) as error:
        raise IncompleteSourceError(f"{where}: is no state of the random generators: {error}") from error


def rng_bytes() -> bytes:
    """The state as it is written."""
    return json.dumps(rng_state()).encode()


def write_rng(path: Path, content: bytes) -> None:
    """Writes what `rng_bytes` gave, whole or not at all."""
    write_atomic(path, content)


def load_rng(path: Path) -> None:
    """Sets all generators from a file. IncompleteSourceError when it is missing or damaged."""
    try:
        state = read_object(path, IncompleteSourceError)
    except FileNotFoundError as error:
        raise IncompleteSourceError(f"{path}: does not exist") from error
    set_rng_state(state, path)


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")


def _bytes(text: str) -> bytes:
    return base64.b64decode(text, validate=True)


def _tensor(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(_bytes(text)), dtype=torch.uint8)
