"""Checkpoints of a training run: saved whole or not at all, in the background if wanted, and loaded to go on exactly.

A save stages (copies to the CPU, when asynchronous), writes into a temporary folder from a thread, and renames. The
thread's collectives have a process group of their own, whose timeout suits hundreds of gigabytes. What is read back is
text and tensors: nothing of a checkpoint is ever unpickled.
"""

from __future__ import annotations

import logging
import shutil
import threading
import time
from collections.abc import Mapping
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint._state_dict_stager import StateDictStager
from torch.optim import Optimizer

from convert.dcp_index import DcpIndex, read_index
from convert.job import omniloom_version
from convert.output import check_space, write_atomic
from convert.patterns import some
from convert.trainer import STATE_FILE
from schemas.errors import IncompleteSourceError, OmniloomError, UnsupportedError
from train.agreement import Agreement
from train.checkpoint_io import (
    STATE_VERSION,
    amend_state,
    check_family,
    check_tensors,
    local_bytes,
    read_state,
    read_tensors,
    state_bytes,
    write_tensors,
)
from train.checkpoint_layout import begin, end_commit, find_step, rng_file, step_folder, tidy
from train.checkpoint_save import Save, rank_progress
from train.checkpoint_state import (
    model_tensors,
    optimizer_record,
    optimizer_tensors,
    restore_record,
    state_templates,
    widen_states,
)
from train.config import CheckpointConfig
from train.lora.plan import check_record
from train.rng import load_rng, rng_bytes, write_rng

OWN = (
    "version",
    "family",
    "step",
    "world_size",
    "versions",
    "optimizer",
    "lora",
)  # keys of state.json that are not the caller's

log = logging.getLogger("omniloom.train")


