"""Trains without a model, to be killed: every data-parallel rank of a world in one process, step by step.

python -m tests.train.data.loader_driver FOLDER DP_SIZE NUM_WORKERS

FOLDER has clips/ and text/; each step adds a line to FOLDER/steps.jsonl, then FOLDER/state.json is replaced.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch

from tests.train.data.loading import Setup, data_config, keys_of
from train.config import BatchConfig
from train.data.rank_plan import DataRank

EPOCHS = 2
BATCH = 4


def make_setup(folder: Path) -> Setup:
    sources = [
        {"path": str(folder / "clips")},
        {"path": str(folder / "text"), "name": "text", "source_name": "openai_messages", "weight": 0.5},
    ]
    data = data_config(sources, folder / "cache", max_seq_len=256)
    return Setup(data, BatchConfig(global_batch_size=BATCH, num_train_epochs=EPOCHS, seed=7))


def main() -> None:
    torch.set_num_threads(1)
    folder, dp_size, num_workers = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    setup = make_setup(folder)
    dataloader = setup.data.dataloader.model_copy(update={"num_workers": num_workers})
    loaders = [setup.loader(DataRank(rank, dp_size), dataloader=dataloader) for rank in range(dp_size)]
    state = folder / "state.json"
    if state.exists():
        for loader in loaders:
            loader.load_state_dict(json.loads(state.read_text()))
    with open(folder / "steps.jsonl", "a", encoding="utf-8") as log:
        for steps in zip(*loaders, strict=True):
            rows = sorted(key for step in steps for key in keys_of(step))
            log.write(json.dumps({"epoch": steps[0].epoch, "step": steps[0].step, "rows": rows}) + "\n")
            log.flush()
            beside = state.with_name("state.new")
            beside.write_text(json.dumps(loaders[0].state_dict()))
            os.replace(beside, state)


if __name__ == "__main__":
    main()
