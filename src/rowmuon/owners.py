"""Who orthogonalises which matrix, and which matrices go through the pipeline together."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch

from rowmuon.buckets import Matrix
from rowmuon.layout import ROWS, STACK, Box, Layout
from rowmuon.members import Held, runs_of

if TYPE_CHECKING:
    from rowmuon.plan import Entry, PlanOptions

__all__ = ["assign_owners", "cut_into_buckets", "sharing_pays"]


def assign_owners(matrices: Sequence[Matrix], entries: Sequence[Entry], share: bool) -> list[Matrix]:
    """Gives each matrix to the least loaded owner, the costliest first (longest processing time first).

    Owners are (`Layout.replica_index`, `Layout.shard_index`). A matrix that is whole on a rank stays there; only its
    replica is then free to choose. Of owners with equal loads those on different replicas come first: what one replica
    has done is gathered over all of them, padded to the one with most.
    """
    layout = entries[matrices[0].entry].layout
    num_replicas = layout.num_replicas if share else 1
    num_members = layout.num_shards
    order = sorted(range(len(matrices)), key=lambda i: (-entries[matrices[i].entry].num_flops, i))
    load: dict[tuple[int, int], int] = {}
    free = [(0, s, r) for s in range(num_members) for r in range(num_replicas)]  # in order, so it is a heap
    owners: list[tuple[int, int]] = [(0, 0)] * len(matrices)
    for i in order:
        matrix = matrices[i]
        entry = entries[matrix.entry]
        if entry.layout.matrices_are_whole:
            s = _holder(entry.layout, matrix.box)
            _, r = min((load.get((r, s), 0), r) for r in range(num_replicas))
        else:
            while True:
                known, s, r = heapq.heappop(free)
                if known == load.get((r, s), 0):
                    break
                heapq.heappush(free, (load[r, s], s, r))  # it was given something while it waited
            heapq.heappush(free, (known + entry.num_flops, s, r))
        load[r, s] = load.get((r, s), 0) + entry.num_flops
        owners[i] = (r, s)
    return [Matrix(m.entry, m.index, m.box, owner) for m, owner in zip(matrices, owners, strict=True)]


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
    """Matrices that may become a bucket, and the largest buffer that they need on any rank, in elements."""

    def __init__(self, kind: str, entries: Sequence[Entry]) -> None:
        self.kind = kind
        self.entries = entries
        self.matrices: list[Matrix] = []
        self.most = 0
        self._stacks: dict[object, int] = {}  # by owner
        self._held: dict[int, Held] = {}  # by replica

    def add(self, matrices: Sequence[Matrix]) -> None:
        for matrix in matrices:
            self._add(matrix, self.entries[matrix.entry].layout)
        self.matrices += matrices

    def _add(self, matrix: Matrix, layout: Layout) -> None:
        if self.kind != "gather":
            owner = matrix.owner if self.kind == "exchange" else _holder(layout, matrix.box)
            self._stacks[owner] = self._stacks.get(owner, 0) + matrix.box.numel
            self.most = max(self.most, self._stacks[owner])
        if self.kind != "local" and layout.splits:
            group = _group(layout)
            held = self._held.setdefault(matrix.owner[0], Held(len(group)))
            held.add(runs_of(layout, group, matrix.box))
            self.most = max(self.most, held.most * (len(group) if self.kind == "gather" else 1))


def cut_into_buckets(
    matrices: Sequence[Matrix], kind: str, entries: Sequence[Entry], dtype: torch.dtype, options: PlanOptions
) -> Iterator[list[Matrix]]:
    """Cuts matrices of one shape into buckets whose every buffer fits ``bucket_bytes`` on every rank.

    One matrix always fits. An all-gather is padded to the rank that holds most, so matrices that lie on different
    ranks are gathered together, however large they are: the chunks of one parameter.
    """
    limit = options.bucket_bytes // (dtype if kind == "local" else options.comm_dtype).itemsize
    part = _Part(kind, entries)
    for _, unit in itertools.groupby(matrices, lambda matrix: _unit(matrix, kind, entries)):
        members = list(unit)
        part.add(members)
        if part.most > limit and len(part.matrices) > len(members):
            yield part.matrices[: -len(members)]
            part = _Part(kind, entries)
            part.add(members)
    if part.matrices:
        yield part.matrices


def _unit(matrix: Matrix, kind: str, entries: Sequence[Entry]) -> tuple[int, ...]:
    """Consecutive matrices with the same key stay together."""
    if kind != "gather":
        return (matrix.entry, matrix.index)
    split = {split.view_dim for split in entries[matrix.entry].layout.splits}
    if STACK in split:
        return (matrix.entry,)
    stack = matrix.box.bounds[STACK][0]
    return (matrix.entry, stack) if ROWS in split else (matrix.entry, stack, matrix.index)
