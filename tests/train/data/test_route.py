from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from train.data.route import MediaRoute, RouteSpec, make_route
from train.data.sample import MediaUnit, TrainSample

SPEC = RouteSpec(sound_window=200)  # 26 tokens


def sound_tokens(mel: int) -> int:
    def half(length: int) -> int:
        return (length - 1) // 2 + 1

    return half(half(half(mel % 100))) + 13 * (mel // 100) if mel % 100 else 13 * (mel // 100)


@st.composite
def train_samples(draw: st.DrawFn) -> list[TrainSample]:
    """Samples of text, videos, images and sounds at random places."""
    samples = []
    for number in range(draw(st.integers(0, 4))):
        units, length = [], draw(st.integers(1, 9))
        for kind in draw(st.lists(st.sampled_from(["video", "image", "audio"]), max_size=3)):
            if kind == "audio":
                mel = draw(st.integers(1, 900))
                rows = length + np.arange(sound_tokens(mel))
                unit = MediaUnit("audio", 0, rows, num_samples=mel * 160, num_mel=mel)
            else:
                grid = (draw(st.integers(1, 6)) if kind == "video" else 1, draw(st.sampled_from([2, 4, 8])), 4)
                rows = length + np.arange(grid[0] * grid[1] * grid[2] // 4)
                unit = MediaUnit(kind, 0, rows, grid=grid)  # type: ignore[arg-type]
            units.append(unit)
            length = int(rows[-1]) + 1 + draw(st.integers(1, 5))
        ids = np.zeros(length, np.int64)
        samples.append(TrainSample(ids, ids, np.zeros((3, length)), units, "s", str(number), 0, length))
    return samples


def routes(samples: list[TrainSample], sp_size: int) -> tuple[int, list[MediaRoute]]:
    unit = sp_size * 8
    length = max(1, -(-sum(map(len, samples)) // unit)) * unit
    return length, [make_route(samples, length, rank, sp_size, SPEC) for rank in range(sp_size)]


@settings(max_examples=80, deadline=None)
@given(train_samples(), st.sampled_from([1, 2, 3, 4, 8]))
def test_every_embedding_reaches_the_rank_that_owns_its_token(samples: list[TrainSample], sp_size: int) -> None:
    length, found = routes(samples, sp_size)
    share = length // sp_size
    wanted = set()
    first = 0
    for sample in samples:
        wanted |= {(unit.kind == "audio", first + int(row)) for unit in sample.media for row in unit.rows}
        first += len(sample)
    filled = set()
    for audio in (False, True):
        exchange = [route.audio if audio else route.vision for route in found]
        made = [
            np.concatenate([*(p.rows for p in route.pieces if (p.tower == "audio") == audio), np.zeros(0, np.int64)])
            for route in found
        ]
        sent = [rows[e.send_index] for rows, e in zip(made, exchange, strict=True)]  # each embedding "is" its row
        for receiver, e in enumerate(exchange):
            parts = []
            for sender, other in enumerate(exchange):
                assert other.send_counts[receiver] == e.recv_counts[sender]
                start = sum(other.send_counts[:receiver])
                parts.append(sent[sender][start : start + other.send_counts[receiver]])
            received = np.concatenate(parts)
            assert np.array_equal(received, e.recv_rows + receiver * share)
            assert ((e.recv_rows >= 0) & (e.recv_rows < share)).all()
            filled |= {(audio, int(row)) for row in received}
            assert sum(e.send_counts) == len(e.send_index) == len(made[receiver])
        assert sum(map(len, made)) == sum(is_audio == audio for is_audio, _ in wanted)
    assert filled == wanted


@settings(max_examples=60, deadline=None)
@given(train_samples(), st.sampled_from([2, 4]))
def test_pieces_cut_only_where_the_towers_allow_and_cover_every_unit_once(
    samples: list[TrainSample], sp_size: int
) -> None:
    _, found = routes(samples, sp_size)
    covered: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for route in found:
        for piece in route.pieces:
            unit = samples[piece.sample].media[piece.unit]
            covered.setdefault((piece.sample, piece.unit), []).append((piece.start, piece.stop))
            if unit.kind == "audio":
                assert piece.start % SPEC.sound_window == 0
                assert piece.stop % SPEC.sound_window == 0 or piece.stop == unit.num_mel
                assert len(piece.rows) == sound_tokens(piece.stop - piece.start)
            else:
                assert unit.grid is not None
                per_grid = len(unit.rows) // unit.grid[0]
                assert len(piece.rows) == (piece.stop - piece.start) * per_grid
    for number, sample in enumerate(samples):
        for index, unit in enumerate(sample.media):
            spans = sorted(covered.pop((number, index)))
            end = unit.num_mel if unit.kind == "audio" else unit.grid[0]  # type: ignore[index]
            assert spans[0][0] == 0 and spans[-1][1] == end
            assert all(a[1] == b[0] for a, b in pairwise(spans))
    assert not covered


def test_the_load_is_equal_to_within_one_grid() -> None:
    rows = np.arange(50 * 8)
    unit = MediaUnit("video", 0, rows, grid=(50, 8, 4))
    ids = np.zeros(500, np.int64)
    sample = TrainSample(ids, ids, np.zeros((3, 500)), [unit], "s", "k", 0, 500)
    grids = [sum(p.stop - p.start for p in make_route([sample], 512, rank, 4).pieces) for rank in range(4)]
    assert sum(grids) == 50
    assert max(grids) - min(grids) <= 1


def test_one_rank_keeps_everything() -> None:
    unit = MediaUnit("image", 0, np.arange(3, 11), grid=(1, 8, 4))
    ids = np.zeros(20, np.int64)
    sample = TrainSample(ids, ids, np.zeros((3, 20)), [unit], "s", "k", 0, 20)
    route = make_route([sample, sample], 40, 0, 1)
    assert [(p.sample, p.start, p.stop) for p in route.pieces] == [(0, 0, 1), (1, 0, 1)]
    assert route.vision.recv_rows.tolist() == [*range(3, 11), *range(23, 31)]
    assert route.vision.send_index.tolist() == list(range(16))
    assert route.audio.send_counts == [0]


def test_sound_windows_are_whole_chunks() -> None:
    with pytest.raises(ValueError, match="no multiple of 100"):
        RouteSpec(sound_window=150)
