"""Ctrl-C as a request."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

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


PARENT = """
import os, time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from rowdit.train.stop import end_with_parent

if __name__ == "__main__":
    with ProcessPoolExecutor(1, get_context("spawn"), initializer=end_with_parent) as pool:
        print(pool.submit(os.getpid).result(), flush=True)
        time.sleep(100)
"""


def test_workers_end_with_a_parent_that_is_killed(tmp_path: Path) -> None:
    """They once stayed for ever: the pipe that they wait at is open as long as they are."""
    (tmp_path / "parent.py").write_text(PARENT)
    parent = subprocess.Popen([sys.executable, tmp_path / "parent.py"], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    worker = int(parent.stdout.readline())
    os.kill(worker, 0)  # it is there
    parent.kill()
    parent.wait()
    deadline = time.monotonic() + 30
    while _is_alive(worker) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not _is_alive(worker)


def _is_alive(pid: int) -> bool:
    """Zombies aren't: whoever inherits an orphan may reap it late."""
    listed = subprocess.run(["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True, check=False).stdout
    return bool(listed.strip()) and not listed.strip().startswith("Z")
