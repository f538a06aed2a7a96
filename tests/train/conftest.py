"""What several test files share: one process group of two ranks, which goes through all that needs two."""

from __future__ import annotations

import pytest

from tests.dist import run
from tests.train.checkpoint_worker import Ranks, two_ranks
from tests.train.tiny_training import Training, checkpointer


@pytest.fixture(scope="session")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Ranks:
    folder = tmp_path_factory.mktemp("ranks")
    course = Training.start(1)
    course.steps(3)
    course.save(checkpointer(folder / "one"), 3, final=True)
    return Ranks(folder, run(2, two_ranks, folder), course.whole(), course.rates())
