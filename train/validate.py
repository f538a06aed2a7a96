"""`omniloom train validate`: everything that can be known of a training before it starts, without a GPU.

Degrees, the model's files, the operations that would run, memory of each GPU, data, steps. Each check raises the error
that the training itself would end with; `validate_config` collects them, so that one run shows all.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from schemas.errors import OmniloomError
from train.config import OmniConfig, TrainConfig
from train.data.prepare import open_data, plan_notes
from train.data.rank_plan import DataRank, RankPlan
from train.estimate import estimate_memory
from train.lora.apply import adapter_names, trained_table
from train.mesh import Degrees
from train.model_assets import training_assets
from train.model_build import (
    AnyModel,
    ModelFiles,
    add_hearing,
    build_model,
    choose_ops,
    master_dtype,
    model_spec,
    plan_lora,
    towers_of,
)
from train.models.freeze import freeze
from train.models.loading import open_weights
from train.objective import check_references
from train.ops.registry import OPS, Device, resolve
from train.optim.groups import learning_rates, parameter_groups

GPU_CAPABILITY = (9, 0)  # of a Hopper GPU: what `auto` is resolved for when this machine has none


@dataclass
class Findings:
    """facts: (what, how it will be); faults: errors, the first one's kind decides the exit code."""

    facts: list[tuple[str, str]] = field(default_factory=list)
    faults: list[OmniloomError] = field(default_factory=list)

    def add(self, what: str, how: str) -> None:
        self.facts.append((what, how))

    @contextmanager
    def check(self) -> Iterator[None]:
        """Keeps the error of a check and goes on."""
        try:
            yield
        except OmniloomError as error:
            self.faults.append(error)

    def raise_faults(self) -> None:
        """All faults as one error of the first one's kind."""
        if self.faults:
            error = OmniloomError("\n".join(str(fault) for fault in self.faults))
            error.exit_code = self.faults[0].exit_code
            raise error


def validate_config(config: OmniConfig, world_size: int, *, data: bool = True) -> Findings:
    """What is known of a training on so many ranks. data: also open the sources and plan the first epoch."""
    found = Findings()
    degrees: Degrees | None = None
    with found.check():
        degrees = Degrees.of(config.train.accelerator, world_size)
        found.add("ranks", f"{degrees.dp_replicate} replicas x {degrees.dp_shard} shards x {degrees.ulysses} slices")
    with found.check():
        _check_ops(config, found)
    model = _check_model(config, degrees, found)
    if model is not None and degrees is not None:
        with found.check():
            memory = estimate_memory(model, degrees, config.train, config.data.max_seq_len, config.model.lora_config)
            *parts, total = memory.lines()
            found.add("memory of each GPU", f"{total.rpartition('GPU ')[2]}: {', '.join(parts)}")
    if data:
        with found.check():
            _check_data(config, degrees, found)
    return found


def _check_ops(config: OmniConfig, found: Findings) -> None:
    """The choices for the GPU of this machine, or for a Hopper one with the packages that are installed here."""
    here = torch.cuda.is_available()
    device = Device("cuda", torch.cuda.get_device_capability() if here else GPU_CAPABILITY)
    dtype = config.train.accelerator.fsdp_config.mixed_precision.compute_dtype
    chosen = resolve(config.model.ops_implementation.model_dump(), device, dtype)
    said = ", ".join(f"{OPS[op].key.removesuffix('_implementation')} {name}" for op, name in chosen.items())
    found.add("operations on this GPU" if here else "operations on a Hopper GPU", said)


def _check_model(config: OmniConfig, degrees: Degrees | None, found: Findings) -> AnyModel | None:
    """Built on the meta device; names and shapes of its weights are read from their headers."""
    model: AnyModel | None = None
    with found.check():
        ops = choose_ops(_plain(config).model, config.train, torch.device("cpu"))
        model = build_model(config.model, ops, master_dtype(config.train))
        with found.check():
            add_hearing(model, config.model, config.train, ops)
            if (beside := getattr(model, "frozen_audio", None)) is not None:
                found.add("audio tower", f"frozen, beside the model, {beside.nbytes / 1e9:.1f} GB")
        train = config.train
        frozen = freeze(model, vit=train.freeze_vit, audio_tower=train.freeze_audio_tower, modules=train.freeze_modules)
        lora = plan_lora(model, config.model, train, frozen)
        if lora is not None:
            lora.add(model, master_dtype(train))
            frozen = ()  # all but the adapters is
            first, *kinds = trained_table(model)
            found.add("adapters", f"{first}, of {len(kinds)} kinds")
        count = sum(parameter.numel() for parameter in model.parameters())
        trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
        found.add("model", f"{model.config.model_type}, {count / 1e9:.3g} B parameters, {trained / 1e9:.3g} B trained")
        if frozen:
            found.add("frozen", f"{len(frozen)} parameters, the first {frozen[0]}")
        if degrees is not None:
            degrees.check_experts(getattr(model.config.get_text_config(), "num_experts", 0) or 0)
        _check_optimizer(config.train, model, found)
    files = ModelFiles.of(config.model)
    if model is not None and files.weights is not None:
        with found.check():
            adapters = set(adapter_names(model))
            shapes = {name: tuple(p.shape) for name, p in model.named_parameters() if name not in adapters}
            weights = open_weights(files.weights, shapes, native=model_spec(model) is not None)
            found.add("weights", f"{len(weights.tensors)} tensors of {files.weights}, all names and shapes fit")
    elif model is not None:
        found.add("weights", f"random, seed {config.train.seed}")
    return model


def _check_optimizer(train: TrainConfig, model: AnyModel, found: Findings) -> None:
    """Patterns, names and blocks of heads mean something; how many parameters each kind has."""
    with found.check():
        counts = Counter[str]()
        for group in parameter_groups(model, train.optimizer, learning_rates(train, towers_of(model))):
            counts[group["kind"]] += len(group["params"])
        said = ", ".join(f"{kind} of {count} parameters" for kind, count in sorted(counts.items()))
        dtypes = f"parameters {train.optimizer.master_dtype}, averages {train.optimizer.state_dtype}"
        found.add("optimizer", f"{said}; {dtypes}")


def _plain(config: OmniConfig) -> OmniConfig:
    """The same with `auto` operations: to build the shapes on a CPU."""
    names = type(config.model.ops_implementation)()
    return config.model_copy(update={"model": config.model.model_copy(update={"ops_implementation": names})})


def _check_data(config: OmniConfig, degrees: Degrees | None, found: Findings) -> None:
    assets = training_assets(config)
    sources, plans = open_data(config.data, config.train, assets, show=False)
    check_references(config.train.objective, sources)
    steps = plans.steps(0)
    total = config.train.max_steps or plans.total_steps(config.train.num_train_epochs)
    for source in sources:
        found.add(f"data source {source.rows.name}", f"{len(source.lengths):,} rows")
    for note in plan_notes(plans, sources):
        found.add("note", note)
    found.add("steps", f"{steps:,} in the first epoch, {total:,} in all")
    if degrees is not None:
        mine = RankPlan(plans, DataRank(0, degrees.dp, 0, degrees.ulysses), config.train)
        found.add("micro-batches", f"{mine.micro_steps} of each rank per step")


def report_lines(found: Findings) -> list[str]:
    """Facts as aligned lines."""
    width = max((len(what) for what, _ in found.facts), default=0)
    return [f"{what:<{width}}  {how}" for what, how in found.facts]
