"""Gram row steps of whole parameters: which take them, what they keep, and the step itself.

`rowmuon.gram` has the formulas; `rowmuon.renewal` says what a refresh does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor

from rowmuon import gram
from rowmuon.gram import GramShape, GramState
from rowmuon.layout import ROWS, STACK, Layout, local_tensor
from rowmuon.plan import PlanOptions
from rowmuon.shards import Shard
from rowmuon.stacks import mean_layout

__all__ = [
    "GRAM_KEYS",
    "check_gram_period",
    "gram_dtypes",
    "gram_shape",
    "gram_state",
    "init_gram_state",
    "place_mean",
    "prepare_gram_row_steps",
    "why_plain",
]

GRAM_KEYS = ("gram_ema", "gram_factor", "num_grams")
"""Of a parameter's state. ``num_grams``: refreshes that have gone into the first two."""


def why_plain(layout: Layout) -> str:
    """Why a parameter takes plain row steps where Gram row steps are asked for; empty if it doesn't."""
    if layout.column_axes:
        return "its rows are split between ranks"
    if layout.view_shape[STACK] > 1:
        return "it is a stack of matrices"
    return ""


def gram_block(layout: Layout) -> int:
    """Columns that have a Gram matrix of their own: all, or of a wide matrix as many as one of its chunks has rows.

    So what is kept of a parameter is never more than of as many square ones. All chunks share it: they have the same
    inputs. The rows of one chunk decide the width, those of all chunks make up the Gram matrix.
    """
    num_rows, num_cols = layout.matrix_shape
    return num_rows if num_cols > num_rows and num_cols % num_rows == 0 else num_cols


@lru_cache(maxsize=4096)
def gram_shape(layout: Layout, options: PlanOptions, ns_dtype: torch.dtype) -> GramShape | None:
    """What is kept of a parameter; None if it takes plain row steps."""
    if options.cheap_step != "gram_row" or why_plain(layout):
        return None
    block = gram_block(layout)
    return GramShape(layout.matrix_shape[1] // block, block, ns_dtype, options.gram_damping)


def check_gram_period(group: Mapping[str, Any], options: PlanOptions, where: str) -> None:
    """Raises ValueError where Gram row steps are asked for and, at some time, no refresh comes any more."""
    period = group.get("period", 1)  # AdamW's groups have none
    segments = period if isinstance(period, (tuple, list)) else ((0, period),)
    if options.cheap_step == "gram_row" and any(every is None for _, every in segments):
        raise ValueError(
            f'period={period!r} in {where} with cheap_step="gram_row": what a Gram row step goes by is renewed at '
            'refreshes, and None has none after the first. Give a K, or take cheap_step="row".'
        )


# ------------------------------------------------------------------------------------------------------------ state


def init_gram_state(parameter: Tensor, shape: GramShape | None, layout: Layout) -> dict[str, Any]:
    """Before the first refresh: no mean yet, and the identity.

    Args:
        parameter: whose state it is.
        shape: of what is kept; None keeps nothing.
        layout: of the parameter.

    Returns:
        ``gram_ema``, packed: a DTensor whose rows are split over the ranks that share the parameter, or a plain tensor
        where nobody does. ``gram_factor``, whole on every rank. ``num_grams``.
    """
    if shape is None:
        return {}
    device = local_tensor(parameter).device
    factor = torch.eye(shape.block, dtype=shape.factor_dtype, device=device).repeat(shape.num_blocks, 1, 1)
    start, stop = _rows_here(shape, layout)
    rows = torch.zeros(stop - start, shape.packed_size[1], dtype=shape.dtype, device=device)
    return {"gram_ema": _as_dtensor(rows, parameter, shape, layout), "gram_factor": factor, "num_grams": 0}


def place_mean(mean: Tensor, parameter: Tensor, shape: GramShape, layout: Layout) -> Tensor:
    """A copy of a mean, whole or split in whatever way, as `init_gram_state` places it.

    One that is split in another way is gathered first, by all ranks.
    """
    gather = getattr(mean, "full_tensor", None)
    mesh, placements = getattr(parameter, "device_mesh", None), _placements(parameter, layout)
    if gather is not None and (mean.device_mesh, mean.placements) == (mesh, placements):  # type: ignore[attr-defined]
        return mean.clone()
    whole = mean if gather is None else gather()
    start, stop = _rows_here(shape, layout)
    rows = whole[start:stop].to(local_tensor(parameter).device, copy=True)
    return _as_dtensor(rows, parameter, shape, layout)


def _rows_here(shape: GramShape, layout: Layout) -> tuple[int, int]:
    rank = 0 if layout.grid is None else torch.distributed.get_rank()
    return mean_layout(layout, shape).box(rank).bounds[ROWS]


def _placements(parameter: Tensor, layout: Layout) -> tuple[Any, ...] | None:
    """Of a parameter's mean on the parameter's mesh; None: it is a plain tensor."""
    if layout.num_shards == 1:
        return None
    from torch.distributed.tensor import Replicate, Shard

    num_axes = parameter.device_mesh.ndim  # type: ignore[attr-defined]
    return tuple(Shard(0) if axis in layout.shard_axes else Replicate() for axis in range(num_axes))


def _as_dtensor(rows: Tensor, parameter: Tensor, shape: GramShape, layout: Layout) -> Tensor:
    placements = _placements(parameter, layout)
    if placements is None:
        return rows
    from torch.distributed.tensor import DTensor

    size, mesh = torch.Size(shape.packed_size), parameter.device_mesh  # type: ignore[attr-defined]
    return DTensor.from_local(rows, mesh, placements, run_check=False, shape=size, stride=(size[1], 1))


def gram_dtypes(ns_dtype: torch.dtype) -> tuple[torch.dtype, torch.dtype]:
    """Of E, and of Q."""
    return torch.promote_types(ns_dtype, torch.float32), ns_dtype


def gram_state(state: Mapping[str, Any]) -> GramState | None:
    return GramState(local_tensor(state["gram_ema"]), state["gram_factor"]) if "gram_ema" in state else None


# --------------------------------------------------------------------------------------------------------- the step


def prepare_gram_row_steps(shards: Sequence[Shard]) -> Callable[[], None]:
    """The Gram row step of these parameters, which must have whole rows here; to be called once."""
    steps = []
    for shard in shards:
        if shard.local_grad is None:
            continue
        assert shard.gram is not None
        weight, momentum, grad = shard.rows
        steps.append(
            partial(
                gram.gram_row_step_,
                [weight],
                [momentum],
                [grad],
                [shard.gram.factor],
                scales=[shard.row_scale],
                **shard.hyper.arguments(),
            )
        )

    def apply() -> None:
        for step in steps:
            step()

    return apply
