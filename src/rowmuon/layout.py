"""What each rank holds of each matrix, as frozen values.

A parameter is seen as a stack of matrices, ``(stack, rows, columns)``: the leading ``stack_dims`` dimensions count
independent matrices (experts), the next one is the rows (output features), the rest are flattened into columns.
``chunks`` matrices may lie above each other in the rows of one parameter (a fused qkv is three).

A mesh axis either replicates the parameter or splits one of its dimensions by ``torch.chunk``'s rule, so what a rank
holds is always one box of that view. Everything here is arithmetic on shapes: no process group, no tensor data.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["Box", "Grid", "Layout", "Split", "layout_of", "local_layout", "local_tensor"]

STACK, ROWS, COLS = range(3)


@dataclass(frozen=True)
class Box:
    """A half-open box of the (stack, rows, columns) view: ``bounds[d] = (start, stop)``."""

    bounds: tuple[tuple[int, int], tuple[int, int], tuple[int, int]]

    @property
    def shape(self) -> tuple[int, int, int]:
        (s0, s1), (r0, r1), (c0, c1) = self.bounds
        return (s1 - s0, r1 - r0, c1 - c0)

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    def intersect(self, other: Box) -> Box:
        """The common part; a box with no elements where there is none."""
        bounds = []
        for (a0, a1), (b0, b1) in zip(self.bounds, other.bounds, strict=True):
            start = max(a0, b0)
            bounds.append((start, max(start, min(a1, b1))))
        return Box((bounds[0], bounds[1], bounds[2]))

    def slices(self, origin: Box) -> tuple[slice, slice, slice]:
        """Where this box lies in a tensor that holds ``origin``."""
        parts = [slice(b0 - o0, b1 - o0) for (b0, b1), (o0, _) in zip(self.bounds, origin.bounds, strict=True)]
        return (parts[0], parts[1], parts[2])


@dataclass(frozen=True)
class Grid:
    """The ranks of a device mesh: ``ranks`` in row-major order of ``shape``."""

    shape: tuple[int, ...]
    ranks: tuple[int, ...]

    def __hash__(self) -> int:
        return self._hash  # thousands of ranks, and every layout on the mesh is a key that contains them

    @cached_property
    def _hash(self) -> int:
        return hash((self.shape, self.ranks))

    @cached_property
    def _coordinates(self) -> dict[int, tuple[int, ...]]:
        return dict(zip(self.ranks, itertools.product(*map(range, self.shape)), strict=True))

    def coordinate(self, rank: int) -> tuple[int, ...]:
        """Mesh coordinate of a global rank."""
        return self._coordinates[rank]

    def rises_along(self, axis: int) -> bool:
        """Whether the ranks rise along ``axis`` everywhere, as they do in their process groups."""
        return _rises_along(self, axis)

    def index_along(self, axes: tuple[int, ...], rank: int) -> int:
        """Position of ``rank`` on ``axes``, in row-major order of the mesh; its order of ranks may be any."""
        index = 0
        for axis in axes:
            index = index * self.shape[axis] + self._coordinates[rank][axis]
        return index

    def slice_along(self, axes: tuple[int, ...], rank: int) -> tuple[int, ...]:
        """The ranks that differ from ``rank`` on ``axes`` alone, itself included, in rising order.

        Rising order is the order of a torch process group over them, whatever the mesh's own order is.
        """
        return _slice_along(self, axes, rank)


@lru_cache(maxsize=256)
def _rises_along(grid: Grid, axis: int) -> bool:
    stride = math.prod(grid.shape[axis + 1 :])
    ends = stride * grid.shape[axis]
    return all(
        grid.ranks[i] < grid.ranks[i + stride] for i in range(len(grid.ranks) - stride) if i % ends < ends - stride
    )


@lru_cache(maxsize=4096)
def _slice_along(grid: Grid, axes: tuple[int, ...], rank: int) -> tuple[int, ...]:
    here = grid.coordinate(rank)
    strides = [math.prod(grid.shape[axis + 1 :]) for axis in range(len(grid.shape))]
    base = sum(here[axis] * strides[axis] for axis in range(len(grid.shape)) if axis not in axes)
    offsets = itertools.product(*(range(grid.shape[axis]) for axis in axes))
    return tuple(
        sorted(grid.ranks[base + sum(i * strides[a] for i, a in zip(offset, axes, strict=True))] for offset in offsets)
    )


@dataclass(frozen=True)
class Split:
    """Mesh axis ``axis`` splits view dimension ``view_dim`` into ``num_parts`` contiguous parts.

    The dimension that torch splits has ``length`` entries; each of them is ``unit`` entries of the view dimension
    (a convolution's input channel is kh * kw columns).
    """

    axis: int
    view_dim: int
    num_parts: int
    length: int
    unit: int


@dataclass(frozen=True)
class Layout:
    """One parameter: its view as matrices, and how a mesh divides it. Equal on all ranks.

    Args:
        shape: the global shape.
        stack_dims: number of leading dimensions that count independent matrices.
        chunks: matrices above each other in the rows.
        grid: the mesh, or None for a tensor that this process alone knows.
        splits: in the order in which they are applied (FSDP over TP splits by TP first).
    """

    shape: tuple[int, ...]
    stack_dims: int = 0
    chunks: int = 1
    grid: Grid | None = None
    splits: tuple[Split, ...] = ()

    @cached_property
    def view_shape(self) -> tuple[int, int, int]:
        """(stack, rows, columns) of the whole parameter."""
        return view_shape(self.shape, self.stack_dims)

    @cached_property
    def matrix_shape(self) -> tuple[int, int]:
        """(rows, columns) of one matrix: (out features, in features)."""
        _, rows, cols = self.view_shape
        return rows // self.chunks, cols

    @cached_property
    def num_matrices(self) -> int:
        return self.view_shape[STACK] * self.chunks

    def matrix_box(self, index: int) -> Box:
        """Where matrix ``index`` lies: stack-major, then chunk."""
        stack, chunk = divmod(index, self.chunks)
        num_rows, num_cols = self.matrix_shape
        return Box(((stack, stack + 1), (chunk * num_rows, (chunk + 1) * num_rows), (0, num_cols)))

    def box(self, rank: int) -> Box:
        """What ``rank`` holds."""
        return _box(self, rank)

    @cached_property
    def shard_axes(self) -> tuple[int, ...]:
        return tuple(sorted(split.axis for split in self.splits))

    @cached_property
    def replica_axes(self) -> tuple[int, ...]:
        if self.grid is None:
            return ()
        return tuple(a for a, size in enumerate(self.grid.shape) if size > 1 and a not in self.shard_axes)

    @cached_property
    def column_axes(self) -> tuple[int, ...]:
        """Mesh axes that split rows of the matrices between ranks, so that a row norm needs a sum over them."""
        return tuple(sorted(split.axis for split in self.splits if split.view_dim == COLS))

    def ranks_along(self, axes: tuple[int, ...], rank: int) -> tuple[int, ...]:
        return (rank,) if self.grid is None or not axes else self.grid.slice_along(axes, rank)

    def shard_index(self, rank: int) -> int:
        """Which part this rank holds: equal on all its replicas."""
        return 0 if self.grid is None else self.grid.index_along(self.shard_axes, rank)

    def replica_index(self, rank: int) -> int:
        """Which replica this rank belongs to: equal in the whole shard group."""
        return 0 if self.grid is None else self.grid.index_along(self.replica_axes, rank)

    def shard_group(self, rank: int) -> tuple[int, ...]:
        """The ranks that hold this rank's copy of the parameter between them."""
        return self.ranks_along(self.shard_axes, rank)

    def replica_group(self, rank: int) -> tuple[int, ...]:
        """The ranks that hold the same box as this one."""
        return self.ranks_along(self.replica_axes, rank)

    @cached_property
    def num_shards(self) -> int:
        return math.prod(split.num_parts for split in self.splits)

    @cached_property
    def num_replicas(self) -> int:
        return 1 if self.grid is None else len(self.grid.ranks) // self.num_shards

    @cached_property
    def matrices_are_whole(self) -> bool:
        """True if no border between ranks runs through a matrix, so that nothing need be sent to see one whole."""
        num_rows, _ = self.matrix_shape
        if any(split.view_dim == COLS for split in self.splits):
            return False
        if all(split.view_dim == STACK for split in self.splits):
            return True
        total = self.view_shape[ROWS]
        cuts = {bound for bounds in part_bounds(self.splits, ROWS, total) for bound in bounds}
        return all(cut % num_rows == 0 or cut == total for cut in cuts)


def view_shape(shape: tuple[int, ...], stack_dims: int) -> tuple[int, int, int]:
    """(stack, rows, columns) of a parameter of ``shape``."""
    return math.prod(shape[:stack_dims]), shape[stack_dims], math.prod(shape[stack_dims + 1 :])


def _chunk(start: int, stop: int, num_parts: int, part: int) -> tuple[int, int]:
    """Part ``part`` of [start, stop) by ``torch.chunk``'s rule: equal parts, the last ones short or empty."""
    size = -(-(stop - start) // num_parts)
    begin = min(start + part * size, stop)
    return begin, min(begin + size, stop)


@lru_cache(maxsize=65536)
def _box(layout: Layout, rank: int) -> Box:
    stack, rows, cols = layout.view_shape
    bounds = [(0, stack), (0, rows), (0, cols)]
    if layout.grid is not None:
        coordinate = layout.grid.coordinate(rank)
        for dim in (STACK, ROWS, COLS):
            splits = [split for split in layout.splits if split.view_dim == dim]
            if splits:
                start, stop = 0, splits[0].length
                for split in splits:
                    start, stop = _chunk(start, stop, split.num_parts, coordinate[split.axis])
                bounds[dim] = (start * splits[0].unit, stop * splits[0].unit)
    return Box((bounds[0], bounds[1], bounds[2]))


def part_bounds(splits: tuple[Split, ...], view_dim: int, length: int) -> list[tuple[int, int]]:
    """All parts into which ``splits`` cut a view dimension of ``length``, in rising order of their start."""
    mine = [split for split in splits if split.view_dim == view_dim]
    if not mine:
        return [(0, length)]
    parts = [(0, mine[0].length)]
    for split in mine:
        parts = [_chunk(a, b, split.num_parts, i) for a, b in parts for i in range(split.num_parts)]
    return [(a * mine[0].unit, b * mine[0].unit) for a, b in parts]


# ---------------------------------------------------------------------------------------------- from tensors


def local_layout(shape: tuple[int, ...], *, stack_dims: int, chunks: int) -> Layout:
    """The layout of a tensor that only this process works on."""
    return Layout(tuple(shape), stack_dims, chunks)


def layout_of(
    tensor: Tensor, *, name: str, stack_dims: int, chunks: int, process_group: ProcessGroup | None = None
) -> Layout:
    """The layout of a parameter, from its DTensor placements or, for a plain tensor, from ``process_group``.

    Args:
        tensor: a DTensor; or a plain tensor, replicated over ``process_group`` if that is given.
        name: for error messages.
        stack_dims, chunks: as in :class:`Layout`.

    Raises:
        ValueError: a placement that can't be worked on where it lies, naming parameter, shape and placements.
    """
    shape = tuple(tensor.shape)
    placements = getattr(tensor, "placements", None)
    if placements is None:
        if process_group is None:
            return local_layout(shape, stack_dims=stack_dims, chunks=chunks)
        ranks = tuple(torch.distributed.get_process_group_ranks(process_group))
        return Layout(shape, stack_dims, chunks, Grid((len(ranks),), tuple(sorted(ranks))))
    mesh = tensor.device_mesh  # type: ignore[attr-defined]
    grid = grid_of(mesh)
    for axis, placement in enumerate(placements):
        if not placement.is_replicate() and not grid.rises_along(axis):
            raise ValueError(
                f"parameter {name!r} {shape}, placements {placements}: it is split along mesh axis {axis}, on which "
                f"the ranks of the mesh, {mesh.mesh.tolist()}, don't rise. torch deals such shards by the order of "
                "ranks in the process group in some operations and by the order in the mesh in others. Make the mesh "
                "of rising ranks (init_device_mesh does)."
            )
    splits = tuple(
        _split(axis, tensor_dim, grid, shape, stack_dims, f"parameter {name!r} {shape}, placements {placements}")
        for axis, tensor_dim in _split_order(placements, grid, f"parameter {name!r} {shape}")
    )
    layout = Layout(shape, stack_dims, chunks, grid, splits)
    rank = torch.distributed.get_rank()
    if mesh.get_coordinate() is None:
        raise ValueError(
            f"parameter {name!r} {shape}: rank {rank} is none of its mesh's ranks {list(grid.ranks)}. Give each rank's "
            "optimizer the parameters that live on that rank, as with pipeline stages."
        )
    held = tuple(tensor.to_local().shape)  # type: ignore[attr-defined]
    right = layout.box(rank)
    if math.prod(held) != right.numel or (right.numel and view_shape(held, stack_dims) != right.shape):
        raise ValueError(
            f"parameter {name!r} {shape}, placements {placements}: rank {rank} holds {held}, but these placements "
            f"put {right.shape} of (stack, rows, columns) there. Distribute it with torch.chunk's rule "
            "(fully_shard, distribute_tensor and parallelize_module do)."
        )
    return layout


@lru_cache(maxsize=256)
def grid_of(mesh: DeviceMesh) -> Grid:
    """The ranks of a device mesh. Read outside of any fake mode: they're facts about the cluster, not tensor data."""
    with _disable_current_modes():
        return Grid(tuple(mesh.shape), tuple(mesh.mesh.flatten().tolist()))


def _split_order(placements: tuple, grid: Grid, what: str) -> list[tuple[int, int]]:
    """(mesh axis, tensor dimension) of each split, in the order of application.

    Plain shards apply from left to right. A strided shard says how many parts exist before it cuts them further, so
    it goes behind the axes that make those parts (FSDP2 on top of TP).
    """
    order: list[tuple[int, int]] = []
    for axis in reversed(range(len(placements))):
        placement = placements[axis]
        if grid.shape[axis] == 1 or placement.is_replicate():
            continue
        if placement.is_partial():
            raise ValueError(
                f"{what}, placements {placements}: a partial parameter has no shard that a step could update. "
                "Redistribute it to Shard or Replicate."
            )
        dim, factor = placement.dim, getattr(placement, "split_factor", 1)
        before = [entry for entry in order if entry[1] == dim]
        num_before = 0
        while factor > 1 and num_before < len(before):
            factor, rest = divmod(factor, grid.shape[before[num_before][0]])
            num_before += 1
            if rest:
                factor = 0
        if factor != 1:
            raise ValueError(
                f"{what}, placements {placements}: the strided shard's split_factor isn't the number of parts that "
                "the other mesh axes make of that dimension. Apply tensor parallelism first, then fully_shard."
            )
        position = order.index(before[num_before - 1]) + 1 if num_before else 0
        order.insert(position, (axis, dim))
    return order


def _split(axis: int, dim: int, grid: Grid, shape: tuple[int, ...], stack_dims: int, what: str) -> Split:
    dim %= len(shape)
    if dim < stack_dims:
        view_dim, first, unit = STACK, 0, math.prod(shape[1:stack_dims])
    elif dim == stack_dims:
        view_dim, first, unit = ROWS, stack_dims, 1
    else:
        view_dim, first, unit = COLS, stack_dims + 1, math.prod(shape[stack_dims + 2 :])
    if dim != first:
        raise ValueError(
            f"{what}: dimension {dim} is split, and what a rank then holds of the (stack, rows, columns) view isn't "
            f"contiguous. Shard dimension {first} instead."
        )
    return Split(axis, view_dim, grid.shape[axis], shape[dim], unit)


def local_tensor(tensor: Tensor) -> Tensor:
    """This rank's part of a DTensor (sharing its memory), or the tensor itself."""
    to_local = getattr(tensor, "to_local", None)
    return tensor if to_local is None else to_local()
