"""How activation memory grows with the length of a sequence, on the first of the ranks that share it: the bytes that
torch allocates, over a group whose other ranks are not there (jobs/bench/parallel_measure.py). Values are not looked
at; that memory is what it is on real ranks is checked with two."""

from __future__ import annotations

from dataclasses import replace

import pytest

from jobs.bench.parallel_measure import fake_peaks, peaks, slope
from jobs.bench.parallel_model import TINY
from jobs.bench.parallel_ranks import Ranks
from tests import dist as processes

# torch's attention on CPUs has other buffers below 768 rows; experts that copy nothing depend on no routing
SHAPE = replace(TINY, layers=3, experts=4, attention="sdpa")
TOTALS = [1024, 2048]
BOUNDS = {2: 0.55, 4: 0.3}


def _slopes(keeps: str) -> dict[int, float]:
    """By ranks of a sequence."""
    return {sp: slope(TOTALS, fake_peaks(SHAPE, sp, TOTALS, keeps)) for sp in (1, 2, 4)}


@pytest.fixture(scope="module")
def slopes() -> dict[str, dict[int, float]]:
    with Ranks(1, "cpu", group=False) as one:
        return {keeps: one.run(_slopes, keeps)[0] for keeps in ("everything", "inputs", "inputs and attention")}


@pytest.mark.slow
def test_slope_falls_with_the_ranks_of_a_sequence(slopes: dict[str, dict[int, float]]) -> None:
    for keeps, found in slopes.items():
        for ranks, bound in BOUNDS.items():
            assert found[ranks] <= bound * found[1], (keeps, ranks, found)
    assert slopes["inputs"][1] < slopes["inputs and attention"][1] < slopes["everything"][1]


@pytest.mark.slow
def test_a_group_of_one_measures_what_two_ranks_do(slopes: dict[str, dict[int, float]]) -> None:
    """Threads of gloo hold the buffers of an all-to-all a little longer, by 0 to 0.15 of it from run to run."""
    real = processes.run(2, peaks, SHAPE, {"ulysses_size": 2}, TOTALS, "everything")[0]
    assert slopes["everything"][2] == pytest.approx(slope(TOTALS, real), rel=0.15)
