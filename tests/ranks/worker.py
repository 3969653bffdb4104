"""What runs in each rank of a `RankPool`: join the process group, then one case after another until the pipe closes."""

from __future__ import annotations

import faulthandler
import importlib.util
import os
import signal
import sys
import traceback
from collections.abc import Callable
from datetime import timedelta
from functools import reduce
from multiprocessing.connection import Connection
from types import ModuleType
from typing import Any

__all__ = ["rank_main"]


def rank_main(
    rank: int,
    world_size: int,
    device: str,
    port: int,
    group_timeout_s: float,
    connection: Connection,
    stack_file: str,
) -> None:
    """A rank's life. ``stack_file`` takes its stack whenever it gets SIGUSR1."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's, which closes the pipe
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
    with open(stack_file, "w") as stacks:
        faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=False)
        try:
            _join(rank, world_size, device, port, group_timeout_s)
        except BaseException:
            connection.send(("failed", traceback.format_exc()))
            return
        connection.send(("ok", None))
        _serve(connection)
    os._exit(0)  # the others may have ended, and there's nothing to tidy up that the system doesn't


def _join(rank: int, world_size: int, device: str, port: int, group_timeout_s: float) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    if device == "cuda":
        torch.cuda.set_device(rank)
    timeout = timedelta(seconds=group_timeout_s)
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timeout)
    backend = "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timeout)


def _serve(connection: Connection) -> None:
    while True:
        try:
            source, qualname, args = connection.recv()
        except EOFError:
            return
        try:
            answer = ("ok", _find(source, qualname)(*args))
        except BaseException:
            answer = ("failed", traceback.format_exc())
        connection.send(answer)


_MODULES: dict[str, ModuleType] = {}


def _find(source: str, qualname: str) -> Callable[..., Any]:
    """A function by its file and name: a test file belongs to no package that could be imported by name."""
    module = _MODULES.get(source)
    if module is None:
        name = f"_ranks_case_{len(_MODULES)}"
        spec = importlib.util.spec_from_file_location(name, source)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
        _MODULES[source] = module
    return reduce(getattr, qualname.split("."), module)  # type: ignore[arg-type, return-value]
