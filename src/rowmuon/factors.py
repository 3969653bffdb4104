"""Gram row steps of whole parameters: which take them, what they keep, and what a refresh and a step do with it.

Local arithmetic only. `rowmuon.gram` has the formulas, `rowmuon.runtime` sends.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import lru_cache, partial
from typing import Any, Protocol

import torch
from torch import Tensor

from rowmuon import gram
from rowmuon.gram import GramShape, GramState
from rowmuon.layout import STACK, Layout, local_tensor
from rowmuon.plan import PlanOptions
from rowmuon.shards import Shard
from rowmuon.stacks import GramStack

__all__ = [
    "GRAM_KEYS",
    "check_gram_period",
    "gram_dtypes",
    "gram_shape",
    "gram_state",
    "init_gram_state",
    "prepare_gram_row_steps",
    "renew_factors",
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


def init_gram_state(parameter: Tensor, shape: GramShape | None) -> dict[str, Any]:
    """Before the first refresh: no mean yet, and the identity. Plain tensors, the same on every rank."""
    if shape is None:
        return {}
    device = local_tensor(parameter).device
    factor = torch.eye(shape.block, dtype=shape.factor_dtype, device=device).repeat(shape.num_blocks, 1, 1)
    return {
        "gram_ema": torch.zeros(shape.size, dtype=shape.dtype, device=device),
        "gram_factor": factor,
        "num_grams": 0,
    }


def gram_dtypes(ns_dtype: torch.dtype) -> tuple[torch.dtype, torch.dtype]:
    """Of E, and of Q."""
    return torch.promote_types(ns_dtype, torch.float32), ns_dtype


def gram_state(state: Mapping[str, Any]) -> GramState | None:
    return GramState(state["gram_ema"], state["gram_factor"]) if "gram_ema" in state else None


# -------------------------------------------------------------------------------------------------------- a refresh


class Work(Protocol):
    """A collective under way."""

    def wait(self) -> object:
        """Until it is done."""


def renew_factors(
    stacks: Sequence[GramStack],
    shards: Sequence[Shard],
    options: PlanOptions,
    all_reduce: Callable[..., Work],
    phase: Callable[[str], AbstractContextManager[Any]],
) -> None:
    """Takes Gram matrices into their means and renews the factors: while one stack is summed, the next one is made.

    Args:
        stacks: that are summed over the same ranks.
        shards: this rank's, by the plan's entries; every momentum has taken its gradient in.
        all_reduce: of a tensor over ranks, in place; takes ``maximum``.
        phase: see `rowmuon.runtime.Phase`.
    """
    ranks = stacks[0].ranks
    alone = len(ranks) == 1
    with phase("newton_schulz"):
        largest = _largest_entries([shards[i] for stack in stacks for i in stack.members], stacks[0].dtype)
    if not alone:
        with phase("gather"):
            all_reduce(largest, ranks, maximum=True).wait()
    under_way: list[tuple[list[Shard], Tensor, Work | None]] = []
    for stack, tops in zip(stacks, largest.split([len(stack.members) for stack in stacks]), strict=True):
        members = [shards[i] for i in stack.members]
        with phase("newton_schulz"):
            total = _sum_grams(stack, members, tops)
        under_way.append((members, total, None if alone else all_reduce(total, ranks)))
        del total
        while len(under_way) > (0 if alone or stack is stacks[-1] else 1):
            members, total, work = under_way.pop(0)
            if work is not None:
                with phase("gather"):
                    work.wait()
            with phase("newton_schulz"):
                _factorize(members, total, options)
            del total, work


def _largest_entries(shards: Sequence[Shard], dtype: torch.dtype) -> Tensor:
    """(number of shards,): `rowmuon.gram.largest_entry` of each."""
    found = [gram.largest_entry(*_momentum_and_grad(s), nesterov=s.hyper.nesterov, dtype=dtype) for s in shards]
    return torch.stack(found)


def _sum_grams(stack: GramStack, members: Sequence[Shard], largest: Tensor) -> Tensor:
    """(blocks of all members, b, b): what this rank's rows add. ``largest``, of each member, is over all ranks."""
    total = members[0].local_weight.new_zeros(stack.size, dtype=stack.dtype)
    for shard, part, top in zip(members, total.split(stack.num_blocks), largest.unbind(), strict=True):
        momentum, grad = _momentum_and_grad(shard)
        h = shard.hyper
        gram.add_gram_(part, momentum, grad, top, beta=h.beta, nesterov=h.nesterov, maximize=h.maximize)
    return total


def _factorize(members: Sequence[Shard], total: Tensor, options: PlanOptions) -> None:
    """Takes the sums of all ranks into the members' means, and renews their factors. ``total`` is overwritten."""
    states = [shard.gram for shard in members if shard.gram is not None]
    parts = total.split(len(total) // len(states))
    for state, part in zip(states, parts, strict=True):
        gram.update_gram_(state.ema, part, decay=options.gram_decay)
        part.copy_(state.ema)
    gram.factorize_(total, options.gram_damping, torch.finfo(states[0].factor.dtype).eps)
    for state, part in zip(states, parts, strict=True):
        state.factor.copy_(part)


def _momentum_and_grad(shard: Shard) -> tuple[Tensor, Tensor | None]:
    """As (rows, columns). The momentum has taken the gradient in; without a gradient it stands for the direction."""
    grad = None if shard.grad is None else shard.grad.flatten(0, 1)
    return shard.momentum.flatten(0, 1), grad


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
