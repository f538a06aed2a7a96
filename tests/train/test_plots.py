"""metrics.jsonl and its page: lines that are taken back, numbers that JSON lacks, axes, and what the page shows."""

from __future__ import annotations

import errno
import io
import json
import math
import os
import re
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from schemas.errors import ConfigError, OmniloomError
from tests.browser import Page, find_chromium
from train.chart import MAX_POINTS, Curve, axis_ticks, chart_file, chart_svg, label, step_ticks, thinned, tick_labels
from train.config import LoggingConfig, WandbConfig
from train.metric_names import METRICS
from train.metric_writers import JsonlWriter, open_writers, read_metrics
from train.panels import panels_of
from train.plots import SMOOTHED, plots_html, write_plots


def write(path: Path, start: int, steps: range) -> None:
    writer = JsonlWriter(path, start)
    for step in steps:
        writer.write(step, {"loss": float(step)})
    writer.close()


def test_lines_of_steps_that_are_taken_again_are_taken_back(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write(path, 0, range(1, 6))
    with path.open("a") as file:
        file.write('{"step": 6, "lo')  # cut off by a kill
    write(path, 3, range(4, 8))
    assert [line["step"] for line in read_metrics(path)] == [1, 2, 3, 4, 5, 6, 7]
    write(path, 0, range(1, 2))
    assert [line["step"] for line in read_metrics(path)] == [1]
    assert len(read_metrics(tmp_path / "metrics_1.jsonl")) == 7


def test_numbers_that_json_lacks_are_texts(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    writer = JsonlWriter(path, 0)
    writer.write(1, {"loss": math.nan, "grad_norm": math.inf, "tokens": 3})
    assert json.loads(path.read_text()) == {"step": 1, "loss": "nan", "grad_norm": "inf", "tokens": 3}
    page = plots_html([*read_metrics(path), {"step": 2, "loss": 1.5}], "t")
    assert "<b>1.5</b>" in page and "nan" not in page


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (LoggingConfig(tensorboard=True), r"train\.logging\.tensorboard: needs the package tensorboard"),
        (LoggingConfig(wandb=WandbConfig(enable=True)), r"train\.logging\.wandb\.enable: needs the package wandb"),
    ],
)
def test_a_missing_package_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, config: LoggingConfig, message: str
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    with pytest.raises(ConfigError, match=message):
        open_writers(tmp_path, config, 0, {})


class FakeRun:
    def __init__(self, **keys: Any) -> None:
        self.keys, self.id, self.logged = keys, keys["id"] or "fresh", []

    def log(self, values: dict[str, Any], step: int) -> None:
        self.logged.append((step, values))


def test_wandb_goes_on_with_the_same_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs: list[FakeRun] = []

    class Wandb:
        @staticmethod
        def init(**keys: Any) -> FakeRun:
            runs.append(FakeRun(**keys))
            return runs[-1]

    monkeypatch.setitem(sys.modules, "wandb", Wandb)
    config = LoggingConfig(wandb=WandbConfig(enable=True, project="p", name="n"))
    for _ in range(2):
        _, writer = open_writers(tmp_path, config, 0, {"seed": 1})
        writer.write(3, {"loss": 1.0, "time": "now"})
    assert [run.keys["id"] for run in runs] == [None, "fresh"]
    assert runs[0].keys["project"] == "p" and runs[0].keys["config"] == {"seed": 1}
    assert runs[0].logged == [(3, {"loss": 1.0})]


@pytest.mark.parametrize(
    ("low", "high", "ticks"),
    [
        (0.0, 1.0, [0.0, 0.2, 0.4, 0.6, 0.8, 1.0]),
        (2.1, 9.7, [2, 4, 6, 8, 10]),
        (0.0, 0.0, [0.0, 0.2, 0.4, 0.6, 0.8, 1.0]),
        (-3.0, 5.0, [-4, -2, 0, 2, 4, 6]),
    ],
)
def test_axes_are_round_and_hold_the_values(low: float, high: float, ticks: list[float]) -> None:
    assert axis_ticks(low, high) == pytest.approx(ticks)


def test_steps_and_labels() -> None:
    assert step_ticks(1, 1000) == [200, 400, 600, 800, 1000]
    assert step_ticks(7, 7) == [7] and step_ticks(1, 3) == [1, 2, 3]
    assert [label(x) for x in (0, 0.0123, 1e-5, 1.23456, 12345, 3.4e6, -2e9)] == [
        "0", "0.0123", "1e-05", "1.235", "12.35k", "3.4M", "-2G",
    ]  # fmt: skip


