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


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Refuses tests whose names hold an address: each process has another, so workers can't agree on what to run."""
    for item in items:
        if " at 0x" in item.nodeid:
            raise pytest.UsageError(f"{item.nodeid}: its name differs in each process; give parametrize other ids")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Hands out whole files, and all of tests/distributed as one, in the order of collection.

    Tests that start ranks of their own would otherwise wait for each other's cores, and a module's fixtures would be
    made once per worker. xdist's own groups (`--dist loadgroup`, 3.8.0) aren't used because they do nothing under
    pytest 9.2: they rename a private attribute that is no longer read.
    """
    from xdist.scheduler import LoadScopeScheduling

    class FileScheduling(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            path = nodeid.partition("::")[0]
            return "distributed" if "distributed" in path.split("/") else path

    if config.getoption("dist") != "load":  # another mode was asked for
        return None
    config.option.loadscopereorder = False  # by number of tests, the long system tests would come last
    return FileScheduling(config, log)


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


@pytest.fixture(autouse=True, scope="session")
def no_network() -> Iterator[None]:
    """Python code under test reaches this machine's loopback and nothing else."""
    connect = socket.socket.connect

    def guarded(self: socket.socket, address: Any) -> None:
        if self.family in {socket.AF_INET, socket.AF_INET6} and not _is_local(address):
            raise OSError(f"a test tried to connect to {address!r}: tests use no network")
        return connect(self, address)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(socket.socket, "connect", guarded)
        yield
