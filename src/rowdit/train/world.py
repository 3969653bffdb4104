"""The ranks of a run: who I am, on which device, and the few things that all must agree on. One process is a world of
one rank that sends nothing.

Under torchrun the environment says RANK, LOCAL_RANK and WORLD_SIZE. On CUDA the device is the local rank's and the
backend NCCL, else gloo; gloo is there on CUDA too, for what lives on the CPU (checkpoints under way, flags).
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from rowdit.models.parallel import ParallelConfig
from rowdit.train.config import ConfigError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

TIMEOUT = timedelta(minutes=30)


@dataclass(frozen=True)
class World:
    """The ranks of a run.

    Args:
        rank: of this process, in 0 .. size - 1.
        size: number of ranks.
        device: of this process.
        mesh: what the model is sharded over; None for a plain model.
        host_group: a gloo group of all ranks, for plain data; None where no process group is.
        checkpoint_group: another one, which only checkpoints use: they may be written beside whatever else is sent, and
            two threads that take turns in one group would each get what was meant for the other.
    """

    rank: int = 0
    size: int = 1
    device: torch.device = torch.device("cpu")
    mesh: DeviceMesh | None = None
    host_group: dist.ProcessGroup | None = None
    checkpoint_group: dist.ProcessGroup | None = None

    @property
    def is_main(self) -> bool:
        """Whether this rank writes what is written once."""
        return self.rank == 0

    def mean(self, values: Tensor) -> Tensor:
        """The mean over the ranks, elementwise; all ranks get the same bits."""
        if self.size > 1:
            dist.all_reduce(values)
            values /= self.size
        return values

    def total(self, values: Tensor) -> Tensor:
        """The sum over the ranks, elementwise."""
        if self.size > 1:
            dist.all_reduce(values)
        return values

    def any(self, flag: bool) -> bool:
        """Whether the flag is set on some rank; all ranks must ask alike."""
        if self.size == 1:
            return flag
        flags = torch.tensor(float(flag), device=self.device)
        dist.all_reduce(flags, op=dist.ReduceOp.MAX)
        return bool(flags.item())

    def share(self, value: Any) -> Any:
        """The main rank's value, on all ranks; small plain data."""
        if self.size == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=0, group=self.host_group)
        return box[0]

    def gather(self, tensor: Tensor) -> Tensor:
        """The ranks' tensors of one shape, concatenated in the order of the ranks, on all ranks."""
        if self.size == 1:
            return tensor
        parts = [torch.empty_like(tensor) for _ in range(self.size)]
        dist.all_gather(parts, tensor.contiguous())
        return torch.cat(parts)

    def barrier(self) -> None:
        if self.size > 1:
            dist.barrier()


@contextmanager
def join_world(parallel: ParallelConfig, *, timeout: timedelta = TIMEOUT) -> Iterator[World]:
    """The world of this process, for as long as the context lasts: as torchrun's environment says, or one process.

    Raises:
        ConfigError: replicas that don't divide the number of ranks, or fewer devices than ranks on this machine.
    """
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if size % parallel.replicas:
        raise ConfigError(
            f"parallel.replicas = {parallel.replicas}: must divide the number of ranks, {size}; "
            f"it may be {', '.join(str(n) for n in range(1, size + 1) if size % n == 0)}"
        )
    device = _device()
    if size == 1 and "RANK" not in os.environ and not parallel.needs_sharding:
        yield World(device=device)
        return
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    place: dict[str, Any] = {}
    if "RANK" not in os.environ:
        place = {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    dist.init_process_group(backend, timeout=timeout, **place)
    try:
        yield world_of_group(parallel, device, timeout=timeout)
    finally:
        dist.destroy_process_group()


def world_of_group(parallel: ParallelConfig, device: torch.device, *, timeout: timedelta = TIMEOUT) -> World:
    """The world of the default process group, which stands already. A collective."""
    size = dist.get_world_size()
    host_group, checkpoint_group = (dist.new_group(backend="gloo", timeout=timeout) for _ in range(2))
    return World(dist.get_rank(), size, device, _mesh(size, parallel, device), host_group, checkpoint_group)


def _device() -> torch.device:
    if not torch.cuda.is_available():
        return torch.device("cpu")
    local_rank, num_devices = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
    if local_rank >= num_devices:
        raise ConfigError(
            f"LOCAL_RANK = {local_rank}, but this machine has {num_devices} CUDA devices; "
            f"start at most {num_devices} processes on it (torchrun --nproc-per-node {num_devices})"
        )
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    return device


def _mesh(size: int, parallel: ParallelConfig, device: torch.device) -> DeviceMesh | None:
    from torch.distributed.device_mesh import init_device_mesh

    if size == 1 and not parallel.needs_sharding:
        return None
    if parallel.replicas == 1:
        return init_device_mesh(device.type, (size,), mesh_dim_names=("shards",))
    shape: Sequence[int] = (parallel.replicas, size // parallel.replicas)
    return init_device_mesh(device.type, tuple(shape), mesh_dim_names=("replicas", "shards"))
