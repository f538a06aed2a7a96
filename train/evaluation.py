"""The loss on held-out data, over all ranks and by source."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from schemas.errors import ConfigError
from train.config import BatchConfig, DataConfig, TrainConfig
from train.data.device import Destination
from train.data.loader import TrainLoader
from train.data.model_inputs import model_inputs
from train.data.plan_store import PlanStore
from train.data.prepare import open_data
from train.data.processor import ProcessorAssets
from train.data.rank_plan import DataRank, Position
from train.data.serving import ModelInputs
from train.data.sources import OpenSource
from train.loss import source_losses
from train.mesh import Mesh
from train.models.inputs import ModelOutput


@dataclass(frozen=True)
class HeldOut:
    """The sources of `evaluation`, opened. data, batch: of a training on them, one micro-batch of each rank a step."""

    data: DataConfig
    batch: BatchConfig
    sources: list[OpenSource]
    plans: PlanStore

    @classmethod
    def open(
        cls, data: DataConfig, train: TrainConfig, assets: ProcessorAssets, dp: int, *, show: bool = True
    ) -> HeldOut:
        """Laid out and packed as the training data are. dp: data-parallel ranks; show: see `open_data`."""
        held_out = held_out_data(data, train)
        batch = BatchConfig(
            global_batch_size=dp * train.micro_batch_size,
            micro_batch_size=train.micro_batch_size,
            pad_multiple=train.pad_multiple,
            seed=train.seed,
            max_steps=train.evaluation.max_batches,
        )
        sources, plans = open_data(held_out, batch, assets, show=show, whose="evaluation")
        if batch.max_steps is not None:  # not more than there is
            steps = min(batch.max_steps, plans.steps(0))
            batch = batch.model_copy(update={"max_steps": steps})
            _check_labels(sources, plans, steps)
        return cls(held_out, batch, sources, plans)


def _check_labels(sources: list[OpenSource], plans: PlanStore, steps: int) -> None:
    """ConfigError: `max_batches` leaves no row with a label, and the loss would be 0 of nothing."""
    labels = np.concatenate([source.lengths.labels for source in sources])
    epoch = plans.epoch(0)
    if not any(labels[epoch.step_rows(step)].any() for step in range(steps)):
        raise ConfigError(
            f"train.evaluation.max_batches: none of the rows in the first {steps} of {plans.steps(0)} steps has a "
            "token to train on, which those of the assistant are; raise it, or null for all"
        )


def held_out_data(data: DataConfig, train: TrainConfig) -> DataConfig:
    """The section `data` with the sources of `evaluation` in the place of its own."""
    return data.model_copy(update={"sources": train.evaluation.sources})


@dataclass(frozen=True, eq=False)
class Evaluator:
    """names: of the sources, in one order on all ranks; loader: of micro-batches, one a step."""

    names: tuple[str, ...]
    loader: TrainLoader
    mesh: Mesh
    assets: ProcessorAssets

    @classmethod
    def make(
        cls,
        data: DataConfig,
        train: TrainConfig,
        assets: ProcessorAssets,
        mesh: Mesh,
        inputs: ModelInputs,
        to: Destination,
    ) -> Evaluator:
        """Opens the sources of `evaluation` and plans them; nothing of it is done again when it runs. to: where the
        batches of the training go, too."""
        held = HeldOut.open(data, train, assets, mesh.degrees.dp, show=mesh.rank == 0)
        rank = DataRank(mesh.dp_rank, mesh.degrees.dp, mesh.sp_rank, mesh.degrees.ulysses)
        loader = TrainLoader(held.sources, held.plans, held.data, held.batch, assets, rank, to, inputs)
        return cls(tuple(source.label for source in held.data.sources), loader, mesh, assets)

    @torch.no_grad()
    def run(self, model: nn.Module) -> dict[str, float]:
        """loss, and loss/<source> where there are several: means over labelled tokens. A collective call."""
        model.eval()
        totals = torch.zeros(len(self.names), dtype=torch.float64, device=self.mesh.device)
        counts = torch.zeros(len(self.names), dtype=torch.float64)
        self.loader.position = Position()
        for step in self.loader:
            while step.micro_batches:
                batch = step.micro_batches.pop(0)
                inputs = model_inputs(batch, self.assets, dummy_towers=self.mesh.world_size > 1)
                output: ModelOutput = model(inputs)
                assert output.token_loss is not None
                for name, loss in source_losses(output.token_loss, batch).items():
                    totals[self.names.index(name)] += loss.total
                    counts[self.names.index(name)] += loss.tokens
        return self._means(totals, counts / self.mesh.degrees.ulysses)

    def _means(self, totals: Tensor, counts: Tensor) -> dict[str, float]:
        """Ranks of one sequence count its labels each."""
        sums = torch.cat([totals, counts.to(totals.device)])
        if self.mesh.params is not None:
            dist.all_reduce(sums)
        losses, tokens = sums.view(2, -1).tolist()
        found = {"loss": sum(losses) / max(sum(tokens), 1.0)}
        if len(self.names) > 1:
            found |= {
                f"loss/{name}": loss / count
                for name, loss, count in zip(self.names, losses, tokens, strict=True)
                if count
            }
        return found
