"""Stopping a job: at once, or after a stretch that must not be torn."""

import os
import signal

import pytest

from pack.signals import Stoppable
from schemas.errors import ResumableError


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_stops_at_once(number):
    with pytest.raises(ResumableError, match=f"stopped by {number.name}"), Stoppable():
        os.kill(os.getpid(), number)
        pytest.fail("the signal was not delivered")


def test_a_held_signal_waits_for_the_end_of_the_block():
    reached = []
    with pytest.raises(ResumableError, match="SIGINT"), Stoppable() as stop, stop.hold():
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # as a library does that takes handlers over
        os.kill(os.getpid(), signal.SIGINT)
        reached.append(True)
    assert reached
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_without_a_signal_a_held_block_changes_nothing():
    with Stoppable() as stop:
        with stop.hold():
            pass
        handler = signal.getsignal(signal.SIGTERM)
    assert handler != signal.getsignal(signal.SIGTERM)
