"""Network namespaces for ``cluster.py``: one per rank, one for the bridge between them, and their removal.

Names carry the pid and the start time of the process that made them, so runs side by side never clash and what a killed
run has left behind is told from what a living one is using. All of it needs Linux, root and iproute2.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

PREFIX = "rowmuon"
SUBNET = "10.77.0"  # only ever inside our own namespaces, so it may be the same in every run
INTERFACE = "net0"  # the name of each rank's own interface
_NAME = re.compile(rf"^{PREFIX}-(?P<pid>\d+)-(?P<start>\d+)-[0-9a-f]+-(?:hub|\d+)$")


@dataclass(frozen=True)
class Network:
    """What joined the ranks: ``kind`` is "namespaces" or "loopback", and ``note`` says why where it's the latter."""

    kind: str
    num_ranks: int
    rate_mbit: float | None  # per link and direction; None: no limit
    note: str = ""

    def describe(self) -> str:
        limit = "no limit" if self.rate_mbit is None else f"{self.rate_mbit:g} Mbit/s a link"
        return f"{self.num_ranks} ranks, {self.kind}, {limit}" + (f" ({self.note})" if self.note else "")


class Unavailable(Exception):
    """Namespaces can't be had here; the message is the reason."""


def _tool(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise Unavailable(f"`{' '.join(command)}` failed: {done.stderr.strip() or done.stdout.strip()}")
    return done.stdout


def _process_start(pid: int) -> str | None:
    """Start time of a living process in clock ticks since boot (so that a reused pid is told apart), else None."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else fields[19]


def _remove_namespaces(names: Collection[str]) -> None:
    """Ends what still runs inside, then deletes; one that another run has just removed isn't an error."""
    for name in names:
        for pid in subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True).stdout.split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
        subprocess.run(["ip", "netns", "delete", name], capture_output=True)


def remove_leftovers() -> list[str]:
    """Removes the namespaces of runs whose process has died without cleaning up (SIGKILL); returns their names."""
    dead = []
    for line in subprocess.run(["ip", "netns", "list"], capture_output=True, text=True).stdout.splitlines():
        name = line.split()[0] if line.strip() else ""
        match = _NAME.match(name)
        if match and _process_start(int(match["pid"])) != match["start"]:
            dead.append(name)
    _remove_namespaces(dead)
    return dead


class Namespaces:
    """One hub namespace with the bridge, and one namespace per rank; made by ``create``, gone after ``delete``."""

    def __init__(self, num_ranks: int, rate_mbit: float | None) -> None:
        self.rate_mbit = rate_mbit
        token = f"{PREFIX}-{os.getpid()}-{_process_start(os.getpid())}-{secrets.token_hex(4)}"
        self.hub = f"{token}-hub"
        self.ranks = [f"{token}-{rank}" for rank in range(num_ranks)]

    @staticmethod
    def check() -> None:
        if not sys.platform.startswith("linux"):
            raise Unavailable(f"network namespaces need Linux, this is {sys.platform}")
        missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
        if missing:
            raise Unavailable(f"{' and '.join(missing)} not found: install iproute2")
        if os.geteuid() != 0:
            raise Unavailable("network namespaces need root")

    def create(self) -> None:
        _tool("ip", "netns", "add", self.hub)
        _tool("ip", "-n", self.hub, "link", "add", "bridge0", "type", "bridge")
        _tool("ip", "-n", self.hub, "link", "set", "bridge0", "addrgenmode", "none", "up")
        for rank, name in enumerate(self.ranks):
            port = f"port{rank}"
            _tool("ip", "netns", "add", name)
            _tool("ip", "-n", self.hub, "link", "add", port, "type", "veth", "peer", "name", INTERFACE, "netns", name)
            _tool("ip", "-n", self.hub, "link", "set", port, "master", "bridge0")
            _tool("ip", "-n", name, "address", "add", f"{SUBNET}.{rank + 1}/24", "dev", INTERFACE)
            for namespace, device in ((self.hub, port), (name, INTERFACE)):
                self._limit(namespace, device)
                # No IPv6 address: its neighbour discovery would be counted, and gloo could pick it.
                _tool("ip", "-n", namespace, "link", "set", device, "addrgenmode", "none", "up")
            _tool("ip", "-n", name, "link", "set", "lo", "up")
            # The same on every host: reno is in every kernel, and where nothing is lost it fills the link steadily.
            _tool("ip", "netns", "exec", name, "sh", "-c", "echo reno > /proc/sys/net/ipv4/tcp_congestion_control")

    def _limit(self, namespace: str, device: str) -> None:
        """A token bucket on what this end sends. The queue is deep, for a fabric that loses nothing."""
        if self.rate_mbit is None:
            return
        bits = round(self.rate_mbit * 1e6)
        # A bucket of 2 ms, so little goes out unlimited after a pause; at least two of the kernel's large packets,
        # which the bucket would otherwise have to cut up on the processors that the ranks compute on.
        burst = min(max(bits // 8 // 500, 32 << 10), 1 << 20)
        packet = min(burst // 2, 65536)
        _tool("ip", "-n", namespace, "link", "set", device, "gso_max_size", str(packet))
        limit = ["rate", f"{bits}bit", "burst", str(burst), "limit", str(16 << 20)]
        _tool("tc", "-n", namespace, "qdisc", "add", "dev", device, "root", "tbf", *limit)

    def bytes_sent(self) -> list[int]:
        links = (json.loads(_tool("ip", "-n", n, "-s", "-j", "link", "show", INTERFACE)) for n in self.ranks)
        return [int(link[0]["stats64"]["tx"]["bytes"]) for link in links]

    def delete(self) -> None:
        _remove_namespaces([*self.ranks, self.hub])
