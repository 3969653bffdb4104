"""The ranks that a benchmark runs on: those it was started on, or some on this machine."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

__all__ = ["is_rank", "join", "start_ranks"]

_TIMEOUT = timedelta(minutes=10)  # of one collective: a peer may compile before its first


def is_rank() -> bool:
    """Whether a launcher such as torchrun has started this process as one of its ranks."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def join(device: str) -> DeviceMesh:
    """This process as one of the ranks."""
    if device == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    dist.init_process_group("nccl" if device == "cuda" else "gloo", timeout=_TIMEOUT)
    return init_device_mesh(device, (dist.get_world_size(),))


def start_ranks(num_ranks: int, arguments: Sequence[str]) -> int:
    """Runs ``rowdit bench ARGUMENTS`` on that many ranks of this machine, a thread each, and returns its exit code."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks)]
    environment = {"OMP_NUM_THREADS": "1", **os.environ}
    return subprocess.run([*command, "-m", "rowdit", "bench", *arguments], env=environment).returncode
