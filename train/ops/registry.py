"""Which implementation of each operation runs, in four stages.

Import: every operation lists its backends with what they need; a backend is named by "module:function" and not loaded,
so that this module imports neither torch nor triton. Configuration: names are checked (`OpEntry.fault`). Build: names
are resolved for a device (`resolve`), where `auto` loads the fastest, and the next where that fails; each slot loads
its function once (`bind_ops`). Run: a slot is a plain call.

An operation's signature stands with its reference implementation, the backend `eager`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from schemas.errors import ConfigError, RegistryError
from schemas.wording import known_names
from train.ops.backend import Backend, Device, Needs, dotted
from train.ops.catalogue import BUILT_IN, PEER_NAMES

AUTO = "auto"
SECTION = "model.ops_implementation"

__all__ = ["AUTO", "OPS", "Backend", "Choices", "Device", "Needs", "OpEntry", "OpRegistry", "OpSlot", "Ops", "bind_ops"]


@dataclass
class OpEntry:
    """One operation. op: its name; key: of the configuration below `model.ops_implementation`; backends by name."""

    op: str
    key: str
    backends: dict[str, Backend] = field(default_factory=dict)

    def fault(self, name: str) -> str | None:
        """What is wrong with a name that is neither `auto` nor a backend's: our name or the nearest, and the list."""
        if name == AUTO or name in self.backends:
            return None
        known = [AUTO, *self.by_rank()]
        said = f"{name!r} is no implementation of {self.op}"
        if advice := PEER_NAMES.get(self.key, {}).get(name):
            return f"{said}; {advice}; known: {', '.join(known)}"
        return said + known_names(name, known)

    def by_rank(self) -> list[str]:
        """Names, the fastest first."""
        return sorted(self.backends, key=lambda name: (self.backends[name].rank, name))

    def obstacle(self, name: str, device: Device, dtype: str | None) -> str | None:
        """Why a backend cannot run there, or None."""
        backend = self.backends[name]
        needs = backend.needs
        if needs.device is not None and device.type != needs.device:
            return f"it needs a {needs.device.upper()} device, this is {device.type}"
        if needs.min_capability is not None and (device.capability or (0, 0)) < needs.min_capability:
            return f"it needs capability {dotted(needs.min_capability)}, this is {dotted(device.capability)}"
        if needs.max_capability is not None and (device.capability or (0, 0)) > needs.max_capability:
            return f"it needs at most capability {dotted(needs.max_capability)}, this is {dotted(device.capability)}"
        if needs.dtypes and dtype is not None and dtype not in needs.dtypes:
            return f"it computes in {' or '.join(needs.dtypes)}, not in {dtype}"
        if device.repeatable and not backend.repeatable:
            return "its results differ from run to run, and train.deterministic is true"
        for package in needs.packages:
            if not device.has(package):
                return f"the package {package} is not installed"
        if not device.has(backend.module):
            return f"its module {backend.module} is not there"
        return None

    def available(self, device: Device, dtype: str | None = None) -> list[str]:
        """Backends that can run there, the fastest first."""
        return [name for name in self.by_rank() if self.obstacle(name, device, dtype) is None]

    def resolve(self, name: str, device: Device, dtype: str | None = None) -> str:
        """The backend for a name of the configuration, as `choose`."""
        return self.choose(name, device, dtype)[0]

    def choose(self, name: str, device: Device, dtype: str | None = None) -> tuple[str, tuple[str, ...]]:
        """(the backend for a name of the configuration, why faster ones were passed over). `auto` = the fastest that is
        available and loads; only on a device that is here anything is loaded. ConfigError: unknown, or why it is not
        available and what is, or does not load."""
        if name != AUTO:
            self._check(name, device, dtype)
        failed: list[str] = []
        for candidate in self.available(device, dtype) if name == AUTO else [name]:
            if not device.loads:
                return candidate, ()
            try:
                self.load(candidate, device)
            except ConfigError as error:
                failed.append(str(error))
            else:
                return candidate, tuple(failed)
        said = "; ".join(failed) or f"nothing is available on {device}"
        raise ConfigError(f"{SECTION}.{self.key}: {said}")

    def _check(self, name: str, device: Device, dtype: str | None) -> None:
        if fault := self.fault(name):
            raise ConfigError(f"{SECTION}.{self.key}: {fault}")
        why = self.obstacle(name, device, dtype)
        if why is not None:
            found = ", ".join(self.available(device, dtype))
            raise ConfigError(
                f"{SECTION}.{self.key}: {name} is not available on {device}: {why}; available here: {found}"
            )

    def load(self, name: str, device: Device) -> Callable[..., Any]:
        """The function of an available backend. ConfigError: what it needs does not load."""
        return self.backends[name].load(repeatable=device.repeatable, capability=device.capability)


