"""What a trainer is made of, built in a fixed order; each part by a method that may be overridden."""

from __future__ import annotations

import logging
import os
import random
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist
from torch.optim import Optimizer

from schemas.errors import ConfigError
from train.agreement import Agreement
from train.checkpoint import Checkpointer
from train.config import OmniConfig
from train.data.batch import Batch
from train.data.device import Destination
from train.data.loader import TrainLoader
from train.data.plan_store import PlanStore
from train.data.prepare import open_data
from train.data.processor import ProcessorAssets
from train.data.rank_plan import DataRank
from train.data.serving import ModelInputs
from train.data.sources import OpenSource
from train.evaluation import Evaluator
from train.export import check_export
from train.lora.apply import adapted_weights, trained_table
from train.lora.base import base_digest
from train.lora.plan import LoraPlan
from train.mesh import Mesh, Process, start_process_group
from train.metric_writers import check_packages
from train.model_assets import training_assets
from train.model_build import (
    AnyModel,
    ModelFiles,
    add_hearing,
    build_model,
    check_model,
    checkpoint_policy,
    choose_ops,
    data_inputs,
    family_of,
    master_dtype,
    model_spec,
    parallelize,
    plan_lora,
    read_dtype,
    set_gradient_checkpointing,
    share_router,
)
from train.models.flops import MicroBatch, ModelFlops
from train.models.freeze import freeze
from train.models.moe import has_experts
from train.models.spec import ModelSpec
from train.objective import GrpoObjective, check_references, with_rollouts
from train.ops.registry import Ops
from train.optim.build import make_optimizer
from train.optim.groups import LearningRate, decay_note, learning_rates, parameter_groups
from train.optim.schedule import LrScheduler, Schedule
from train.parallel.fsdp import GradientSync, needs_wrapping
from train.state import TrainerState
from train.step import StepParts

COLLECTIVE_TIMEOUT_S = 1800.0  # of a step; saving and opening data have train.checkpoint.timeout_s

log = logging.getLogger("omniloom.train")