class Checkpointer:
    """Saves and loads; every rank has one and calls the same methods in the same order.

    family: model_type of the model, noted and checked. group: for the collectives, of CPU tensors; None makes one with
    `config.timeout_s` where torch.distributed runs (a collective call). files: small files by name, config.json among
    them, written beside each checkpoint so that it can be converted by itself. device: of this rank's tensors. lora:
    what is noted of the adapters of a model that has them, and compared when it is loaded.
    """

    def __init__(
        self,
        config: CheckpointConfig,
        *,
        rank: int,
        world_size: int,
        family: str,
        group: dist.ProcessGroup | None = None,
        files: Mapping[str, bytes] | None = None,
        device: torch.device | None = None,
        lora: Mapping[str, Any] | None = None,
    ) -> None:
        if "://" in config.output_dir:
            raise UnsupportedError(
                f"train.checkpoint.output_dir: {config.output_dir} is no folder of a file system; mount it"
            )
        self.config, self.rank, self.world_size, self.family = config, rank, world_size, family
        self.output_dir = Path(config.output_dir)
        self.files = dict(files or {})
        self.device = device or torch.device("cpu")
        self.lora = None if lora is None else dict(lora)
        if group is None and world_size > 1:
            group = cast(dist.ProcessGroup, dist.new_group(backend="gloo", timeout=timedelta(seconds=config.timeout_s)))
        self._group, self._ranks = group, Agreement(rank, world_size, group)
        self._stager: StateDictStager | None = None
        self._running: Save | None = None
        self._saved: Path | None = None  # the newest checkpoint of this run, or the one it goes on from
        self._committed: list[Path] = []
        self._reading: set[Path] = set()

    def save(
        self, step: int, model: nn.Module, optimizer: Optimizer, state: Mapping[str, Any], *, final: bool = False
    ) -> Path:
        """Saves a step and returns where it appears. state: JSON of the caller, given back by `load`.

        Waits for the save before this one, whose error is raised here. With `save_async` it returns as soon as all is
        copied; final: waits until it is on disk.
        """
        self.wait()
        path = step_folder(self.output_dir, step)
        if path == self._saved:
            return path
        if taken := sorted(set(OWN) & set(state)):
            raise ValueError(f"state.json: {', '.join(taken)} are not the caller's to set")
        record = self._record(step, model, optimizer, state)
        tensors = {**model_tensors(model), **optimizer_tensors(model, optimizer)}
        nbytes = sum(tensor.numel() * tensor.dtype.itemsize for tensor in tensors.values())
        temporary = Path(self._ranks.on_first(partial(self._begin, step, nbytes)))
        asynchronous = self.config.save_async and not final
        if asynchronous:
            tensors = self._stage(tensors)
        save = Save(step, temporary, nbytes)
        save.thread = threading.Thread(
            target=self._write, args=(save, tensors, record, rng_bytes()), name=f"save-step-{step}", daemon=True
        )
        self._running = save
        save.thread.start()
        if not asynchronous:
            self.wait()
        return path

    def amend(self, step: int, state: Mapping[str, Any]) -> None:
        """Other values of keys of the caller's state in the checkpoint of a step that this run saved or goes on from;
        nothing where there is none. One that is still being written appears with them. No collective call, as a save in
        the background has those of the group: rank 0 writes, and warns when it cannot."""
        if self.rank != 0:
            return
        save, path = self._running, step_folder(self.output_dir, step)
        try:
            if save is not None and save.step == step:
                save.amend(state)
            elif path == self._saved:
                amend_state(path, state)
        except (OSError, OmniloomError) as error:
            log.warning("%s: what came after the save could not be added: %s", path, error)

    def wait(self) -> None:
        """Until nothing is being saved, with progress on rank 0. Raises the error of the save."""
        save = self._running
        if save is None:
            return
        save.wait(self.rank)
        self._running = None
        if save.error is not None:
            raise save.error
        self._saved = step_folder(self.output_dir, save.step)

    def status(self) -> str | None:
        """`saving step 100: 120.4 of 402.1 GB`, None when nothing is being saved."""
        save = self._running
        if save is None or not save.running:
            return None
        return f"saving step {save.step}: {save.written() / 1e9:.1f} of {save.nbytes / 1e9:.1f} GB"

    def take_committed(self) -> list[Path]:
        """Checkpoints that became complete since the last call."""
        found, self._committed = self._committed, []
        return found

    def hold(self, path: Path) -> None:
        """Keeps a checkpoint from being removed while somebody reads it, until `release`."""
        self._reading.add(path)

    def release(self, path: Path) -> None:
        """See `hold`."""
        self._reading.discard(path)

    def find(self) -> Path | None:
        """The checkpoint that `load_path` means, the same on every rank; None to start anew. See `find_step`."""
        found: str | None = self._ranks.on_first(lambda: _text(find_step(self.output_dir, self.config.load_path)))
        return None if found is None else Path(found)

    def mend(self) -> None:
        """Ends what a kill left undone when a checkpoint had just taken its name. For the run that the folder is of."""
        self._ranks.on_first(partial(end_commit, self.output_dir))

    def check(self, path: Path) -> None:
        """What can be told of a checkpoint before the model has memory: its family and adapters. Raises as `load`."""
        self._ranks.on_all(partial(self._state, path))

    def load(self, path: Path, model: nn.Module, optimizer: Optimizer | None) -> dict[str, Any]:
        """Fills model and optimizer, its states included, and the random generators when the world size is that of the
        checkpoint; returns the state that was given to `save`.

        ConfigError: a checkpoint of another family, of other parameters, shapes or dtypes. UnsupportedError: another
        version. IncompleteSourceError: missing or damaged files. UnsafeInputError: it wants to run code.
        """
        record, index = self._ranks.on_all(partial(self._open, path, optimizer is not None))
        tensors = model_tensors(model)
        self._ranks.on_all(partial(check_tensors, path, tensors, index.tensors, "model."))
        if optimizer is not None:
            states = {name: it for name, it in index.tensors.items() if name.startswith("optimizer.state.")}
            templates = self._ranks.on_all(partial(state_templates, model, optimizer, states))
            tensors |= templates
            restored = partial(restore_record, model, optimizer, record["optimizer"], path / STATE_FILE)
            notes = self._ranks.on_all(restored)
            for note in notes if self.rank == 0 else []:
                log.warning("%s", note)
        with rank_progress(self.rank, f"loading {path.name}", local_bytes(tensors)) as advance:
            read_tensors(index, tensors, self._group, advance)
        if optimizer is not None:
            widen_states(optimizer)
        if record["world_size"] == self.world_size:
            self._ranks.on_all(partial(load_rng, rng_file(path, self.rank)))
        elif self.rank == 0:
            log.info(
                "%s was saved by %s ranks, now there are %d: random generators start from the seed",
                path,
                record["world_size"],
                self.world_size,
            )
        if path.absolute().parent == self.output_dir.absolute():
            self._saved = step_folder(self.output_dir, record["step"])
        return {key: value for key, value in record.items() if key not in OWN or key == "step"}

    def _record(self, step: int, model: nn.Module, optimizer: Optimizer, state: Mapping[str, Any]) -> bytes:
        record = {
            "version": STATE_VERSION,
            "family": self.family,
            "step": step,
            "world_size": self.world_size,
            "versions": {"omniloom": omniloom_version(), "torch": torch.__version__},
            "optimizer": optimizer_record(model, optimizer),
            "lora": self.lora,
            **state,
        }
        return state_bytes(record)

    def _begin(self, step: int, nbytes: int) -> str:
        self.output_dir.mkdir(parents=True, exist_ok=True)
        tidy(self.output_dir, keep_last=0)
        # a failure, as nothing was saved: what starts a stopped training again would do so for ever
        check_space(self.output_dir, nbytes, OmniloomError)
        return str(begin(self.output_dir, step))

    def _stage(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Copies in CPU memory, which are used again for the next save. torch's DefaultStager, which does the same,
        ends after one use in torch 2.11."""
        cuda = self.device.type == "cuda"
        if self._stager is None:
            self._stager = StateDictStager(pin_memory=cuda, share_memory=False)
        staged: dict[str, Tensor] = self._stager.stage(tensors, non_blocking=cuda)
        if cuda:
            torch.cuda.synchronize(self.device)
        return staged

    def _write(self, save: Save, tensors: Mapping[str, Tensor], record: bytes, rng: bytes) -> None:
        """The thread of a save."""
        try:
            if self.device.type == "cuda":
                torch.cuda.set_device(self.device)
            self._ranks.on_all(partial(self._write_small, save, record, rng))
            write_tensors(tensors, save.temporary, self._group, partial(self._commit, save))
            self._committed.append(step_folder(self.output_dir, save.step))
        except BaseException as error:  # noqa: BLE001 (raised by whoever waits)
            save.error = error
            if isinstance(error, OSError):
                save.error = OmniloomError(f"{save.temporary}: the checkpoint could not be written: {error}")
                save.error.__cause__ = error
            if self.rank == 0:
                shutil.rmtree(save.temporary, ignore_errors=True)

    def _write_small(self, save: Save, record: bytes, rng: bytes) -> None:
        write_rng(rng_file(save.temporary, self.rank), rng)
        if self.rank == 0:
            for name, content in {**self.files, STATE_FILE: record}.items():
                write_atomic(save.temporary / name, content)

    def _commit(self, save: Save) -> None:
        """On rank 0, when all ranks have written."""
        missing = [rank for rank in range(self.world_size) if not rng_file(save.temporary, rank).is_file()]
        if missing:
            raise IncompleteSourceError(
                f"{save.temporary}: the files of ranks {missing[:5]} are not visible here; "
                "train.checkpoint.output_dir must be a folder that all nodes share"
            )
        final = save.appear()
        seconds = time.monotonic() - save.began
        log.info("%s: %.2f GB saved in %.1f s", final, save.nbytes / 1e9, seconds)
        try:
            tidy(self.output_dir, self.config.keep_last, {*self._reading, final})
        except OSError as error:
            log.warning("%s: older checkpoints could not be removed: %s", self.output_dir, error)

    def _state(self, path: Path) -> dict[str, Any]:
        record = read_state(path)
        check_family(path, record, self.family)
        check_record(path, record.get("lora"), self.lora)
        return record

    def _open(self, path: Path, with_optimizer: bool) -> tuple[dict[str, Any], DcpIndex]:
        record = self._state(path)
        prefixes = ("model.", "optimizer.state.") if with_optimizer else ("model.",)
        index = read_index(path, lambda name: name.startswith(prefixes))
        if index.objects:
            raise UnsupportedError(
                f"{path}: holds pickled objects, which are never loaded: {some(index.objects)}; it was not saved here"
            )
        return record, index


def _text(path: Path | None) -> str | None:
    return None if path is None else str(path)
