"""What a plan says of Gram row steps: who adds up which Gram matrices, who computes which factors, bytes and FLOPs.

The means of Gram matrices, packed, lie over the ranks of a shard group by their rows. A refresh takes three ways
through that group: Gram matrices of what each rank holds of the momentum go to the ranks that hold those rows of the
mean (a `GramStack`); rows of the means go to the owners of their blocks, and rows of the factors come home
(`FactorRound.there` and `back`); and from there the factors go to all (`FactorRound.gathers`). The last two are buckets
like any other.

Pure values, the same on all ranks. Replicas do the same as each other, each for itself.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

import torch

from rowmuon.buckets import Bucket, Matrix, Route
from rowmuon.gram import GramShape
from rowmuon.layout import ROWS, Layout, Split

if TYPE_CHECKING:
    from rowmuon.plan import Entry, PlanOptions, StepPlan

__all__ = ["FactorRound", "GramStack", "Renewal", "gram_bytes", "gram_flops", "mean_layout", "rows_held"]

LEAST_ROUNDED_DAMPING, LEAST_ROUNDED_COLUMNS = 5e-4, 512
"""Rounding what is added up to bf16 moves eigenvalues by about 2^-9 |G| / sqrt(columns), |G| the Frobenius norm: by
1e-4 to 8e-4 of the largest. From so many columns on a step is then within 5 %, as with a momentum that is sent in bf16,
and the mean takes most of that away again. Where columns are fewer, or less damping, Gram matrices go as they are."""


@lru_cache(maxsize=4096)
def mean_layout(layout: Layout, shape: GramShape) -> Layout:
    """How the packed mean of a parameter lies on the parameter's mesh: by rows, over all axes that split that.

    Its matrices are the blocks. Several axes split one after another in the mesh's order, whatever they do to the
    parameter, so that this is a DTensor's ``Shard(0)`` on each of them.
    """
    rows, cols = shape.packed_size
    splits: tuple[Split, ...] = ()
    if layout.grid is not None:
        splits = tuple(Split(axis, ROWS, layout.grid.shape[axis], rows, 1) for axis in layout.shard_axes)
    return Layout((rows, cols), 0, shape.num_blocks, layout.grid, splits)


@lru_cache(maxsize=4096)
def rows_held(layout: Layout, group: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
    """[start, stop) of the rows that each member of a shard group holds."""
    return tuple(layout.box(rank).bounds[ROWS] for rank in group)


@lru_cache(maxsize=4096)
def _is_in_order(layout: Layout) -> bool:
    assert layout.grid is not None
    bounds = rows_held(layout, layout.shard_group(layout.grid.ranks[0]))
    return all(before[1] <= after[0] for before, after in itertools.pairwise(bounds))


@lru_cache(maxsize=4096)
def _most_rows(layout: Layout) -> int:
    """Of any rank."""
    if layout.grid is None:
        return layout.shape[0]
    return max(stop - start for start, stop in rows_held(layout, layout.shard_group(layout.grid.ranks[0])))


@dataclass(frozen=True)
class GramStack:
    """Gram matrices of equal size, of entries that refresh, that are made and added up as one stack.

    num_blocks: of each member; all blocks have ``block`` columns.
    dtype: of the sums. What is sent has the ``comm_dtype``.
    layout: of each member's mean.
    """

    num_blocks: int
    block: int
    dtype: torch.dtype
    comm_dtype: torch.dtype
    layout: Layout
    members: tuple[int, ...]

    @property
    def size(self) -> tuple[int, int, int]:
        return len(self.members) * self.num_blocks, self.block, self.block

    @property
    def num_bytes(self) -> int:
        return math.prod(self.size) * self.dtype.itemsize

    @property
    def row_numel(self) -> int:
        """Elements of one packed row of all members. They lie side by side: row i of each, then row i + 1, ..."""
        return len(self.members) * self.layout.shape[1]

    @property
    def is_in_order(self) -> bool:
        """Whether the ranks, in the order of their process group, hold one row after another."""
        return self.layout.grid is None or _is_in_order(self.layout)

    def route(self, rank: int) -> Route:
        """What this rank sends to whom, and hears from each: its own rows, from everyone."""
        group = self.layout.shard_group(rank)
        counts = [(stop - start) * self.row_numel for start, stop in rows_held(self.layout, group)]
        here = counts[group.index(rank)]
        return Route(group, (), tuple(counts), (here,) * len(group), (), (), ())

    def bytes_sent(self, rank: int) -> tuple[int, int]:
        """Of sums, and of the blocks' traces."""
        num = self.layout.num_shards
        rows, _ = self.layout.shape
        start, stop = self.layout.box(rank).bounds[ROWS]
        sums = (rows - (stop - start)) * self.row_numel * self.comm_dtype.itemsize
        return sums, _all_reduced(self.size[0] * self.dtype.itemsize, num)


