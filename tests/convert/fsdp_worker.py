"""One rank of a training run as far as its checkpoints go: loads one DCP, saves another, both sharded as FSDP2 does.

Arguments: rank, world size, folder. In the folder: `memory.safetensors` (the whole parameters under training names),
`load/` (a DCP that must hold exactly them), `save/` (written here, with optimizer state).
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor


def main(rank: int, world_size: int, folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=world_size)
    mesh = init_device_mesh("cpu", (world_size,))
    whole = load_file(folder / "memory.safetensors")
    shards = {name: distribute_tensor(tensor, mesh, [Shard(0)]) for name, tensor in whole.items()}

    empty = {name: torch.zeros_like(shard) for name, shard in shards.items()}
    dcp.load({"model": empty}, checkpoint_id=folder / "load")
    wrong = [name for name, shard in empty.items() if not torch.equal(local(shard), local(shards[name]))]
    assert not wrong, f"rank {rank}: {wrong[:5]}"

    states = {name: {"exp_avg": torch.ones_like(s), "step": torch.tensor(3.0)} for name, s in shards.items()}
    state = {
        "model": shards,
        "optimizer": {"state": states, "param_groups": {"lr": 0.1}},
        "rng": {"cpu": torch.get_rng_state()},
    }
    dcp.save(state, checkpoint_id=folder / "save")
    dist.destroy_process_group()


def local(tensor: torch.Tensor) -> torch.Tensor:
    assert isinstance(tensor, DTensor)
    return tensor.to_local()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
