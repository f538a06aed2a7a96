"""The callbacks of a configuration, in the order in which they run."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from train.callbacks.adapter_export import AdapterExportCallback
from train.callbacks.base import Callback
from train.callbacks.checkpoint import CheckpointCallback
from train.callbacks.evaluation import EvaluationCallback
from train.callbacks.export import ExportCallback
from train.callbacks.finite import FiniteCallback
from train.callbacks.garbage import GarbageCallback
from train.callbacks.memory import MemoryCallback
from train.callbacks.metrics import MetricsCallback, MetricsEnd
from train.callbacks.moe_load import MoeLoadCallback
from train.callbacks.profiler import ProfilerCallback
from train.callbacks.progress import ProgressCallback
from train.callbacks.source_loss import SourceLossCallback
from train.callbacks.stopping import StoppingCallback, StoppingEnd
from train.export import Exporter
from train.metrics import Meter
from train.stopping import Stopper

if TYPE_CHECKING:
    from train.trainer import BaseTrainer


def standard_callbacks(trainer: BaseTrainer) -> list[Callback]:
    """Stopping, garbage, progress, metrics, source loss, MoE load, finite gradients, checkpoint, evaluation, export,
    profiler, memory, of a trainer that has all but these; a collective call. Evaluation comes after saving, so that a
    step is safe if it fails; its result is added to the checkpoint."""
    config, mesh = trainer.args.train, trainer.mesh
    rank, world_size, first = mesh.rank, mesh.world_size, mesh.rank == 0
    checkpointer = trainer.checkpointer
    output_dir = checkpointer.output_dir
    exporter = None
    if first and trainer.lora is None:
        exporter = Exporter(output_dir, export_base(trainer), hold=checkpointer.hold, release=checkpointer.release)
    sources = [source.label for source in trainer.args.data.sources]
    meter = Meter(sources, mesh.device, rank=rank, world_size=world_size)
    source_loss = SourceLossCallback()
    moe_load = MoeLoadCallback(config.moe_load_balance_monitor_interval, output_dir, rank=rank)
    progress = ProgressCallback(trainer.train_dataloader.total_steps(), status=checkpointer.status) if first else None
    metrics = MetricsCallback(
        meter,
        config.logging,
        output_dir,
        listeners=[source_loss.observe, moe_load.observe],
        writers=[progress] if progress is not None else [],
    )
    stopping = StoppingCallback(Stopper(world_size))
    shown: list[Callback] = [progress] if progress is not None else []
    return [
        stopping,
        GarbageCallback(),
        *shown,
        metrics,
        source_loss,
        moe_load,
        FiniteCallback(config.logging.log_steps),
        CheckpointCallback(),
        StoppingEnd(stopping),
        EvaluationCallback(),
        MetricsEnd(metrics),
        ExportCallback(exporter)
        if trainer.lora is None
        else AdapterExportCallback(output_dir, rank=rank, per_expert=config.checkpoint.lora_per_expert),
        ProfilerCallback(config.profile, output_dir, rank=rank),
        MemoryCallback(output_dir, mesh.device, rank=rank, enable=config.memory.snapshot_on_error),
    ]


def export_base(trainer: BaseTrainer) -> Path | None:
    """`checkpoint.hf_base`, else the model that the training began from, None when that had no weights."""
    base = trainer.args.train.checkpoint.hf_base
    return Path(base) if base is not None else trainer.files.weights
