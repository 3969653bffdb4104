"""Buckets: matrices of one shape that are orthogonalised as one stack, and the route that each rank takes in one.

Pure values. A bucket is the same on all ranks; `Bucket.route` says what one of them sends, receives and computes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Literal

import torch

from rowmuon.layout import COLS, ROWS, Box, Layout

__all__ = ["Bucket", "Matrix", "Piece", "Route", "merge_pieces", "needs_exchange"]


@dataclass(frozen=True)
class Matrix:
    """Matrix ``index`` of entry ``entry``; ``owner`` = (replica, member of the shard group) that orthogonalises it.

    In local and gather buckets the owner has no meaning and is (0, 0).
    """

    entry: int
    index: int
    box: Box
    owner: tuple[int, int] = (0, 0)


@dataclass(frozen=True)
class Piece:
    """``count`` equal boxes of one matrix that lie ``stride`` elements apart in a flat buffer, the first at ``offset``.

    They are adjacent along ``dim`` in the matrix and together make ``box`` (global coordinates). Ranks with equal
    shards make one piece, so that assembling a matrix takes a few copies, not one per rank.
    """

    matrix: int
    box: Box
    offset: int
    count: int = 1
    stride: int = 0
    dim: int = ROWS

    @property
    def numel(self) -> int:
        return self.box.numel


@dataclass(frozen=True)
class Route:
    """What one rank does in one bucket. Offsets and counts are in elements.

    mine: this rank's part of every matrix of the bucket that it sends (or works on), in the order of the send buffer.
    send_counts, recv_counts: per member of ``group``; empty where nothing is exchanged.
    owned: the matrices that this rank orthogonalises, positions in the bucket.
    assemble: pieces of the received buffer that make up the owned matrices, stacked in the order of ``owned``.
    home: after the exchange back, this rank's parts of the matrices that its own replica has orthogonalised.
    shared: with shared replicas, this rank's parts of all matrices in the buffer gathered over ``replicas``.
    """

    group: tuple[int, ...]
    mine: tuple[Piece, ...]
    send_counts: tuple[int, ...]
    recv_counts: tuple[int, ...]
    owned: tuple[int, ...]
    assemble: tuple[Piece, ...]
    home: tuple[Piece, ...]
    replicas: tuple[int, ...] = ()
    share_count: int = 0
    shared: tuple[Piece, ...] = ()


@dataclass(frozen=True, eq=False)
class Bucket:
    """Matrices of one shape that are orthogonalised as one stack. Compared by identity.

    kind: "local" (whole on their rank), "gather" (all-gather, every rank computes all) or "exchange" (all-to-all).
    layouts: of the entries that occur, by entry.
    shares_replicas: the replicas divide the matrices between them and gather the results.
    """

    kind: Literal["local", "gather", "exchange"]
    num_rows: int
    num_cols: int
    dtype: torch.dtype
    comm_dtype: torch.dtype
    num_flops: int
    matrices: tuple[Matrix, ...]
    layouts: dict[int, Layout] = field(repr=False)
    shares_replicas: bool = False

    @cached_property
    def layout(self) -> Layout:
        """Any of the layouts: grid and axes are the same for all."""
        return self.layouts[self.matrices[0].entry]

    @property
    def matrix_numel(self) -> int:
        return self.num_rows * self.num_cols

    def part(self, position: int, rank: int) -> Box:
        """What ``rank`` holds of the matrix at ``position``."""
        matrix = self.matrices[position]
        return matrix.box.intersect(self.layouts[matrix.entry].box(rank))

    def parts(self, positions: Sequence[int], rank: int, offset: int = 0) -> Iterator[Piece]:
        """This rank's non-empty parts of those matrices, laid one after another from ``offset``."""
        for position in positions:
            box = self.part(position, rank)
            if box.numel:
                yield Piece(position, box, offset)
                offset += box.numel

    def route(self, rank: int) -> Route:
        """What ``rank`` does in this bucket."""
        if self.kind == "local":
            return self._local_route(rank)
        return self._gather_route(rank) if self.kind == "gather" else self._exchange_route(rank)

    def _local_route(self, rank: int) -> Route:
        mine = tuple(self.parts(range(len(self.matrices)), rank))
        owned = tuple(piece.matrix for piece in mine)
        return Route((rank,), mine, (), (), owned, mine, mine)

    def _gather_route(self, rank: int) -> Route:
        group = self.layout.shard_group(rank)
        everything = range(len(self.matrices))
        held = [tuple(self.parts(everything, member)) for member in group]
        padded = max(sum(piece.numel for piece in pieces) for pieces in held)
        mine = held[group.index(rank)]
        assemble = merge_pieces([_shift(p, i * padded) for i, pieces in enumerate(held) for p in pieces])
        return Route(group, mine, (padded,), (padded,) * len(group), tuple(everything), assemble, mine)

    def _exchange_route(self, rank: int) -> Route:
        layout = self.layout
        group, replicas = layout.shard_group(rank), layout.replica_group(rank)
        member, replica = group.index(rank), replicas.index(rank)
        if not self.shares_replicas:
            replica = 0
        by_owner: dict[tuple[int, int], list[int]] = {}
        for position, matrix in enumerate(self.matrices):
            by_owner.setdefault(matrix.owner, []).append(position)

        def parts_of(of_replica: int) -> list[tuple[Piece, ...]]:
            out, offset = [], 0
            for owner in range(len(group)):
                pieces = tuple(self.parts(by_owner.get((of_replica, owner), ()), rank, offset))
                offset += sum(piece.numel for piece in pieces)
                out.append(pieces)
            return out

        per_owner = parts_of(replica)
        mine = tuple(piece for pieces in per_owner for piece in pieces)
        owned = tuple(by_owner.get((replica, member), ()))
        received: list[Piece] = []
        counts: list[int] = []
        offset = 0
        for source in group:
            pieces = tuple(self.parts(owned, source, offset))
            counts.append(sum(piece.numel for piece in pieces))
            offset += counts[-1]
            received += pieces
        send_counts = tuple(sum(piece.numel for piece in pieces) for pieces in per_owner)
        route = (group, mine, send_counts, tuple(counts), owned, merge_pieces(received), mine)
        if not self.shares_replicas:
            return Route(*route)
        of_replica = [tuple(p for pieces in parts_of(r) for p in pieces) for r in range(len(replicas))]
        share_count = max(sum(piece.numel for piece in pieces) for pieces in of_replica)
        shared = tuple(_shift(p, r * share_count) for r, pieces in enumerate(of_replica) for p in pieces)
        return Route(*route, replicas, share_count, shared)


