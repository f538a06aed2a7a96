"""Who orthogonalises which matrices, and in what portions: matrices of one shape that are spread over a group are dealt
to its ranks, whole ones stay where they are."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from train.optim.muon_layout import Matrices

PORTION = 1 << 28  # elements that a rank orthogonalises at a time: 537 MB in 16 bits, and as many again five times


@dataclass(frozen=True, eq=False)
class Entry:
    """Matrices first to first + count of a parameter, all with the same owner, a rank of their group."""

    matrices: Matrices
    first: int
    count: int
    owner: int = 0


@dataclass
class Portion:
    """What is orthogonalised in one go, of one shape; entries in the order of their owners."""

    entries: list[Entry] = field(default_factory=list)

    @property
    def like(self) -> Matrices:
        """One of them: group, shape and blocks are those of all."""
        return self.entries[0].matrices

    def counts(self) -> list[int]:
        """Matrices of each rank of the group."""
        found = [0] * self.like.ranks
        for entry in self.entries:
            found[entry.owner] += entry.count
        return found

    @property
    def shared(self) -> bool:
        return self.like.group is not None


def make_portions(parameters: Iterable[Matrices]) -> list[Portion]:
    """Shared and whole matrices in turn, so that those that travel do so while others are orthogonalised. Every rank of
    a group finds the same portions of it, in the same order."""
    shared: dict[object, list[Matrices]] = {}
    whole: dict[object, list[Matrices]] = {}
    for matrices in parameters:
        key = (matrices.group, matrices.rows, matrices.columns, matrices.blocks, matrices.held)
        (whole if matrices.group is None else shared).setdefault(key, []).append(matrices)
    loads: dict[object, list[float]] = {}
    travelling: list[Portion] = []
    for alike in sorted(shared.values(), key=lambda found: -cost(found[0])):
        travelling += _deal(alike, loads.setdefault(alike[0].group, [0.0] * alike[0].ranks))
    staying = [portion for alike in whole.values() for portion in _fill(_pieces(alike), 1)]
    return list(_in_turn(travelling, staying))


def cost(matrices: Matrices) -> float:
    """Multiplications of a Newton-Schulz step for one matrix."""
    rows, columns = matrices.block_shape
    small, large = min(rows, columns), max(rows, columns)
    return matrices.blocks * (2.0 * small * small * large + small**3)


def _pieces(alike: Sequence[Matrices]) -> Iterator[Entry]:
    """No piece is more than a portion on each rank."""
    for matrices in alike:
        most = max(1, PORTION * matrices.ranks // (matrices.rows * matrices.columns))
        pieces = -(-matrices.count // most)
        sizes = [matrices.count // pieces + (number < matrices.count % pieces) for number in range(pieces)]
        first = 0
        for size in sizes:
            yield Entry(matrices, first, size)
            first += size


def _deal(alike: Sequence[Matrices], loads: list[float]) -> list[Portion]:
    """Equal shares, what is left over to those with the least to do."""
    dealt: list[Entry] = []
    for piece in _pieces(alike):
        share, over = divmod(piece.count, len(loads))
        lucky = set(sorted(range(len(loads)), key=lambda rank: (loads[rank], rank))[:over])
        first = piece.first
        for rank in range(len(loads)):
            count = share + (rank in lucky)
            if count:
                dealt.append(Entry(piece.matrices, first, count, rank))
                first += count
                loads[rank] += count * cost(piece.matrices)
    return _fill(dealt, len(loads))


def _fill(entries: Iterable[Entry], ranks: int) -> list[Portion]:
    """Until a rank has its fill."""
    portions: list[Portion] = []
    filled = [0] * ranks
    for entry in entries:
        size = entry.count * entry.matrices.rows * entry.matrices.columns
        if not portions or filled[entry.owner] + size > PORTION:
            portions.append(Portion())
            filled = [0] * ranks
        portions[-1].entries.append(entry)
        filled[entry.owner] += size
    for portion in portions:
        portion.entries.sort(key=lambda entry: entry.owner)
    return portions


def _in_turn(travelling: list[Portion], staying: list[Portion]) -> Iterator[Portion]:
    """Evenly mixed, one that travels first."""
    done = 0
    for number, portion in enumerate(travelling):
        yield portion
        until = len(staying) * (number + 1) // len(travelling)
        yield from staying[done:until]
        done = until
    yield from staying[done:]


def begun_before(portions: Sequence[Portion]) -> list[list[int]]:
    """For each portion the numbers of those that begin right before it is orthogonalised: itself, and with one that
    travels the next one that does. So every rank of a group sends in one order, out 0, out 1, back 0, out 2, back 1,
    however many portions of its own stay in between."""
    travelling = [number for number, portion in enumerate(portions) if portion.shared]
    following = dict(pairwise(travelling))
    begun: set[int] = set()
    found: list[list[int]] = []
    for number in range(len(portions)):
        wanted = [number, following[number]] if number in following else [number]
        found.append([other for other in wanted if other not in begun])
        begun.update(wanted)
    return found
