"""Who shares what: degrees of parallelism, and the named groups of ranks that follow from them.

Ranks lie on a grid (dp_replicate, dp_shard, ulysses), the last running fastest. Ranks of one `sp` group read the same
sequences and hold a slice of each; those of one `fsdp` group (dp_shard x ulysses) shard the parameters among them; `dp`
(dp_replicate x dp_shard) counts those that read other sequences. Experts lie on a grid of the same ranks,
(ep_replicate, ep_fsdp, ep).
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import HashStore, ProcessGroup
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from schemas.errors import ConfigError
from train.config_trainer import AcceleratorConfig

SECTION = "train.accelerator"


@dataclass(frozen=True)
class Degrees:
    """How many ranks divide what."""

    dp_replicate: int = 1
    dp_shard: int = 1
    ulysses: int = 1
    ep: int = 1

    @classmethod
    def of(cls, accelerator: AcceleratorConfig, world_size: int) -> Degrees:
        """ConfigError, naming both numbers, when they do not fit the world or one another."""
        replicate, shard, ulysses = accelerator.dp_replicate_size, accelerator.dp_shard_size, accelerator.ulysses_size
        if shard == -1:
            known = f"dp_replicate_size {replicate} x ulysses_size {ulysses}"
            if world_size % (replicate * ulysses):
                raise ConfigError(f"{SECTION}: {world_size} ranks are no multiple of {known} = {replicate * ulysses}")
            shard = world_size // (replicate * ulysses)
        product = replicate * shard * ulysses
        if product != world_size:
            raise ConfigError(
                f"{SECTION}: dp_replicate_size {replicate} x dp_shard_size {shard} x ulysses_size {ulysses} = "
                f"{product}, but there are {world_size} ranks"
            )
        if (shard * ulysses) % accelerator.ep_size:
            raise ConfigError(
                f"{SECTION}: ep_size {accelerator.ep_size} does not divide dp_shard_size {shard} x ulysses_size "
                f"{ulysses} = {shard * ulysses}"
            )
        if accelerator.fsdp_config.fsdp_mode == "ddp":
            if accelerator.ep_size > 1:
                raise ConfigError(
                    f"{SECTION}: ep_size {accelerator.ep_size} divides experts, but fsdp_mode ddp does not"
                )
            return cls(replicate * shard, 1, ulysses, 1)
        return cls(replicate, shard, ulysses, accelerator.ep_size)

    @property
    def world(self) -> int:
        return self.dp_replicate * self.dp_shard * self.ulysses

    @property
    def dp(self) -> int:
        """Ranks that read different sequences."""
        return self.dp_replicate * self.dp_shard

    @property
    def fsdp(self) -> int:
        """Ranks that shard a parameter."""
        return self.dp_shard * self.ulysses

    @property
    def ep_fsdp(self) -> int:
        """Ranks that shard an expert."""
        return self.fsdp // self.ep

    def check_experts(self, num_experts: int) -> None:
        """ConfigError when there are none or they cannot be divided evenly."""
        if self.ep > 1 and not num_experts:
            raise ConfigError(f"{SECTION}: ep_size {self.ep} divides experts, but the model has none; write 1")
        if self.ep > 1 and num_experts % self.ep:
            raise ConfigError(f"{SECTION}: ep_size {self.ep} does not divide the model's {num_experts} experts")

    def check_heads(self, heads: int, kv_heads: int) -> None:
        """ConfigError when sequence parallelism cannot deal out the attention heads."""
        if heads % self.ulysses:
            raise ConfigError(f"{SECTION}: ulysses_size {self.ulysses} does not divide the {heads} attention heads")
        if kv_heads % self.ulysses and self.ulysses % kv_heads:
            raise ConfigError(
                f"{SECTION}: ulysses_size {self.ulysses} neither divides the {kv_heads} key/value heads nor is a "
                "multiple of them"
            )


@dataclass(frozen=True, eq=False)
class Mesh:
    """One rank's view. params: the device mesh of FSDP, (dp_replicate, fsdp) or (fsdp); data: (dp, sp); experts:
    (ep_replicate, ep_fsdp, ep); None without process groups, where only the arithmetic is of use."""

    degrees: Degrees
    rank: int
    device: torch.device
    params: DeviceMesh | None = None
    data: DeviceMesh | None = None
    experts: DeviceMesh | None = None

    @classmethod
    def make(cls, accelerator: AcceleratorConfig, world_size: int, rank: int, device: torch.device) -> Mesh:
        """Makes the groups when torch.distributed has been started; every rank must call it."""
        degrees = Degrees.of(accelerator, world_size)
        if not 0 <= rank < world_size:
            raise ValueError(f"rank {rank} of {world_size}")
        if not dist.is_initialized():
            return cls(degrees, rank, device)
        if dist.get_world_size() != world_size:
            raise ValueError(f"{world_size} ranks, but the process group has {dist.get_world_size()}")
        kind, d = device.type, degrees
        params = init_device_mesh(kind, (d.dp_replicate, d.fsdp), mesh_dim_names=("dp_replicate", "fsdp"))
        data = init_device_mesh(kind, (d.dp, d.ulysses), mesh_dim_names=("dp", "sp"))
        experts = None
        if d.ep > 1:
            shape, names = (d.dp_replicate, d.ep_fsdp, d.ep), ("ep_replicate", "ep_fsdp", "ep")
            experts = init_device_mesh(kind, shape, mesh_dim_names=names)
        return cls(degrees, rank, device, params, data, experts)

    @property
    def world_size(self) -> int:
        return self.degrees.world

    @property
    def dp_rank(self) -> int:
        """Which share of the sequences."""
        return self.rank // self.degrees.ulysses

    @property
    def sp_rank(self) -> int:
        """Which slice of each sequence."""
        return self.rank % self.degrees.ulysses

    @property
    def shards(self) -> DeviceMesh | None:
        """What `fully_shard` takes: two dimensions when parameters are replicated, too."""
        if self.params is None or self.degrees.dp_replicate > 1:
            return self.params
        return self.params["fsdp"]

    @property
    def dp_group(self) -> ProcessGroup | None:
        """Ranks with the same slice of other sequences."""
        return None if self.data is None else self.data.get_group("dp")

    @property
    def sp_group(self) -> ProcessGroup | None:
        """Ranks with the other slices of the same sequences."""
        return None if self.data is None else self.data.get_group("sp")

    def describe(self) -> str:
        """'8 ranks: 2 replicas x 4 shards'."""
        d = self.degrees
        if d.world == 1:
            return f"1 rank on {self.device.type}"
        parts = [f"{d.dp_replicate} replicas"] if d.dp_replicate > 1 else []
        parts += [f"{d.dp_shard} shards"] if d.dp_shard > 1 else []
        parts += [f"{d.ulysses} sequence slices"] if d.ulysses > 1 else []
        experts = f"; experts: {d.ep} parts x {d.ep_fsdp} shards" if d.ep > 1 else ""
        return f"{d.world} ranks on {self.device.type}: {' x '.join(parts)}{experts}"


@dataclass(frozen=True)
class Process:
    """This process among those that torchrun started: rank, world_size over all nodes; local_rank on this node."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0

    @classmethod
    def from_environment(cls) -> Process:
        """ConfigError when torchrun's variables are there in part only."""
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
        found = {name: os.environ[name] for name in names if name in os.environ}
        if not found:
            return cls()
        if missing := [name for name in names if name not in found]:
            raise ConfigError(f"{', '.join(found)} are set, but not {', '.join(missing)}; torchrun sets all of them")
        return cls(int(found["RANK"]), int(found["WORLD_SIZE"]), int(found["LOCAL_RANK"]))

    def device(self) -> torch.device:
        """The GPU of this process, or the CPU where there is none. ConfigError: more processes than GPUs."""
        if not torch.cuda.is_available():
            return torch.device("cpu")
        count = torch.cuda.device_count()
        if self.local_rank >= count:
            raise ConfigError(
                f"local rank {self.local_rank}, but this machine has {count} GPUs; start {count} processes"
            )
        return torch.device("cuda", self.local_rank)


def end_process_group() -> None:
    """Leaves the other processes. Of all ranks, when none has failed: NCCL would wait for one that is gone."""
    if dist.is_initialized():
        dist.destroy_process_group()


def start_process_group(process: Process, device: torch.device, timeout_s: float) -> None:
    """Joins the other processes: NCCL for tensors on GPUs, gloo for those on CPUs. A single process makes a group of
    its own, without a port."""
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    timeout = timedelta(seconds=timeout_s)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if process.world_size == 1 and "MASTER_ADDR" not in os.environ:
        dist.init_process_group(backend, timeout=timeout, store=HashStore(), rank=0, world_size=1)
        return
    dist.init_process_group(backend, timeout=timeout, rank=process.rank, world_size=process.world_size)
