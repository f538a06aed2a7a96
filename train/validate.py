"""`omniloom train validate`: everything that can be known of a training before it starts, without a GPU.

Degrees, the model's files, the operations that would run, memory of each GPU, data, steps. Each check raises the error
that the training itself would end with; `validate_config` collects them, so that one run shows all.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from logging import WARNING
from pathlib import Path
from typing import Any

import torch

from schemas.errors import OmniloomError
from train.checkpoint_io import check_family, read_state
from train.checkpoint_layout import find_step
from train.config import DataConfig, OmniConfig, TrainConfig, WandbConfig
from train.data.loader import check_same_data
from train.data.prepare import open_data, plan_notes, reward_notes
from train.data.processor import ProcessorAssets
from train.data.rank_plan import DataRank, RankPlan
from train.data.sources import check_source
from train.estimate import count_text, estimate_memory, size_text
from train.evaluation import HeldOut, held_out_data
from train.export import check_export
from train.lora.apply import adapter_names, trained_table
from train.mesh import Degrees
from train.metric_writers import check_packages
from train.model_assets import training_assets
from train.model_build import (
    AnyModel,
    ModelFiles,
    add_hearing,
    build_model,
    check_keeping,
    check_model_folder,
    choose_ops,
    family_of,
    master_dtype,
    model_spec,
    plan_lora,
    towers_of,
)
from train.models.freeze import freeze
from train.models.loading import open_weights
from train.models.moe import has_experts
from train.objective import check_references
from train.ops.device import describe_device
from train.ops.registry import AUTO, OPS, Device, resolve
from train.optim.groups import decay_note, learning_rates, parameter_groups
from train.optim.schedule import Schedule
from train.state import finished_note

GPU_CAPABILITY = (9, 0)  # of a Hopper GPU: what `auto` is resolved for when this machine has none


@dataclass
class Findings:
    """facts: (what, how it will be); faults: errors, the first one's kind decides the exit code."""

    facts: list[tuple[str, str]] = field(default_factory=list)
    faults: list[OmniloomError] = field(default_factory=list)

    def add(self, what: str, how: str) -> None:
        self.facts.append((what, how))

    @contextmanager
    def check(self, key: str = "") -> Iterator[None]:
        """Keeps the error of a check and goes on. key: of the configuration, for an error that does not name it."""
        try:
            yield
        except OmniloomError as error:
            if key:
                error.args = (f"{key}: {error}",)
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
    chosen: Mapping[str, str] | None = None
    with found.check():
        chosen = _check_ops(config, found)
    has_config = _check_model_folder(config, found)
    model = _check_model(config, degrees, found, chosen) if has_config else None
    if model is not None and degrees is not None:
        with found.check():
            memory = estimate_memory(model, degrees, config.train, config.data.max_seq_len, config.model.lora_config)
            *parts, total = memory.lines()
            found.add("memory of each GPU", f"{total.rpartition('GPU ')[2]}: {', '.join(parts)}")
    saved = _check_outputs(config, model, found)
    if data:
        _check_sources(config, degrees, found, saved, laid_out=has_config)
    elif config.train.max_steps is not None:
        with found.check():
            Schedule.of(config.train.optimizer, config.train.max_steps)
    return found


def _check_model_folder(config: OmniConfig, found: Findings) -> bool:
    """One fault, not one for each part that needs the file."""
    with found.check():
        check_model_folder(config.model)
        return True
    return False


def _check_outputs(config: OmniConfig, model: AnyModel | None, found: Findings) -> Mapping[str, Any] | None:
    """Packages of writers, the base of exports, the checkpoint to go on from, whose state is returned."""
    train, family = config.train, None if model is None else family_of(model)
    for logging in (
        train.logging.model_copy(update={"tensorboard": False}),
        train.logging.model_copy(update={"wandb": WandbConfig()}),
    ):
        with found.check():
            check_packages(logging)
    with found.check():
        check_export(train.checkpoint, family, adapters=config.model.lora_config is not None)
    with found.check():
        path = find_step(Path(train.checkpoint.output_dir), train.checkpoint.load_path)
        if path is not None:
            state = read_state(path)
            check_family(path, state, family or state["family"])
            found.add("goes on", f"after step {state['step']} from {path}")
            return state
    return None


