"""Pickles of checkpoints, read without executing them.

An allowed global becomes an inert class that only remembers what it was given; any other global is refused before the
pickle can call it. Nothing of torch, Megatron or numpy runs, whatever the stream says.
"""

from __future__ import annotations

import io
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeGuard

import torch

from convert.archives import DAMAGED_ARCHIVE, read_members
from convert.pickle_scan import TooDeepError, check_pickle
from convert.printing import printable
from schemas.errors import IncompleteSourceError, UnsafeInputError

COMMON_LIMIT = 32 << 20  # bytes of the pickles of a common.pt; those of a large run have about 1 MB
_CHECKPOINT = "torch.distributed.checkpoint"
_MCORE = "megatron.core.dist_checkpointing."

# what the index of a torch distributed checkpoint consists of
_METADATA_GLOBALS = frozenset(
    [(f"{_CHECKPOINT}.metadata", name) for name in (
        "Metadata", "MetadataIndex", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata",
        "TensorProperties", "StorageMeta", "_MEM_FORMAT_ENCODING",
    )]
    + [(f"{_CHECKPOINT}.planner", name) for name in (
        "SavePlan", "WriteItem", "WriteItemType", "TensorWriteData", "BytesIOWriteData",
    )]
    + [(f"{_CHECKPOINT}.filesystem", "_StorageInfo"), ("torch", "Size"), ("torch.serialization", "_get_layout")]
    # StorageMeta.checkpoint_id is the path that was given to save()
    + [(module, name) for module in ("pathlib", "pathlib._local") for name in ("PosixPath", "WindowsPath")]
)  # fmt: skip
_MCORE_CLASSES = frozenset({"MCoreMetadata", "MCoreSavePlan"})
_DATACLASSES = _MCORE_CLASSES | {
    "Metadata", "MetadataIndex", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata", "StorageMeta",
    "_StorageInfo", "SavePlan", "WriteItem", "TensorWriteData", "BytesIOWriteData",
}  # fmt: skip

# what the header of one tensor written by torch.save consists of
_TENSOR_GLOBALS = frozenset({("torch._utils", "_rebuild_tensor_v2"), ("collections", "OrderedDict")})

# common.pt holds the arguments of the training run: plain values, configuration classes, enumerations
_COMMON_GLOBALS = frozenset(
    [("argparse", "Namespace"), ("types", "SimpleNamespace"), ("functools", "partial"), ("_codecs", "encode"),
     ("datetime", "datetime"), ("datetime", "timedelta"), ("io", "BytesIO"), ("signal", "Signals"), ("torch", "Size"),
     ("torch", "device"), ("torch.serialization", "_get_layout"), ("numpy", "dtype"), ("numpy", "ndarray")]
    + [("collections", name) for name in ("OrderedDict", "defaultdict", "deque", "Counter")]
    + [(module, name) for module in ("pathlib", "pathlib._local") for name in (
        "Path", "PosixPath", "PurePosixPath", "WindowsPath", "PureWindowsPath")]
    + [("builtins", name) for name in (
        "set", "frozenset", "dict", "list", "tuple", "int", "float", "complex", "str", "bool", "bytes", "bytearray",
        "slice", "range", "object")]
    + [("torch._utils", name) for name in ("_rebuild_tensor_v2", "_rebuild_tensor_v3", "_rebuild_parameter")]
    + [(module, name) for module in ("torch.nn.functional", "torch._C._nn", "torch") for name in (
        "gelu", "silu", "relu", "sigmoid")]
    + [(f"numpy.{core}.multiarray", name) for core in ("core", "_core") for name in ("_reconstruct", "scalar")]
    + [(f"numpy.{core}.numeric", "_frombuffer") for core in ("core", "_core")]
)  # fmt: skip
_OLD_MODULES = {"__builtin__": "builtins", "copy_reg": "copyreg"}  # as protocols up to 2 write them
_COMMON_PACKAGES = frozenset({"megatron", "transformer_engine"})

_DTYPES: dict[str, torch.dtype] = {
    name: getattr(torch, name)
    for name in (
        "float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz",
        "float8_e5m2fnuz", "float8_e8m0fnu", "int64", "int32", "int16", "int8", "uint8", "bool",
    )
}  # fmt: skip


class Inert:
    """An object of a pickle that does nothing: `args` it was made with, `state` it was given."""

    __slots__ = ("state",)
    args: tuple[Any, ...] = ()
    state: Any

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _Called(Inert):
    """Whatever is made with arguments. A dataclass is not, and pickle makes those without a line of Python: the index
    of a large checkpoint has a million of them."""

    __slots__ = ("args",)

    def __new__(cls, *args: Any) -> _Called:
        self = object.__new__(cls)
        self.args = args
        self.state = None
        return self

    # a list, dict or set subclass is filled item by item
    def append(self, item: Any) -> None: ...

    def extend(self, items: Any) -> None: ...

    def add(self, item: Any) -> None: ...

    def __setitem__(self, key: Any, value: Any) -> None: ...


