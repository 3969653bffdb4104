"""What each rank holds, against torch.chunk itself; boxes; where matrices lie."""

from __future__ import annotations

import math

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from plan_simulation import LARGE_MESHES, covers_once, grids, layouts
from rowmuon.layout import COLS, ROWS, STACK, Box, Grid, Layout, Split, layout_of, local_layout, view_shape

BOUNDS = st.tuples(st.integers(0, 6), st.integers(0, 6)).map(lambda ab: (min(ab), max(ab)))
BOXES = st.tuples(BOUNDS, BOUNDS, BOUNDS).map(Box)
WHOLE = Box(((0, 6), (0, 6), (0, 6)))


def held_by_torch(layout: Layout, rank: int) -> torch.Tensor:
    """Numbers of the elements that ``rank`` holds, in its order, by chunking a tensor as DTensor's placements do."""
    tensor = torch.arange(math.prod(layout.shape)).reshape(layout.shape)
    assert layout.grid is not None
    coordinate = layout.grid.coordinate(rank)
    first = {STACK: 0, ROWS: layout.stack_dims, COLS: layout.stack_dims + 1}
    for split in layout.splits:
        parts = list(torch.chunk(tensor, split.num_parts, dim=first[split.view_dim]))
        empty = tensor.narrow(first[split.view_dim], 0, 0)
        parts += [empty] * (split.num_parts - len(parts))
        tensor = parts[coordinate[split.axis]]
    return tensor.flatten()


@settings(max_examples=80)
@given(grids().flatmap(layouts))
def test_boxes_are_what_torch_chunk_gives(layout: Layout) -> None:
    numbers = torch.arange(math.prod(layout.shape)).reshape(layout.view_shape)
    whole = Box(tuple((0, n) for n in layout.view_shape))  # type: ignore[arg-type]
    for rank in layout.grid.ranks:
        box = layout.box(rank)
        held = numbers[box.slices(whole)]
        assert tuple(held.shape) == box.shape
        assert torch.equal(held.flatten(), held_by_torch(layout, rank))


