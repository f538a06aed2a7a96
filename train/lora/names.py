"""Names of parameters in a PEFT adapter: those of transformers' model, which has its parts elsewhere for some."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from convert.tables.trainer import STYLES, Names
from train.models.foundation import FoundationModel

ROOTS = ("", "thinker.")  # before the names: of the model itself, of a whole Qwen3-Omni around it


@dataclass(frozen=True)
class Naming:
    """Between our names and those of an adapter. parts: (prefix here, prefix there)."""

    parts: tuple[tuple[str, str], ...]

    def there(self, name: str) -> str:
        """The adapter's name of one of ours."""
        return _renamed(name, self.parts)

    def here(self, name: str) -> str:
        """Our name of one of the adapter's."""
        return _renamed(name, [(there, here) for here, there in self.parts])


def namings(model: nn.Module) -> list[Naming]:
    """All under which adapters of a model are known, transformers' own first."""
    if not isinstance(model, FoundationModel):
        return [Naming(())]
    styles = STYLES[model.config.model_type]
    native = next(names for names in styles if names.style == "native")
    ordered = sorted(styles, key=lambda names: names.style == "native")
    return [Naming(_parts(native, names)) for names in ordered]


def hub_naming(model: nn.Module) -> Naming:
    """Names of the files of a checkpoint, which engines go by: a thinker's begin with `thinker.`."""
    omni = isinstance(model, FoundationModel) and model.config.model_type.startswith("qwen3_omni")
    return Naming((("", "thinker."),) if omni else ())


def _parts(native: Names, other: Names) -> tuple[tuple[str, str], ...]:
    pairs = [(getattr(native, part), getattr(other, part)) for part in ("text", "visual", "audio")]
    return tuple((here, there) for here, there in pairs if here is not None and there is not None)


def _renamed(name: str, parts: Sequence[tuple[str, str]]) -> str:
    """With the longest prefix that fits replaced."""
    fitting = [(old, new) for old, new in parts if name.startswith(old)]
    if not fitting:
        return name
    old, new = max(fitting, key=lambda pair: len(pair[0]))
    return new + name.removeprefix(old)