@dataclass(frozen=True)
class FactorRound:
    """Factors that are computed at the same time, each by its owner, and then sent to all.

    there: the blocks of the means, packed, on their way to the owners. Local where nothing is split.
    back: the same blocks of the factors, coming home to where those rows came from.
    gathers: all of them, some parameters at a time; each parameter's blocks follow one another.
    """

    there: Bucket
    back: Bucket
    gathers: tuple[Bucket, ...]

    def owned(self, rank: int) -> int:
        return len(self.there.route(rank).owned)

    def collective_bytes(self, rank: int) -> Iterator[int]:
        """Bytes that a rank sends in each collective."""
        there, back = self.there.route(rank), self.back
        here = there.group.index(rank)
        yield (sum(there.send_counts) - there.send_counts[here]) * self.there.comm_dtype.itemsize
        yield (sum(there.recv_counts) - there.recv_counts[here]) * back.comm_dtype.itemsize
        for bucket in self.gathers:
            route = bucket.route(rank)
            yield (len(route.group) - 1) * route.send_counts[0] * bucket.comm_dtype.itemsize


@dataclass(frozen=True)
class Renewal:
    """All that one set of process groups does at a refresh for Gram row steps."""

    device: str
    dtype: torch.dtype
    stacks: tuple[GramStack, ...]
    rounds: tuple[FactorRound, ...]

    @property
    def is_local(self) -> bool:
        """Whether every rank holds all of the means, so that nothing is sent."""
        return self.stacks[0].layout.num_shards == 1

    @property
    def members(self) -> list[int]:
        return [index for stack in self.stacks for index in stack.members]

    def ranks(self, rank: int) -> tuple[int, ...]:
        return self.stacks[0].layout.shard_group(rank)

    @property
    def scale_bytes(self) -> int:
        """Bytes that a rank sends for the largest entries of all members, over all ranks."""
        return _all_reduced(len(self.members) * self.dtype.itemsize, self.stacks[0].layout.num_shards)

    def collective_bytes(self, rank: int) -> Iterator[int]:
        """Bytes that a rank sends in each collective."""
        if self.is_local:
            return
        yield self.scale_bytes
        for stack in self.stacks:
            yield from stack.bytes_sent(rank)
        for part in self.rounds:
            yield from part.collective_bytes(rank)


def _all_reduced(num_bytes: int, num_ranks: int) -> int:
    return 2 * (num_ranks - 1) * num_bytes // num_ranks


# ------------------------------------------------------------------------------------------------- making the values


def make_renewals(entries: Sequence[Entry], renewed: Sequence[int], options: PlanOptions) -> list[Renewal]:
    """What renews the factors of the entries ``renewed``."""
    families: dict[tuple, list[int]] = {}
    for index in renewed:
        entry = entries[index]
        layout, shape = entry.layout, _shape(entry)
        key = (layout.grid, layout.shard_axes, entry.device, shape.dtype, shape.factor_dtype)
        families.setdefault(key, []).append(index)
    return [
        Renewal(device, dtype, tuple(_stacks(members, entries, options)), tuple(_rounds(members, entries, options)))
        for (_, _, device, dtype, _), members in families.items()
    ]


def _shape(entry: Entry) -> GramShape:
    assert entry.gram is not None
    return entry.gram


