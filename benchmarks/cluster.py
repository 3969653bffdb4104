"""A cluster in one box: each rank in its own network namespace, joined by a bridge, links limited at both ends.

    python benchmarks/cluster.py --ranks 4 --rate 200 -- python script.py args      # every rank runs the command
    with Cluster(num_ranks=4, rate_mbit=200) as cluster:                            # or from Python
        reports = cluster.run("script.py", ["--steps", "3"])

The script is an ordinary ``torch.distributed`` program on gloo: RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT are set
as torchrun sets them. On the rank's side ``SentBytes`` counts what leaves its interface, and ``report`` hands a result
back.

The bridge and all addresses live in namespaces of this run alone, so the host's network isn't touched and several
clusters can stand side by side. Needs Linux, root and iproute2; without them it says so and the ranks run on the
loopback interface, without a limit and without byte counts (``cluster.network`` says which it was).
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType

from namespaces import INTERFACE, SUBNET, Namespaces, Network, Unavailable, remove_leftovers

PORT = 29500
MAX_RANKS = 200
ENV_REPORT, ENV_INTERFACE = "ROWMUON_CLUSTER_REPORT", "ROWMUON_CLUSTER_INTERFACE"


class RankFailed(RuntimeError):
    """A rank ended with an error; the message holds the end of its output. ``returncode`` is that rank's."""

    def __init__(self, message: str, returncode: int) -> None:
        super().__init__(message)
        self.returncode = returncode


# ----------------------------------------------------------------------------------------------- on the rank's side


class SentBytes:
    """Bytes that leave this rank's interface inside a ``with`` block, headers included; None on the loopback.

    The caller puts a barrier at each end where the region has to hold whole collectives.
    """

    value: int | None = None

    def __enter__(self) -> SentBytes:
        self._start = interface_bytes_sent()
        return self

    def __exit__(self, *_: object) -> None:
        end = interface_bytes_sent()
        self.value = None if end is None or self._start is None else end - self._start


def interface_bytes_sent() -> int | None:
    """The transmit counter of this rank's interface in /proc/net/dev; None outside an emulated cluster."""
    interface = os.environ.get(ENV_INTERFACE)
    if not interface:
        return None
    for line in Path("/proc/net/dev").read_text().splitlines():
        name, _, counters = line.partition(":")
        if name.strip() == interface:
            return int(counters.split()[8])
    raise RuntimeError(f"interface {interface!r} (from {ENV_INTERFACE}) isn't in /proc/net/dev")


def report(values: Mapping[str, object]) -> None:
    """Hands this rank's result (anything JSON can hold) to the process that called ``Cluster.run``."""
    path = os.environ.get(ENV_REPORT)
    if path:
        Path(path).write_text(json.dumps(values))


# ------------------------------------------------------------------------------------------------------ the cluster


@dataclass
class _Rank:
    rank: int
    process: subprocess.Popen[str]
    reader: threading.Thread
    tail: deque[str]

    def output(self) -> str:
        self.reader.join(timeout=2)
        return "".join(list(self.tail))


