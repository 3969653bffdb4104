"""The processes that share an evaluation: who this one is, and the little that they tell each other.

Images and features are shared out by number, so nothing but lists and small objects is ever sent, over gloo on the
CPU, whatever the model runs on.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

Item = TypeVar("Item")
TIMEOUT = timedelta(days=1)  # a rank may wait long for one with more to do; torchrun ends all if one fails


@dataclass(frozen=True)
class Ranks:
    """This process among others.

    Args:
        rank: of this process, 0..world_size - 1.
        world_size: how many there are.
        group: a process group that can send CPU objects (gloo); None with one process, or for the default group.
    """

    rank: int = 0
    world_size: int = 1
    group: Any = None

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def share(self, items: Sequence[Item]) -> Sequence[Item]:
        """Every world_size-th item, from the rank-th on. The shares of all ranks are disjoint and complete."""
        return items[self.rank :: self.world_size]

    def from_first(self, value: Item | None) -> Item:
        """What rank 0 gives, on every rank. A collective."""
        if self.world_size == 1:
            return value  # type: ignore[return-value]
        box = [value]
        dist.broadcast_object_list(box, src=0, group=self.group)
        return box[0]  # type: ignore[return-value]

    def gather(self, value: Item) -> list[Item]:
        """What every rank gives, in the order of the ranks, on every rank. A collective."""
        if self.world_size == 1:
            return [value]
        values: list[Any] = [None] * self.world_size
        dist.all_gather_object(values, value, group=self.group)
        return values

    def wait(self) -> None:
        """Until every rank has come here. A collective."""
        if self.world_size > 1:
            dist.barrier(group=self.group)


@contextmanager
def joined() -> Iterator[Ranks]:
    """The ranks that torchrun started (RANK and WORLD_SIZE in the environment), or this process alone.

    Joins a gloo group of its own, and leaves it at the end. Where a default group stands already, a new group beside
    it is used.
    """
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    if dist.is_initialized():
        group = dist.new_group(backend="gloo", timeout=TIMEOUT)
        try:
            yield Ranks(dist.get_rank(), dist.get_world_size(), group)
        finally:
            dist.destroy_process_group(group)
        return
    if world_size == 1:
        yield Ranks()
        return
    dist.init_process_group("gloo", timeout=TIMEOUT)
    try:
        yield Ranks(dist.get_rank(), world_size)
    finally:
        dist.destroy_process_group()


def default_device() -> torch.device:
    """The GPU of LOCAL_RANK where there is one, or the CPU."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
