"""`omniloom train logprobs`: the log-probability that the trainer's own model gives to each token of its data, on the
trainer's own data path and parallel layout, without a step.

Each chosen row is visited once, whatever the weights of the sources. Ranks of a sequence gather its slices to the first
of them, which writes the file of its data-parallel rank.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist
import transformers
from torch import Tensor, nn

from convert.job import omniloom_version
from schemas.errors import ConfigError
from train.agreement import Agreement
from train.config import BatchConfig, OmniConfig
from train.data.batch import Batch
from train.data.device import Destination
from train.data.labelling import MODALITY, MODALITY_INFO, Relabel, TokenChoice, token_modalities
from train.data.loader import TrainLoader
from train.data.model_inputs import model_inputs
from train.data.prepare import open_data
from train.data.rank_plan import DataRank
from train.data.route import Tower
from train.data.sources import OpenSource
from train.logprob_features import FeatureWriter, TowerCapture, batch_features
from train.logprob_files import DumpCard, DumpFile, DumpWriter, SampleLogprobs, begin_dump, dump_writer, finish_dump
from train.logprob_samples import choose_rows, sample_logprobs, source_counts
from train.model_build import AnyModel, data_inputs, family_of
from train.models.foundation import FoundationModel
from train.models.inputs import ModelOutput
from train.models.spec import spec_of
from train.progress import progress
from train.trainer_build import TrainerParts


@dataclass(frozen=True)
class DumpOptions:
    """out: folder of the dump, which is not there yet; tokens: which have a line; max_samples: so many rows of all
    sources, by chance of train.seed alone, None = all; features: also what the towers make."""

    out: Path
    tokens: TokenChoice = "labelled"
    max_samples: int | None = None
    features: bool = False

    def __post_init__(self) -> None:
        if self.max_samples is not None and self.max_samples < 1:
            raise ConfigError(f"--max-samples {self.max_samples}: must be at least 1")


@dataclass
class Totals:
    """What one rank did."""

    file: DumpFile | None = None
    features: Sequence[str] = ()
    samples: int = 0
    tokens: int = 0
    dead: int = 0


class LogprobRun(TrainerParts):
    """A trainer without optimizer and schedule."""

    backend = "native"
    images_first = False  # order in which its towers see the media of a sample; False: in that of their tokens

    def __init__(self, config: OmniConfig, options: DumpOptions) -> None:
        super().__init__(config)
        self.options = options
        self.batch_config = BatchConfig()

    def build(self) -> None:
        """In the order of a training."""
        self.build_distributed()
        self.ranks = Agreement(self.mesh.rank, self.mesh.world_size, self._setup_group)
        self.ranks.on_first(lambda: begin_dump(self.options.out))
        self.build_model()
        self.build_loss()
        self.build_assets()
        self.build_dataset()
        self.build_collate()
        self.build_loader()
        self.build_checkpointer()
        self.build_parallel()
        self.restore()
        self.built = True

    def build_dataset(self) -> None:
        """The chosen rows, each planned once; packed into as few sequences as the ranks take."""
        train, data = self.args.train, self.args.data
        once = [source.model_copy(update={"weight": 1.0}) for source in data.sources]
        self.args = self.args.model_copy(update={"data": data.model_copy(update={"sources": once})})
        self.batch_config = BatchConfig(
            global_batch_size=self.mesh.degrees.dp * train.micro_batch_size,
            micro_batch_size=train.micro_batch_size,
            pad_multiple=train.pad_multiple,
            seed=train.seed,
        )

        def choose(sources: list[OpenSource]) -> list[OpenSource]:
            return choose_rows(sources, data.max_seq_len, self.options.max_samples, train.seed)

        show = self.mesh.rank == 0
        self.sources, self.plans = open_data(self.args.data, self.batch_config, self.assets, show, choose)
        self._agree_on(self.plans.digest, "see other data")
        for source in self.sources:
            chosen, usable = source_counts(source, data.max_seq_len)
            rows = f"{chosen} of {usable} usable rows ({len(source.lengths)} in all)"
            self.say(f"data source {source.rows.name}: {rows}")

    def build_collate(self) -> None:
        self.model_inputs = replace(
            data_inputs(self.model),
            extra_arrays=token_modalities,
            extra_info=MODALITY_INFO,
            relabel=Relabel(self.options.tokens),
        )

    def build_loader(self) -> None:
        mesh = self.mesh
        rank = DataRank(mesh.dp_rank, mesh.degrees.dp, mesh.sp_rank, mesh.degrees.ulysses)
        self.train_dataloader = TrainLoader(
            self.sources,
            self.plans,
            self.args.data,
            self.batch_config,
            self.assets,
            rank,
            Destination.on(mesh.device),
            self.model_inputs,
        )

    def restore(self) -> None:
        """The weights of a checkpoint, where the configuration means one."""
        if self.resume_from is not None:
            self.checkpointer.load(self.resume_from, self.model, None)
            self.say(f"weights of {self.resume_from}")

    @torch.no_grad()
    def run(self) -> DumpCard:
        """Writes the dump; a collective call. VerificationError: a log-probability that is no number."""
        self.build()
        self.model.eval()
        kept = FeatureWriter(self.options.out, self.mesh.dp_rank, self.mesh.sp_rank)
        capture = TowerCapture(self.towers() if self.options.features else {})
        with self._progress() as advance, dump_writer(self.options.out, self.mesh.dp_rank) as writer, closing(capture):
            totals = self._pass(writer, capture, kept, advance)
            kept.flush()
            totals.file, totals.features = writer.finish(), kept.names
        return self._finish(totals)

    def _pass(
        self, writer: DumpWriter, capture: TowerCapture, kept: FeatureWriter, advance: Callable[[int], None]
    ) -> Totals:
        totals = Totals()
        for step in self.train_dataloader:
            while step.micro_batches:
                batch = step.micro_batches.pop(0)
                for sample in self.samples(batch, self.token_losses(batch)):
                    writer.add(sample)
                    totals.samples += 1
                    totals.tokens += len(sample.index)
                for key, rows in batch_features(batch, capture.take(), images_first=self.images_first):
                    kept.add(key, rows)
                if batch.route.sp_rank == 0:
                    totals.dead += len(batch.dead)
            advance(len(self.plans.epoch(0).step_rows(step.step)))
        return totals

    def towers(self) -> dict[Tower, nn.Module]:
        """Those that the model has."""
        return native_towers(self.model)

    def token_losses(self, batch: Batch) -> Tensor:
        """float32 [S], minus the log-probability of each label of this rank's slice."""
        output: ModelOutput = self.model(model_inputs(batch, self.assets, dummy_towers=self.mesh.world_size > 1))
        assert output.token_loss is not None
        return output.token_loss

    def samples(self, batch: Batch, losses: Tensor) -> Iterator[SampleLogprobs]:
        """The samples of a micro-batch on the first rank of its sequence; nothing on the others."""
        whole = self._gathered(torch.stack([losses, batch.labels[0], batch.extra[MODALITY]]).double())
        if whole is None:
            return
        loss, labels, kinds = whole
        first = 0
        for source, key, length in zip(batch.sources, batch.keys, batch.sample_tokens.tolist(), strict=True):
            here = slice(first, first + length)
            yield sample_logprobs(source, key, loss[here], labels[here].astype(np.int64), kinds[here].astype(np.int8))
            first += length

    def _gathered(self, mine: Tensor) -> np.ndarray | None:
        """float64 [3, T] of the slices [3, S] of a sequence. In double every id is exact."""
        size, first = self.mesh.degrees.ulysses, self.mesh.sp_rank == 0
        if size == 1:
            return mine.cpu().numpy()
        parts = [torch.empty_like(mine) for _ in range(size)] if first else None
        dist.gather(mine, parts, group=self.mesh.sp_group, group_dst=0)
        return torch.cat(parts, 1).cpu().numpy() if parts is not None else None

    def _progress(self) -> AbstractContextManager[Callable[[int], None]]:
        if self.mesh.rank:
            return nullcontext(lambda count: None)
        return progress("log-probabilities", len(self.plans.epoch(0).rows), "samples")

    def _finish(self, mine: Totals) -> DumpCard:
        every: list[Any] = [mine]
        if self._setup_group is not None:
            every = [None] * self.mesh.world_size
            dist.all_gather_object(every, mine, group=self._setup_group)
        found = cast(list[Totals], every)
        card = self._card(found)
        self.ranks.on_first(lambda: finish_dump(self.options.out, card))
        return card

    def _card(self, found: Sequence[Totals]) -> DumpCard:
        degrees = self.mesh.degrees
        return DumpCard(
            model=self.model_record(),
            sources={source.rows.name: self._source_record(source) for source in self.sources},
            degrees={f.name: getattr(degrees, f.name) for f in fields(degrees)},
            dtype=self.args.train.accelerator.fsdp_config.mixed_precision.compute_dtype,
            operations=self.operations(),
            backend=self.backend,
            tokens=self.options.tokens,
            samples=sum(totals.samples for totals in found),
            token_count=sum(totals.tokens for totals in found),
            dead=sum(totals.dead for totals in found),
            versions={
                "omniloom": omniloom_version(),
                "torch": torch.__version__,
                "transformers": transformers.__version__,
                "python": platform.python_version(),
            },
            files=[totals.file for totals in found if totals.file is not None],
            features=[name for totals in found for name in totals.features],
        )

    def model_record(self) -> dict[str, Any]:
        """Where the weights come from."""
        return {
            "family": family_of(self.model),
            "config": str(self.files.config),
            "weights": None if self.files.weights is None else str(self.files.weights),
            "checkpoint": None if self.resume_from is None else str(self.resume_from),
        }

    def operations(self) -> dict[str, str | None]:
        """Operation -> implementation."""
        return {f.name: getattr(self.ops, f.name).name for f in fields(self.ops)}

    def _source_record(self, source: OpenSource) -> dict[str, Any]:
        chosen, usable = source_counts(source, self.args.data.max_seq_len)
        return {
            "path": source.config.path,
            "fingerprint": source.index,
            "rows": len(source.lengths),
            "usable": usable,
            "chosen": chosen,
        }


def native_towers(model: AnyModel) -> dict[Tower, nn.Module]:
    """The towers of a native model, the frozen one beside it included."""
    if not isinstance(model, FoundationModel):
        return {}
    names = spec_of(model).names
    found: dict[Tower, nn.Module] = {}
    if names.visual is not None:
        found["vision"] = model.get_submodule(names.visual.rstrip("."))
    if names.audio is not None:
        found["audio"] = model.get_submodule(names.audio.rstrip("."))
    elif model.frozen_audio is not None:
        found["audio"] = model.frozen_audio.tower
    return found