class Cluster:
    """W ranks as W hosts. Use as a context manager; leaving it, however, ends the ranks and removes the network.

    Args:
        num_ranks: 1 to 200.
        rate_mbit: limit per link and direction in Mbit/s; None for none.
        threads_per_rank: OMP_NUM_THREADS and MKL_NUM_THREADS of each rank.
        timeout_s: default limit for one ``run``, in seconds.
        echo_ranks: ranks whose output is passed on line by line; the end of every rank's output is kept anyway.
        fallback: run on the loopback where namespaces can't be had; False raises instead.

    Example::

        with Cluster(num_ranks=4, rate_mbit=200) as cluster:
            reports = cluster.run("benchmarks/sharded_step.py", ["--worker"])
    """

    def __init__(
        self,
        num_ranks: int,
        rate_mbit: float | None = None,
        *,
        threads_per_rank: int = 1,
        timeout_s: float = 600.0,
        echo_ranks: Collection[int] = (0,),
        fallback: bool = True,
    ) -> None:
        if not 1 <= num_ranks <= MAX_RANKS:
            raise ValueError(f"num_ranks is {num_ranks}; give 1 to {MAX_RANKS}")
        if rate_mbit is not None and not rate_mbit > 0:
            raise ValueError(f"rate_mbit is {rate_mbit}; give a positive rate in Mbit/s, or None for no limit")
        self.num_ranks, self.rate_mbit, self.timeout_s = num_ranks, rate_mbit, timeout_s
        self.threads_per_rank, self.echo_ranks, self.fallback = threads_per_rank, frozenset(echo_ranks), fallback
        self.network = Network("not started", num_ranks, rate_mbit)
        self._namespaces: Namespaces | None = None
        self._ranks: list[_Rank] = []
        self._handlers: dict[int, object] = {}

    def __enter__(self) -> Cluster:
        self._catch_signals()
        try:
            self._start_network()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        in_main = threading.current_thread() is threading.main_thread()
        # A second Ctrl-C must not stop the clean-up half-way.
        ignored = {s: signal.signal(s, signal.SIG_IGN) for s in (signal.SIGINT, *self._handlers) if in_main}
        try:
            self._end_ranks()
            if self._namespaces is not None:
                self._namespaces.delete()
                self._namespaces = None
        finally:
            for number, handler in {**ignored, **self._handlers}.items():
                signal.signal(number, handler)  # type: ignore[arg-type]
            self._handlers = {}

    def run(
        self,
        script_or_module: str | os.PathLike[str],
        args: Sequence[str] = (),
        *,
        env: Mapping[str, str] | None = None,
        timeout_s: float | None = None,
    ) -> list[dict[str, object]]:
        """Runs a Python file (or a module, by its dotted name) on every rank; returns each rank's ``report``, by rank.

        Raises:
            RankFailed: a rank ended with an error; the others were ended, its traceback is in the message.
            TimeoutError: some rank was still running after ``timeout_s``; the message says where each one stood.
        """
        target = os.fspath(script_or_module)
        where = [target] if target.endswith(".py") or os.path.exists(target) else ["-m", target]
        return self.run_command([sys.executable, *where, *args], env=env, timeout_s=timeout_s)

    def run_command(
        self, command: Sequence[str], *, env: Mapping[str, str] | None = None, timeout_s: float | None = None
    ) -> list[dict[str, object]]:
        """As ``run``, for any command line."""
        if self.network.kind == "not started":
            raise RuntimeError("the cluster isn't started: use `with Cluster(...) as cluster:`")
        with tempfile.TemporaryDirectory(prefix="rowmuon-cluster-") as folder:
            paths = [Path(folder, f"rank{rank}.json") for rank in range(self.num_ranks)]
            port = str(PORT if self._namespaces else _free_port())
            try:
                for rank, path in enumerate(paths):
                    variables = {**os.environ, **(env or {}), **self._environment(rank, port), ENV_REPORT: str(path)}
                    self._ranks.append(self._start_rank(rank, command, variables))
                self._wait(self.timeout_s if timeout_s is None else timeout_s)
            finally:
                self._end_ranks()
            return [json.loads(path.read_text()) if path.exists() else {} for path in paths]

    def bytes_sent(self) -> list[int] | None:
        """Bytes each rank's interface has sent since the cluster stands; None on the loopback."""
        return self._namespaces.bytes_sent() if self._namespaces else None

    def _catch_signals(self) -> None:
        def end(number: int, _: FrameType | None) -> None:
            raise SystemExit(128 + number)

        if threading.current_thread() is threading.main_thread():
            self._handlers = {s: signal.signal(s, end) for s in (signal.SIGTERM, signal.SIGHUP)}

    def _start_network(self) -> None:
        try:
            Namespaces.check()
            remove_leftovers()
            self._namespaces = Namespaces(self.num_ranks, self.rate_mbit)
            self._namespaces.create()
            self.network = Network("namespaces", self.num_ranks, self.rate_mbit)
        except Unavailable as reason:
            if self._namespaces is not None:
                self._namespaces.delete()
                self._namespaces = None
            if not self.fallback:
                raise RuntimeError(f"no emulated cluster: {reason}") from None
            print(f"cluster: {reason}; running on the loopback, no rate limit, no byte counts", file=sys.stderr)
            self.network = Network("loopback", self.num_ranks, None, str(reason))

    def _environment(self, rank: int, port: str) -> dict[str, str]:
        apart = self._namespaces is not None  # each rank is then its own host, as torchrun would see it
        interface = INTERFACE if apart else ("lo" if sys.platform.startswith("linux") else "lo0")
        threads = str(self.threads_per_rank)
        return {
            "RANK": str(rank),
            "WORLD_SIZE": str(self.num_ranks),
            "LOCAL_RANK": "0" if apart else str(rank),
            "LOCAL_WORLD_SIZE": "1" if apart else str(self.num_ranks),
            "MASTER_ADDR": f"{SUBNET}.1" if apart else "127.0.0.1",
            "MASTER_PORT": port,
            "GLOO_SOCKET_IFNAME": interface,
            ENV_INTERFACE: INTERFACE if apart else "",
            "OMP_NUM_THREADS": threads,
            "MKL_NUM_THREADS": threads,
            "PYTHONUNBUFFERED": "1",
            # Quiet: the store warns that it can't look up the names of hosts that have none.
            "TORCH_CPP_LOG_LEVEL": os.environ.get("TORCH_CPP_LOG_LEVEL", "ERROR"),
            "PYTHONFAULTHANDLER": "1",  # so that a rank that hangs can be made to say where
        }

    def _start_rank(self, rank: int, command: Sequence[str], variables: Mapping[str, str]) -> _Rank:
        inside = ["ip", "netns", "exec", self._namespaces.ranks[rank]] if self._namespaces else []
        process = subprocess.Popen(
            [*inside, *command],
            env=dict(variables),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,  # Ctrl-C reaches this process alone, which then ends the ranks in order
            preexec_fn=_before_exec(os.getpid()),
        )
        tail: deque[str] = deque(maxlen=200)
        reader = threading.Thread(target=self._read, args=(rank, process, tail), daemon=True)
        reader.start()
        return _Rank(rank, process, reader, tail)

    def _read(self, rank: int, process: subprocess.Popen[str], tail: deque[str]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            tail.append(line)
            if rank in self.echo_ranks:
                print(f"[rank {rank}] {line}", end="", flush=True)

    def _wait(self, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while True:
            codes = [rank.process.poll() for rank in self._ranks]
            failed = [rank for rank, code in zip(self._ranks, codes, strict=True) if code]
            if failed:
                heads = (f"rank {r.rank} ended with {_ending(r.process.returncode)}:\n{r.output()}" for r in failed)
                raise RankFailed("\n".join(heads), failed[0].process.returncode)
            if all(code == 0 for code in codes):
                return
            if time.monotonic() > deadline:
                raise TimeoutError(self._dump_stacks(timeout_s))
            time.sleep(0.02)

    def _dump_stacks(self, timeout_s: float) -> str:
        running = [rank for rank in self._ranks if rank.process.poll() is None]
        for rank in running:  # faulthandler prints every thread's stack on SIGABRT
            _signal_group(rank, signal.SIGABRT)
        names = ", ".join(str(rank.rank) for rank in running)
        stacks = "\n".join(f"rank {rank.rank}:\n{rank.output()}" for rank in running)
        return f"ranks {names} of {self.num_ranks} still running after {timeout_s:g} s\n{stacks}"

    def _end_ranks(self) -> None:
        for number, patience_s in ((signal.SIGTERM, 3.0), (signal.SIGKILL, 3.0)):
            deadline = time.monotonic() + patience_s
            living = [rank for rank in self._ranks if rank.process.poll() is None]
            for rank in living:
                _signal_group(rank, number)
            for rank in living:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    rank.process.wait(timeout=max(deadline - time.monotonic(), 0.01))
        for rank in self._ranks:
            _signal_group(rank, signal.SIGKILL)  # children that a rank started and left
            rank.reader.join(timeout=2)
            if rank.process.stdout is not None and not rank.reader.is_alive():
                rank.process.stdout.close()
        self._ranks = []


def _before_exec(parent: int):  # type: ignore[no-untyped-def]
    libc = ctypes.CDLL(None) if sys.platform.startswith("linux") else None

    def prepare() -> None:
        if libc is not None:
            libc.prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: the rank doesn't outlive a parent that was killed
            if os.getppid() != parent:
                os._exit(1)
        import resource

        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))

    return prepare


