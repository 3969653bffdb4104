"""What each rank sends and computes in one step of a plan, for all ranks at once.

`StepPlan.bytes_sent(rank)` and `num_flops(rank)` answer for one rank by building its routes, which for thousands of
ranks takes minutes. Here the same sums come from runs of members that hold equal parts. The tests hold the two equal.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from rowmuon.buckets import Bucket, needs_exchange
from rowmuon.layout import Layout
from rowmuon.members import Held, runs_of
from rowmuon.plan import StepPlan
from rowmuon.stacks import Renewal


@dataclass(frozen=True)
class Spread:
    """A quantity over the ranks."""

    mean: float
    max: int

    @staticmethod
    def of(values: Sequence[int]) -> Spread:
        return Spread(sum(values) / len(values), max(values))

    def scaled(self, factor: float) -> tuple[float, float]:
        return self.mean * factor, self.max * factor


def bytes_sent(plan: StepPlan) -> list[int]:
    """`plan.bytes_sent(rank)` of every rank, in the mesh's order. Entries must lie on one mesh, split by rows."""
    grid = plan.entries[0].layout.grid
    if grid is None:
        return [0]
    total = [0] * len(grid.ranks)
    for bucket in plan.buckets:
        if bucket.kind == "gather":
            sent = _gather_bytes(bucket, grid.ranks[0])
            total = [known + sent for known in total]
        elif bucket.kind == "exchange":
            for position, sent in enumerate(_exchange_bytes(bucket)):
                total[position] += sent
    for renewal in plan.renewals:
        for position, sent in enumerate(_renewal_bytes(renewal)):
            total[position] += sent
    return total


def flops(plan: StepPlan) -> list[int]:
    """`plan.num_flops(rank)` of every rank, in the mesh's order."""
    grid = plan.entries[0].layout.grid
    if grid is None:
        return [plan.num_flops(0)]
    total = [0] * len(grid.ranks)
    for bucket in plan.buckets:
        for position, count in enumerate(owned_counts(bucket)):
            total[position] += count * bucket.num_flops
    for layout, per_row in _gram_products(plan).items():
        for position, rank in enumerate(grid.ranks):
            total[position] += per_row * layout.box(rank).shape[1]
    for renewal in plan.renewals:
        for part in renewal.rounds:
            for position, count in enumerate(owned_counts(part.there)):
                total[position] += count * part.there.num_flops
    return total


def _gram_products(plan: StepPlan) -> dict[Layout, int]:
    """By layout: FLOPs for each row that a rank holds."""
    work: dict[Layout, int] = {}
    for index in (*plan.renewed, *plan.gram_rows):
        entry = plan.entries[index]
        assert entry.gram is not None
        work[entry.layout] = work.get(entry.layout, 0) + entry.gram.product_flops(1)
    return work


def _renewal_bytes(renewal: Renewal) -> list[int]:
    """`Renewal.collective_bytes` of every rank, in the mesh's order, added up."""
    layout = renewal.stacks[0].layout
    assert layout.grid is not None
    ranks = layout.grid.ranks
    if renewal.is_local:
        return [0] * len(ranks)
    group = layout.shard_group(ranks[0])
    total = [renewal.scale_bytes + sum(sum(stack.bytes_sent(rank)) for stack in renewal.stacks) for rank in ranks]
    for part in renewal.rounds:
        ways = _all_to_all(part.there, group)
        gathered = sum(_gather_bytes(bucket, ranks[0]) for bucket in part.gathers)
        for position, rank in enumerate(ranks):
            there, back = ways[0, layout.shard_index(rank)]
            total[position] += there * part.there.comm_dtype.itemsize + back * part.back.comm_dtype.itemsize + gathered
    return total


def owned_counts(bucket: Bucket) -> list[int]:
    """Matrices that each rank orthogonalises, in the mesh's order."""
    layout = bucket.layout
    assert layout.grid is not None
    ranks = layout.grid.ranks
    if bucket.kind == "gather" or not layout.splits and bucket.kind == "local":
        return [len(bucket.matrices)] * len(ranks)
    counts: dict[tuple[int, int], int] = {}
    for position, matrix in enumerate(bucket.matrices):
        if bucket.kind == "local":
            (run,) = bucket.runs(position, layout.shard_group(ranks[0]))
            owner = (0, run.first)
        else:
            owner = matrix.owner
        counts[owner] = counts.get(owner, 0) + 1
    return [counts.get(_owner(bucket, rank), 0) for rank in ranks]


def _owner(bucket: Bucket, rank: int) -> tuple[int, int]:
    layout = bucket.layout
    return layout.replica_index(rank) if bucket.shares_replicas else 0, layout.shard_index(rank)


def _gather_bytes(bucket: Bucket, rank: int) -> int:
    group = bucket.layout.shard_group(rank)
    held = Held(len(group))
    held.add(run for position in range(len(bucket.matrices)) for run in bucket.runs(position, group))
    return (len(group) - 1) * held.most * bucket.comm_dtype.itemsize


def _exchange_bytes(bucket: Bucket) -> list[int]:
    layout, itemsize = bucket.layout, bucket.comm_dtype.itemsize
    assert layout.grid is not None
    ranks = layout.grid.ranks
    total = [0] * len(ranks)
    if needs_exchange(bucket):
        sent = _all_to_all(bucket, layout.shard_group(ranks[0]))
        total = [sum(sent[_owner(bucket, rank)]) * itemsize for rank in ranks]
    shared = _shared_bytes(bucket)
    return [known + shared[layout.shard_index(rank)] for known, rank in zip(total, ranks, strict=True)]


