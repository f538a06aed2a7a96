"""What steps took, by a made-up device that a made-up host runs ahead of."""

from __future__ import annotations

import time

import pytest
import torch

from tests.train.fake_device import FakeDevice
from train.step_times import HostClock, Idle, StepTimes, clock_of

LAUNCH = 0.5  # s in which the host gives the device a step
STEP = 4.0  # s that it takes the device


def step(times: StepTimes, device: FakeDevice, wait_s: float = 0.0, seconds: float = STEP) -> None:
    """With the waiting for data before it."""
    device.host(wait_s)
    times.begin_step()
    device.host(LAUNCH)
    device.give(seconds)
    times.waited(wait_s)
    times.end_step()


def test_intervals_are_between_ends_on_the_device() -> None:
    device = FakeDevice()
    times = StepTimes(device)
    spans = []
    for _ in range(3):
        step(times, device)
        spans.append(times.cut())
    assert device.time == 100.0 + 3 * LAUNCH  # nothing was waited for
    assert [span.seconds() for span in spans] == [LAUNCH + STEP, STEP, STEP]
    assert device.time == 100.0 + LAUNCH + 3 * STEP


def test_what_was_before_the_training_belongs_to_no_interval() -> None:
    device = FakeDevice()
    times = StepTimes(device)
    device.give(30.0)  # weights are loaded
    device.host(10.0)
    times.start()
    step(times, device)
    assert times.cut().seconds() == STEP


@pytest.mark.parametrize(
    ("pause_s", "wait_s", "idle"),
    [
        (2.0, 0.0, Idle(0.0, 0.0)),  # hidden by the step, which takes the device 4 s
        (0.0, 3.0, Idle(0.0, 0.0)),
        (6.0, 0.0, Idle(0.0, 2.0)),  # of which the step hides 4 s
        (0.0, 6.0, Idle(2.0, 0.0)),
        (3.0, 3.0, Idle(2.0, 0.0)),  # the pause is over before the device is idle
        (5.0, 3.0, Idle(3.0, 1.0)),
    ],
)
def test_what_the_device_does_not_notice_is_no_idle_time(pause_s: float, wait_s: float, idle: Idle) -> None:
    device = FakeDevice()
    times = StepTimes(device)
    step(times, device)
    device.host(pause_s)
    step(times, device, wait_s)
    assert times.idle() == idle
    busy = 2 * STEP + LAUNCH  # and the second launch, where the device had to wait for it
    seconds = times.cut().seconds() - idle.wait_s - idle.pause_s
    assert busy <= seconds <= busy + LAUNCH


def test_an_evaluation_that_is_waited_for_is_a_pause() -> None:
    device = FakeDevice()
    times = StepTimes(device)
    step(times, device)
    device.give(7.0)
    device.wait(device.mark())
    step(times, device, wait_s=1.0)
    assert times.idle() == Idle(1.0, 7.0)


def test_what_the_device_needs_longer_than_the_host_belongs_to_the_steps() -> None:
    """Such as a batch that is still on its way to the device when the host has it."""
    device = FakeDevice()
    times = StepTimes(device)
    step(times, device, seconds=0.0)
    device.host(1.0)
    device.give(3.0)  # before the mark of the next step
    step(times, device)
    assert times.idle() == Idle(0.0, 1.0)
    assert times.cut().seconds() == LAUNCH + 1.0 + 3.0 + STEP  # the second launch is hidden


def test_what_comes_before_the_first_step_is_a_pause() -> None:
    device = FakeDevice()
    times = StepTimes(device)
    device.host(6.0)  # an evaluation
    step(times, device, wait_s=2.0)
    assert times.idle() == Idle(2.0, 6.0)


def test_the_host_alone_hides_nothing() -> None:
    device = FakeDevice()
    times = StepTimes(device)
    step(times, device, wait_s=2.0, seconds=0.0)
    device.host(5.0)
    step(times, device, wait_s=1.0, seconds=0.0)
    assert times.idle() == Idle(3.0, 5.0)
    assert times.idle() == Idle()
    assert times.cut().seconds() == 8.0 + 2 * LAUNCH


def test_reading_waits_for_the_last_step_to_begin_and_not_to_end() -> None:
    device = FakeDevice()
    times = StepTimes(device)
    for _ in range(4):
        step(times, device)
    times.idle()
    assert device.time == 100.0 + LAUNCH + 3 * STEP and not device.reached(device.mark())


def test_marks_of_long_intervals_do_not_pile_up() -> None:
    device = FakeDevice()
    times = StepTimes(device)
    for _ in range(50):
        step(times, device)
        device.host(STEP + 0.5)  # the device catches up
    assert len(times._gaps) < 3
    assert times.idle().pause_s == pytest.approx(49 * 0.5)


def test_the_clock_of_a_cpu() -> None:
    clock = clock_of(torch.device("cpu"))
    assert isinstance(clock, HostClock)
    first = clock.mark()
    time.sleep(0.02)
    second = clock.mark()
    assert clock.reached(second) and 0.02 <= clock.between(first, second) < 5.0