def _check_ops(config: OmniConfig, found: Findings) -> Mapping[str, str]:
    """Operation -> backend for the GPU of this machine, or for a Hopper one with the packages that are installed
    here."""
    names, device = config.model.ops_implementation.model_dump(), _gpu(repeatable=config.train.deterministic)
    chosen = resolve(names, device, config.train.accelerator.fsdp_config.mixed_precision.compute_dtype)
    # operations may share a key
    keys = {OPS[op].key.removesuffix("_implementation"): name for op, name in chosen.items()}
    said = ", ".join(f"{key} {name}" for key, name in keys.items())
    found.add("operations on this GPU" if device.here else "operations on a Hopper GPU", said)
    for op, faster in chosen.passed_over.items():
        for why in faster:
            found.add("passed over by auto", f"{OPS[op].key}: {why}")
    if not device.here and AUTO in names.values():
        said = "of packages that are installed on this machine, none of them loaded; the GPU machine may differ"
        found.add("chosen by auto", said)
    return chosen


def _gpu(*, repeatable: bool) -> Device:
    """That of this machine, or a Hopper one, for which no package is loaded."""
    if torch.cuda.is_available():
        return describe_device("cuda", repeatable=repeatable)
    return Device("cuda", GPU_CAPABILITY, repeatable=repeatable, here=False)


def _check_model(
    config: OmniConfig, degrees: Degrees | None, found: Findings, chosen: Mapping[str, str] | None
) -> AnyModel | None:
    """Built on the meta device; names and shapes of its weights are read from their headers. chosen: operation ->
    backend, None after a fault of them. None after a fault of what is trained, of which no memory can be told."""
    model: AnyModel | None = None
    whole = False  # built, frozen and with its adapters: as it would train
    with found.check():
        ops = choose_ops(_plain(config).model, config.train, torch.device("cpu"))
        model = build_model(config.model, ops, master_dtype(config.train))
        with found.check():
            add_hearing(model, config.model, config.train, ops)
            if (beside := getattr(model, "frozen_audio", None)) is not None:
                found.add("audio tower", f"frozen, beside the model, {size_text(beside.nbytes)}")
        train = config.train
        with found.check():
            if chosen is not None:
                check_keeping(train.gradient_checkpointing, chosen, sparse=has_experts(model))
        frozen = freeze(model, vit=train.freeze_vit, audio_tower=train.freeze_audio_tower, modules=train.freeze_modules)
        lora = plan_lora(model, config.model, train, frozen)
        if lora is not None:
            lora.add(model, master_dtype(train))
            frozen = ()  # all but the adapters is
            first, *kinds = trained_table(model)
            found.add("adapters", f"{first}, of {len(kinds)} kinds")
        count = sum(parameter.numel() for parameter in model.parameters())
        trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
        found.add("model", f"{model.config.model_type}, {count_text(count)} parameters, {count_text(trained)} trained")
        if frozen:
            found.add("frozen", f"{len(frozen)} tensors, the first {frozen[0]}")
        if degrees is not None:
            degrees.check_experts(getattr(model.config.get_text_config(), "num_experts", 0) or 0)
        _check_optimizer(config.train, model, found)
        whole = True
    files = ModelFiles.of(config.model)
    if model is not None and files.weights is not None:
        with found.check():
            adapters = set(adapter_names(model))
            shapes = {name: tuple(p.shape) for name, p in model.named_parameters() if name not in adapters}
            weights = open_weights(files.weights, shapes, native=model_spec(model) is not None)
            found.add("weights", f"{len(weights.tensors)} tensors of {files.weights}, all names and shapes fit")
    elif model is not None:
        found.add("weights", f"random, seed {config.train.seed}")
    return model if whole else None


