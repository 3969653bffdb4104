"""How many ranks there are, and how they hold the model between them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from rowmuon.layout import ROWS, Grid, Layout, Split

MAX_RANKS = 2**20  # each rank is an entry of the grid: beyond this a typing error would fill the memory


@dataclass(frozen=True)
class RankMesh:
    """FSDP2 over ``world_size`` ranks: every parameter in `Shard(0)` over one mesh axis; with replicas, HSDP.

    Args:
        world_size: ranks, 1 to `MAX_RANKS`.
        num_replicas: copies of the model; must divide world_size. 1 is FSDP2 over all ranks.

    Raises:
        ValueError: numbers that don't fit together.

    Example:
        >>> RankMesh(256, num_replicas=32).num_shards
        8
    """

    world_size: int
    num_replicas: int = 1

    def __post_init__(self) -> None:
        if self.world_size < 1:
            raise ValueError(f"world_size = {self.world_size}: there must be at least one rank")
        if self.world_size > MAX_RANKS:
            raise ValueError(f"world_size = {self.world_size}: every rank is counted, and at most {MAX_RANKS:,} can be")
        if self.num_replicas < 1 or self.world_size % self.num_replicas:
            divisors = [n for n in range(1, self.world_size + 1) if self.world_size % n == 0]
            near = min(divisors, key=lambda n: abs(n - self.num_replicas))
            raise ValueError(
                f"replicas = {self.num_replicas}: {self.world_size} ranks can't be divided by it; the nearest number "
                f"that divides them is {near}"
            )

    @property
    def num_shards(self) -> int:
        """Ranks that hold the model between them."""
        return self.world_size // self.num_replicas

    @cached_property
    def grid(self) -> Grid:
        """(num_shards,), or (num_replicas, num_shards) with replicas."""
        shape = (self.num_shards,) if self.num_replicas == 1 else (self.num_replicas, self.num_shards)
        return Grid(shape, tuple(range(self.world_size)))

    def place(self, layout: Layout) -> Layout:
        """The layout of a whole parameter, divided over this mesh."""
        axis, length = len(self.grid.shape) - 1, layout.shape[0]
        if self.num_shards == 1:
            return dataclasses.replace(layout, grid=self.grid)
        return dataclasses.replace(layout, grid=self.grid, splits=(Split(axis, ROWS, self.num_shards, length, 1),))

    def numel(self, shape: Sequence[int]) -> int:
        """Elements of a parameter on rank 0. No rank holds more, and FSDP2 pads the others to as many."""
        return -(-shape[0] // self.num_shards) * math.prod(shape[1:]) if shape else 1
