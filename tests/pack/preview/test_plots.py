from xml.etree import ElementTree

import numpy as np

from pack.preview import plots


def test_counts_become_bars_and_empty_ends_are_left_out() -> None:
    histogram = plots.of_counts("Duration", "s", [0, 1, 2, 5, 10, 60], [0, 3, 0, 1, 0])
    assert histogram is not None
    assert histogram.bars == [("1 s to 2 s", 3), ("2 s to 5 s", 0), ("5 s to 10 s", 1)]
    assert (histogram.low, histogram.high) == ("1 s", "10 s")
    assert histogram.summary == "4 values, median in 1 s to 2 s"
    assert plots.of_counts("Duration", "s", [0, 1], [0]) is None


def test_values_are_counted_as_numpy_counts_them() -> None:
    values = [1.0, 2.0, 2.5, 9.0]
    histogram = plots.of_numbers("Loudness", "dBFS", values, bins=4)
    assert histogram is not None
    assert [n for _, n in histogram.bars] == np.histogram(values, 4)[0].tolist()
    assert histogram.summary == "4 values, median 2.25 dBFS"
    assert plots.of_numbers("Loudness", "dBFS", []) is None


def test_the_drawing_is_one_labelled_image_whose_bars_are_in_proportion() -> None:
    histogram = plots.Histogram("Rate <b>", [("a & b", 10), ("c", 5)], "low", "high", "15 values")
    root = ElementTree.fromstring(str(plots.draw(histogram)))
    assert root.get("role") == "img" and root.get("aria-label") == "Rate <b>: 15 values"
    bars = root.findall(".//rect")
    heights = [float(bar.get("height") or 0) for bar in bars]
    assert heights[0] == 2 * heights[1] > 0
    assert [bar.findtext("title") for bar in bars] == ["a & b: 10", "c: 5"]
    assert all(float(b.get("y") or 0) + h == plots.BASE for b, h in zip(bars, heights, strict=True))


def test_numbers_are_short() -> None:
    shown = [plots.short(v) for v in (0, 0.5, 23.976, 1280, 86400, 1234567)]
    assert shown == ["0", "0.5", "23.98", "1,280", "86,400", "1.2e+06"]
    assert plots.with_unit(2**20, "bytes") == "1.05 MB"
