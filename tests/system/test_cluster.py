"""benchmarks/cluster.py: ranks as hosts on limited links, counted bytes, and nothing left behind however a run ends."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

import namespaces  # noqa: E402
from cluster import Cluster, RankFailed  # noqa: E402

EXCHANGE = f"""
import os, sys, time
sys.path.insert(0, {str(BENCHMARKS)!r})
from cluster import SentBytes, report
import socket
# Rank 0 sends NUM_BYTES to rank 1 over TCP and waits for one byte back: no torch, so the test takes a second.
num_bytes, port = int(sys.argv[1]), int(os.environ["MASTER_PORT"])
with SentBytes() as sent:
    if os.environ["RANK"] == "0":
        with socket.create_server((os.environ["MASTER_ADDR"], port)) as server:
            peer, _ = server.accept()
            start = time.perf_counter()
            peer.sendall(bytes(num_bytes))
            assert peer.recv(1) == b"!"
            seconds = time.perf_counter() - start
    else:
        seconds = None
        while True:
            try:
                peer = socket.create_connection((os.environ["MASTER_ADDR"], port))
                break
            except ConnectionRefusedError:
                time.sleep(0.01)
        left = num_bytes
        while left:
            left -= len(peer.recv(1 << 20))
        peer.sendall(b"!")
report({{"bytes_sent": sent.value, "seconds": seconds, "threads": os.environ["OMP_NUM_THREADS"]}})
"""

FAILING = """
import os, sys, time
if os.environ["RANK"] == "1" and sys.argv[1] == "raise":
    raise ValueError("planted failure")
print("waiting", flush=True)
time.sleep(60)
"""


def _why_not() -> str:
    try:
        namespaces.Namespaces.check()
        probe = namespaces.Namespaces(1, 10.0)
        try:
            probe.create()
        finally:
            probe.delete()
    except namespaces.Unavailable as reason:
        return str(reason)
    return ""


@pytest.fixture(scope="module")
def emulated() -> None:
    """Skips, with the reason, where network namespaces can't be had."""
    reason = _why_not()
    if reason:
        pytest.skip(f"no emulated cluster here: {reason}")


@pytest.fixture
def script(tmp_path: Path):
    def write(text: str) -> Path:
        path = tmp_path / "script.py"
        path.write_text(text)
        return path

    return write


def _own_namespaces(pid: int) -> list[str]:
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True).stdout.split()
    return [name for name in listed if name.startswith(f"{namespaces.PREFIX}-{pid}-")]


def test_the_rate_holds_and_the_bytes_are_counted(emulated, script) -> None:
    num_bytes, rate_mbit = 2_000_000, 80.0
    with Cluster(num_ranks=2, rate_mbit=rate_mbit, timeout_s=60, fallback=False) as cluster:
        sender, receiver = cluster.run(script(EXCHANGE), [str(num_bytes)])
        assert cluster.network.kind == "namespaces"
    # Headers are 52 to 66 bytes in 1500; a GSO packet of tens of kilobytes is counted with one header.
    assert num_bytes < sender["bytes_sent"] < 1.06 * num_bytes
    assert receiver["bytes_sent"] < 0.05 * num_bytes  # acknowledgements
    # What fits in the two token buckets goes at once, so the least time is a little under bytes / rate.
    assert sender["seconds"] > 0.9 * num_bytes * 8 / (rate_mbit * 1e6)
    assert sender["threads"] == "1"


def test_clusters_stand_side_by_side(emulated, script) -> None:
    path = script(EXCHANGE)
    with (
        Cluster(num_ranks=2, timeout_s=60, fallback=False) as first,
        Cluster(num_ranks=3, timeout_s=60, fallback=False) as second,
    ):
        assert len(_own_namespaces(os.getpid())) == 3 + 4
        assert first.run(path, ["1000"])[0]["bytes_sent"] > 1000
        assert second.bytes_sent() == [0, 0, 0]
    assert _own_namespaces(os.getpid()) == []


def test_a_failing_rank_ends_the_run_with_its_traceback(emulated, script) -> None:
    start = time.monotonic()
    with (
        pytest.raises(RankFailed, match="rank 1 ended with exit status 1(.|\n)*planted failure") as failure,
        Cluster(num_ranks=3, timeout_s=50, fallback=False) as cluster,
    ):
        cluster.run(script(FAILING), ["raise"])
    assert failure.value.returncode == 1
    assert time.monotonic() - start < 30  # the other ranks sleep for 60 s
    assert _own_namespaces(os.getpid()) == []


def test_a_hang_times_out_and_says_where(emulated, script) -> None:
    with (
        pytest.raises(TimeoutError, match="ranks 0, 1 of 2 still running after 1 s(.|\n)*script.py"),
        Cluster(num_ranks=2, timeout_s=1, fallback=False) as cluster,
    ):
        cluster.run(script(FAILING), ["sleep"])
    assert _own_namespaces(os.getpid()) == []


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGKILL, -9)])
def test_nothing_is_left_after_a_signal(emulated, script, number: int, status: int) -> None:
    command = [sys.executable, str(BENCHMARKS / "cluster.py"), "--ranks", "2", "--rate", "50", "--no-fallback", "--"]
    launcher = subprocess.Popen(
        [*command, sys.executable, str(script(FAILING)), "sleep"],
        stdout=subprocess.PIPE,
        text=True,
        # A shell starts background jobs with SIGINT ignored, and that would be inherited.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    assert launcher.stdout is not None
    assert "waiting" in launcher.stdout.readline()
    inside = _own_namespaces(launcher.pid)
    assert len(inside) == 3
    launcher.send_signal(number)
    assert launcher.wait(timeout=30) == status
    launcher.stdout.close()
    if number == signal.SIGKILL:  # nobody could clean up: the next run does, but leaves what is in use alone
        with Cluster(num_ranks=1, fallback=False) as living:
            assert _own_namespaces(launcher.pid) == []
            namespaces.remove_leftovers()
            assert len(_own_namespaces(os.getpid())) == 2
            assert living.network.kind == "namespaces"
    assert _own_namespaces(launcher.pid) == []


def test_falls_back_to_the_loopback(monkeypatch, script, capsys) -> None:
    monkeypatch.setattr(shutil, "which", lambda _: None)
    with Cluster(num_ranks=2, rate_mbit=100, timeout_s=60) as cluster:
        reports = cluster.run(script(EXCHANGE), ["1000"])
        assert cluster.network.kind == "loopback"
        assert cluster.network.rate_mbit is None  # a result can't claim a limit that wasn't there
        assert cluster.bytes_sent() is None
    assert [r["bytes_sent"] for r in reports] == [None, None]
    assert capsys.readouterr().err.count("\n") == 1
    with pytest.raises(RuntimeError, match="no emulated cluster"), Cluster(num_ranks=1, fallback=False):
        pass


@pytest.mark.parametrize(("arguments", "match"), [((0, None), "num_ranks is 0"), ((2, -1.0), "rate_mbit is -1")])
def test_bad_arguments(arguments: tuple[int, float | None], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        Cluster(*arguments)
