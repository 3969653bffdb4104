"""The text of ``optimizer.describe()``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rowmuon.factors import why_plain
from rowmuon.groups import name_of
from rowmuon.routing import table

if TYPE_CHECKING:
    from torch import Tensor

    from rowmuon.layout import Layout
    from rowmuon.optimizer import PeriodicRowMuon
    from rowmuon.plan import StepPlan

__all__ = ["describe"]


def describe(optimizer: PeriodicRowMuon) -> str:
    """Tables of routing and buckets, and the cost of each kind of step on this rank."""
    rows = []
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            shape = "x".join(map(str, parameter.shape)) or "scalar"
            layout = optimizer._layouts.get(parameter)
            matrices = "" if layout is None else f"{layout.num_matrices} of {'x'.join(map(str, layout.matrix_shape))}"
            held = "" if layout is None else _placement(layout)
            phase = f"phase {optimizer.state[parameter]['phase']}" if optimizer.stagger and layout is not None else ""
            note = phase if parameter.requires_grad else "frozen"
            note = "; ".join(filter(None, (note, _cheap_step(optimizer, parameter))))
            rows.append((name_of(group, parameter), shape, group["algorithm"], matrices, held, note))
    parts = [table(("parameter", "shape", "algorithm", "matrices", "layout", ""), rows)]
    for group in optimizer.param_groups:
        hidden = ("params", "param_names")
        parts.append("group: " + ", ".join(f"{k}={v!r}" for k, v in group.items() if k not in hidden))
    parts.append("computed with: " + ", ".join(f"{k}={v}" for k, v in _options(optimizer).items()))
    refresh, row = optimizer.plan("refresh"), optimizer.plan("row")
    rank = optimizer._runtime.rank
    buckets = [
        (
            str(i),
            bucket.kind + (", shared by replicas" if bucket.shares_replicas else ""),
            f"{len(bucket.matrices)} of {bucket.num_rows}x{bucket.num_cols}",
            str(len(bucket.route(rank).owned)),
            f"{bucket.matrix_numel * bucket.comm_dtype.itemsize * len(bucket.route(rank).owned):,}",
        )
        for i, bucket in enumerate(refresh.buckets)
    ]
    parts.append(table(("bucket", "kind", "matrices", "owned here", "bytes of the stack"), buckets))
    # Staggered, all refresh together in the first step of each entry of the period alone.
    whole = "refresh of all" if optimizer.stagger else "refresh"
    parts.append("\n".join(_cost(kind, plan, rank) for kind, plan in ((whole, refresh), ("row step", row))))
    if row.gram_state_bytes(rank):
        num = sum(part.owned(rank) for renewal in refresh.renewals for part in renewal.rounds)
        parts.append(
            f"Gram row steps keep {row.gram_state_bytes(rank):,} bytes of state on rank {rank}, beside the momentum; a "
            f"refresh computes {num} of their factors there"
        )
    return "\n\n".join(parts)


def _cheap_step(optimizer: PeriodicRowMuon, parameter: Tensor) -> str:
    """What a parameter does between refreshes, where there is a choice."""
    layout = optimizer._layouts.get(parameter)
    if optimizer.options.cheap_step == "row" or layout is None:
        return ""
    shape = optimizer._gram_shape(parameter)
    if shape is None:
        return f"row steps: {why_plain(layout)}"
    return f"Gram row steps, {shape.num_blocks} of {shape.block}x{shape.block}"


def _options(optimizer: PeriodicRowMuon) -> dict[str, object]:
    """What the constructor decides and no group says."""
    options = optimizer.options
    state_dtype = optimizer.state_dtype or "the parameter's"
    names = ("cheap_step", "gram_decay", "gram_damping") if options.cheap_step != "row" else ()
    return {
        **{name: repr(getattr(options, name)) for name in names},
        "refresh": repr(options.refresh),
        "stagger": optimizer.stagger,
        "ns_dtype": optimizer.ns_dtype,
        "state_dtype": state_dtype,
        "comm_dtype": options.comm_dtype,
        "bucket_bytes": f"{options.bucket_bytes:,}",
        "overlap": repr(optimizer.overlap),
        "skip_nonfinite": optimizer.skip_nonfinite,
        "compile": optimizer.compile,
        "ns_kernels": repr(options.ns_kernels),
    }


def _placement(layout: Layout) -> str:
    if layout.grid is None:
        return "local"
    splits = ", ".join(f"{('stack', 'rows', 'columns')[s.view_dim]}/{s.num_parts}" for s in layout.splits)
    replicas = f"x{layout.num_replicas}" if layout.num_replicas > 1 else ""
    return " ".join(part for part in (splits, replicas) if part) or "whole"


def _cost(kind: str, plan: StepPlan, rank: int) -> str:
    return (
        f"{kind}: {plan.num_flops(rank):,} FLOPs, {plan.num_orthogonalizations(rank)} orthogonalisations, "
        f"{plan.num_collectives(rank)} collectives, {plan.bytes_sent(rank):,} bytes sent by rank {rank}, which takes "
        f"{plan.peak_bytes(rank):,} bytes of memory at most, beside parameters, gradients and state"
    )