class _InertUnpickler(pickle.Unpickler):
    def __init__(self, stream: io.BytesIO, allowed: Callable[[str, str], bool], what: str) -> None:
        super().__init__(stream)
        self._allowed, self._what = allowed, what
        # made anew for every pickle, since a pickle may set attributes on a class
        self._classes: dict[tuple[str, str], type] = {}

    def find_class(self, module: str, name: str) -> Any:
        module = _OLD_MODULES.get(module, module)
        if module == "torch" and name in _DTYPES:
            return _DTYPES[name]
        if not self._allowed(module, name):
            raise UnsafeInputError(
                f"{self._what} asks for the Python object {module}.{name}, which has no place in a checkpoint; "
                "refused, nothing of it was executed"
            )
        if (module, name) == ("torch", "Size"):
            return torch.Size  # a tuple of whole numbers, which nothing can change
        key = (module, name)
        if key not in self._classes:
            base = Inert if name in _DATACLASSES else _Called
            self._classes[key] = type(name.rpartition(".")[2], (base,), {"__slots__": ()})
        return self._classes[key]

    def persistent_load(self, pid: Any) -> Any:
        return pid  # torch.save: where a tensor's storage lies; it is not followed


def is_inert(value: Any, name: str) -> TypeGuard[Inert]:
    """True for an object that the pickle made of the allowed class `name`."""
    return isinstance(value, Inert) and type(value).__name__ == name


def _load(data: bytes, allowed: Callable[[str, str], bool], what: str) -> Any:
    try:
        check_pickle(data)
        return _InertUnpickler(io.BytesIO(data), allowed, what).load()
    except UnsafeInputError:
        raise
    except TooDeepError as error:
        raise UnsafeInputError(f"{what} is refused: {error}") from error
    except Exception as error:
        # a damaged stream raises whatever the method that it happens to call raises
        said = printable(str(error))[:200]
        raise IncompleteSourceError(f"{what} is not a whole pickle: {type(error).__name__}: {said}") from error


def _in_metadata(module: str, name: str) -> bool:
    return (module, name) in _METADATA_GLOBALS or (module.startswith(_MCORE) and name in _MCORE_CLASSES)


def _is_storage(module: str, name: str) -> bool:
    return module in ("torch", "torch.storage") and name.endswith("Storage") and name.isalnum()


def _in_tensor(module: str, name: str) -> bool:
    return (module, name) in _TENSOR_GLOBALS or _is_storage(module, name)


def _in_common(module: str, name: str) -> bool:
    if (module, name) in _COMMON_GLOBALS or _is_storage(module, name):
        return True
    if module == "numpy.dtypes":
        return name.endswith("DType") and name.isalnum()
    return module.partition(".")[0] in _COMMON_PACKAGES and name.isidentifier()


def load_metadata(data: bytes, what: str) -> Any:
    """The object of a `.metadata` file, of `Inert` parts. what: the file, for messages.

    UnsafeInputError for a global that is not on the list, IncompleteSourceError for a damaged pickle.
    """
    return _load(data, _in_metadata, what)


def load_tensor_header(data: bytes, what: str) -> Any:
    """The object of the `data.pkl` of one saved tensor; errors as `load_metadata`."""
    return _load(data, _in_tensor, what)


def load_common(path: Path) -> list[Any]:
    """The objects pickled in a `common.pt`, of `Inert` parts; [] when the file does not exist.

    Every pickle of the file is read to its end, so that a forbidden global is found. Errors as `load_metadata`.
    """
    if not path.exists():
        return []
    if not path.is_file():
        raise IncompleteSourceError(f"{path} is no file, though it should hold the state that all ranks share")
    try:
        pickles = _pickles_of(path)
    except DAMAGED_ARCHIVE as error:
        raise IncompleteSourceError(f"{path} is damaged: {printable(str(error))[:200]}") from error
    return [_load(data, _in_common, f"{path} ({printable(name)})" if name else str(path)) for name, data in pickles]


def _pickles_of(path: Path) -> list[tuple[str, bytes]]:
    """(name in the archive, content) of every pickle; one without a name where the file is no archive, as torch.save
    wrote before version 1.6: several pickles, then raw storages. UnsafeInputError for more than COMMON_LIMIT bytes."""
    if not zipfile.is_zipfile(path):
        if path.stat().st_size > COMMON_LIMIT:
            raise UnsafeInputError(
                f"{path} has {path.stat().st_size} bytes; {COMMON_LIMIT} are the most that is expected"
            )
        return [("", path.read_bytes())]
    with zipfile.ZipFile(path) as archive:
        members = [info for info in archive.infolist() if info.filename.endswith(".pkl")]
        contents = read_members(archive, members, COMMON_LIMIT, str(path))
    return list(zip((info.filename for info in members), contents, strict=True))
