"""Ranks for tests: W processes joined in one process group, started once and then given one case after another.

    pool = RankPool(4)
    results = pool.run(function, *args)      # function(*args) on every rank; what rank r returned is results[r]

A case that raises on a rank, a rank that dies and a case that takes too long all end in `RankError`, which says which
rank and where: with its traceback, or with the stack of a rank that hangs. The processes are then ended and the next
case gets new ones, so a fault in one case is no fault in another.

Device and backend are gloo on the CPU, or NCCL if the variable ROWMUON_TEST_DEVICE is "cuda".
"""

from __future__ import annotations

import contextlib
import inspect
import multiprocessing
import os
import signal
import tempfile
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from ranks.worker import rank_main

__all__ = ["RankError", "RankPool", "available", "device_type"]

PRELOADED = [
    "torch",
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.fsdp",
    "torch.distributed.tensor.debug",
    "torch.distributed.tensor.parallel",
    "hypothesis",
    "numpy",
    "pytest",
]
START_TIMEOUT_S = 120.0
"""For importing torch once and starting the ranks, on a machine that is busy with something else."""
GRACE_S = 4.0
"""How long the other ranks may take to end a case in which one has failed: they often fail alike."""


def device_type() -> str:
    """ "cpu" or "cuda": what the ranks work on."""
    return os.environ.get("ROWMUON_TEST_DEVICE", "cpu")


def available(world_size: int) -> bool:
    """On the CPU always; on CUDA with a device for each rank."""
    if device_type() != "cuda":
        return True
    import torch

    return torch.cuda.device_count() >= world_size


class RankError(AssertionError):
    """A case failed on one rank or more."""


class RankPool:
    """W ranks of one process group.

    Args:
        world_size: W.
        group_timeout_s: of the default process group. Every rank's own groups should take it over.
    """

    def __init__(self, world_size: int, group_timeout_s: float = 60.0) -> None:
        self.world_size = world_size
        self.group_timeout_s = group_timeout_s
        self.num_starts = 0
        self._processes: list[Any] = []
        self._connections: list[Connection] = []
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._store: Any = None

    # ----------------------------------------------------------------------------------------------- processes

    def _start(self) -> None:
        from torch.distributed import TCPStore

        context = multiprocessing.get_context("forkserver")
        # Imported once; every rank is a fork of that process, and none has to load torch again.
        context.set_forkserver_preload(PRELOADED)
        self._folder = tempfile.TemporaryDirectory(prefix="ranks-")
        # The store lives here, on a port that the system chooses, so it outlives any rank.
        timeout = timedelta(seconds=self.group_timeout_s)
        self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timeout)
        for rank in range(self.world_size):
            here, there = context.Pipe()
            arguments = (rank, self.world_size, device_type(), self._store.port, self.group_timeout_s, there)
            process = context.Process(target=rank_main, args=(*arguments, self._stack_file(rank)), daemon=True)
            process.start()
            there.close()
            self._processes.append(process)
            self._connections.append(here)
        self.num_starts += 1
        self._collect("starting the ranks", START_TIMEOUT_S)

    def _stack_file(self, rank: int) -> str:
        assert self._folder is not None
        return str(Path(self._folder.name, f"stack-{rank}.txt"))

    def close(self) -> None:
        """Ends the ranks; they're started again if another case comes."""
        for connection in self._connections:
            connection.close()  # an idle rank ends by itself then
        deadline = time.monotonic() + 5.0
        for process in self._processes:
            process.join(max(0.0, deadline - time.monotonic()))
            if process.is_alive():
                process.kill()
                process.join()
            process.close()
        self._processes, self._connections, self._store = [], [], None
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None

    def _kill(self) -> None:
        for process in self._processes:
            if process.is_alive():
                process.kill()
        self.close()

    # ---------------------------------------------------------------------------------------------------- cases

    def run(
        self, function: Callable[..., Any], *args: Any, timeout_s: float = 120.0, may_die: Sequence[int] = ()
    ) -> list[Any]:
        """Calls ``function(*args)`` on every rank; returns what each has returned.

        Args:
            function: a module's function (of a test file too); it finds its rank by ``dist.get_rank()``.
            args: picklable.
            timeout_s: for this case, on all ranks together.
            may_die: ranks whose process may end in it; they give None. The pool is of no use to another case then.

        Raises:
            RankError: it raised on a rank, a rank died, or it took too long.
        """
        __tracebackhide__ = True  # pytest then shows the rank's traceback alone
        if not self._processes:
            self._start()
        source = inspect.getsourcefile(function)
        assert source is not None
        for connection in self._connections:
            with contextlib.suppress(OSError):  # that rank has died; collecting says how
                connection.send((source, function.__qualname__, args))
        return self._collect(f"{function.__name__}{args!r}", timeout_s, may_die)

    def _collect(self, what: str, timeout_s: float, may_die: Sequence[int] = ()) -> list[Any]:
        """One answer from every rank."""
        __tracebackhide__ = True
        deadline = time.monotonic() + timeout_s
        answers: dict[int, tuple[str, Any]] = {}
        while len(answers) < self.world_size:
            pending = {self._connections[r]: r for r in range(self.world_size) if r not in answers}
            ready = wait(list(pending), max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for connection in ready:
                rank = pending[connection]  # type: ignore[index]
                try:
                    answers[rank] = connection.recv()  # type: ignore[union-attr]
                except (EOFError, OSError):
                    self._processes[rank].join(5.0)
                    if rank in may_die:
                        answers[rank] = ("ok", None)
                        continue
                    answers[rank] = ("died", f"the process ended with exit code {self._processes[rank].exitcode}")
                if answers[rank][0] != "ok":
                    deadline = min(deadline, time.monotonic() + GRACE_S)
        if all(state == "ok" for state, _ in answers.values()) and len(answers) == self.world_size:
            return [answers[rank][1] for rank in range(self.world_size)]
        stacks = {rank: self._stack_of(rank) for rank in range(self.world_size) if rank not in answers}
        self._kill()
        raise RankError(_report(what, timeout_s, self.world_size, answers, stacks))

    def _stack_of(self, rank: int) -> str:
        """Where a rank is right now."""
        process, path = self._processes[rank], Path(self._stack_file(rank))
        if process.is_alive():
            os.kill(process.pid, signal.SIGUSR1)
        deadline = time.monotonic() + 3.0
        while time.monotonic() < deadline:
            if path.exists() and "<module>" in path.read_text():  # the outermost frame is written last
                break
            time.sleep(0.05)
        return path.read_text() if path.exists() else ""


def _report(
    what: str, timeout_s: float, world_size: int, answers: dict[int, tuple[str, Any]], stacks: dict[int, str]
) -> str:
    """What went wrong where; ranks that failed alike share a paragraph."""
    alike: dict[str, list[int]] = {}
    for rank, (state, text) in sorted(answers.items()):
        if state != "ok":
            alike.setdefault(str(text), []).append(rank)
    parts = [f"{what}, W = {world_size}:"]
    parts += [f"-- rank {', '.join(map(str, ranks))}:\n{text}" for text, ranks in alike.items()]
    fine = [rank for rank, (state, _) in sorted(answers.items()) if state == "ok"]
    if fine:
        parts.append(f"-- fine: rank {', '.join(map(str, fine))}")
    for rank, stack in stacks.items():
        reason = f"was still waiting {GRACE_S:.0f} s later" if alike else f"was not done after {timeout_s:.0f} s"
        parts.append(f"-- rank {rank} {reason}, here:\n{stack}")
    return "\n".join(parts)
