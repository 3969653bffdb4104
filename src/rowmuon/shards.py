"""One parameter's tensors on this rank, and what a step does to parts of them. Local arithmetic and copies only."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache, partial
from typing import Any

import torch
from torch import Tensor

from rowmuon import compiled
from rowmuon.buckets import Bucket, Piece, Route, lies_in_order
from rowmuon.gram import GramState
from rowmuon.groups import name_of
from rowmuon.layout import ROWS, Box, Layout, local_tensor
from rowmuon.update import (
    AdjustLr,
    apply_direction_,
    apply_split_row_step_,
    row_step_,
    row_step_scale,
    spectral_scale,
    split_row_sums_,
    update_momentum_,
    write_direction,
)

__all__ = ["Hyper", "Shard", "make_shard"]


@dataclass
class Hyper:
    """A group's settings in this step. ``lr`` may be a 0-dim tensor and is never read back."""

    lr: float | Tensor
    weight_decay: float
    beta: float
    nesterov: bool
    eps: float
    maximize: bool

    @classmethod
    def of(cls, group: Mapping[str, Any]) -> Hyper:
        names = ("lr", "weight_decay", "momentum", "nesterov", "eps", "maximize")
        return cls(*(group[name] for name in names))

    def arguments(self) -> dict[str, Any]:
        """All of them, by the names that row steps give them."""
        return dict(vars(self))


@dataclass
class Shard:
    """One Muon parameter's tensors on this rank, of which the step sees (stack, rows, columns) views by ``box``.

    Views are made when they are asked for, and never kept from one step to the next: a parameter's memory may be
    another then. A missing gradient leaves weight and momentum as they are; the momentum then stands for the direction
    in what other ranks are owed.
    """

    box: Box
    local_weight: Tensor
    local_momentum: Tensor
    local_grad: Tensor | None
    hyper: Hyper
    spectral_scale: float
    row_scale: float
    has_momentum: bool = False  # whether this step's gradient is in the momentum already
    copies: list[tuple[Tensor, Tensor]] = field(default_factory=list)  # (tensor, its copy where no view was possible)
    gram: GramState | None = None  # of a parameter that takes Gram row steps

    @cached_property
    def weight(self) -> Tensor:
        return self._view_or_copy(self.local_weight)

    @cached_property
    def momentum(self) -> Tensor:
        return self._view_or_copy(self.local_momentum)

    @cached_property
    def grad(self) -> Tensor | None:
        return None if self.local_grad is None else self.local_grad.reshape(self.box.shape)

    def _view_or_copy(self, local: Tensor) -> Tensor:
        view = _view(local, self.box.shape)
        if view is None:
            view = local.reshape(self.box.shape).contiguous()
            self.copies.append((local, view))
        return view

    @property
    def rows(self) -> tuple[Tensor, Tensor, Tensor]:
        """Weight, momentum and gradient as (stack * rows, columns): what a row step works on. There is a gradient."""
        assert self.local_grad is not None
        if self.local_weight.shape == self.box.shape[1:]:  # they are that, whatever their strides
            return self.local_weight, self.local_momentum, self.local_grad
        assert self.grad is not None
        return self.weight.flatten(0, 1), self.momentum.flatten(0, 1), self.grad.flatten(0, 1)

    def write_back(self) -> None:
        """After the step: where a tensor's strides allowed no view of it as matrices, its copy goes back into it."""
        for tensor, copy in self.copies:
            tensor.copy_(copy.view(tensor.shape))


def make_shard(
    parameter: Tensor, momentum: Tensor, layout: Layout, rank: int, group: Mapping[str, Any], hyper: Hyper
) -> Shard:
    """This rank's part of a parameter. Its gradient must be placed as it is.

    Raises:
        ValueError: a gradient that is placed otherwise; the parameter is named.
    """
    spectral, row = _scales(layout.matrix_shape, group["adjust_lr_fn"])
    return Shard(
        layout.box(rank),
        local_tensor(parameter),
        local_tensor(momentum),
        _gradient(parameter, group),
        hyper,
        spectral,
        group["row_scale"] * row,
    )


