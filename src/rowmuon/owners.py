"""Who orthogonalises which matrix, and which matrices go through the pipeline together."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

import torch

from rowmuon.buckets import Matrix
from rowmuon.layout import ROWS, STACK, Box, Layout
from rowmuon.members import Held, runs_of

if TYPE_CHECKING:
    from rowmuon.plan import Entry, PlanOptions

__all__ = ["assign_owners", "cut_into_buckets", "sharing_pays", "spread"]


def assign_owners(matrices: Sequence[Matrix], entries: Sequence[Entry], share: bool) -> list[Matrix]:
    """Gives each matrix to the least loaded owner, the costliest first (longest processing time first).

    Owners are (`Layout.replica_index`, `Layout.shard_index`). A matrix that is whole on a rank stays there; only its
    replica is then free to choose. Of equally loaded owners those on different replicas come first, then members of the
    shard group that lie far from each other (`spread`): where ranks outnumber matrices, or in the last round, the few
    owners, to whom everyone sends, are on as many machines as can be. If replicas share, matrices that lie on the same
    ranks, the first chunks of all parameters say, come one after another: then what replicas gather from each other,
    padded to the one with most, is about the same for all of them.
    """
    layout = entries[matrices[0].entry].layout
    num_replicas = layout.num_replicas if share else 1
    num_members = layout.num_shards
    order = sorted(
        range(len(matrices)),
        key=lambda i: (*_size(entries[matrices[i].entry]), matrices[i].index if share else 0, i),
    )
    load: dict[tuple[int, int], int] = {}
    turns = spread(num_members)
    # (load, whose turn it is, replica): in order, so it is a heap
    free = [(0, turn, r) for turn in range(num_members) for r in range(num_replicas)]
    owners: list[tuple[int, int]] = [(0, 0)] * len(matrices)
    for i in order:
        matrix = matrices[i]
        entry = entries[matrix.entry]
        if entry.layout.matrices_are_whole:
            s = _holder(entry.layout, matrix.box)
            _, r = min((load.get((r, s), 0), r) for r in range(num_replicas))
        else:
            while free[0][0] != load.get((free[0][2], turns[free[0][1]]), 0):  # it was given one that it holds whole
                _, turn, r = free[0]
                heapq.heapreplace(free, (load[r, turns[turn]], turn, r))
            known, turn, r = free[0]
            heapq.heapreplace(free, (known + entry.num_flops, turn, r))
            s = turns[turn]
        load[r, s] = load.get((r, s), 0) + entry.num_flops
        owners[i] = (r, s)
    return [Matrix(m.entry, m.index, m.box, owner) for m, owner in zip(matrices, owners, strict=True)]


@lru_cache(maxsize=64)
def spread(num_members: int) -> tuple[int, ...]:
    """All members, in an order whose every beginning, and every stretch, is spread evenly over them.

    They count upwards with their binary digits reversed (van der Corput's sequence). Of the first n members, every
    aligned block of 2^k members, a machine of eight or what hangs on one switch, has the same number, give or take one.

    Example:
        >>> spread(8)
        (0, 4, 2, 6, 1, 5, 3, 7)
    """
    num_digits = (num_members - 1).bit_length()
    reverse = (int(f"{turn:0{num_digits}b}"[::-1], 2) if num_digits else 0 for turn in range(1 << num_digits))
    return tuple(member for member in reverse if member < num_members)


def _size(entry: Entry) -> tuple[int, tuple[int, int]]:
    """Sorts the costliest first, and matrices of one shape, which go into buckets together, behind one another."""
    return -entry.num_flops, entry.layout.matrix_shape


def _group(layout: Layout) -> tuple[int, ...]:
    """One of the shard groups; all of them hold the same between them."""
    assert layout.grid is not None
    return layout.shard_group(layout.grid.ranks[0])


def _holder(layout: Layout, box: Box) -> int:
    """`Layout.shard_index` of the ranks that hold ``box`` whole."""
    if layout.grid is None or not layout.splits:
        return 0
    group = _group(layout)
    (run,) = runs_of(layout, group, box)
    assert run.count == 1, f"no rank holds all of {box} of {layout}"
    return layout.shard_index(group[run.first])


def sharing_pays(
    alone: Sequence[Matrix], together: Sequence[Matrix], entries: Sequence[Entry], options: PlanOptions
) -> bool:
    """Whether replicas should divide the matrices: FLOPs saved on the busiest rank against bytes gathered after.

    Pure replication (DDP) always divides: there every rank would otherwise do everything.

    Args:
        alone, together: the same matrices with owners in every replica, and with owners among all replicas.
    """
    layout = entries[alone[0].entry].layout
    if layout.num_replicas == 1:
        return False
    if layout.num_shards == 1:
        return True
    saved = _busiest(alone, entries) - _busiest(together, entries)
    # Stacks of one shape are gathered each for itself, all replicas padded to the one with most.
    numel: dict[tuple[int, int], dict[int, int]] = {}
    for matrix in together:
        of_shape = numel.setdefault(entries[matrix.entry].layout.matrix_shape, {})
        of_shape[matrix.owner[0]] = of_shape.get(matrix.owner[0], 0) + matrix.box.numel
    padded = sum(max(of_shape.values()) for of_shape in numel.values()) * (layout.num_replicas - 1)
    return saved > options.flops_per_byte * padded / layout.num_shards * options.comm_dtype.itemsize


def _busiest(matrices: Sequence[Matrix], entries: Sequence[Entry]) -> int:
    load: dict[tuple[int, int], int] = {}
    for matrix in matrices:
        load[matrix.owner] = load.get(matrix.owner, 0) + entries[matrix.entry].num_flops
    return max(load.values())


class _Part:
    """Matrices that may become a bucket, and the largest stack and message of any rank, in elements."""

    def __init__(self, kind: str, entries: Sequence[Entry]) -> None:
        self.kind = kind
        self.entries = entries
        self.matrices: list[Matrix] = []
        self.stack = self.message = 0
        self._stacks: dict[object, int] = {}  # by owner
        self._held: dict[int, Held] = {}  # by replica

    @property
    def largest(self) -> int:
        return max(self.stack, self.message)

    def add(self, matrices: Sequence[Matrix]) -> None:
        for matrix in matrices:
            self._add(matrix, self.entries[matrix.entry].layout)
        self.matrices += matrices

    def _add(self, matrix: Matrix, layout: Layout) -> None:
        if self.kind != "gather":
            owner = matrix.owner if self.kind == "exchange" else _holder(layout, matrix.box)
            self._stacks[owner] = self._stacks.get(owner, 0) + matrix.box.numel
            self.stack = max(self.stack, self._stacks[owner])
        if self.kind != "local" and layout.splits:
            group = _group(layout)
            held = self._held.setdefault(matrix.owner[0], Held(len(group)))
            held.add(runs_of(layout, group, matrix.box))
            self.message = max(self.message, held.most * (len(group) if self.kind == "gather" else 1))


def cut_into_buckets(
    matrices: Sequence[Matrix],
    kind: str,
    shares: bool,
    entries: Sequence[Entry],
    dtype: torch.dtype,
    options: PlanOptions,
) -> Iterator[tuple[list[Matrix], int]]:
    """Cuts matrices of one shape into buckets whose every buffer fits ``bucket_bytes`` on every rank.

    With each bucket's matrices comes the size of its largest buffer on any rank, in elements.

    Two things always fit, or ranks would idle. Every rank may own one matrix; and of matrices that lie unevenly, as
    chunks do, it may send as much as two. And all that a gather must receive to get one matrix stays together: it is
    padded to the rank that holds most, so the chunks of a parameter cost no more than one of them does.
    """
    numel = matrices[0].box.numel
    limit = options.bucket_bytes // (dtype if kind == "local" else options.comm_dtype).itemsize
    if kind == "exchange":
        matrices = _by_turns(matrices, max(1, limit // numel), rotate=shares)
    part = _Part(kind, entries)
    for _, unit in itertools.groupby(matrices, lambda matrix: _unit(matrix, kind, entries)):
        members, before = list(unit), part.largest
        part.add(members)
        fits = part.stack <= max(limit, numel) and part.message <= max(limit, 2 * numel if kind == "exchange" else 0)
        if not fits and len(part.matrices) > len(members):
            yield part.matrices[: -len(members)], before
            part = _Part(kind, entries)
            part.add(members)
    if part.matrices:
        yield part.matrices, part.largest


def _by_turns(matrices: Sequence[Matrix], at_once: int, rotate: bool) -> list[Matrix]:
    """``at_once`` matrices of every owner, then as many of every owner, ...: all owners are busy at the same time.

    rotate: each owner begins at another place of its list. With shared replicas all of them would else take first
    chunks first, and the ranks that hold those would be the only ones to send.
    """
    of_owner: dict[tuple[int, int], list[Matrix]] = {}
    for matrix in matrices:
        of_owner.setdefault(matrix.owner, []).append(matrix)
    turns: list[list[Matrix]] = []
    for (_, member), own in of_owner.items():
        begin = member * at_once % len(own) if rotate else 0
        own = own[begin:] + own[:begin]
        for turn, first in enumerate(range(0, len(own), at_once)):
            if turn == len(turns):
                turns.append([])
            turns[turn] += own[first : first + at_once]
    return list(itertools.chain.from_iterable(turns))


def _unit(matrix: Matrix, kind: str, entries: Sequence[Entry]) -> tuple[int, ...]:
    """Consecutive matrices with the same key stay together."""
    if kind != "gather":
        return (matrix.entry, matrix.index)
    split = {split.view_dim for split in entries[matrix.entry].layout.splits}
    if STACK in split:
        return (matrix.entry,)
    stack = matrix.box.bounds[STACK][0]
    return (matrix.entry, stack) if ROWS in split else (matrix.entry, stack, matrix.index)
