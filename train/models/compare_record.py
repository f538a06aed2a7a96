"""What every module of a model is given and makes, on the same input in transformers and in ours, under our paths."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import xxhash
from torch import Tensor, nn

from train.models.compare_inputs import Case
from train.models.foundation import FoundationModel
from train.models.spec import ModelSpec, spec_of
from train.models.text import RMSNorm

Choice = tuple[Tensor, Tensor]
INPUT_NAMES = ("hidden_states", "inputs_embeds")  # of transformers' modules, the one that matters
LM_HEAD = "lm_head"


@dataclass(frozen=True)
class Values:
    """What a module was given and made, in float32 on the CPU; of all its calls in one forward pass."""

    given: Tensor | None
    made: Tensor


@dataclass
class Recording:
    """kinds: kind of input -> path -> values, in the order in which modules finish; choices: kind of input -> path of
    the experts of a layer -> (their ids for each row, their weights); weights: name -> hash of a parameter's bytes."""

    kinds: dict[str, dict[str, Values]] = field(default_factory=dict)
    choices: dict[str, dict[str, Choice]] = field(default_factory=dict)
    weights: dict[str, str] = field(default_factory=dict)


def record_reference(model: nn.Module, spec: ModelSpec, cases: Sequence[Case]) -> Recording:
    """Runs a model of transformers; paths and names are ours."""
    names = _native_paths(model, spec)
    found = Recording(weights=_hashes((_native_name(n, names), p) for n, p in model.named_parameters()))
    for case in cases:
        with torch.no_grad(), _recorded(model, names) as values, _choices(model, names) as chosen:
            model(**case.arguments, use_cache=False)
        found.kinds[case.kind], found.choices[case.kind] = _merged_calls(values), chosen
    return found


def record_native(
    model: FoundationModel, cases: Sequence[Case], choices: Mapping[str, Mapping[str, Choice]] | None = None
) -> Recording:
    """Runs a native model, whose head is no module that is called. choices: makes the experts of every row those of
    another recording, so that a tie that falls the other way does not hide what comes after."""
    names = {path: path for path, _ in model.named_modules() if path}
    found = Recording(weights=_hashes(model.named_parameters()))
    norm = f"{spec_of(model).names.text}norm"
    for case in cases:
        given = {} if choices is None else choices[case.kind]
        with torch.no_grad(), _chosen(model, given), _recorded(model, names) as values:
            logits = model(case.inputs, logits=True).logits
        joined = _merged_calls(values)
        joined[LM_HEAD] = Values(joined[norm].made, _kept(logits))
        found.kinds[case.kind] = joined
    return found


@contextmanager
def _choices(model: nn.Module, names: Mapping[str, str]) -> Iterator[dict[str, Choice]]:
    """Keeps which experts transformers gives each row, and with which weights."""
    found: dict[str, Choice] = {}

    def hook(path: str) -> Callable[..., None]:
        def keep(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
            ids = next(value for value in tensors if not value.is_floating_point())
            _, weights = (value for value in tensors if value.is_floating_point())
            found[path] = (ids.clone(), weights.float())

        return keep

    modules = [(names[path], m) for path, m in model.named_modules() if path in names and path.endswith(".mlp.experts")]
    handles = [module.register_forward_pre_hook(hook(path), with_kwargs=True) for path, module in modules]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def _chosen(model: FoundationModel, choices: Mapping[str, Choice]) -> Iterator[None]:
    """Gives our experts these choices."""

    def hook(choice: Choice) -> Callable[..., Any]:
        return lambda _module, args: (args[0], *choice)

    handles = [model.get_submodule(path).register_forward_pre_hook(hook(choice)) for path, choice in choices.items()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def _recorded(model: nn.Module, names: Mapping[str, str]) -> Iterator[dict[str, list[Values]]]:
    """Keeps what every module in `names` (path in the model -> path to keep it under) is given and makes."""
    values: dict[str, list[Values]] = {}

    def hook(path: str) -> Callable[..., None]:
        def keep(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            made = _tensor(output)
            if made is not None:
                given = _given(module, args, kwargs, output)
                kept = None if given is None or not given.is_floating_point() else _kept(given)
                values.setdefault(path, []).append(Values(kept, _kept(made)))

        return keep

    handles = [
        module.register_forward_hook(hook(names[path]), with_kwargs=True)
        for path, module in model.named_modules()
        if path in names
    ]
    try:
        yield values
    finally:
        for handle in handles:
            handle.remove()


def _merged_calls(values: Mapping[str, list[Values]]) -> dict[str, Values]:
    """All calls of a module in one."""
    found = {}
    for path, calls in values.items():
        given = [call.given for call in calls if call.given is not None]
        whole = torch.cat(given) if len(given) == len(calls) else None
        found[path] = Values(whole, torch.cat([call.made for call in calls]))
    return found


def _given(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Tensor | None:
    """What a module works on; of our norms, which add the residual themselves, the sum."""
    if isinstance(module, RMSNorm):
        return _tensor(output[1])
    named = next((kwargs[key] for key in INPUT_NAMES if isinstance(kwargs.get(key), Tensor)), None)
    return _tensor(args) if named is None else named


def _tensor(value: Any) -> Tensor | None:
    """The first tensor of an output."""
    if isinstance(value, Tensor):
        return value
    parts = value.values() if isinstance(value, Mapping) else value if isinstance(value, tuple | list) else ()
    return next((part for part in parts if isinstance(part, Tensor)), None)


def _kept(value: Tensor) -> Tensor:
    """Without the batch dimension of transformers."""
    value = value.detach().to("cpu", torch.float64 if value.dtype == torch.float64 else torch.float32, copy=True)
    return value[0] if value.ndim == 3 and value.shape[0] == 1 else value


def _native_paths(model: nn.Module, spec: ModelSpec) -> dict[str, str]:
    """Path of a module in transformers -> ours, of the parts that both have."""
    paths = {id(module): path for path, module in model.named_modules()}
    decoder = paths[id(model.get_decoder())]  # type: ignore[operator]
    roots = {decoder: spec.names.text.removesuffix(".")}
    for ours in (spec.names.visual, spec.names.audio):
        if ours is not None:
            last = ours.removesuffix(".").rpartition(".")[2]
            theirs = next(path for path in paths.values() if path.rpartition(".")[2] == last)
            roots[theirs] = ours.removesuffix(".")
    found = {paths[id(model.get_output_embeddings())]: LM_HEAD}  # type: ignore[operator]
    for path in paths.values():
        for theirs, ours in roots.items():
            if path.startswith(f"{theirs}.") or (path == theirs and theirs == decoder):
                found[path] = ours + path.removeprefix(theirs)
    return found


def _native_name(name: str, paths: Mapping[str, str]) -> str:
    path, _, leaf = name.rpartition(".")
    return f"{paths.get(path, path)}.{leaf}"


def _hashes(parameters: Iterable[tuple[str, nn.Parameter]]) -> dict[str, str]:
    """Of the bytes of each parameter."""
    found = {}
    for name, parameter in parameters:
        raw = parameter.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
        found[name] = xxhash.xxh3_64_hexdigest(raw.data)
    return found
