"""Ctrl-C as a request."""

from __future__ import annotations

import os
import signal

import pytest

from rowdit.train import stop as module
from rowdit.train.stop import Interrupted, StopRequest


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_asks_and_a_later_one_interrupts(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same signal again at once is torchrun's, which passes on what Slurm has sent to all."""
    now = 100.0
    monkeypatch.setattr(module.time, "monotonic", lambda: now)
    before = signal.getsignal(number)
    with StopRequest() as stop:
        stop.check()
        os.kill(os.getpid(), number)
        assert stop.requested
        with pytest.raises(Interrupted):
            stop.check()
        now = 101.9
        os.kill(os.getpid(), number)
        assert stop.requested
        now = 102.1
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), number)
    assert signal.getsignal(number) is before


def test_another_source_may_ask() -> None:
    wanted = False
    stop = StopRequest(also=lambda: wanted)
    assert not stop.requested
    wanted = True
    assert stop.requested
