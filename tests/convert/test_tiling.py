"""BoxTree against looking at every box."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from convert.tensors import Box, intersect
from convert.tiling import BoxTree

span = st.tuples(st.integers(0, 6), st.integers(1, 4)).map(lambda pair: (pair[0], pair[0] + pair[1]))


def boxes(rank: int) -> st.SearchStrategy[list[Box]]:
    return st.lists(st.tuples(*[span] * rank), max_size=24)


@settings(max_examples=200, deadline=None)
@given(st.data(), st.integers(1, 3))
def test_finds_what_a_look_at_every_box_finds(data: st.DataObject, rank: int) -> None:
    found = data.draw(boxes(rank))
    asked = data.draw(st.tuples(*[span] * rank))
    tree = BoxTree(found)
    wanted = {(i, common) for i, box in enumerate(found) if (common := intersect(box, asked)) is not None}
    assert set(tree.overlapping(asked)) == wanted
    overlaps = any(intersect(a, b) is not None for a, b in itertools.combinations(found, 2))
    assert (tree.first_overlap() is not None) == overlaps


def test_a_scalar_has_one_box() -> None:
    assert list(BoxTree([()]).overlapping(())) == [(0, ())]
    assert BoxTree([()]).first_overlap() is None
    assert BoxTree([(), ()]).first_overlap() is not None


@pytest.mark.parametrize("count", [1, 3, 50])
def test_a_long_row_of_boxes(count: int) -> None:
    tree = BoxTree([((i * 10, i * 10 + 10),) for i in reversed(range(count))])
    assert [common for _, common in tree.overlapping(((0, count * 10),))].__len__() == count
    assert [tree.boxes[i] for i, _ in tree.overlapping(((10 * count - 1, 10 * count),))] == [
        ((10 * count - 10, 10 * count),)
    ]
