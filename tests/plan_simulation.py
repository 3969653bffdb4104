"""Random layouts and plans, and what a plan does to the numbers of all its ranks, without a process group."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import hypothesis.strategies as st
import torch
from torch import Tensor

from rowmuon import newton_schulz_flops
from rowmuon.buckets import Bucket, Piece, Route, needs_exchange
from rowmuon.layout import COLS, ROWS, STACK, Box, Grid, Layout, Split
from rowmuon.plan import Entry, PlanOptions, StepPlan
from rowmuon.shards import assemble, disassemble

SMALL_MESHES = [(1,), (2,), (3,), (5,), (8,), (16,), (2, 2), (2, 3), (4, 2), (1, 4), (2, 2, 2), (3, 1, 2), (2, 4, 2)]
LARGE_MESHES = [(64,), (512,), (4096,), (64, 64), (8, 512), (512, 8), (16, 16, 16)]


@st.composite
def grids(draw: st.DrawFn, meshes: Sequence[tuple[int, ...]] = tuple(SMALL_MESHES)) -> Grid:
    """Meshes whose ranks come in order, backwards or shuffled."""
    shape = draw(st.sampled_from(meshes))
    ranks = list(range(math.prod(shape)))
    order = draw(st.sampled_from(["rising", "falling", "shuffled"]))
    if order == "falling":
        ranks.reverse()
    elif order == "shuffled":
        draw(st.randoms(use_true_random=False)).shuffle(ranks)
    return Grid(shape, tuple(ranks))


@st.composite
def layouts(draw: st.DrawFn, grid: Grid | None, largest: int = 12) -> Layout:
    """A matrix, stack or convolution, its chunks, and any splits: several axes may split one dimension."""
    stack = draw(st.sampled_from([(), (), (1,), (3,), (8,), (2, 3)]))
    chunks = draw(st.sampled_from([1, 1, 2, 3, 6]))
    rows = chunks * draw(st.integers(1, largest))
    cols = draw(st.sampled_from([(1,), (4,), (7,), (16,), (3, 2, 2)]))
    shape = (*stack, rows, *cols)
    splits = []
    sizes = () if grid is None else grid.shape
    for axis in draw(st.permutations(range(len(sizes)))):
        dims = [None, ROWS, ROWS, COLS, *([STACK] if stack else [])]
        dim = draw(st.sampled_from(dims)) if sizes[axis] > 1 else None
        if dim is not None:
            first = {STACK: 0, ROWS: len(stack), COLS: len(stack) + 1}[dim]
            unit = {STACK: math.prod(stack[1:]), ROWS: 1, COLS: math.prod(cols[1:])}[dim]
            splits.append(Split(axis, dim, sizes[axis], shape[first], unit))
    return Layout(shape, len(stack), chunks, grid, tuple(splits))


def entry_of(layout: Layout, index: int = 0, dtype: torch.dtype = torch.float64) -> Entry:
    flops = newton_schulz_flops(*layout.matrix_shape, 5)
    return Entry(f"entry {index}", layout, dtype, "cpu", (), flops, depth=float(index))


@st.composite
def entries_on_one_grid(
    draw: st.DrawFn, meshes: Sequence[tuple[int, ...]] = tuple(SMALL_MESHES), most: int = 5, largest: int = 12
) -> list[Entry]:
    grid = draw(grids(meshes))
    # Repeated layouts, so that buckets hold several entries.
    kinds = draw(st.lists(layouts(grid, largest), min_size=1, max_size=2))
    chosen = draw(st.lists(st.sampled_from(kinds), min_size=1, max_size=most))
    return [entry_of(layout, i) for i, layout in enumerate(chosen)]


OPTIONS = st.builds(
    PlanOptions,
    refresh=st.sampled_from(["exchange", "gather"]),
    comm_dtype=st.just(torch.float64),
    bucket_bytes=st.sampled_from([1, 400, 3_000, 64 << 20]),
    ahead_bytes=st.sampled_from([0, 1, 2_000, 64 << 20]),
    flops_per_byte=st.sampled_from([0.0, 10_000.0]),
)


# ----------------------------------------------------------------------------------------------------------- the data
def values_of(entry: Entry, index: int) -> Tensor:
    """The whole parameter as (stack, rows, columns): every element a number of its own."""
    shape = entry.layout.view_shape
    return torch.arange(math.prod(shape), dtype=torch.float64).reshape(shape) + 1_000_000 * (index + 1)


class Simulation:
    """Moves those numbers through a bucket as the runtime would, for all ranks at once."""

    def __init__(self, plan: StepPlan) -> None:
        self.plan = plan
        self.values = [values_of(entry, i) for i, entry in enumerate(plan.entries)]
        self.moved: dict[int, int] = {}  # bytes that have left each rank

    def of_box(self, bucket: Bucket, piece: Piece) -> Tensor:
        entry = bucket.matrices[piece.matrix].entry
        whole = Box(tuple((0, n) for n in self.values[entry].shape))  # type: ignore[arg-type]
        return self.values[entry][piece.box.slices(whole)]

    def packed(self, bucket: Bucket, pieces: Iterable[Piece], numel: int) -> Tensor:
        """A flat buffer; what no piece fills is NaN."""
        buffer = torch.full((numel,), math.nan, dtype=torch.float64)
        for piece in pieces:
            assert bool(buffer[piece.offset : piece.offset + piece.numel].isnan().all()), "pieces overlap"
            buffer[piece.offset : piece.offset + piece.numel] = self.of_box(bucket, piece).flatten()
        return buffer

    def check_arrivals(self, bucket: Bucket, pieces: Iterable[Piece], buffer: Tensor) -> list[tuple[int, Box]]:
        """That a buffer holds what the pieces say; returns (entry, box) of each."""
        found = []
        for piece in pieces:
            part = buffer[piece.offset : piece.offset + piece.numel].view(piece.box.shape)
            assert torch.equal(part, self.of_box(bucket, piece))
            found.append((bucket.matrices[piece.matrix].entry, piece.box))
        return found

    def refresh(self, bucket: Bucket, ranks: Sequence[int]) -> dict[int, list[tuple[int, Box]]]:
        """Runs the bucket on whole process groups; rank -> the (entry, box) that have come home to it."""
        routes = {rank: bucket.route(rank) for rank in ranks}
        sent = {rank: self.send(bucket, route) for rank, route in routes.items()}
        home: dict[int, list[tuple[int, Box]]] = {}
        outgoing: dict[int, Tensor] = {}
        for rank, route in routes.items():
            received = self.receive(bucket, rank, routes, sent)
            stack = assemble(bucket, route, received)
            for slot, position in enumerate(route.owned):
                matrix = bucket.matrices[position]
                whole = Piece(position, matrix.box, 0)
                assert torch.equal(stack[slot], self.of_box(bucket, whole)[0]), "a matrix was put together wrongly"
            if bucket.kind != "exchange":
                home[rank] = [(bucket.matrices[piece.matrix].entry, piece.box) for piece in route.home]
                assert {piece.matrix for piece in route.home} <= set(route.owned)
            elif needs_exchange(bucket):
                outgoing[rank] = disassemble(bucket, route, stack)
            else:
                outgoing[rank] = stack.flatten()
        if bucket.kind == "exchange":
            self.return_home(bucket, routes, outgoing, home)
        return home

    def send(self, bucket: Bucket, route: Route) -> Tensor:
        numel = route.send_counts[0] if bucket.kind == "gather" else sum(piece.numel for piece in route.mine)
        return self.packed(bucket, route.mine, numel)

    def receive(self, bucket: Bucket, rank: int, routes: dict[int, Route], sent: dict[int, Tensor]) -> Tensor:
        route = routes[rank]
        if bucket.kind == "gather":
            others = len(route.group) - 1
            self.count(bucket, rank, others * sent[rank].numel())
            return torch.cat([sent[member] for member in route.group])
        if not needs_exchange(bucket):
            return sent[rank]
        return self.all_to_all(bucket, rank, routes, sent, back=False)

    def all_to_all(
        self, bucket: Bucket, rank: int, routes: dict[int, Route], sent: dict[int, Tensor], *, back: bool
    ) -> Tensor:
        here = routes[rank].group.index(rank)
        parts = []
        for source, member in enumerate(routes[rank].group):
            counts = routes[member].recv_counts if back else routes[member].send_counts
            expected = routes[rank].send_counts if back else routes[rank].recv_counts
            assert counts[here] == expected[source], "sender and receiver disagree"
            assert sum(counts) == sent[member].numel()
            parts.append(sent[member].split(list(counts))[here])
            if source != here:
                self.count(bucket, member, counts[here])
        return torch.cat(parts)

    def return_home(
        self,
        bucket: Bucket,
        routes: dict[int, Route],
        outgoing: dict[int, Tensor],
        home: dict[int, list[tuple[int, Box]]],
    ) -> None:
        back = {}
        for rank, route in routes.items():
            exchanged = needs_exchange(bucket)
            part = self.all_to_all(bucket, rank, routes, outgoing, back=True) if exchanged else outgoing[rank]
            found = self.check_arrivals(bucket, route.home, part)
            if not bucket.shares_replicas:
                home[rank] = found
            most = max([part.numel(), *(share.start + share.count for share in route.shares)])
            back[rank] = torch.cat([part, torch.full((most - part.numel(),), math.nan, dtype=part.dtype)])
        if not bucket.shares_replicas:
            return
        for rank, route in routes.items():
            home[rank] = []
            for i, share in enumerate(route.shares):
                portions = []
                for replica in route.replicas:
                    other = routes[replica].shares[i]
                    assert other.count == share.count and len(routes[replica].shares) == len(route.shares)
                    portions.append(back[replica][other.start : other.start + other.count])
                self.count(bucket, rank, (len(route.replicas) - 1) * share.count)
                home[rank] += self.check_arrivals(bucket, share.pieces, torch.cat(portions))

    def count(self, bucket: Bucket, rank: int, numel: int) -> None:
        self.moved[rank] = self.moved.get(rank, 0) + numel * bucket.comm_dtype.itemsize


def covers_once(boxes: Iterable[Box], whole: Box) -> bool:
    """Whether the boxes tile ``whole``: every element in exactly one."""
    count = torch.zeros(whole.shape, dtype=torch.int32)
    for box in boxes:
        if box.numel:
            assert box.intersect(whole) == box, f"{box} sticks out of {whole}"
            count[box.slices(whole)] += 1
    return bool((count == 1).all())


def elements(piece: Piece) -> dict[int, tuple[int, int, int, int]]:
    """Offset in the buffer -> (matrix, stack, row, column) of each element, by the definition of a piece."""
    out = {}
    (s0, s1), (r0, r1), (c0, c1) = piece.box.bounds
    assert s1 - s0 == 1
    rows, cols = r1 - r0, c1 - c0
    part_rows = rows // piece.count if piece.dim == ROWS else rows
    part_cols = cols // piece.count if piece.dim == COLS else cols
    for k in range(piece.count):
        for i in range(part_rows):
            for j in range(part_cols):
                row = r0 + i + (k * part_rows if piece.dim == ROWS else 0)
                col = c0 + j + (k * part_cols if piece.dim == COLS else 0)
                offset = piece.offset + k * piece.stride + i * part_cols + j
                assert offset not in out
                out[offset] = (piece.matrix, s0, row, col)
    return out
