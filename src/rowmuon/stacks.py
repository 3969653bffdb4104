"""What a plan says of Gram row steps: which Gram matrices are summed and factorised as one stack, bytes and FLOPs.

Pure values, as `rowmuon.buckets` has them for what is orthogonalised. Everyone computes every factor of what they hold
a part of, from sums over all who do.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from rowmuon.plan import StepPlan

__all__ = ["GramStack", "by_ranks", "gram_bytes", "gram_flops", "gram_stacks"]


@dataclass(frozen=True)
class GramStack:
    """``members`` are entries that refresh and whose Gram matrices are summed over ``ranks`` as one stack.

    num_blocks: of each member; all blocks have ``block`` columns.
    dtype: of the sums.
    """

    ranks: tuple[int, ...]
    device: str
    num_blocks: int
    block: int
    dtype: torch.dtype
    members: tuple[int, ...]

    @property
    def size(self) -> tuple[int, int, int]:
        return len(self.members) * self.num_blocks, self.block, self.block

    @property
    def num_bytes(self) -> int:
        return math.prod(self.size) * self.dtype.itemsize


def gram_stacks(plan: StepPlan, rank: int) -> list[GramStack]:
    """The Gram matrices of the entries in ``renewed``, at most ``bucket_bytes`` at a time, or one entry's."""
    families: dict[tuple, list[int]] = {}
    for index in plan.renewed:
        entry = plan.entries[index]
        shape = entry.gram
        assert shape is not None
        ranks = entry.layout.shard_group(rank)
        families.setdefault((ranks, entry.device, shape.num_blocks, shape.block, shape.dtype), []).append(index)
    stacks = []
    for (ranks, device, num_blocks, block, dtype), members in families.items():
        at_once = max(1, plan.options.bucket_bytes // (num_blocks * block * block * dtype.itemsize))
        for start in range(0, len(members), at_once):
            part = tuple(members[start : start + at_once])
            stacks.append(GramStack(ranks, device, num_blocks, block, dtype, part))
    return stacks


def by_ranks(stacks: Sequence[GramStack]) -> list[list[GramStack]]:
    """Stacks whose members' largest entries are found in one collective."""
    families: dict[tuple, list[GramStack]] = {}
    for stack in stacks:
        families.setdefault((stack.ranks, stack.device, stack.dtype), []).append(stack)
    return list(families.values())


def gram_bytes(stacks: Sequence[GramStack]) -> Iterator[int]:
    """Bytes that each of ``ranks`` sends in each collective: of the largest entries of all members, then of sums."""
    for together in by_ranks(stacks):
        ranks, dtype = together[0].ranks, together[0].dtype
        if len(ranks) > 1:
            largest = sum(len(stack.members) for stack in together) * dtype.itemsize
            for num_bytes in (largest, *(stack.num_bytes for stack in together)):
                yield 2 * (len(ranks) - 1) * num_bytes // len(ranks)


def gram_flops(plan: StepPlan, rank: int) -> int:
    """Of Gram matrices and their factors at a refresh, and of the products of Gram row steps."""
    total = 0
    for index in (*plan.renewed, *plan.gram_rows):
        entry = plan.entries[index]
        assert entry.gram is not None
        total += entry.gram.product_flops(entry.layout.box(rank).shape[1])
        if index in plan.renewed:
            total += entry.gram.factor_flops
    return total
