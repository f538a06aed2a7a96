"""Which parameters Muon takes, and into which blocks of attention heads their rows are split."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn
from torch.nn.modules.conv import _ConvNd

from schemas.errors import ConfigError
from schemas.nearest import nearest_key
from train.config_optimizer import OptimizerConfig
from train.models.moe import Router
from train.models.vision import PatchProjection

ADAMW_MODULES = (nn.Embedding, _ConvNd, PatchProjection, Router)
ADAMW_NAMES = ("embed_tokens", "embedding", "lm_head", "output_layer")
ROUTERS = ("mlp.gate.weight", "router.weight", "gate.wg.weight")  # in models of transformers
HEADS = ("heads", "kv_heads", "num_heads", "n_heads", "num_attention_heads", "num_key_value_heads")
HEAD_SIZES = ("head_dim", "qk_head_dim")


def muon_names(model: nn.Module, without_decay: Iterable[str] = ()) -> set[str]:
    """Names of the trained parameters that Muon takes: matrices [M, K] and stacks of them [E, M, K], but for
    embeddings, the head, routers, convolutions, and those whose weights are set not to decay (`without_decay`)."""
    others = set(without_decay)
    for path, module in model.named_modules():
        if isinstance(module, ADAMW_MODULES):
            others |= {f"{path}.{name}" if path else name for name, _ in module.named_parameters(recurse=False)}
    return {
        name
        for name, parameter in model.named_parameters()
        if parameter.requires_grad and parameter.ndim in (2, 3) and name not in others and not _by_name(name)
    }


def head_blocks(model: nn.Module, names: Iterable[str], config: OptimizerConfig) -> dict[str, int]:
    """Blocks of rows that each weight is split into, by name; those that stay whole are left out (Muon Split).

    A block is `muon_head_group_size` heads of a projection in `muon_head_split_modules`. ConfigError: a name that no
    trained projection has, rows that are not the heads of the attention around it, heads that the size does not divide.
    """
    size, wanted = config.muon_head_group_size, config.muon_head_split_modules
    if not size:
        return {}
    taken, found = set(names), {}
    seen: set[str] = set()
    for name in sorted(taken):
        path, _, last = name.rpartition(".")
        child = path.rpartition(".")[2]
        if last == "weight" and child in wanted:
            found[name] = _blocks(model, path, size)
            seen.add(child)
    if missing := [child for child in wanted if child not in seen]:
        known = {name.split(".")[-2] for name in taken if name.endswith(".weight") and name.count(".")}
        near = nearest_key(missing[0], known)
        hint = f"; did you mean {near!r}?" if near else f"; there are {', '.join(sorted(known))}"
        raise ConfigError(
            f"train.optimizer.muon_head_split_modules: no matrix of Muon is in a module {missing[0]!r}{hint}"
        )
    return found


def _blocks(model: nn.Module, path: str, size: int) -> int:
    key = f"train.optimizer.muon_head_group_size: {size}"
    rows, columns = model.get_parameter(f"{path}.weight").shape
    owner = model.get_submodule(path.rpartition(".")[0])
    counts, sizes = _numbers(owner, HEADS), _numbers(owner, HEAD_SIZES)
    if not counts:
        raise ConfigError(f"{key}: {path}: the module around it ({type(owner).__name__}) states no number of heads")
    sizes = sizes or [columns // counts[0]]  # towers have as many heads of k and v as of q
    # a joint projection has the rows of q, k and v, of as many heads each
    known = {parts * heads * dim: (heads, parts) for parts in (3, 1) for heads in counts for dim in sizes}
    if rows not in known:
        said = ", ".join(str(count) for count in known)
        raise ConfigError(f"{key}: {path} has {rows} rows, which are no heads; projections of heads there have {said}")
    heads, parts = known[rows]
    if heads % size:
        raise ConfigError(f"{key} does not divide the {heads} heads of {path}; give a divisor of {heads}")
    return parts * heads // size


def _numbers(module: nn.Module, names: Iterable[str]) -> list[int]:
    """Of the module itself, else of its config."""
    for owner in (module, getattr(module, "config", None)):
        values: list[Any] = [getattr(owner, name, None) for name in names]
        if found := [value for value in values if isinstance(value, int) and value > 0]:
            return found
    return []


def _by_name(name: str) -> bool:
    return any(part in name for part in ADAMW_NAMES) or name.endswith(ROUTERS)
