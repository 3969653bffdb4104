"""What holds for all tests: one thread, no network, distributed tests one at a time; "nothing ran" is a failure."""

from __future__ import annotations

import os

# Before torch is imported: several test processes share the cores, and results must not depend on the thread count.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import ipaddress
import socket
from collections.abc import Iterator
from typing import Any

import hypothesis
import pytest

# A shared machine stalls now and then: an example that takes long is no failure. In CI the same examples each time.
hypothesis.settings.register_profile("local", deadline=None, print_blob=True)
hypothesis.settings.register_profile("ci", deadline=None, print_blob=True, derandomize=True, database=None)
hypothesis.settings.load_profile("ci" if os.environ.get("CI") else "local")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests that start ranks of their own share one worker, or they would wait for each other's cores."""
    for item in items:
        if "distributed" in item.path.parts:
            item.add_marker(pytest.mark.xdist_group("distributed"))


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """A session in which every test was skipped has tested nothing: it exits as an empty one does."""
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    is_worker = hasattr(session.config, "workerinput")
    if reporter is None or is_worker or exitstatus != pytest.ExitCode.OK or session.config.option.collectonly:
        return
    if not any(reporter.stats.get(outcome) for outcome in ("passed", "xfailed", "xpassed")):
        session.exitstatus = pytest.ExitCode.NO_TESTS_COLLECTED


def _is_local(address: Any) -> bool:
    if not isinstance(address, tuple):  # a Unix socket's path
        return True
    try:
        return address[0] in {"", "localhost"} or ipaddress.ip_address(address[0]).is_loopback
    except ValueError:
        return False


@pytest.fixture(autouse=True)
def no_network(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Python code under test reaches this machine's loopback and nothing else."""
    connect = socket.socket.connect

    def guarded(self: socket.socket, address: Any) -> None:
        if self.family in {socket.AF_INET, socket.AF_INET6} and not _is_local(address):
            raise OSError(f"a test tried to connect to {address!r}: tests use no network")
        return connect(self, address)

    monkeypatch.setattr(socket.socket, "connect", guarded)
    yield
