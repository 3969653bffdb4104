"""Buckets: matrices of one shape that are orthogonalised as one stack, and the route that each rank takes in one.

Pure values. A bucket is the same on all ranks; `Bucket.route` says what one of them sends, receives and computes.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Literal

import torch

from rowmuon.layout import COLS, ROWS, STACK, Box, Layout
from rowmuon.members import Held, Run, runs_of

__all__ = ["Bucket", "Matrix", "Piece", "Route", "Share", "lies_in_order", "merge_pieces", "needs_exchange", "travels"]

_MAX_ROUTES_KEPT = 8  # a process asks for its own; whoever prices a cluster asks for many, one after another


@dataclass(frozen=True)
class Matrix:
    """Matrix ``index`` of entry ``entry``; the rank with (replica index, shard index) ``owner`` orthogonalises it.

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
class Share:
    """One all-gather over the replicas.

    This rank sends ``count`` elements of its parts that have come home, from ``start`` on, and the others as many.
    ``pieces`` are what then lies in the gathered buffer.
    """

    start: int
    count: int
    pieces: tuple[Piece, ...]


@dataclass(frozen=True)
class Route:
    """What one rank does in one bucket. Offsets and counts are in elements.

    mine: this rank's part of every matrix of the bucket that it sends (or works on), in the order of the send buffer.
    send_counts, recv_counts: per member of ``group``; empty where nothing is exchanged.
    owned: the matrices that this rank orthogonalises, positions in the bucket.
    assemble: pieces of the received buffer that make up the owned matrices, stacked in the order of ``owned``.
    home: after the exchange back, this rank's parts of the matrices that its own replica has orthogonalised.
    shares: with shared replicas, how those go around ``replicas``, one after another.
    """

    group: tuple[int, ...]
    mine: tuple[Piece, ...]
    send_counts: tuple[int, ...]
    recv_counts: tuple[int, ...]
    owned: tuple[int, ...]
    assemble: tuple[Piece, ...]
    home: tuple[Piece, ...]
    replicas: tuple[int, ...] = ()
    shares: tuple[Share, ...] = ()

    @cached_property
    def home_numel(self) -> int:
        """Of the buffer to which this rank's parts come home. What replicas gather of it may reach beyond its end."""
        return max(sum(piece.numel for piece in self.home), *(share.start + share.count for share in self.shares), 0)


