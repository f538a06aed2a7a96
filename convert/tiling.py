"""Which chunks of a tensor hold a box of it, found without looking at all of them."""

from __future__ import annotations

import bisect
from collections import defaultdict
from collections.abc import Iterator, Sequence

from convert.tensors import Box, intersect


class BoxTree:
    """The boxes of one tensor, by their starts along one dimension after the other.

    A stacked tensor of a mixture of experts has tens of thousands of chunks; a look-up takes a handful of steps per
    dimension.
    """

    def __init__(self, boxes: Sequence[Box]) -> None:
        self.boxes = boxes
        self._root = _Node(boxes, range(len(boxes)), 0) if boxes else None

    def overlapping(self, box: Box) -> Iterator[tuple[int, Box]]:
        """(number of a box, the part of it that lies in `box`) for every one that shares something with it."""
        if self._root is None:
            return
        for i in self._root.find(box):
            common = intersect(self.boxes[i], box) if box else ()
            if common is not None:
                yield i, common

    def first_overlap(self) -> tuple[int, int] | None:
        """Two boxes that share an element, None when there are none."""
        for i, box in enumerate(self.boxes):
            for other, _ in self.overlapping(box):
                if other != i:
                    return i, other
        return None


class _Node:
    """Boxes that start at the same place in all dimensions before `dim`."""

    def __init__(self, boxes: Sequence[Box], members: Sequence[int], dim: int) -> None:
        self.dim = dim
        self.leaf = tuple(members) if len(members) < 4 or dim == len(boxes[0]) else ()
        self.starts: list[int] = []
        self.ends: list[int] = []  # the furthest stop of this and all earlier starts
        self.children: list[_Node] = []
        if self.leaf:
            return
        by_start: defaultdict[int, list[int]] = defaultdict(list)
        for i in members:
            by_start[boxes[i][dim][0]].append(i)
        end = 0
        for start, here in sorted(by_start.items()):
            end = max(end, max(boxes[i][dim][1] for i in here))
            self.starts.append(start)
            self.ends.append(end)
            self.children.append(_Node(boxes, here, dim + 1))

    def find(self, box: Box) -> Iterator[int]:
        """Every member that may overlap the box."""
        if self.leaf:
            yield from self.leaf
            return
        low, high = box[self.dim]
        for i in range(bisect.bisect_right(self.ends, low), bisect.bisect_left(self.starts, high)):
            yield from self.children[i].find(box)