def test_labels_of_an_axis_are_told_apart() -> None:
    assert tick_labels(axis_ticks(0.9986, 1.0003)) == ["0.9985", "0.999", "0.9995", "1", "1.0005"]
    assert tick_labels([9.009, 9.0095, 9.01]) == ["9.009", "9.0095", "9.01"]
    assert tick_labels([0.0, 0.5, 1.0]) == ["0", "0.5", "1"]
    picture, _ = chart_svg([Curve("ratio", [(0, 0.9986), (1, 1.0003)])], from_zero=False)
    assert ">1.0005</text>" in picture


def test_long_curves_are_averaged_and_end_where_they_end() -> None:
    points = [(step, float(step)) for step in range(10_000)]
    found = thinned(points)
    assert len(found) <= MAX_POINTS and found[-1] == (9999, 9999.0)
    assert all(abs(step - value) <= 1 for step, value in found)


def test_a_curve_lies_where_its_values_are() -> None:
    picture, data = chart_svg([Curve("loss", [(0, 0.0), (50, 5.0), (100, 10.0)])], from_zero=True)
    (path,) = re.findall(r'd="M([^"]+)"', picture)
    assert path == "52.0 196.0 L252.0 103.0 L452.0 10.0"
    assert data["range"] == [0, 100] and data["values"] == [["0", "5", "10"]]


def lines(count: int) -> list[dict[str, Any]]:
    return [
        {"step": step, "loss": 5.0 / step, "loss/a<b>": 4.0 / step, "lr/base": 1e-5, "tokens_total": step * 1000}
        for step in range(1, count + 1)
    ]


def test_a_chart_in_a_file_of_its_own() -> None:
    curves = [Curve("a < b", [(0, 1.0), (5, 2.0)]), Curve("c", [(0, 3.0), (5, 1.0)])]
    root = ElementTree.fromstring(chart_file("loss & step", curves, from_zero=False))
    name = "{http://www.w3.org/2000/svg}"
    texts = [element.text for element in root.iter(f"{name}text")]
    assert root.tag == f"{name}svg" and {"loss & step", "a < b", "c"} <= set(texts)
    assert len(list(root.iter(f"{name}path"))) == 2 * len(curves)  # lines and the legend's marks


def test_the_page_has_a_chart_for_what_there_is(tmp_path: Path) -> None:
    write_plots(tmp_path / "none.jsonl", tmp_path / "none.html", "t")
    assert not (tmp_path / "none.html").exists()
    writer = JsonlWriter(tmp_path / "m.jsonl", 0)
    for line in lines(50):
        writer.write(line["step"], line)
    write_plots(tmp_path / "m.jsonl", tmp_path / "m.html", "Run <1>")
    page = (tmp_path / "m.html").read_text()
    assert re.findall("<h2>(.*?)</h2>", page) == ["Loss", "Loss by source", "Learning rate"]
    assert "Run &lt;1&gt;" in page and "a&lt;b&gt;" in page and "a<b>" not in page
    assert "http" not in page and "step 50, 50,000 tokens" in page


def test_only_a_curve_of_means_is_called_smoothed() -> None:
    assert "loss (smoothed)" in legend(panel(plots_html(lines(SMOOTHED), "t"), "Loss"))
    assert "loss" in legend(panel(plots_html(lines(SMOOTHED - 1), "t"), "Loss"))


def panel(page: str, title: str) -> str:
    (found,) = re.findall(f"<section><h2>{re.escape(title)}</h2>(.*?)</section>", page)
    return str(found)


def legend(section: str) -> dict[str, str]:
    return dict(re.findall(r'<li style="[^"]*">(.*?) <b>(.*?)</b>', section))


def test_every_panel_says_its_unit() -> None:
    for grpo in ({}, {"grpo/reward": 1}):
        assert [it.title for it in panels_of(grpo) if it.subtitle in ("", "1")] == []


def test_every_metric_of_an_objective_is_drawn() -> None:
    drawn = {name for it in panels_of({}) for name in it.names}
    wanted = {name for name in METRICS if name.startswith(("grpo/", "loss", "moe/", "source/loss", "eval/"))}
    assert wanted - drawn == set()