def _signal_group(rank: _Rank, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(rank.process.pid, number)


def _ending(code: int) -> str:
    return f"exit status {code}" if code >= 0 else f"signal {signal.Signals(-code).name}"


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def _one_line_errors() -> Iterator[None]:
    """Ends the command with the rank's output and its status instead of this launcher's own traceback."""
    try:
        yield
    except RankFailed as failure:
        print(f"cluster: {failure}", file=sys.stderr)
        code = failure.returncode
        raise SystemExit(code if code > 0 else 128 - code) from None
    except (OSError, RuntimeError, ValueError) as failure:  # TimeoutError is an OSError
        print(f"cluster: {failure}", file=sys.stderr)
        raise SystemExit(1) from None
    except KeyboardInterrupt:
        print("cluster: interrupted; ranks ended, network removed", file=sys.stderr)
        raise SystemExit(130) from None


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Run a command on every rank of an emulated cluster.")
    parser.add_argument("--ranks", type=int, default=4, help="number of ranks (default 4)")
    parser.add_argument("--rate", type=float, default=None, help="Mbit/s per link and direction (default: no limit)")
    parser.add_argument("--threads", type=int, default=1, help="threads per rank (default 1)")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds until a run counts as hung (default 600)")
    parser.add_argument("--no-fallback", action="store_true", help="fail where namespaces can't be had")
    parser.add_argument("--json", type=Path, help="write the ranks' reports and bytes here")
    parser.add_argument("command", nargs=argparse.REMAINDER, help="-- command and arguments")
    options = parser.parse_args(argv)
    command = options.command[1:] if options.command[:1] == ["--"] else options.command
    if not command:
        parser.error("no command: put it after --, as in `-- python script.py`")
    with (
        _one_line_errors(),
        Cluster(
            options.ranks,
            options.rate,
            threads_per_rank=options.threads,
            timeout_s=options.timeout,
            echo_ranks=range(options.ranks),
            fallback=not options.no_fallback,
        ) as cluster,
    ):
        reports = cluster.run_command(command)
        sent = cluster.bytes_sent()
        print(f"cluster: {cluster.network.describe()}" + (f"; bytes sent by rank: {sent}" if sent else ""))
        if options.json:
            result = {"network": asdict(cluster.network), "bytes_sent": sent, "reports": reports}
            options.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