@lru_cache(maxsize=1024)
def _scales(matrix_shape: tuple[int, int], adjust_lr_fn: AdjustLr) -> tuple[float, float]:
    return spectral_scale(*matrix_shape, adjust_lr_fn), row_step_scale(*matrix_shape, adjust_lr_fn)


def _view(tensor: Tensor, shape: tuple[int, int, int]) -> Tensor | None:
    """``tensor`` as (stack, rows, columns), if that and the matrices above each other are both views of it."""
    try:
        view = tensor.view(shape)
        view.view(shape[0] * shape[1], shape[2])
    except RuntimeError:
        return None
    return view


def _gradient(parameter: Tensor, group: Mapping[str, Any]) -> Tensor | None:
    grad = parameter.grad
    if grad is None:
        return None
    if getattr(grad, "placements", None) != getattr(parameter, "placements", None):
        raise ValueError(
            f"parameter {name_of(group, parameter)!r} is placed {getattr(parameter, 'placements', None)}, its gradient "
            f"{getattr(grad, 'placements', None)}. Redistribute the gradient before the step."
        )
    return local_tensor(grad)


def row_sums(shard: Shard, *, compile: bool = False) -> Tensor:
    if shard.local_grad is None:
        momentum = shard.momentum.flatten(0, 1)
        sums = torch.linalg.vector_norm(momentum, dim=1, dtype=torch.promote_types(momentum.dtype, torch.float32))
        return sums.square_()
    h = shard.hyper
    _, momentum, grad = shard.rows
    sum_rows_ = compiled.split_row_sums_ if compile else split_row_sums_
    return sum_rows_(momentum, grad, beta=h.beta, nesterov=h.nesterov, maximize=h.maximize)


def finish_split_rows(shard: Shard, sums: Tensor, *, compile: bool = False) -> None:
    if shard.local_grad is None:
        return
    apply = compiled.apply_split_row_step_ if compile else apply_split_row_step_
    apply(
        *shard.rows,
        sums,
        scale=shard.row_scale,
        **shard.hyper.arguments(),
    )


def take_gradient(shard: Shard) -> None:
    """Once a step, whether this rank sends anything of it or not: a replica's momentum must not fall behind."""
    if shard.grad is None or shard.has_momentum:
        return
    momentum, grad = shard.momentum.flatten(0, 1), shard.grad.flatten(0, 1)
    update_momentum_(momentum, grad, beta=shard.hyper.beta, maximize=shard.hyper.maximize)
    shard.has_momentum = True


def write_part(shard: Shard, piece: Piece, buffer: Tensor) -> None:
    """Writes the direction in ``piece`` into its place in a flat buffer; the same before `take_gradient` and after."""
    out = buffer[piece.offset : piece.offset + piece.numel].view(piece.box.shape)[0]
    where = piece.box.slices(shard.box)
    where = (where[0].start, *where[1:])
    h = shard.hyper
    if shard.grad is None:
        out.copy_(shard.momentum[where])
        return
    momentum, grad, taken = shard.momentum[where], shard.grad[where], shard.has_momentum
    write_direction(momentum, grad, out, beta=h.beta, nesterov=h.nesterov, maximize=h.maximize, taken=taken)


def apply_part(shard: Shard, box: Box, part: Tensor) -> None:
    if shard.grad is None:
        return
    where = box.slices(shard.box)
    weight = shard.weight[where].squeeze(0)
    apply_direction_(
        weight,
        part.view(weight.shape),
        lr=shard.hyper.lr,
        weight_decay=shard.hyper.weight_decay,
        scale=shard.spectral_scale,
    )