class OpRegistry(Mapping[str, OpEntry]):
    """Operation -> its entry."""

    def __init__(self, keys: Mapping[str, str]) -> None:
        """keys: operation -> key of the configuration."""
        self._entries = {op: OpEntry(op, key) for op, key in keys.items()}

    def register(self, op: str, backend: Backend) -> None:
        """Adds a backend. RegistryError: unknown operation, malformed target, or a name that is taken."""
        if op not in self._entries:
            raise RegistryError(f"no operation is called {op!r}{known_names(op, self._entries)}")
        module, _, function = backend.target.partition(":")
        if not module or not function or backend.name == AUTO:
            raise RegistryError(
                f"backend {backend.name!r} of {op}: the target is module:function, not {backend.target!r}, "
                f"and the name {AUTO!r} is taken"
            )
        taken = self._entries[op].backends.setdefault(backend.name, backend)
        if taken is not backend:
            raise RegistryError(f"{op} has a backend {backend.name!r} already: {taken.target}")

    def __getitem__(self, op: str) -> OpEntry:
        return self._entries[op]

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)


def _built_in() -> OpRegistry:
    registry = OpRegistry({op: key for op, (key, _) in BUILT_IN.items()})
    for op, (_, backends) in BUILT_IN.items():
        for backend in backends:
            registry.register(op, backend)
    return registry


OPS = _built_in()
register_backend = OPS.register


class Choices(dict[str, str]):
    """Operation -> backend. passed_over: operation -> why `auto` did not take faster ones, which do not load here."""

    def __init__(self) -> None:
        super().__init__()
        self.passed_over: dict[str, tuple[str, ...]] = {}


def resolve(
    names: Mapping[str, str], device: Device, dtype: str | None = None, ops: Mapping[str, OpEntry] = OPS
) -> Choices:
    """Operation -> backend on a device. names: key of the configuration -> name, `auto` where a key is missing;
    dtype: torch's name of the dtype that the model computes in, e.g. bfloat16. ConfigError: every fault, one a line."""
    found, faults = Choices(), []
    for op, entry in ops.items():
        try:
            name = names.get(entry.key, AUTO)
            found[op], found.passed_over[op] = entry.choose(name, device, dtype)
        except ConfigError as error:
            faults.append(str(error))
    if unknown := sorted(set(names) - {entry.key for entry in ops.values()}):
        faults += [f"{SECTION}.{key}: unknown key{known_names(key, [e.key for e in ops.values()])}" for key in unknown]
    if faults:
        raise ConfigError("\n".join(faults))
    return found


class OpSlot:
    """Where a model calls an operation. Bound once, then a plain call."""

    def __init__(self, op: str, ops: Mapping[str, OpEntry] = OPS) -> None:
        if op not in ops:
            raise RegistryError(f"no operation is called {op!r}{known_names(op, ops)}")
        self.op = op
        self.name: str | None = None
        self.passed_over: tuple[str, ...] = ()
        self._entry = ops[op]
        self._function: Callable[..., Any] | None = None

    def bind(self, name: str, device: Device, dtype: str | None = None) -> OpSlot:
        """Loads the backend; itself. RegistryError when another is bound; ConfigError when it is not available or does
        not load."""
        if self.name is not None and self.name != name:
            raise RegistryError(f"{self.op} is bound to {self.name} and cannot be bound to {name}; make another slot")
        if self._function is None:
            found = self._entry.resolve(name, device, dtype)
            self._function = self._entry.load(found, device)
            self.name = found
        return self

    @property
    def backend(self) -> Backend | None:
        """That it is bound to."""
        return None if self.name is None else self._entry.backends[self.name]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._function is None:
            raise RegistryError(f"{self.op} is called before it is bound to a backend")
        return self._function(*args, **kwargs)

    def __repr__(self) -> str:
        return f"OpSlot({self.op!r}, {self.name!r})"


@dataclass(frozen=True)
class Ops:
    """The operations of a model, each bound."""

    attention: OpSlot
    moe_experts: OpSlot
    linear_cross_entropy: OpSlot
    rms_norm: OpSlot
    layer_norm: OpSlot
    linear: OpSlot
    linear_gelu: OpSlot
    qk_norm_rope: OpSlot
    vision_rope: OpSlot
    swiglu: OpSlot
    topk_softmax: OpSlot
    router_statistics: OpSlot

    def describe(self) -> str:
        """One line per operation: its name, the backend, and what `auto` passed over."""
        slots: list[OpSlot] = [getattr(self, f.name) for f in fields(self)]
        width = max(len(slot.op) for slot in slots)
        notes = [f"  (passed over: {'; '.join(slot.passed_over)})" if slot.passed_over else "" for slot in slots]
        return "\n".join(f"{slot.op:<{width}}  {slot.name}{note}" for slot, note in zip(slots, notes, strict=True))


def bind_ops(
    resolved: Mapping[str, str], device: Device, dtype: str | None = None, ops: Mapping[str, OpEntry] = OPS
) -> Ops:
    """The bound operations. resolved: operation -> backend, from `resolve`."""
    slots = {f.name: OpSlot(f.name, ops).bind(resolved[f.name], device, dtype) for f in fields(Ops)}
    if isinstance(resolved, Choices):
        for op, why in resolved.passed_over.items():
            slots[op].passed_over = why
    return Ops(**slots)


def eager_ops(device: object = "cpu") -> Ops:
    """Every operation by its reference, attention by sdpa. device: a torch device or its name."""
    names = {op: "sdpa" if op == "attention" else "eager" for op in OPS}
    return bind_ops(names, Device(str(device).partition(":")[0]))
