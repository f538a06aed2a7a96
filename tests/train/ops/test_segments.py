from __future__ import annotations

import pytest
import torch

from train.ops.segments import Segments


def test_boundaries_leave_empty_segments_out() -> None:
    segments = Segments.from_lengths([3, 0, 1, 4, 0], "cpu")
    assert segments.cu_seqlens.tolist() == [0, 3, 4, 8]
    assert segments.cu_seqlens.dtype == torch.int32
    assert (segments.lengths, segments.max_seqlen, segments.total) == ((3, 1, 4), 4, 8)
    assert segments.ids.tolist() == [0, 0, 0, 1, 2, 2, 2, 2]
    assert segments.ids is segments.ids


def test_runs_of_equal_neighbours() -> None:
    assert Segments.from_lengths([4, 4, 2, 4, 4, 4]).runs == [(2, 4), (1, 2), (3, 4)]


def test_no_rows() -> None:
    segments = Segments.from_lengths([0, 0])
    assert (segments.cu_seqlens.tolist(), segments.lengths, segments.max_seqlen, segments.total) == ([0], (), 0, 0)
    assert segments.ids.shape == (0,)


def test_a_negative_length_is_refused() -> None:
    with pytest.raises(ValueError, match="a segment cannot have -2 rows"):
        Segments.from_lengths([3, -2])