def _shared_bytes(bucket: Bucket) -> list[int]:
    """What a rank sends to its replicas, by shard; zeros where they don't share the work."""
    layout = bucket.layout
    assert layout.grid is not None
    if not bucket.shares_replicas:
        return [0] * layout.num_shards
    counts = [sum(share.count for share in bucket.route(r).shares) for r in layout.shard_group(layout.grid.ranks[0])]
    return [(layout.num_replicas - 1) * count * bucket.comm_dtype.itemsize for count in counts]


class RankWork(NamedTuple):
    """What a bucket is for a rank: bytes that it sends to owners in an all-to-all and receives as one (home it is the
    reverse), and matrices that it orthogonalises."""

    sent: int
    received: int
    owned: int


def rank_works(plan: StepPlan) -> list[tuple[RankWork, ...]]:
    """Of every bucket, for each kind of rank: ranks for which all of it is the same are listed once."""
    grid = plan.entries[0].layout.grid if plan.entries else None
    if grid is None:
        return [tuple(RankWork(0, 0, len(bucket.matrices)) for bucket in plan.buckets)]
    of_buckets: list[list[RankWork]] = []
    for bucket in plan.buckets:
        owned = owned_counts(bucket)
        if bucket.kind != "exchange" or not needs_exchange(bucket):
            of_buckets.append([RankWork(0, 0, count) for count in owned])
            continue
        size = bucket.comm_dtype.itemsize
        moved = _all_to_all(bucket, bucket.layout.shard_group(grid.ranks[0]))
        places = (moved[_owner(bucket, rank)] for rank in grid.ranks)
        of_buckets.append(
            [RankWork(size * out, size * into, count) for (out, into), count in zip(places, owned, strict=True)]
        )
    return list(dict.fromkeys(zip(*of_buckets, strict=True)))


def gathered_bytes(bucket: Bucket) -> int:
    """Bytes that a rank sends in the all-gather of a bucket, there or, from the owners' replicas, after its exchange;
    the most of any rank."""
    if bucket.layout.grid is None or bucket.kind == "local":
        return 0
    return _gather_bytes(bucket, bucket.layout.grid.ranks[0]) if bucket.kind == "gather" else max(_shared_bytes(bucket))


def most_moved(bucket: Bucket) -> int:
    """Elements that the busiest rank sends to owners or, as an owner, gets."""
    layout = bucket.layout
    assert layout.grid is not None
    ways = _all_to_all(bucket, layout.shard_group(layout.grid.ranks[0]))
    return max(max(there, back) for there, back in ways.values())


def _all_to_all(bucket: Bucket, group: tuple[int, ...]) -> dict[tuple[int, int], tuple[int, int]]:
    """Elements that (replica, shard) sends to the owners of its replica's matrices, and then back as an owner."""
    of_replica: dict[int, Held] = {}
    parts: dict[tuple[int, int], int] = {}  # of what an owner owns, held by itself: goes nowhere
    owned: dict[tuple[int, int], int] = {}
    for position, matrix in enumerate(bucket.matrices):
        runs = bucket.runs(position, group)
        replica, shard = matrix.owner
        of_replica.setdefault(replica, Held(len(group))).add(runs)
        part = sum(run.numel for run in runs if run.first <= shard < run.first + run.count)
        parts[matrix.owner] = parts.get(matrix.owner, 0) + part
        owned[matrix.owner] = owned.get(matrix.owner, 0) + matrix.box.numel
    sent = {}
    for replica in range(bucket.layout.num_replicas if bucket.shares_replicas else 1):
        held = of_replica.get(replica, Held(len(group)))
        for (start, stop), count in zip(pairwise([*held.starts, len(group)]), held.counts, strict=True):
            for shard in range(start, stop):
                part = parts.get((replica, shard), 0)
                sent[replica, shard] = (count - part, owned.get((replica, shard), 0) - part)
    return sent


def most_orthogonalizations(plan: StepPlan) -> int:
    """`plan.num_orthogonalizations(rank)` of the rank with most."""
    grid = plan.entries[0].layout.grid
    if grid is None:
        return plan.num_orthogonalizations(0)
    counts = [owned_counts(bucket) for bucket in plan.buckets]
    return max((sum(of_rank) for of_rank in zip(*counts, strict=True)), default=0)


def representative_ranks(plan: StepPlan, at_most: int = 64) -> list[int]:
    """All ranks of up to ``at_most``; of more, as many of different kinds, those that hold and own most first.

    Ranks of a kind hold equal shapes and own as many matrices of every bucket. They may still differ a little in when
    their pieces come, so in their peak memory.
    """
    grid = plan.entries[0].layout.grid
    if grid is None:
        return [0]
    if len(grid.ranks) <= at_most:
        return list(grid.ranks)
    held = [_held_numbers(layout) for layout in {entry.layout for entry in plan.entries}]
    owned = [owned_counts(bucket) for bucket in plan.buckets]
    kinds: dict[tuple, tuple[int, int]] = {}
    for position, rank in enumerate(grid.ranks):
        kind = (*(numbers[position] for numbers in held), *(counts[position] for counts in owned))
        size = sum(kind[: len(held)])
        size += sum(c[position] * bucket.matrix_numel for c, bucket in zip(owned, plan.buckets, strict=True))
        kinds.setdefault(kind, (-size, rank))
    return [rank for _, rank in sorted(kinds.values())[:at_most]]


def _held_numbers(layout: Layout) -> list[int]:
    """Elements of a parameter that each rank holds, in the mesh's order."""
    assert layout.grid is not None
    group = layout.shard_group(layout.grid.ranks[0])
    of_shard = [0] * len(group)
    for run in runs_of(layout, group):
        for member in range(run.first, run.first + run.count):
            of_shard[member] = run.numel
    return [of_shard[layout.shard_index(rank)] for rank in layout.grid.ranks]
