"""Signals in one process; two ranks: test_checkpoint_ranks."""

from __future__ import annotations

import os
import signal
import threading

import pytest

from train.stopping import SIGNALS, Stopper


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGINT])
def test_a_signal_stops_after_the_next_step(number: signal.Signals) -> None:
    before = {it: signal.getsignal(it) for it in SIGNALS}
    with Stopper() as stopper:
        stopper.begin_step()
        assert not stopper.should_stop()
        stopper.begin_step()
        os.kill(os.getpid(), number)  # in the middle of a step
        assert not stopper.should_stop()
        stopper.begin_step()
        assert stopper.should_stop() and stopper.reason == number.name
        stopper.begin_step()
        assert stopper.should_stop()  # it stays so
    assert {it: signal.getsignal(it) for it in SIGNALS} == before


def test_a_second_interrupt_ends_at_once() -> None:
    with Stopper() as stopper:
        os.kill(os.getpid(), signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    assert stopper.reason is None  # no step came


def test_outside_the_main_thread_no_handler_is_set() -> None:
    before = signal.getsignal(signal.SIGTERM)
    found: list[object] = []

    def train() -> None:
        with Stopper() as stopper:
            found.append(signal.getsignal(signal.SIGTERM))
            stopper.request("a limit")
            stopper.begin_step()
            found.append(stopper.should_stop())

    thread = threading.Thread(target=train)
    thread.start()
    thread.join()
    assert found == [before, True]
