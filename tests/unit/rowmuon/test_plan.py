"""Plans of random layouts: what all ranks would send, put together and bring home, without a process group."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter

import hypothesis.strategies as st
import torch
from hypothesis import given, settings

from plan_simulation import (
    LARGE_MESHES,
    OPTIONS,
    Simulation,
    elements,
    entries_on_one_grid,
    entry_of,
)
from rowmuon.buckets import Bucket, Matrix, Piece, merge_pieces, needs_exchange
from rowmuon.layout import COLS, ROWS, Box, Grid, Layout, Split, local_layout
from rowmuon.owners import assign_owners, spread
from rowmuon.plan import Entry, PlanOptions, StepPlan, build_plan, explain_difference, plan_hash

MANY = settings(max_examples=60)
LARGE = settings(max_examples=20)


def ranks_of(plan: StepPlan) -> tuple[int, ...]:
    grid = plan.entries[0].layout.grid
    return (0,) if grid is None else grid.ranks


# -------------------------------------------------------------------------------------------------- the whole refresh
@settings(max_examples=150)
@given(entries_on_one_grid(), OPTIONS)
def test_a_refresh_brings_every_rank_its_rows(entries: list[Entry], options: PlanOptions) -> None:
    plan = build_plan(entries, range(len(entries)), options)
    simulation = Simulation(plan)
    ranks = ranks_of(plan)
    arrived: dict[int, Counter] = {rank: Counter() for rank in ranks}
    for bucket in plan.buckets:
        for rank, boxes in simulation.refresh(bucket, ranks).items():
            for entry, box in boxes:
                assert box.intersect(entries[entry].layout.box(rank)) == box
                arrived[rank][entry] += box.numel
    for rank in ranks:
        for i, entry in enumerate(entries):
            # None is missing, and `Simulation` has seen that none overlaps with another.
            assert arrived[rank][i] == entry.layout.box(rank).numel
        assert plan.bytes_sent(rank) == simulation.moved.get(rank, 0)


@MANY
@given(entries_on_one_grid(), OPTIONS)
def test_every_matrix_is_orthogonalised_as_often_as_the_mode_says(entries: list[Entry], options: PlanOptions) -> None:
    plan = build_plan(entries, range(len(entries)), options)
    listed = Counter((m.entry, m.index) for bucket in plan.buckets for m in bucket.matrices)
    assert listed == Counter((i, k) for i, entry in enumerate(entries) for k in range(entry.layout.num_matrices))
    for bucket in plan.buckets:
        owners = Counter(position for rank in ranks_of(plan) for position in bucket.route(rank).owned)
        for position, matrix in enumerate(bucket.matrices):
            layout = entries[matrix.entry].layout
            expected = 1 if bucket.shares_replicas else layout.num_replicas
            if bucket.kind == "gather":
                expected = layout.num_replicas * layout.num_shards
            assert owners[position] == expected, bucket.kind
        if bucket.kind == "local":
            assert all(entries[m.entry].layout.matrices_are_whole for m in bucket.matrices)
        shapes = {entries[m.entry].layout.matrix_shape for m in bucket.matrices}
        assert shapes == {(bucket.num_rows, bucket.num_cols)}
    for rank in ranks_of(plan)[:3]:
        assert plan.num_flops(rank) == sum(
            entries[bucket.matrices[p].entry].num_flops for bucket in plan.buckets for p in bucket.route(rank).owned
        )


@MANY
@given(entries_on_one_grid(), OPTIONS)
def test_buffers_stay_within_bucket_bytes(entries: list[Entry], options: PlanOptions) -> None:
    plan = build_plan(entries, range(len(entries)), options)
    for bucket in plan.buckets:
        # A buffer of one matrix always fits; so does one parameter of a gather, whose stack shares its padding.
        alone = len({m.entry for m in bucket.matrices}) if bucket.kind == "gather" else len(bucket.matrices)
        if alone == 1:
            continue
        limit = max(options.bucket_bytes // bucket.comm_dtype.itemsize, bucket.matrix_numel)
        for rank in ranks_of(plan):
            route = bucket.route(rank)
            assert len(route.owned) * bucket.matrix_numel <= limit
            # Of matrices that lie unevenly, as chunks do, a rank may send as much as two.
            assert sum(route.send_counts) <= max(limit, 2 * bucket.matrix_numel)
            assert sum(route.recv_counts) <= limit
            for share in route.shares:  # a row of every replica always fits
                rows = len(route.replicas) * max(piece.box.shape[COLS] for piece in share.pieces)
                assert share.count * len(route.replicas) <= max(limit, rows)


@MANY
@given(entries_on_one_grid(most=12), st.booleans())
def test_owners_carry_about_the_same(entries: list[Entry], shared: bool) -> None:
    options = PlanOptions("exchange", torch.float64, 64 << 20, 0.0 if shared else math.inf)
    plan = build_plan(entries, range(len(entries)), options)
    families: dict[tuple, list[Bucket]] = {}
    for bucket in plan.buckets:
        if bucket.kind == "exchange" and not any(
            e.layout.matrices_are_whole for e in map(entry_in(plan), bucket.layouts)
        ):
            layout = bucket.layout
            families.setdefault((layout.shard_axes, bucket.shares_replicas), []).append(bucket)
    for (axes, shares), buckets in families.items():
        if any(e.layout.matrices_are_whole and e.layout.shard_axes == axes for e in entries):
            continue  # those stay where they are whole
        layout = buckets[0].layout
        owners = [(r, s) for r in range(layout.num_replicas if shares else 1) for s in range(layout.num_shards)]
        load = Counter({owner: 0 for owner in owners})
        for bucket in buckets:
            for matrix in bucket.matrices:
                load[matrix.owner] += bucket.num_flops
        assert set(load) == set(owners)
        # Each went to the least loaded owner.
        assert max(load.values()) - min(load.values()) <= max(bucket.num_flops for bucket in buckets)


@settings(max_examples=80)
@given(
    st.integers(1, 4096),
    st.lists(st.tuples(st.integers(1, 6), st.sampled_from([(6, 4), (12, 4), (60, 7)])), min_size=1, max_size=12),
    st.sampled_from([1, 400, 64 << 20]),
    st.integers(0, 11),
)
def test_few_owners_are_spread_over_the_machines(
    num_ranks: int, kinds: list[tuple[int, tuple[int, int]]], bucket_bytes: int, digits: int
) -> None:
    """A machine, or what hangs on one switch, has a power of two of ranks."""
    grid = Grid((num_ranks,), tuple(range(num_ranks)))
    splits = (Split(0, ROWS, num_ranks, 60, 1),)
    layouts_of = [Layout((60, cols), 0, 60 // rows, grid, splits) for _, (rows, cols) in kinds]
    entries = [entry_of(layout, i) for i, layout in enumerate(layouts_of)]
    plan = build_plan(entries, range(len(entries)), PlanOptions("exchange", torch.float64, bucket_bytes))
    owned = Counter(m.owner[1] for bucket in plan.buckets for m in bucket.matrices)
    num_matrices, size = owned.total(), 2**digits
    if num_ranks == 1 or num_matrices > num_ranks:
        return
    assert set(owned.values()) == {1}
    on_machine = Counter(member // size for member in owned)
    counts = [on_machine[machine] for machine in range(num_ranks // size)]
    assert not counts or max(counts) - min(counts) <= 1


@given(st.integers(1, 5000), st.integers(0, 12), st.data())
def test_every_stretch_of_the_turns_is_spread(num_members: int, digits: int, data: st.DataObject) -> None:
    turns = spread(num_members)
    assert sorted(turns) == list(range(num_members))
    size = 2**digits
    stop = data.draw(st.integers(0, num_members))
    start = data.draw(st.integers(0, stop))
    found = Counter(member // size for member in turns[start:stop])
    counts = [found[machine] for machine in range(num_members // size)]
    assert not counts or max(counts) - min(counts) <= (1 if start == 0 else 2)


@settings(max_examples=40)
@given(st.integers(2, 600), st.integers(1, 4), st.integers(0, 9))
def test_the_last_round_is_spread_too(num_ranks: int, num_rounds: int, digits: int) -> None:
    """Matrices of one cost: everyone has as many, and some one more."""
    grid = Grid((num_ranks,), tuple(range(num_ranks)))
    num_matrices = num_ranks * num_rounds + num_ranks // 3
    layout = Layout((8, 4), 0, 1, grid, (Split(0, ROWS, num_ranks, 8, 1),))
    matrices = [Matrix(i, 0, layout.matrix_box(0)) for i in range(num_matrices)]
    owners = assign_owners(matrices, [entry_of(layout, i) for i in range(num_matrices)], share=False)
    owned, size = Counter(m.owner[1] for m in owners), 2**digits
    assert {owned[member] for member in range(num_ranks)} <= {num_rounds, num_rounds + 1}
    one_more = Counter(member // size for member, count in owned.items() if count > num_rounds)
    counts = [one_more[machine] for machine in range(num_ranks // size)]
    assert not counts or max(counts) - min(counts) <= 1


def entry_in(plan: StepPlan):
    return lambda index: plan.entries[index]


# ------------------------------------------------------------------------------------------------ thousands of ranks
@LARGE
@given(entries_on_one_grid(tuple(LARGE_MESHES), most=4, largest=600), OPTIONS, st.integers(0, 2**20))
def test_routes_of_thousands_of_ranks_agree_in_pairs(entries: list[Entry], options: PlanOptions, seed: int) -> None:
    plan = build_plan(entries, range(len(entries)), options)
    for bucket in plan.buckets:
        if bucket.kind == "local" or not needs_exchange(bucket):
            continue
        group = bucket.layout.shard_group(ranks_of(plan)[seed % len(ranks_of(plan))])
        owners = [s for r, s in {m.owner for m in bucket.matrices}]
        members = {group[i] for i in (0, seed % len(group), len(group) - 1, *owners[:2])}
        for a in sorted(members):
            for b in sorted(members):
                assert sent_boxes(bucket, a, b) == expected_boxes(bucket, b, a)


def sent_boxes(bucket: Bucket, sender: int, receiver: int) -> list[tuple[int, Box, int]]:
    """(matrix, box, offset in the message) of what ``sender`` puts in its message to ``receiver``."""
    route = bucket.route(sender)
    if bucket.kind == "gather":
        return [(piece.matrix, piece.box, piece.offset) for piece in route.mine]
    to = route.group.index(receiver)
    begin = sum(route.send_counts[:to])
    end = begin + route.send_counts[to]
    return [(p.matrix, p.box, p.offset - begin) for p in route.mine if begin <= p.offset < end]


def expected_boxes(bucket: Bucket, receiver: int, sender: int) -> list[tuple[int, Box, int]]:
    """The same as ``receiver`` reads it, with joined pieces taken apart."""
    route = bucket.route(receiver)
    source = route.group.index(sender)
    begin = sum(route.recv_counts[:source])
    end = begin + route.recv_counts[source]
    found = []
    for piece in route.assemble:
        for k in range(piece.count):
            offset = piece.offset + k * piece.stride
            if begin <= offset < end:
                found.append((piece.matrix, part_of(piece, k), offset - begin))
    return sorted(found, key=lambda item: item[2])


def part_of(piece: Piece, k: int) -> Box:
    bounds = list(piece.box.bounds)
    start, stop = bounds[piece.dim]
    length = (stop - start) // piece.count
    bounds[piece.dim] = (start + k * length, start + (k + 1) * length)
    return Box(tuple(bounds))  # type: ignore[arg-type]


def test_a_plan_for_4096_ranks_takes_no_time() -> None:
    grid = Grid((4096,), tuple(range(4096)))
    entries = [
        entry_of(Layout(shape, 0, chunks, grid, (Split(0, ROWS, 4096, shape[0], 1),)), i, torch.bfloat16)
        for i, (shape, chunks) in enumerate([((15360, 5120), 3), ((5120, 5120), 1), ((20480, 5120), 1)] * 8)
    ]
    plan = build_plan(entries, range(len(entries)), PlanOptions())
    owners = Counter(matrix.owner for bucket in plan.buckets for matrix in bucket.matrices)
    assert sum(owners.values()) == 8 * 5 and max(owners.values()) == 1
    idle = next(rank for rank in range(4096) if (0, rank) not in owners)
    # All that it holds goes out, each to another rank. Home comes what others send.
    assert plan.bytes_sent(idle) == 2 * sum(entry.layout.box(idle).numel for entry in entries)
    busy = next(rank for rank in range(4096) if (0, rank) in owners)
    (matrix,) = (m for bucket in plan.buckets for m in bucket.matrices if m.owner == (0, busy))
    kept = entries[matrix.entry].layout.box(busy).intersect(matrix.box).numel
    out = sum(entry.layout.box(busy).numel for entry in entries) - kept
    assert plan.bytes_sent(busy) == 2 * (out + matrix.box.numel - kept)


# ---------------------------------------------------------------------------------------------------------- row steps
@MANY
@given(entries_on_one_grid(), OPTIONS)
def test_a_row_step_sends_partial_sums_alone(entries: list[Entry], options: PlanOptions) -> None:
    plan = build_plan(entries, [], options)
    assert plan.buckets == () and plan.rows == tuple(range(len(entries)))
    for rank in ranks_of(plan):
        expected = 0
        splits = plan.split_rows(rank)
        assert {i for split in splits for i in split.members} == {
            i for i, entry in enumerate(entries) if entry.layout.column_axes
        }
        for split in splits:
            num_rows = 0
            for i in split.members:
                layout = entries[i].layout
                held = [layout.box(member) for member in split.ranks]
                assert {box.bounds[: ROWS + 1] for box in held if box.numel} <= {layout.box(rank).bounds[: ROWS + 1]}
                # together they hold whole rows
                assert sum(box.shape[COLS] for box in held) == layout.view_shape[COLS]
                num_rows += math.prod(layout.box(rank).shape[:COLS])
            expected += 2 * (len(split.ranks) - 1) * num_rows * 8 // len(split.ranks)
        assert plan.bytes_sent(rank) == expected
        assert plan.num_collectives(rank) == len(splits)
        assert plan.num_flops(rank) == plan.num_orthogonalizations(rank) == 0


@MANY
@given(entries_on_one_grid(most=6), OPTIONS, st.data())
def test_a_mixed_step_divides_the_entries(entries: list[Entry], options: PlanOptions, data: st.DataObject) -> None:
    due = data.draw(st.lists(st.sampled_from(range(len(entries))), unique=True))
    plan = build_plan(entries, due, options)
    assert {m.entry for bucket in plan.buckets for m in bucket.matrices} == set(due)
    assert set(plan.rows) == set(range(len(entries))) - set(due)


# --------------------------------------------------------------------------------------------------- pieces and hashes
@st.composite
def piece_lists(draw: st.DrawFn) -> list[Piece]:
    """Boxes of a few matrices, one after another: rows or columns that continue each other, with gaps and jumps."""
    pieces, offset = [], 0
    for matrix in range(draw(st.integers(1, 3))):
        along = draw(st.sampled_from([ROWS, COLS]))
        start = 0
        for _ in range(draw(st.integers(0, 6))):
            length, other = draw(st.integers(1, 3)), draw(st.sampled_from([2, 2, 2, 3]))
            start += draw(st.sampled_from([0, 0, 0, 1]))
            ranges = [(matrix, matrix + 1), (0, other), (0, other)]
            ranges[along] = (start, start + length)
            box = Box(tuple(ranges))  # type: ignore[arg-type]
            offset += draw(st.sampled_from([0, 0, 0, 2]))
            pieces.append(Piece(matrix, box, offset))
            offset += box.numel
            start += length
    return draw(st.permutations(pieces)) if draw(st.booleans()) else pieces


@MANY
@given(piece_lists())
def test_merged_pieces_are_the_same_elements(pieces: list[Piece]) -> None:
    merged = merge_pieces(pieces)
    before = {k: v for piece in pieces for k, v in elements(piece).items()}
    after: dict[int, tuple[int, int, int, int]] = {}
    for piece in merged:
        found = elements(piece)
        assert not set(found) & set(after)
        after |= found
    assert after == before
    assert len(merged) <= len(pieces)


def test_equal_shards_merge_into_one_piece() -> None:
    pieces = [Piece(0, Box(((0, 1), (2 * r, 2 * r + 2), (0, 5))), 100 * r) for r in range(64)]
    assert merge_pieces(pieces) == (Piece(0, Box(((0, 1), (0, 128), (0, 5))), 0, 64, 100, ROWS),)


def some_entry(**changes: object) -> Entry:
    return dataclasses.replace(entry_of(local_layout((8, 6), stack_dims=0, chunks=1)), **changes)


def test_plan_hash_sees_what_matters_and_not_names() -> None:
    base = plan_hash([some_entry()], PlanOptions(), [1])
    assert base == plan_hash([some_entry(name="another")], PlanOptions(), [1])
    assert 0 <= base < 2**63
    others = [
        plan_hash([some_entry(dtype=torch.bfloat16)], PlanOptions(), [1]),
        plan_hash([some_entry(kernel=(1,))], PlanOptions(), [1]),
        plan_hash([some_entry(layout=local_layout((6, 8), stack_dims=0, chunks=1))], PlanOptions(), [1]),
        plan_hash([some_entry()] * 2, PlanOptions(), [1]),
        plan_hash([some_entry()], PlanOptions(bucket_bytes=5), [1]),
        plan_hash([some_entry()], PlanOptions(refresh="gather"), [1]),
        plan_hash([some_entry()], PlanOptions(), [2]),
    ]
    assert len({base, *others}) == 1 + len(others)
    assert explain_difference({0: base, 1: base}) == ""
    assert "rank(s) [2] would do something else in this step than rank(s) [0, 1]" in explain_difference(
        {0: base, 1: base, 2: others[0]}
    )


def test_different_kinds_dont_share_a_bucket() -> None:
    entries = [
        some_entry(),
        some_entry(dtype=torch.bfloat16),
        some_entry(device="cuda"),
        some_entry(kernel=(2,)),
        some_entry(layout=local_layout((16, 6), stack_dims=0, chunks=2)),
    ]
    plan = build_plan(entries, range(5), PlanOptions())
    together = {frozenset(m.entry for m in bucket.matrices) for bucket in plan.buckets}
    assert together == {frozenset({0, 4}), frozenset({1}), frozenset({2}), frozenset({3})}
    assert Matrix(4, 1, Box(((0, 1), (8, 16), (0, 6)))) in [m for b in plan.buckets for m in b.matrices]