def with_gradients(bucket: Bucket, route: Route, shards: Sequence[Shard] | Mapping[int, Shard]) -> Route:
    """A local bucket without the matrices that have no gradient: nobody else waits for them."""
    owned = tuple(p for p in route.owned if shards[bucket.matrices[p].entry].grad is not None)
    if owned == route.owned:
        return route
    mine = tuple(bucket.parts(owned, route.group[0]))
    return Route(route.group, mine, (), (), owned, mine, mine)


def assemble(bucket: Bucket, route: Route, received: Tensor) -> Tensor:
    """The owned matrices, stacked: (number owned, rows, columns). A view where they already lie like that."""
    shape = (len(route.owned), bucket.num_rows, bucket.num_cols)
    if received.numel() == math.prod(shape) and lies_in_order(bucket, route):
        return received.view(shape)
    stack = received.new_empty(shape)
    for part, buffer in _piece_views(bucket, route, stack, received):
        part.copy_(buffer)
    return stack


def disassemble(bucket: Bucket, route: Route, stack: Tensor) -> Tensor:
    """The inverse of `assemble`, into a buffer in the bucket's dtype of communication."""
    if lies_in_order(bucket, route) and sum(route.recv_counts) == stack.numel():
        return stack.to(bucket.comm_dtype).flatten()
    send = stack.new_empty(sum(route.recv_counts), dtype=bucket.comm_dtype)
    for part, buffer in _piece_views(bucket, route, stack, send):
        buffer.copy_(part)
    return send


def _piece_views(bucket: Bucket, route: Route, stack: Tensor, buffer: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Pairs of equal-shaped views: where each piece belongs in the stack, and where it lies in the buffer."""
    slot = {position: i for i, position in enumerate(route.owned)}
    for piece in route.assemble:
        part = stack[slot[piece.matrix]][piece.box.slices(bucket.matrices[piece.matrix].box)[1:]]
        num_rows, num_cols = part.shape
        if piece.dim == ROWS:
            rows = num_rows // piece.count
            part = part.unflatten(0, (piece.count, rows))
            size, stride = (piece.count, rows, num_cols), (piece.stride, num_cols, 1)
        else:
            cols = num_cols // piece.count
            part = part.unflatten(1, (piece.count, cols)).transpose(0, 1)
            size, stride = (piece.count, num_rows, cols), (piece.stride, cols, 1)
        yield part, buffer.as_strided(size, stride, buffer.storage_offset() + piece.offset)


def prepare_row_steps(whole: Sequence[Shard], split: Sequence[Shard], *, compile: bool = False) -> Callable[[], None]:
    """Compiles what the row steps take, before anything has changed.

    Args:
        whole: parameters whose rows are whole here.
        split: parameters whose rows are split between ranks; `row_sums` and `finish_split_rows` step them.
        compile: whether they are compiled at all.

    Returns:
        The row step of ``whole``, all of a group in one call; to be called once.

    Raises:
        RuntimeError: it can't be built here.
    """
    steps = [_prepare_row_step(members, compile) for members in _by_group(whole)]
    for shard in split if compile else ():
        if shard.local_grad is not None:
            compiled.build_split_row_step(*shard.rows)

    def apply() -> None:
        for step in steps:
            step()

    return apply


def _prepare_row_step(members: Sequence[Shard], compile: bool) -> Callable[[], None]:
    weights, momenta, grads = zip(*(shard.rows for shard in members), strict=True)
    scales = [shard.row_scale for shard in members]
    if compile:
        step = compiled.prepare_row_step(weights, momenta, grads, scales)
    else:
        step = partial(row_step_, weights, momenta, grads, scales=scales)
    return partial(step, **members[0].hyper.arguments())


def _by_group(shards: Sequence[Shard]) -> list[list[Shard]]:
    """Those that have a gradient, by parameter group."""
    groups: dict[int, list[Shard]] = {}
    for shard in shards:
        if shard.local_grad is not None:
            groups.setdefault(id(shard.hyper), []).append(shard)
    return list(groups.values())
