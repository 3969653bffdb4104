"""What the members of a shard group hold of a matrix, as runs of members instead of one by one.

`torch.chunk`'s rule gives nearly all members equal parts, so a matrix on 4096 ranks is a handful of runs.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache

from rowmuon.layout import Box, Layout

__all__ = ["Held", "Run", "runs_of"]


@dataclass(frozen=True)
class Run:
    """Members ``first`` to ``first + count - 1`` of a shard group hold equal boxes, one after another along ``dim``.

    Together they hold ``box``.
    """

    first: int
    count: int
    box: Box
    dim: int

    @property
    def numel(self) -> int:
        """Elements that each of the members holds."""
        return self.box.numel // self.count

    def part(self, first: int, count: int) -> Box:
        """What ``count`` members from ``first`` on hold between them; ``first`` is counted in the group."""
        start, stop = self.box.bounds[self.dim]
        length = (stop - start) // self.count
        start += (first - self.first) * length
        return _with_bounds(self.box, self.dim, start, start + count * length)

    def within(self, box: Box) -> Iterator[Run]:
        """The members' parts of ``box``: at most the first and the last of them are cut."""
        whole, common = self.box, self.box.intersect(box)
        if not common.numel:
            return
        origin, (start, stop) = whole.bounds[self.dim][0], common.bounds[self.dim]
        length = (whole.bounds[self.dim][1] - origin) // self.count
        head = min(stop, origin + -(-(start - origin) // length) * length)  # where the first whole part begins
        tail = max(head, origin + (stop - origin) // length * length)  # where the last one ends
        for a, b in itertools.pairwise((start, head, tail, stop)):
            if a < b:
                first = (a - origin) // length
                count = -(-(b - origin) // length) - first
                yield Run(self.first + first, count, _with_bounds(common, self.dim, a, b), self.dim)


def _with_bounds(box: Box, dim: int, start: int, stop: int) -> Box:
    bounds = list(box.bounds)
    bounds[dim] = (start, stop)
    return Box((bounds[0], bounds[1], bounds[2]))


@lru_cache(maxsize=128)
def runs_of(layout: Layout, group: tuple[int, ...], box: Box | None = None) -> tuple[Run, ...]:
    """What the members of ``group``, a shard group of ``layout``, hold of ``box`` (None: of the whole parameter).

    In the order of the members; those who hold nothing don't occur.
    """
    if box is not None:
        return tuple(part for run in runs_of(layout, group) for part in run.within(box))
    runs: list[Run] = []
    last: Box | None = None  # of the last member of the last run, if the next member can continue it
    for member, rank in enumerate(group):
        held = layout.box(rank)
        dim = _continues(last, held)
        if not held.numel:
            last = None
            continue
        run = runs[-1] if runs else None
        if dim is not None and run is not None and (run.count == 1 or run.dim == dim):
            joined = _with_bounds(run.box, dim, run.box.bounds[dim][0], held.bounds[dim][1])
            runs[-1] = Run(run.first, run.count + 1, joined, dim)
        else:
            runs.append(Run(member, 1, held, 1))
        last = held
    return tuple(runs)


def _continues(last: Box | None, box: Box) -> int | None:
    """The dimension along which ``box`` lies right behind ``last`` and is equal to it otherwise."""
    if last is None or last.shape != box.shape:
        return None
    moved = [dim for dim in range(3) if last.bounds[dim] != box.bounds[dim]]
    if len(moved) == 1 and last.bounds[moved[0]][1] == box.bounds[moved[0]][0]:
        return moved[0]
    return None


class Held:
    """How many elements each member of a shard group holds of the runs added so far.

    A step function of the member: ``counts[i]`` from member ``starts[i]`` to the next start.
    """

    def __init__(self, num_members: int) -> None:
        self.num_members = num_members
        self.starts = [0]
        self.counts = [0]

    def add(self, runs: Iterable[Run]) -> None:
        for run in runs:
            begin, end = self._cut(run.first), self._cut(run.first + run.count)
            for i in range(begin, end):
                self.counts[i] += run.numel

    def _cut(self, member: int) -> int:
        """Makes ``member`` a start; its position, or the end's."""
        i = bisect_left(self.starts, member)
        if member < self.num_members and (i == len(self.starts) or self.starts[i] != member):
            self.starts.insert(i, member)
            self.counts.insert(i, self.counts[i - 1])
        return i

    @property
    def most(self) -> int:
        return max(self.counts)

    def sizes(self) -> list[int]:
        """Number of members of each step."""
        return [b - a for a, b in itertools.pairwise([*self.starts, self.num_members])]

    def steps(self, run: Run) -> range:
        """Positions of the steps that make up ``run``, which must have been added."""
        stop = run.first + run.count
        end = len(self.starts) if stop == self.num_members else bisect_left(self.starts, stop)
        return range(bisect_left(self.starts, run.first), end)