def _check_optimizer(train: TrainConfig, model: AnyModel, found: Findings) -> None:
    """Patterns, names and blocks of heads mean something; how many tensors each kind has."""
    with found.check():
        counts = Counter[str]()
        for group in parameter_groups(model, train.optimizer, learning_rates(train, towers_of(model))):
            counts[group["kind"]] += len(group["params"])
        said = ", ".join(f"{kind} of {count} tensors" for kind, count in sorted(counts.items()))
        dtypes = f"parameters {train.optimizer.master_dtype}, averages {train.optimizer.state_dtype}"
        found.add("optimizer", f"{said}; {dtypes}")
        if (note := decay_note(train.optimizer)) is not None:
            found.add("note", note)


def _plain(config: OmniConfig) -> OmniConfig:
    """The same with `auto` operations: to build the shapes on a CPU."""
    names = type(config.model.ops_implementation)()
    return config.model_copy(update={"model": config.model.model_copy(update={"ops_implementation": names})})


def _check_sources(
    config: OmniConfig, degrees: Degrees | None, found: Findings, saved: Mapping[str, Any] | None, *, laid_out: bool
) -> None:
    """Each source by itself, then all together. laid_out: the model's config.json is there, which decides how rows are
    laid out; saved: the state to go on from."""
    held_out = held_out_data(config.data, config.train)
    data_fit = _each_source("data", config.data, found)
    held_fit = _each_source("train.evaluation", held_out, found)
    if not laid_out:
        return
    with found.check():
        assets = training_assets(config)
        if data_fit:
            with found.check():
                _check_data(config, degrees, assets, found, saved)
        if held_fit and held_out.sources:
            with found.check():
                _check_held_out(config, degrees, assets, found)


def _each_source(section: str, data: DataConfig, found: Findings) -> bool:
    """It is there, and its preprocessor and rollouts are."""
    before = len(found.faults)
    for number, source in enumerate(data.sources):
        with found.check(f"{section}.sources.{number}"):
            check_source(source, data)
    return len(found.faults) == before


def _check_data(
    config: OmniConfig,
    degrees: Degrees | None,
    assets: ProcessorAssets,
    found: Findings,
    saved: Mapping[str, Any] | None,
) -> None:
    sources, plans = open_data(config.data, config.train, assets, show=False)
    check_references(config.train.objective, sources)
    steps = plans.steps(0)
    total = config.train.max_steps or plans.total_steps(config.train.num_train_epochs)
    for source in sources:
        found.add(f"data source {source.rows.name}", f"{len(source.lengths):,} rows")
    for note in plan_notes(plans, sources):
        found.add("note", note)
    for level, note in reward_notes(sources):
        found.add("warning" if level >= WARNING else "note", note)
    found.add("steps", f"{steps:,} in the first epoch, {total:,} in all")
    with found.check():
        Schedule.of(config.train.optimizer, total)
    if saved is not None:
        if (finished := finished_note(int(saved["step"]), total, config.train)) is not None:
            found.add("note", finished)
        with found.check():
            check_same_data(saved.get("data", {}), plans, sources)
    if degrees is not None:
        mine = RankPlan(plans, DataRank(0, degrees.dp, 0, degrees.ulysses), config.train)
        found.add("micro-batches", f"{mine.micro_steps} of each rank per step")


def _check_held_out(config: OmniConfig, degrees: Degrees | None, assets: ProcessorAssets, found: Findings) -> None:
    held = HeldOut.open(config.data, config.train, assets, 1 if degrees is None else degrees.dp, show=False)
    for source in held.sources:
        found.add(f"evaluation source {source.rows.name}", f"{len(source.lengths):,} rows")
    for note in plan_notes(held.plans, held.sources, training=False):
        found.add("note", f"evaluation: {note}")


def report_lines(found: Findings) -> list[str]:
    """Facts as aligned lines."""
    width = max((len(what) for what, _ in found.facts), default=0)
    return [f"{what:<{width}}  {how}" for what, how in found.facts]
