"""`omniloom train logprobs --backend transformers`: the same dump by the model of transformers, one sample at a time,
without packing, parallelism or kernels of ours. Rows, tokens, positions, pixels and log-mel are those of the data path.

Every data-parallel rank has the whole model; there is no other parallelism here.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn

from schemas.errors import ConfigError, UnsupportedError
from train.data.batch import Batch
from train.data.device import make_features
from train.data.route import Tower
from train.export import HF_FOLDER
from train.logprob_reference import Reference, sample_rows
from train.logprobs import LogprobRun

AS_EXPORT = "model.model_path={} model.config_path=null train.checkpoint.load_path=null"


class HubLogprobRun(LogprobRun):
    """The model is transformers' own, from `model.model_path`; ours stays without memory and tells the data path what
    it needs to know."""

    backend = "transformers"
    images_first = True
    reference: Reference

    def build_model(self) -> None:
        """ConfigError, UnsupportedError: weights or a layout that transformers does not have."""
        config, degrees = self.args.model, self.mesh.degrees
        if config.model_path is None:
            raise ConfigError(
                "--backend transformers needs model.model_path: it would draw other random weights; after a training "
                f"name its export, {AS_EXPORT.format(f'{self.args.train.checkpoint.output_dir}/{HF_FOLDER}/step_N')}"
            )
        if config.config_path is not None:
            raise ConfigError("--backend transformers reads model.model_path alone; leave model.config_path out")
        if config.lora_config is not None:
            raise UnsupportedError(
                "--backend transformers does not read adapters: merge them (`omniloom convert merge-lora`), name the "
                "result as model.model_path and write model.lora_config=null"
            )
        if degrees.ulysses > 1 or degrees.ep > 1:
            raise ConfigError(
                f"--backend transformers has the whole model on each rank, but train.accelerator.ulysses_size is "
                f"{degrees.ulysses} and ep_size {degrees.ep}; write 1"
            )
        super().build_model()

    def build_checkpointer(self) -> None:
        """ConfigError: the trainer would take a checkpoint, which transformers cannot read."""
        super().build_checkpointer()
        if self.resume_from is not None:
            raise ConfigError(
                f"--backend transformers reads model.model_path, but training goes on from {self.resume_from}; name "
                f"its export, {AS_EXPORT.format(self._export(self.resume_from))}, or write "
                "train.checkpoint.load_path=null alone for the model that the training began from"
            )

    def _export(self, checkpoint: Path) -> str:
        """Where the export of a checkpoint is, or a word in its place."""
        folder = self.checkpointer.output_dir / HF_FOLDER / checkpoint.name
        return str(folder) if folder.is_dir() else "EXPORT"

    def build_parallel(self) -> None:
        """Loads the model whole."""
        assert self.files.weights is not None  # build_model looked
        dtype = getattr(torch, self.args.train.accelerator.fsdp_config.mixed_precision.compute_dtype)
        self.reference = Reference.load(self.args.model, self.files.weights, dtype, self.mesh.device)

    def token_losses(self, batch: Batch) -> Tensor:
        losses = torch.zeros(batch.ids.shape[1], device=batch.ids.device)
        for row in sample_rows(batch, batch.features or make_features(batch, self.assets)):
            losses[row.start : row.start + len(row.ids)] = self.reference.losses(row)
        return losses

    def towers(self) -> dict[Tower, nn.Module]:
        return self.reference.towers()

    def operations(self) -> dict[str, str | None]:
        """transformers' own names."""
        return {"attention": "sdpa", "moe_experts": "eager"}