def _stacks(members: Sequence[int], entries: Sequence[Entry], options: PlanOptions) -> Iterator[GramStack]:
    """Each is at most ``bucket_bytes``, or one entry's, where it is made and where it arrives."""
    families: dict[tuple[GramShape, Layout], list[int]] = {}
    for index in members:
        shape = _shape(entries[index])
        families.setdefault((shape, mean_layout(entries[index].layout, shape)), []).append(index)
    for (shape, layout), alike in families.items():
        sent = shape.dtype if layout.num_shards == 1 else _sent_dtype(shape, options)
        at_once = max(1, options.bucket_bytes // _padded_bytes(shape, layout))
        for start in range(0, len(alike), at_once):
            part = tuple(alike[start : start + at_once])
            yield GramStack(shape.num_blocks, shape.block, shape.dtype, sent, layout, part)


def _sent_dtype(shape: GramShape, options: PlanOptions) -> torch.dtype:
    rounds = options.comm_dtype.itemsize < shape.dtype.itemsize
    may = shape.damping >= LEAST_ROUNDED_DAMPING and shape.block >= LEAST_ROUNDED_COLUMNS
    return options.comm_dtype if rounds and may else shape.dtype


def _padded_bytes(shape: GramShape, layout: Layout) -> int:
    """Of a parameter's Gram matrices, if every rank had as many rows as the one with most."""
    return layout.num_shards * _most_rows(layout) * shape.block * shape.dtype.itemsize


def _rounds(members: Sequence[int], entries: Sequence[Entry], options: PlanOptions) -> Iterator[FactorRound]:
    """Blocks are dealt out to the ranks by turns, the largest first, on from where the last round has stopped."""
    by_block: dict[int, list[int]] = {}
    for index in members:
        by_block.setdefault(_shape(entries[index]).block, []).append(index)
    turn = 0
    for block in sorted(by_block, reverse=True):
        for part in _parts(by_block[block], entries, options):
            layouts = {index: mean_layout(entries[index].layout, _shape(entries[index])) for index in part}
            num_shards = layouts[part[0]].num_shards
            blocks = [(index, k) for index in part for k in range(layouts[index].num_matrices)]
            owned = [
                Matrix(index, k, layouts[index].matrix_box(k), (0, (turn + place) % num_shards))
                for place, (index, k) in enumerate(blocks)
            ]
            turn = (turn + len(blocks)) % num_shards
            yield _round(owned, layouts, entries, options)


def _parts(members: Sequence[int], entries: Sequence[Entry], options: PlanOptions) -> Iterator[list[int]]:
    """What goes into one round: of every owner, and in every message, at most ``bucket_bytes``, or one parameter."""
    part: list[int] = []
    num_blocks = sent = 0
    for index in members:
        shape = _shape(entries[index])
        layout = mean_layout(entries[index].layout, shape)
        most = layout.num_shards * max(1, options.bucket_bytes // (shape.block**2 * shape.dtype.itemsize))
        message = _most_rows(layout) * layout.shape[1] * shape.dtype.itemsize
        if part and (num_blocks + shape.num_blocks > most or sent + message > options.bucket_bytes):
            yield part
            part, num_blocks, sent = [], 0, 0
        part.append(index)
        num_blocks, sent = num_blocks + shape.num_blocks, sent + message
    if part:
        yield part


def _round(
    owned: Sequence[Matrix], layouts: dict[int, Layout], entries: Sequence[Entry], options: PlanOptions
) -> FactorRound:
    first = owned[0].entry
    shape = _shape(entries[first])
    rows, cols = layouts[first].matrix_shape
    kind = "exchange" if layouts[first].num_shards > 1 else "local"
    there = Bucket(
        kind,  # type: ignore[arg-type]
        rows,
        cols,
        shape.dtype,
        shape.dtype,
        shape.block_flops,
        tuple(owned),
        layouts,
        rows * cols,
        options.bucket_bytes,
    )
    back = dataclasses.replace(there, dtype=shape.factor_dtype, comm_dtype=shape.factor_dtype)
    gathers = []
    for part in _gathered(list(layouts), layouts, shape, options) if kind == "exchange" else ():
        whole = tuple(dataclasses.replace(matrix, owner=(0, 0)) for matrix in owned if matrix.entry in part)
        some = {index: layouts[index] for index in part}
        gathers.append(dataclasses.replace(back, kind="gather", matrices=whole, layouts=some))
    return FactorRound(there, back, tuple(gathers))


def _gathered(
    members: Sequence[int], layouts: dict[int, Layout], shape: GramShape, options: PlanOptions
) -> Iterator[list[int]]:
    """Parameters whose factors, every rank's part padded to the largest, take at most ``bucket_bytes``, or one."""
    part: list[int] = []
    held = 0
    for index in members:
        layout = layouts[index]
        taken = layout.num_shards * _most_rows(layout) * layout.shape[1] * shape.factor_dtype.itemsize
        if part and held + taken > options.bucket_bytes:
            yield part
            part, held = [], 0
        part.append(index)
        held += taken
    if part:
        yield part


# ------------------------------------------------------------------------------------------------------- what it costs


def gram_bytes(plan: StepPlan, rank: int) -> Iterator[int]:
    """Bytes that a rank sends in each collective for Gram row steps."""
    for renewal in plan.renewals:
        yield from renewal.collective_bytes(rank)


def gram_flops(plan: StepPlan, rank: int) -> int:
    """Of Gram matrices and factors at a refresh, and of the products of Gram row steps."""
    total = 0
    for index in (*plan.renewed, *plan.gram_rows):
        entry = plan.entries[index]
        total += _shape(entry).product_flops(entry.layout.box(rank).shape[1])
    for renewal in plan.renewals:
        total += sum(part.owned(rank) * part.there.num_flops for part in renewal.rounds)
    return total
