"""Model and optimizer <-> the flat names of a checkpoint.

Tensors stand in the DCP as `model.<parameter>` and `optimizer.state.<parameter>.<key>`; what is no tensor (learning
rates, weight decay, which parameter is in which group) stands in state.json, because a DCP would pickle it.
<parameter> is the module path in the bare model, without what wrappers put before it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from convert.dcp_index import StoredTensor
from convert.patterns import some
from schemas.errors import ConfigError, IncompleteSourceError, UnsupportedError
from train.lora.apply import has_adapters
from train.optim.build import ModelOptimizer

WRAPPERS = ("_checkpoint_wrapped_module", "_orig_mod", "_fsdp_wrapped_module")
CONFIGURED = ("head_group_size", "head_split_modules")  # of a group: how it goes on, not where it stands
KEYS = {"base_lr": "lr"}  # of groups that the configuration calls otherwise
STEP_KEY = "step"  # the optimizers of torch count steps in a scalar of this name, on the CPU unless fused or capturable


def bare(model: nn.Module) -> nn.Module:
    """The model inside DistributedDataParallel."""
    while isinstance(model, DistributedDataParallel):
        model = model.module
    return model


def clean_name(name: str) -> str:
    """A parameter's name without the parts that torch.compile and checkpoint wrappers add."""
    return ".".join(part for part in name.split(".") if part not in WRAPPERS)


def model_tensors(model: nn.Module) -> dict[str, Tensor]:
    """`model.<name>` -> the model's own tensors (parameters and persistent buffers), shared, not copied; of a model
    with adapters what is trained alone: its base is where it came from."""
    found: dict[str, Tensor] = {}
    state = bare(model).state_dict()
    if has_adapters(bare(model)):
        state = {name: state[name] for name, parameter in bare(model).named_parameters() if parameter.requires_grad}
    for name, value in state.items():
        if not isinstance(value, Tensor):
            raise UnsupportedError(f"{name}: extra state of a module is no tensor, which a checkpoint cannot hold")
        if value.is_meta:
            raise ValueError(f"{name} is still on the meta device")
        found[f"model.{clean_name(name)}"] = value
    return found


def parameter_names(model: nn.Module) -> dict[Tensor, str]:
    """The parameters of the sharded model, which the optimizer has, by object."""
    bare(model).state_dict()  # FSDP2 puts the sharded parameters back where whole ones are left from a forward pass
    return {parameter: clean_name(name) for name, parameter in bare(model).named_parameters()}


def optimizer_tensors(model: nn.Module, optimizer: Optimizer) -> dict[str, Tensor]:
    """`optimizer.state.<parameter>.<key>` -> the optimizer's own tensors, as the last step left them."""
    if isinstance(optimizer, ModelOptimizer):
        optimizer.wait_for_states()
    names = parameter_names(model)
    return {
        f"optimizer.state.{names[parameter]}.{key}": value
        for parameter, state in optimizer.state.items()
        for key, value in state.items()
        if isinstance(value, Tensor)
    }


