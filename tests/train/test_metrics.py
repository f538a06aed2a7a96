"""Metrics against hand computation, of one process and of two ranks; names, peaks, what a step costs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.train.checkpoint_worker import Ranks
from tests.train.fake_device import FakeDevice
from tests.train.metric_steps import SOURCES, step_result
from train.loss import SourceLoss
from train.metric_names import METRICS, describe
from train.metrics import Meter, expert_load
from train.peak_flops import named_peak, peak_flops

DOCUMENT = Path(__file__).parents[2] / "docs" / "metrics.md"


def meter(**keys: Any) -> Meter:
    return Meter(SOURCES, torch.device("cpu"), **keys)


def test_one_process_by_hand() -> None:
    one = meter()
    one.add(step_result())
    one.add(step_result(3.0))
    interval = one.end_interval(dead_samples=2).finish()
    found = interval.metrics
    assert interval.steps == 2
    assert found["loss"] == pytest.approx((30 + 90) / (10 + 30))
    assert found["loss/clips"] == pytest.approx((20 + 60) / (6 + 18)) and "loss/text" not in found
    assert found["aux_loss"] == 1.5
    assert (found["grad_norm"], found["grad_norm_max"]) == (6.0, 6.0)
    assert (found["lr/base"], found["lr/vit"]) == (3e-3, 1e-4)
    assert (found["tokens"], found["label_tokens"], found["samples"]) == (200, 40, 16)
    assert (found["tokens/text"], found["tokens/video"], found["tokens/audio"]) == (40, 120, 0)
    assert found["padding"] == pytest.approx(24 / 224)
    assert found["dead_samples"] == 2
    assert found["data_wait_s"] == pytest.approx(0.5)
    assert interval.source_loss == {"clips": (80.0, 24)}
    counts = torch.tensor([[16.0, 0.0, 8.0, 8.0], [4.0, 4.0, 4.0, 4.0]], dtype=torch.float64)
    assert interval.expert_counts is not None and torch.equal(interval.expert_counts, counts)
    assert (found["expert_load_max"], found["expert_load_mean"], found["experts_idle"]) == (2.0, 1.5, 0.125)
    rate = found["interval_s"] * found["tokens_per_second_per_gpu"]
    assert rate == pytest.approx(200) and found["step_s"] * 2 == pytest.approx(found["interval_s"])
    assert found["tflops_per_gpu"] * found["interval_s"] == pytest.approx(8e9 / 1e12)
    assert "mfu" not in found and found["memory_gb"] > 0.01
    with pytest.raises(ValueError, match="no step since"):
        one.end_interval()


def test_two_ranks_by_hand(ranks: Ranks) -> None:
    first, second = (result["metrics"] for result in ranks.results)
    assert first["collectives"] == 1
    assert {k: v for k, v in first["metrics"].items() if not k.endswith(("_s", "gpu", "second", "wait"))} == {
        k: v for k, v in second["metrics"].items() if not k.endswith(("_s", "gpu", "second", "wait"))
    }
    found = first["metrics"]
    labels = 2 * (10 + 20)
    assert found["loss"] == pytest.approx(2 * (30 + 60) / labels)
    assert found["loss/clips"] == pytest.approx(2 * (20 + 40) / (2 * (6 + 12)))
    assert found["loss/text"] == pytest.approx(4.0)
    assert first["sources"] == {"clips": (120.0, 36), "text": (16.0, 4)}
    assert found["aux_loss"] == 1.5 and found["grad_norm"] == 3.0
    assert (found["tokens"], found["samples"], found["label_tokens"], found["dead_samples"]) == (300, 24, 60, 1)
    assert found["data_wait_s"] == pytest.approx(0.5)  # of rank 1, which waited longest
    assert first["experts"] == [[24.0, 0.0, 12.0, 12.0], [6.0] * 4]
    assert found["tokens_per_second_per_gpu"] * found["interval_s"] * 2 == pytest.approx(300)


def test_a_step_without_labels_or_experts() -> None:
    one = meter()
    nothing = {"label_tokens": 0, "source_loss": {}, "expert_counts": None, "aux_loss": None, "tokens": 0, "padding": 0}
    one.add(step_result(loss_sum=torch.tensor(0.0), **nothing))
    interval = one.end_interval().finish()
    assert interval.metrics["loss"] == 0.0 and interval.metrics["padding"] == 0.0 and interval.expert_counts is None
    assert "aux_loss" not in interval.metrics and "expert_load_max" not in interval.metrics


def test_a_loss_that_is_not_a_number_is_told_as_it_is() -> None:
    one = meter()
    one.add(step_result(loss_sum=torch.tensor(float("nan"))))
    loss = one.end_interval().finish().metrics["loss"]
    assert loss != loss


def test_an_unknown_source_is_an_error() -> None:
    with pytest.raises(ValueError, match="'other', which is none of clips, text, songs"):
        meter().add(step_result(source_loss={"other": SourceLoss(torch.tensor(1.0), 1)}))


def test_pauses_between_steps_are_not_work_but_waiting_for_data_is() -> None:
    clock = FakeDevice()
    one = meter(clock=clock)
    clock.host(1.0)  # waiting for data
    for _ in range(2):
        one.times.begin_step()
        clock.host(2.0)  # the step
        one.add(step_result(wait_s=1.0))
        one.times.end_step()
        clock.host(6.0)  # saving for 5 s, waiting for data for 1 s
    one.times.begin_step()
    clock.host(2.0)
    one.add(step_result(wait_s=1.0))
    found = one.end_interval().finish().metrics
    assert found["interval_s"] == pytest.approx(3 * 2.0 + 3 * 1.0)
    assert found["pause_s"] == pytest.approx(10.0)
    assert found["data_wait"] == pytest.approx(3 / 9)
    assert found["tokens_per_second_per_gpu"] == pytest.approx(150 / 9)


def test_mfu_is_the_share_of_the_peak() -> None:
    one = meter()
    one.peak = 1e12
    one.add(step_result())
    found = one.end_interval().finish().metrics
    assert found["mfu"] == pytest.approx(found["tflops_per_gpu"])


def test_expert_load_leaves_out_layers_without_tokens() -> None:
    found = expert_load(torch.tensor([[0.0, 0.0], [3.0, 1.0]], dtype=torch.float64))
    assert found == {"expert_load_max": 1.5, "expert_load_mean": 1.5, "experts_idle": 0.0}
    assert expert_load(torch.zeros(2, 2, dtype=torch.float64))["experts_idle"] == 1.0


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H200", 989e12),
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA L40S", 362e12),
        ("NVIDIA L4", 121e12),
        ("NVIDIA H20", 148e12),
        ("Some Other GPU", None),
    ],
)
def test_peaks(name: str, peak: float | None) -> None:
    assert named_peak(name) == peak
    assert peak_flops(torch.device("cpu")) is None


def test_every_metric_has_a_unit_and_stands_in_the_document() -> None:
    one = meter()
    one.add(step_result())
    for name in one.end_interval().finish().metrics:
        unit, meaning = describe(name)
        assert unit and meaning, name
    text = DOCUMENT.read_text()
    for name, (unit, meaning) in METRICS.items():
        assert f"| `{name}{'…' if name.endswith('/') else ''}` | {unit} | {meaning} |" in text, name
    with pytest.raises(KeyError):
        describe("unheard/of")