def test_the_loss_of_grpo_has_no_unit_and_the_reward_its_panel() -> None:
    rows = [{"step": n, "loss": 0.1, "loss/a": 0.1, "eval/loss": 2.0, "eval/loss/a": 1.0} for n in range(1, 5)]
    plain = plots_html(rows, "t")
    assert "nats per token" in panel(plain, "Loss") and "nats per token" in panel(plain, "Loss by source")
    page = plots_html([row | {"grpo/reward": 0.25, "grpo/reward_std": 0.5} for row in rows], "t")
    for title in ("Loss", "Loss by source"):
        assert "nats" not in panel(page, title) and "objective, without unit" in panel(page, title)
    assert legend(panel(page, "Reward")) == {"reward": "0.25", "reward_std": "0.5"}
    assert "nats per token" in panel(page, "Evaluation")
    assert legend(panel(page, "Evaluation")) == {"loss": "2", "a": "1"}


def test_many_layers_are_drawn_as_their_spread() -> None:
    few = plots_html([{"step": 1, "moe/max/0": 1.5, "moe/max/1": 2.5}], "t")
    assert legend(panel(few, "Fullest expert by layer")) == {"0": "1.5", "1": "2.5"}
    rows = [{"step": n, **{f"moe/max/{layer}": 1.0 + layer * n for layer in range(9)}} for n in (1, 2)]
    found = legend(panel(plots_html(rows, "t"), "Fullest expert by layer"))
    assert found == {"highest of 9 layers": "17", "median of 9 layers": "9", "lowest of 9 layers": "1"}


def test_curves_that_lie_on_each_other_are_one() -> None:
    rows: list[dict[str, Any]] = [{"step": n, "grad_norm": 1.0 * n, "grad_norm_max": 1.0 * n} for n in (1, 2, 3)]
    assert legend(panel(plots_html(rows, "t"), "Gradient norm")) == {"grad_norm, grad_norm_max": "3"}
    section = panel(plots_html([*rows, {"step": 4, "grad_norm": 1.0, "grad_norm_max": 5.0}], "t"), "Gradient norm")
    assert legend(section) == {"grad_norm": "1", "grad_norm_max": "5"}
    assert re.findall(r"stroke: var\((--c\d)\)", section) == ["--c1", "--c0"]  # the first one lies on top


def test_a_slow_first_step_does_not_stretch_the_axis() -> None:
    rows = [{"step": n, "step_s": 60.0 if n == 1 else 0.5 + 0.01 * n, "data_wait_s": 0.1} for n in range(1, 21)]
    section = panel(plots_html(rows, "t"), "Step and waiting for data")
    assert "s per step; cut off: up to 60 at step 1<" in section
    assert max(float(tick) for tick in re.findall(r'<text x="46" [^>]*>([\d.]+)</text>', section)) < 2
    assert '"60"' in section  # the cursor says it
    assert "cut off" not in panel(plots_html(rows[1:], "t"), "Step and waiting for data")
    slow = [row | {"step_s": 5.0 if row["step"] % 3 else 0.5} for row in rows]  # no few: they are how it is
    assert "cut off" not in panel(plots_html(slow, "t"), "Step and waiting for data")


@pytest.mark.browser
@pytest.mark.skipif(find_chromium() is None, reason="no Chromium")
def test_the_page_works_in_a_browser(tmp_path: Path) -> None:
    file = tmp_path / "m.html"
    file.write_text(plots_html(lines(50), "t"))
    move = """(() => {
      const section = document.querySelectorAll('section')[1], svg = section.querySelector('svg');
      const box = svg.getBoundingClientRect(), at = (252 / 460) * box.width + box.left;
      svg.dispatchEvent(new PointerEvent('pointermove', {clientX: at, clientY: box.top + 5}));
      return section.querySelector('p').textContent + ' ' + section.querySelector('li b').textContent })()"""
    with Page(tmp_path / "profile") as page:
        page.open(file)
        assert page.evaluate(move) in (f"step 25 {label(4 / 25)}", f"step 26 {label(4 / 26)}")  # the middle is 25.5
        assert page.complaints() == [] and page.requests() == []


class FullDisk(io.StringIO):
    def flush(self) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_full_disk_is_told_with_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = JsonlWriter(tmp_path / "metrics.jsonl", 0)
    monkeypatch.setattr(writer, "_file", FullDisk())
    with pytest.raises(OmniloomError, match=r"metrics\.jsonl: cannot be written: No space left"):
        writer.write(1, {"loss": 1.0})
