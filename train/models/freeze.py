"""Which parameters are trained: towers without what joins them to the text model, and any module by pattern."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from fnmatch import fnmatchcase

from torch import nn

from convert.patterns import SHOWN
from schemas.errors import ConfigError
from schemas.nearest import nearest_key
from train.models.foundation import FoundationModel
from train.models.spec import spec_of

VISION_JOINTS = ("merger", "merger_list", "deepstack_merger_list")  # tower -> text model
AUDIO_JOINTS = ("proj1", "proj2")


def freeze(
    model: nn.Module, *, vit: bool = False, audio_tower: bool = False, modules: Sequence[str] = ()
) -> tuple[str, ...]:
    """Turns `requires_grad` off; gives the names of the parameters that are frozen now, in the model's order.

    vit: the vision tower without its mergers; audio_tower: the audio tower without its projections; modules: paths of
    modules or parameters, `*` for any run of characters, each with all below it.
    ConfigError: a tower that the model lacks, a pattern that matches nothing, or nothing left to train.
    """
    names = [name for name, _ in model.named_parameters()]
    chosen: set[str] = set()
    if vit:
        chosen |= _tower(model, names, "visual", "freeze_vit", VISION_JOINTS)
    if audio_tower:
        chosen |= _tower(model, names, "audio", "freeze_audio_tower", AUDIO_JOINTS)
    for pattern in modules:
        chosen |= matching(pattern, names, "train.freeze_modules")
    for name, parameter in model.named_parameters():
        if name in chosen:
            parameter.requires_grad_(False)
    frozen = tuple(name for name, parameter in model.named_parameters() if not parameter.requires_grad)
    if len(frozen) == len(names):
        raise ConfigError("train: every parameter is frozen, nothing is left to train")
    return frozen


def _tower(model: nn.Module, names: Sequence[str], kind: str, key: str, joints: Collection[str]) -> set[str]:
    """Parameters of a tower but for those of the modules that join it to the text model."""
    prefix = getattr(spec_of(model).names, kind) if isinstance(model, FoundationModel) else None
    if prefix is None:
        family = spec_of(model).family if isinstance(model, FoundationModel) else type(model).__name__
        raise ConfigError(f"train.{key}: a {family} has no such tower")
    inside = (name.removeprefix(prefix) for name in names if name.startswith(prefix))
    return {prefix + name for name in inside if name.partition(".")[0] not in joints}


def matching(pattern: str, names: Sequence[str], key: str) -> set[str]:
    """Parameters that a pattern names, itself or by a module around them. ConfigError, which names the key, when there
    are none."""
    found = {name for name in names if any(fnmatchcase(path, pattern) for path in _paths(name))}
    if found:
        return found
    paths = sorted({path for name in names for path in _paths(name)}, key=lambda path: (path.count("."), path))
    near = nearest_key(pattern, paths)
    hint = f"did you mean {near!r}? " if near else ""
    more = f" and {len(paths) - SHOWN} more below them" if len(paths) > SHOWN else ""
    raise ConfigError(
        f"{key}: {pattern!r} matches no module or parameter; {hint}there are {', '.join(paths[:SHOWN])}{more}"
    )


def _paths(name: str) -> list[str]:
    """The parameter and every module around it."""
    parts = name.split(".")
    return [".".join(parts[:length]) for length in range(1, len(parts) + 1)]