class TrainerParts:
    """Everything that training needs. `build` calls the build methods in the order in which they stand; each leaves
    what it made in an attribute."""

    process: Process
    mesh: Mesh
    ops: Ops
    files: ModelFiles
    model: AnyModel
    spec: ModelSpec | None
    frozen: tuple[str, ...]
    lora: LoraPlan | None
    flops: Callable[[Batch], float] | None
    assets: ProcessorAssets
    sources: list[OpenSource]
    plans: PlanStore
    model_inputs: ModelInputs
    train_dataloader: TrainLoader
    evaluator: Evaluator | None
    checkpointer: Checkpointer
    optimizer: Optimizer
    lr_scheduler: LrScheduler
    parts: StepParts
    ranks: Agreement

    def __init__(self, config: OmniConfig) -> None:
        self.args = config
        self.state = TrainerState()
        self.resume_from: Path | None = None
        self.evaluator = None
        self.built = False
        self._setup_group: dist.ProcessGroup | None = None

    def build(self) -> None:
        """In this order."""
        self.build_distributed()
        self.build_model()
        self.check_outputs()
        self.build_loss()
        self.build_assets()
        self.build_dataset()
        self.build_collate()
        self.build_loader()
        self.build_evaluation()
        self.build_checkpointer()
        self.build_parallel()
        self.build_optimizer()
        self.build_schedule()
        self.built = True

    def build_distributed(self) -> None:
        """The ranks, their groups, the device, and seeds."""
        train = self.args.train
        self.process = Process.from_environment()
        device = self.process.device()
        alone = Mesh.make(train.accelerator, self.process.world_size, self.process.rank, device)
        dtype = read_dtype(self.args.model.lora_config, train)
        wanted = needs_wrapping(alone, train.accelerator.fsdp_config, dtype)
        if wanted and not dist.is_initialized():
            start_process_group(self.process, device, COLLECTIVE_TIMEOUT_S)
        self.mesh = (
            Mesh.make(train.accelerator, self.process.world_size, self.process.rank, device) if wanted else alone
        )
        if self.mesh.world_size > 1:
            patient = timedelta(seconds=train.checkpoint.timeout_s)
            self._setup_group = cast(dist.ProcessGroup, dist.new_group(backend="gloo", timeout=patient))
        self.ranks = Agreement(self.mesh.rank, self.mesh.world_size, self._setup_group)
        self.say(self.mesh.describe())
        seed_everything(train.seed, deterministic=train.deterministic)

    def build_model(self) -> None:
        """The model without memory, its operations bound, and what of it is trained."""
        self.files = ModelFiles.of(self.args.model)
        self.ops = choose_ops(self.args.model, self.args.train, self.mesh.device)
        self._agree_on(self.ops.describe(), "chose other operations (a package that does not load on one of them?)")
        self.say(self.ops.describe())
        self.model = build_model(self.args.model, self.ops, master_dtype(self.args.train))
        add_hearing(self.model, self.args.model, self.args.train, self.ops)
        self.spec = model_spec(self.model)
        check_model(self.model, self.mesh)
        self.frozen = self.freeze()
        self.lora = plan_lora(self.model, self.args.model, self.args.train, self.frozen)
        self.flops = self.count_flops()
        self.add_adapters()
        train = self.args.train
        again, offload = train.gradient_checkpointing, train.accelerator.offload_config
        policy = checkpoint_policy(again, self.ops, offload, sparse=has_experts(self.model))
        set_gradient_checkpointing(self.model, policy)

    def freeze(self) -> tuple[str, ...]:
        """Names of the parameters that are not trained."""
        train = self.args.train
        return freeze(
            self.model, vit=train.freeze_vit, audio_tower=train.freeze_audio_tower, modules=train.freeze_modules
        )

    def add_adapters(self) -> None:
        """Of a training by LoRA, and says what is trained."""
        if self.lora is None:
            return
        self.lora.add(self.model, master_dtype(self.args.train))
        for line in trained_table(self.model):
            self.say(line)
        if self.lora.config.lora_dropout:  # ranks have other rows, so they drop other inputs
            torch.manual_seed(self.args.train.seed + self.mesh.rank)

    def count_flops(self) -> Callable[[Batch], float] | None:
        """Of the forward and backward pass of a batch; None where it is not known."""
        counted = ModelFlops(self.model, () if self.lora is None else list(adapted_weights(self.lora.targets)))
        return lambda batch: counted.count(micro_batch(batch)).model

    def check_outputs(self) -> None:
        """What is first needed at a log line or at the end of training: packages of writers, the base of exports."""
        if self.process.rank == 0:
            check_packages(self.args.train.logging)
            check_export(self.args.train.checkpoint, family_of(self.model), adapters=self.lora is not None)

    def build_loss(self) -> None:
        """What of the loss spans ranks."""
        share_router(self.model, self.mesh)

    def build_assets(self) -> None:
        """Tokenizer and preprocessor."""
        self.assets = training_assets(self.args)

    def build_dataset(self) -> None:
        """Sources and plans, the same on every rank."""
        first = self.mesh.rank == 0
        self.sources, self.plans = open_data(self.args.data, self.args.train, self.assets, show=first)
        check_references(self.args.train.objective, self.sources)
        self._agree_on(self.plans.digest, "see other data")

    def build_collate(self) -> None:
        """What the model and the objective add to the batches."""
        self.model_inputs = with_rollouts(data_inputs(self.model), self.args.train.objective)

    def build_loader(self) -> None:
        mesh = self.mesh
        rank = DataRank(mesh.dp_rank, mesh.degrees.dp, mesh.sp_rank, mesh.degrees.ulysses)
        dtype = getattr(torch, self.args.train.accelerator.fsdp_config.mixed_precision.compute_dtype)
        self.train_dataloader = TrainLoader(
            self.sources,
            self.plans,
            self.args.data,
            self.args.train,
            self.assets,
            rank,
            Destination.on(mesh.device, dtype),
            self.model_inputs,
        )

    def build_evaluation(self) -> None:
        """The held-out data, opened and planned now, so that what is wrong with them is told before the first step."""
        train = self.args.train
        if train.evaluation.sources:
            to = self.train_dataloader.to
            self.evaluator = Evaluator.make(self.args.data, train, self.assets, self.mesh, self.model_inputs, to)

    def build_checkpointer(self) -> None:
        """And whether there is a checkpoint to go on from."""
        data = self.args.data
        processor = Path(data.processor_path) if data.processor_path is not None else self.files.weights
        self.checkpointer = Checkpointer(
            self.args.train.checkpoint,
            rank=self.mesh.rank,
            world_size=self.mesh.world_size,
            family=family_of(self.model),
            group=self._setup_group,
            files=self.files.small_files(processor),
            device=self.mesh.device,
            lora=None if self.lora is None else self.lora.record(base_digest(self.files.weights, self.args.train.seed)),
        )
        self.resume_from = self.checkpointer.find()
        if self.resume_from is not None:
            self.checkpointer.check(self.resume_from)

    def build_parallel(self) -> None:
        """Sharded parameters, with their values."""
        parallelize(
            self.model,
            self.mesh,
            self.args.train,
            self.files,
            fill=self.resume_from is None,
            lora=self.lora,
            rows=self.args.rows_per_rank,
        )

    def learning_rates(self) -> list[LearningRate]:
        """Of parts of the model that have their own."""
        return learning_rates(self.args.train, {})

    def build_optimizer(self) -> None:
        config = self.args.train.optimizer
        groups = parameter_groups(self.model, config, self.learning_rates())
        if (note := decay_note(config)) is not None:
            self.say(note)
        accelerator = self.args.train.accelerator
        offload = accelerator.offload_config.enable_optimizer and not accelerator.fsdp_config.offload
        seed, device = self.args.train.seed, self.mesh.device
        self.optimizer = make_optimizer(self.model, groups, config, seed=seed, device=device, offload=offload)

    def build_schedule(self) -> None:
        """And the parts of a step, which are complete now."""
        config = self.args.train.optimizer
        total = self.train_dataloader.total_steps()
        self.lr_scheduler = LrScheduler(self.optimizer, Schedule.of(config, total))
        self.parts = StepParts(
            model=self.model,
            optimizer=self.optimizer,
            scheduler=self.lr_scheduler,
            mesh=self.mesh,
            sync=GradientSync(self.model, self.args.train.accelerator.fsdp_config),
            max_grad_norm=config.max_grad_norm,
            assets=self.assets,
            flops=self.flops,
            objective=GrpoObjective.of(self.args.train.objective),
        )

    def say(self, text: str) -> None:
        """Once, not on every rank."""
        if self.process.rank == 0:
            log.info("%s", text)

    def _agree_on(self, mine: str, fault: str) -> None:
        """ConfigError when the ranks do not have the same: they would wait for one another for ever, or not compute the
        same. fault: what they do then."""
        if self._setup_group is None:
            return
        found: list[Any] = [None] * self.mesh.world_size
        dist.all_gather_object(found, mine, group=self._setup_group)
        if other := [rank for rank, theirs in enumerate(found) if theirs != found[0]]:
            advice = "give all nodes the same packages, files and configuration"
            raise ConfigError(f"ranks 0 and {other[0]} {fault}; {advice}")


def micro_batch(batch: Batch) -> MicroBatch:
    """What of a batch decides how much is computed: the whole text, which the first rank of a sequence-parallel group
    counts for all, and this rank's media."""
    tokens = batch.sample_tokens.tolist() if batch.route.sp_rank == 0 else []
    lengths = [part.mel_stop - part.mel_start for part in batch.audio]
    labels = int(batch.label_tokens.sum()) if tokens else 0
    return MicroBatch(tokens, [found.grid for found in batch.vision], lengths, labels)


def seed_everything(seed: int, *, deterministic: bool) -> None:
    """Seeds every generator; deterministic: torch takes kernels that give the same result each time, or raises."""
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when CUDA starts
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
    torch.use_deterministic_algorithms(deterministic)
    torch.backends.cudnn.benchmark = False