@settings(max_examples=50)
@given(grids().flatmap(layouts))
def test_a_shard_group_tiles_each_matrix(layout: Layout) -> None:
    for rank in layout.grid.ranks[:: max(1, len(layout.grid.ranks) // 4)]:
        group = layout.shard_group(rank)
        assert rank in group and len(group) == layout.num_shards and list(group) == sorted(group)
        for index in range(layout.num_matrices):
            matrix = layout.matrix_box(index)
            assert covers_once([layout.box(member).intersect(matrix) for member in group], matrix)
        replicas = layout.replica_group(rank)
        assert len(replicas) == layout.num_replicas
        assert {layout.box(replica) for replica in replicas} == {layout.box(rank)}


@settings(max_examples=15)
@given(grids(LARGE_MESHES).flatmap(lambda grid: layouts(grid, largest=1500)))
def test_up_to_4096_ranks(layout: Layout) -> None:
    rank = layout.grid.ranks[-1]
    group = layout.shard_group(rank)
    assert covers_once([layout.box(member) for member in group], Box(tuple((0, n) for n in layout.view_shape)))  # type: ignore[arg-type]
    assert layout.num_shards * layout.num_replicas == len(layout.grid.ranks)
    for member in group[:: max(1, len(group) // 20)]:
        numbers = held_by_torch(layout, member)
        assert numbers.numel() == layout.box(member).numel


@settings(max_examples=50)
@given(grids().flatmap(layouts))
def test_matrices_tile_the_parameter(layout: Layout) -> None:
    boxes = [layout.matrix_box(i) for i in range(layout.num_matrices)]
    assert covers_once(boxes, Box(tuple((0, n) for n in layout.view_shape)))  # type: ignore[arg-type]
    assert {box.shape for box in boxes} == {(1, *layout.matrix_shape)}
    # in the order of memory
    numbers = torch.arange(math.prod(layout.shape)).reshape(-1, math.prod(layout.matrix_shape))
    whole = Box(tuple((0, n) for n in layout.view_shape))  # type: ignore[arg-type]
    flat = torch.arange(math.prod(layout.shape)).reshape(layout.view_shape)
    assert torch.equal(torch.stack([flat[box.slices(whole)].flatten() for box in boxes]), numbers)


@settings(max_examples=80)
@given(grids().flatmap(layouts))
def test_matrices_are_whole_where_no_border_meets_one(layout: Layout) -> None:
    parts = [
        layout.box(rank).intersect(layout.matrix_box(i)).numel
        for rank in layout.grid.ranks
        for i in range(layout.num_matrices)
    ]
    nothing_cut = all(part in (0, math.prod(layout.matrix_shape)) for part in parts)
    if layout.matrices_are_whole:
        assert nothing_cut
    elif nothing_cut:  # columns: an axis that splits them counts, even if all of them are on one rank
        assert layout.column_axes


@given(BOXES, BOXES)
def test_intersection(a: Box, b: Box) -> None:
    def mask(box: Box) -> torch.Tensor:
        out = torch.zeros(WHOLE.shape, dtype=torch.bool)
        out[box.slices(WHOLE)] = True
        return out

    common = a.intersect(b)
    assert torch.equal(mask(common) & (common.numel > 0), mask(a) & mask(b))
    assert common.numel == int((mask(a) & mask(b)).sum())
    assert common.numel == b.intersect(a).numel


@pytest.mark.parametrize(
    ("shape", "stack_dims", "expected"),
    [
        ((8, 6), 0, (1, 8, 6)),
        ((8, 4, 3, 3), 0, (1, 8, 36)),
        ((5, 8, 6), 1, (5, 8, 6)),
        ((5, 2, 8, 6), 2, (10, 8, 6)),
        ((5, 8, 6), 0, (1, 5, 48)),
        ((0, 8, 6), 1, (0, 8, 6)),
    ],
)
def test_view_shape(shape: tuple[int, ...], stack_dims: int, expected: tuple[int, int, int]) -> None:
    assert view_shape(shape, stack_dims) == expected


def test_a_plain_tensor_is_local() -> None:
    tensor = torch.zeros(12, 4)
    layout = layout_of(tensor, name="w", stack_dims=0, chunks=3)
    assert layout == local_layout((12, 4), stack_dims=0, chunks=3)
    assert (layout.matrix_shape, layout.num_matrices, layout.num_shards, layout.num_replicas) == ((4, 4), 3, 1, 1)
    assert layout.matrices_are_whole and layout.grid is None
    assert layout.box(0) == Box(((0, 1), (0, 12), (0, 4)))
    assert layout.shard_group(5) == layout.replica_group(5) == (5,)


def test_groups_of_a_two_dimensional_mesh() -> None:
    grid = Grid((2, 3), (10, 11, 12, 20, 21, 22))
    assert grid.coordinate(21) == (1, 1)
    assert grid.slice_along((1,), 21) == (20, 21, 22)
    assert grid.slice_along((0,), 21) == (11, 21)
    assert grid.slice_along((0, 1), 21) == (10, 11, 12, 20, 21, 22)
    layout = Layout((6, 4), 0, 1, grid, (Split(1, ROWS, 3, 6, 1),))  # HSDP
    assert (layout.shard_axes, layout.replica_axes, layout.column_axes) == ((1,), (0,), ())
    assert [layout.box(rank).bounds[ROWS] for rank in grid.ranks] == [(0, 2), (2, 4), (4, 6)] * 2
    assert layout.matrices_are_whole is False
    columns = Layout((6, 4), 0, 1, grid, (Split(0, COLS, 2, 4, 1),))
    assert columns.column_axes == (0,)


def test_fsdp_over_tensor_parallel_rows() -> None:
    # Tensor parallelism cuts first, then FSDP cuts what is left: rows 0-1 of a half, not of a whole.
    grid = Grid((2, 2), (0, 1, 2, 3))  # (dp, tp)
    layout = Layout((10, 4), 0, 1, grid, (Split(1, ROWS, 2, 10, 1), Split(0, ROWS, 2, 10, 1)))
    assert [layout.box(rank).bounds[ROWS] for rank in range(4)] == [(0, 3), (5, 8), (3, 5), (8, 10)]