@dataclass(frozen=True, eq=False)
class Bucket:
    """Matrices of one shape that are orthogonalised as one stack. Compared by identity.

    kind: "local" (whole on their rank), "gather" (all-gather, every rank computes all) or "exchange" (all-to-all).
    layouts: of the entries that occur, by entry.
    largest: the size of its largest buffer on any rank, in elements.
    bucket_bytes: what replicas gather at a time; at least one matrix.
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
    largest: int
    bucket_bytes: int = 64 << 20
    shares_replicas: bool = False
    _routes: dict[int, Route] = field(default_factory=dict, init=False, repr=False)

    @cached_property
    def layout(self) -> Layout:
        """Any of the layouts: grid and axes are the same for all."""
        return self.layouts[self.matrices[0].entry]

    @property
    def matrix_numel(self) -> int:
        return self.num_rows * self.num_cols

    @property
    def num_bytes(self) -> int:
        """Of its largest buffer on any rank."""
        gathered = max(self.bucket_bytes, self.matrix_numel * self.comm_dtype.itemsize) if self.shares_replicas else 0
        return max(self.largest * self.comm_dtype.itemsize, gathered)

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

    def runs(self, position: int, group: tuple[int, ...]) -> tuple[Run, ...]:
        """What the members of a shard group hold of the matrix at ``position``."""
        matrix = self.matrices[position]
        return runs_of(self.layouts[matrix.entry], group, matrix.box)

    def route(self, rank: int) -> Route:
        """What ``rank`` does in this bucket; kept, for a few ranks."""
        route = self._routes.get(rank)
        if route is None:
            make = {"local": self._local_route, "gather": self._gather_route, "exchange": self._exchange_route}
            if len(self._routes) >= _MAX_ROUTES_KEPT:
                self._routes.clear()
            route = self._routes[rank] = make[self.kind](rank)
        return route

    def _local_route(self, rank: int) -> Route:
        mine = tuple(self.parts(range(len(self.matrices)), rank))
        owned = tuple(piece.matrix for piece in mine)
        return Route((rank,), mine, (), (), owned, mine, mine)

    def _gather_route(self, rank: int) -> Route:
        group = self.layout.shard_group(rank)
        everything = range(len(self.matrices))
        assemble, counts = self._arriving(everything, group, padded=True)
        mine = tuple(self.parts(everything, rank))
        return Route(group, mine, counts[:1], counts, tuple(everything), assemble, mine)

    def _exchange_route(self, rank: int) -> Route:
        layout = self.layout
        group, replicas = layout.shard_group(rank), layout.replica_group(rank)
        by_owner: dict[tuple[int, int], list[int]] = {}
        for position, matrix in enumerate(self.matrices):
            by_owner.setdefault(matrix.owner, []).append(position)
        busy = {s for _, s in by_owner}

        def parts_of(peer: int) -> tuple[list[Piece], list[int]]:
            """What this rank and its replica ``peer`` hold of the matrices of that one, in the order of its group."""
            pieces: list[Piece] = []
            counts = [0] * len(group)
            offset = 0
            of_replica = layout.replica_index(peer) if self.shares_replicas else 0
            for member, shard in enumerate(map(layout.shard_index, layout.shard_group(peer))):
                if shard in busy:
                    here = list(self.parts(by_owner.get((of_replica, shard), ()), rank, offset))
                    counts[member] = sum(piece.numel for piece in here)
                    offset += counts[member]
                    pieces += here
            return pieces, counts

        pieces, send_counts = parts_of(rank)
        mine = tuple(pieces)
        replica = layout.replica_index(rank) if self.shares_replicas else 0
        owned = tuple(by_owner.get((replica, layout.shard_index(rank)), ()))
        assemble, recv_counts = self._arriving(owned, group, padded=False)
        route = (group, mine, tuple(send_counts), recv_counts, owned, assemble, mine)
        if not self.shares_replicas:
            return Route(*route)
        at_once = max(self.bucket_bytes // self.comm_dtype.itemsize, self.matrix_numel) // len(replicas)
        of_replicas = [list(_portions(parts_of(peer)[0], at_once)) for peer in replicas]
        return Route(*route, replicas, tuple(_shares(of_replicas, replicas.index(rank))))

    def _arriving(
        self, positions: Sequence[int], group: tuple[int, ...], *, padded: bool
    ) -> tuple[tuple[Piece, ...], tuple[int, ...]]:
        """The buffer to which every member of ``group`` has sent its parts of those matrices, member after member.

        Args:
            padded: every member's section has the size of the largest.

        Returns:
            Its pieces, matrix by matrix, and the size of each member's section.
        """
        runs = [(position, run) for position in positions for run in self.runs(position, group)]
        held = Held(len(group))
        held.add(run for _, run in runs)
        sections = [held.most] * len(held.counts) if padded else held.counts
        sizes = held.sizes()
        begins = [0, *itertools.accumulate(size * section for size, section in zip(sizes, sections, strict=True))]
        filled = [0] * len(sections)
        pieces = []
        for position, run in runs:
            for i in held.steps(run):
                box, offset = run.part(held.starts[i], sizes[i]), begins[i] + filled[i]
                filled[i] += run.numel
                several = sizes[i] > 1
                pieces.append(
                    Piece(position, box, offset, sizes[i], sections[i] * several, run.dim if several else ROWS)
                )
        counts = itertools.chain.from_iterable([section] * size for size, section in zip(sizes, sections, strict=True))
        return merge_pieces(pieces), tuple(counts)


def _portions(pieces: Sequence[Piece], numel: int) -> Iterator[list[Piece]]:
    """Consecutive pieces in portions of at most ``numel`` elements, cut between rows; one row always fits."""
    portion: list[Piece] = []
    free = numel
    for piece in pieces:
        (row, end), width = piece.box.bounds[ROWS], piece.box.shape[COLS]
        offset = piece.offset
        while row < end:
            num_rows = min(end - row, free // width)
            if num_rows <= 0 and portion:
                yield portion
                portion, free = [], numel
                continue
            num_rows = max(1, num_rows)
            box = Box((piece.box.bounds[STACK], (row, row + num_rows), piece.box.bounds[COLS]))
            portion.append(Piece(piece.matrix, box, offset))
            row, offset, free = row + num_rows, offset + box.numel, free - box.numel
    if portion:
        yield portion


def _shares(of_replicas: Sequence[Sequence[list[Piece]]], here: int) -> Iterator[Share]:
    """The first portions of all replicas, then the second ones, ...; ``here`` is this rank's place among them."""
    for portions in itertools.zip_longest(*of_replicas, fillvalue=[]):
        count = max(sum(piece.numel for piece in portion) for portion in portions)
        pieces = [
            Piece(piece.matrix, piece.box, r * count + piece.offset - portion[0].offset)
            for r, portion in enumerate(portions)
            for piece in portion
        ]
        yield Share(portions[here][0].offset if portions[here] else 0, count, tuple(pieces))


def merge_pieces(pieces: Sequence[Piece]) -> tuple[Piece, ...]:
    """Joins single boxes to others that they continue, along rows or columns, at equal distances in the buffer."""
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
    if piece.count > 1 or (run.count > 1 and step != run.stride):
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


def travels(bucket: Bucket) -> bool:
    """Whether anything must be sent before a bucket can be orthogonalised."""
    return bucket.kind == "gather" or needs_exchange(bucket)


def lies_in_order(bucket: Bucket, route: Route) -> bool:
    """Whether the buffer holds the owned matrices one after another, each in row-major order."""
    slot = {position: i for i, position in enumerate(route.owned)}
    for piece in route.assemble:
        contiguous = piece.box.shape[2] == bucket.num_cols and (
            piece.count == 1 or (piece.dim == ROWS and piece.stride * piece.count == piece.numel)
        )
        first_row = piece.box.bounds[ROWS][0] - bucket.matrices[piece.matrix].box.bounds[ROWS][0]
        if not contiguous or piece.offset != slot[piece.matrix] * bucket.matrix_numel + first_row * bucket.num_cols:
            return False
    return True
