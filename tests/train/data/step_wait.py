"""How long a trainer waits for steps of 8 micro-batches, each of which takes a worker 0.25 s, when it trains 3 s each.

    python -m tests.train.data.step_wait

Two workers make 8 in one second, so it need not wait at all: it does where they make less than a step ahead.
"""

from __future__ import annotations

import sys
import tempfile
import time
from itertools import islice
from pathlib import Path
from typing import Any

from tests.train.data.loading import Setup, data_config, write_even_mix
from train.config import BatchConfig
from train.data.loader import TrainLoader
from train.data.reader import BatchMaker

MICRO_STEPS, MAKING_S, TRAINING_S, STEPS = 8, 0.25, 3.0, 5


class SlowMaker:
    """Takes its time."""

    def __init__(self, maker: BatchMaker) -> None:
        self.maker = maker

    def __getitem__(self, request: Any) -> Any:
        time.sleep(MAKING_S)
        return self.maker[request]


class SlowLoader(TrainLoader):
    """With such workers."""

    @property
    def maker(self) -> Any:
        return SlowMaker(super().maker)


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="t") as name:
        folder = write_even_mix(Path(name))
        text = {"path": str(folder / "text"), "name": "text", "source_name": "openai_messages", "weight": 10.0}
        sources: list[dict[str, Any]] = [{"path": str(folder / "clips"), "weight": 50.0}, text]
        data = data_config(sources, folder / "cache", max_seq_len=256, lanes=1)
        setup = Setup(data, BatchConfig(global_batch_size=MICRO_STEPS, seed=7))
        for ahead in (2, None):
            workers = data.dataloader.model_copy(update={"num_workers": 2, "prefetch_factor": ahead})
            config = data.model_copy(update={"dataloader": workers})
            loader = SlowLoader(setup.sources, setup.plans, config, setup.batch, setup.assets)
            waits = []
            for step in islice(loader, STEPS):
                waits.append(step.wait_s)
                time.sleep(TRAINING_S)
            said = ", ".join(f"{wait:.2f}" for wait in waits[1:])
            sys.stdout.write(f"prefetch_factor {ahead}: {said} s a step (the first one: {waits[0]:.2f} s)\n")


if __name__ == "__main__":
    main()