def _shift(piece: Piece, offset: int) -> Piece:
    return Piece(piece.matrix, piece.box, piece.offset + offset)


def merge_pieces(pieces: Sequence[Piece]) -> tuple[Piece, ...]:
    """Joins equal boxes that continue each other along rows or columns at equal distances in the buffer."""
    last_of: dict[int, int] = {}
    merged: list[Piece] = []
    for piece in pieces:
        index = last_of.get(piece.matrix)
        joined = _join(merged[index], piece) if index is not None else None
        if joined is None:
            last_of[piece.matrix] = len(merged)
            merged.append(piece)
        else:
            assert index is not None
            merged[index] = joined
    return tuple(merged)


def _join(run: Piece, piece: Piece) -> Piece | None:
    step = piece.offset - (run.offset + (run.count - 1) * run.stride)
    if run.count > 1 and step != run.stride:
        return None
    for dim in (ROWS, COLS):
        if run.count > 1 and dim != run.dim:
            continue
        bounds = list(run.box.bounds)
        start, stop = bounds[dim]
        same_elsewhere = all(d == dim or bounds[d] == piece.box.bounds[d] for d in range(3))
        length = piece.box.bounds[dim][1] - piece.box.bounds[dim][0]
        if same_elsewhere and piece.box.bounds[dim][0] == stop and length * run.count == stop - start:
            bounds[dim] = (start, piece.box.bounds[dim][1])
            return Piece(run.matrix, Box((bounds[0], bounds[1], bounds[2])), run.offset, run.count + 1, step, dim)
    return None


@lru_cache(maxsize=4096)
def _all_whole(layouts: tuple[Layout, ...]) -> bool:
    return all(layout.matrices_are_whole for layout in layouts)


def needs_exchange(bucket: Bucket) -> bool:
    """False where every matrix is whole on its owner, so that only replicas have something to tell each other."""
    return bucket.kind == "exchange" and not _all_whole(tuple(bucket.layouts.values()))