def optimizer_record(model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """What of the optimizer is no tensor, as JSON: {"groups": [{"params": [name], "values": {...}}], "scalars":
    {parameter: {key: value}}}."""
    names = parameter_names(model)
    groups = []
    for index, group in enumerate(optimizer.param_groups):
        values = {key: _plain(f"param_groups.{index}.{key}", value) for key, value in group.items() if key != "params"}
        groups.append({"params": [_name(names, parameter) for parameter in group["params"]], "values": values})
    scalars = {
        names[parameter]: {
            key: _plain(f"{names[parameter]}.{key}", value) for key, value in state.items() if not _is_tensor(value)
        }
        for parameter, state in optimizer.state.items()
    }
    return {"groups": groups, "scalars": {name: values for name, values in scalars.items() if values}}


def restore_record(model: nn.Module, optimizer: Optimizer, record: Mapping[str, Any], where: object) -> list[str]:
    """Puts the values of the groups back, the initial learning rate included; returns what to say of those that the
    configuration has otherwise. ConfigError when the groups hold other parameters than those of the checkpoint."""
    names = parameter_names(model)
    ours = [sorted(_name(names, parameter) for parameter in group["params"]) for group in optimizer.param_groups]
    try:
        groups = record["groups"]
        theirs = [sorted(group["params"]) for group in groups]
        _check_type(_type_of(optimizer.param_groups), _type_of([group["values"] for group in groups]), where)
        _check_groups(ours, theirs, where)
        kept: dict[tuple[str, str, str], list[str]] = {}
        notes: list[str] = []
        for index, (group, saved) in enumerate(zip(optimizer.param_groups, groups, strict=True)):
            for key, value in saved["values"].items():
                current, restored = _restore(group, key, value)
                if current == restored or key == "lr":  # the schedule sets the rate of a step
                    continue
                if key in CONFIGURED:
                    notes.append(f"muon_{key} was {restored} in the checkpoint and is {current} from here on")
                else:
                    kept.setdefault((key, str(restored), str(current)), []).append(str(group.get("name", index)))
        notes += [_kept_note(titles, *values) for values, titles in kept.items()]
        by_name = {name: parameter for parameter, name in names.items()}
        for name, values in record["scalars"].items():
            optimizer.state[by_name[name]].update(values)
        return list(dict.fromkeys(notes))
    except (KeyError, TypeError, AttributeError) as error:
        raise IncompleteSourceError(f"{where}: has no valid record of the optimizer ({error!r})") from error


def state_templates(model: nn.Module, optimizer: Optimizer, stored: Mapping[str, StoredTensor]) -> dict[str, Tensor]:
    """Creates the states that a checkpoint holds, as an optimizer that has not stepped has none to load into.

    Returns them by the checkpoint's names. What is shaped like its parameter is sharded like it, in CPU memory where
    the optimizer's averages live there.
    """
    found: dict[str, Tensor] = {}
    fused = {
        parameter: bool(group.get("fused") or group.get("capturable"))
        for group in optimizer.param_groups
        for parameter in group["params"]
    }
    by_name = {name: parameter for parameter, name in parameter_names(model).items() if parameter in fused}
    optimizer.state.clear()
    for full in sorted(stored):
        name, _, key = full.removeprefix("optimizer.state.").rpartition(".")
        parameter = by_name.get(name)
        if parameter is None:
            raise ConfigError(f"{full}: the checkpoint has optimizer states of a parameter that is not trained now")
        info = stored[full].info
        if info.shape == tuple(parameter.shape) and key != STEP_KEY:
            template = (
                optimizer.new_average(parameter, info.dtype)
                if isinstance(optimizer, ModelOptimizer)
                else torch.zeros_like(parameter, dtype=info.dtype, requires_grad=False)
            )
        elif key == STEP_KEY or not isinstance(parameter, DTensor):
            device = parameter.device if key != STEP_KEY or fused[parameter] else torch.device("cpu")
            template = torch.zeros(info.shape, dtype=info.dtype, device=device)
        else:
            raise UnsupportedError(f"{full} has the shape {list(info.shape)}, its parameter {list(parameter.shape)}")
        optimizer.state[parameter][key] = template
        found[full] = template
    return found


def widen_states(optimizer: Optimizer) -> None:
    """Averages that a checkpoint holds in another dtype, in that of their parameters, where the optimizer is torch's
    own, which takes no other. `ModelOptimizer` does it by itself."""
    if isinstance(optimizer, ModelOptimizer):
        return
    for parameter, states in optimizer.state.items():
        for key, value in states.items():
            if key != STEP_KEY and isinstance(value, Tensor) and value.is_floating_point():
                states[key] = value.to(parameter.dtype)


def _type_of(groups: Sequence[Mapping[str, Any]]) -> str:
    """`train.optimizer.type`, of which muon has groups of both kinds."""
    return "muon" if any(group.get("kind") == "muon" for group in groups) else "adamw"


def _check_type(ours: str, theirs: str, where: object) -> None:
    if ours != theirs:
        raise ConfigError(
            f"{where}: was saved with train.optimizer.type: {theirs}, and now it is {ours}; set it back, or begin a "
            "training from these weights (omniloom convert dcp-to-hf, then model.model_path)"
        )


def _check_groups(ours: list[list[str]], theirs: list[list[str]], where: object) -> None:
    if ours == theirs:
        return
    now, then = {name for group in ours for name in group}, {name for group in theirs for name in group}
    if now != then:
        faults = [f"not trained now: {some(sorted(then - now))}"] if then - now else []
        faults += [f"not trained then: {some(sorted(now - then))}"] if now - then else []
        raise ConfigError(f"{where}: the optimizer had other parameters; {'; '.join(faults)}")
    raise ConfigError(
        f"{where}: the optimizer had {len(theirs)} groups of {', '.join(str(len(g)) for g in theirs)} parameters, now "
        f"{len(ours)} of {', '.join(str(len(g)) for g in ours)}; module_lr, no_decay_* and frozen modules must be "
        "those of the checkpoint"
    )


def _restore(group: dict[str, Any], key: str, value: Any) -> tuple[Any, Any]:
    """(value of the configuration, of the checkpoint): the same where the configuration has none."""
    current = group.get(key)
    if isinstance(current, Tensor):
        current.fill_(value)
        return value, value
    restored = tuple(value) if isinstance(value, list) and isinstance(current, tuple) else value
    known = key in group
    if not (known and key in CONFIGURED):  # of these the configuration's are taken
        group[key] = restored
    return (current if known else restored), restored


def _kept_note(groups: list[str], key: str, restored: str, current: str) -> str:
    what = f"optimizer, {KEYS.get(key, key)} of {', '.join(groups)}"
    return (
        f"{what}: {restored} in the checkpoint and {current} in the configuration; the checkpoint's is taken. To "
        "train with the configuration's, start from the exported weights (model.model_path) in another "
        "train.checkpoint.output_dir"
    )


def _name(names: Mapping[Tensor, str], parameter: Tensor) -> str:
    if parameter not in names:
        raise ValueError(f"the optimizer has a parameter of shape {list(parameter.shape)} that is not in the model")
    return names[parameter]


def _is_tensor(value: Any) -> bool:
    return isinstance(value, Tensor)


def _plain(what: str, value: Any) -> Any:
    """A JSON value."""
    if isinstance(value, Tensor) and value.numel() == 1:
        return value.item()
    if isinstance(value, list | tuple):
        return [_plain(what, item) for item in value]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise UnsupportedError(f"optimizer {what} is a {type(value).__name__}, which a checkpoint cannot hold")
