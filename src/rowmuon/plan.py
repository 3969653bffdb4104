"""From layouts to a frozen plan of one step: buckets, owners, routes, bytes, FLOPs. No process group, no tensor.

A plan is the same on all ranks; what one rank sends, receives and computes is read off it by `Bucket.route`.
`runtime.py` executes plans and `rowdit.cost` prices them.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal, Protocol

import torch

from rowmuon.buckets import Bucket, Matrix, needs_exchange, travels
from rowmuon.gram import LEAST_DAMPING, GramShape
from rowmuon.layout import Layout
from rowmuon.memory import peak_bytes
from rowmuon.owners import assign_owners, cut_into_buckets, sharing_pays
from rowmuon.schedule import Schedule, make_schedule
from rowmuon.stacks import Renewal, gram_bytes, gram_flops, make_renewals, mean_layout
from rowmuon.symmetric import Kernels

__all__ = ["CheapStep", "Entry", "PlanOptions", "StepPlan", "build_plan", "explain_difference", "plan_hash"]

RefreshMode = Literal["exchange", "gather"]
CheapStep = Literal["row", "gram_row"]

FLOPS_PER_BYTE = 10_000.0
"""Matmul FLOPs that take as long as sending one byte: about 500 TFLOP/s against a 400 Gbit/s link."""


@dataclass(frozen=True)
class PlanOptions:
    """What the constructor of the optimizer fixes about how a step is computed."""

    refresh: RefreshMode = "exchange"
    comm_dtype: torch.dtype = torch.bfloat16
    bucket_bytes: int = 64 << 20
    flops_per_byte: float = FLOPS_PER_BYTE
    ahead_bytes: int = 0
    """What buckets that are sent out during backward may hold on a rank, about; 0: none is sent out before the step."""
    cheap_step: CheapStep = "row"
    gram_decay: float = 0.8
    gram_damping: float = 1e-3
    ns_kernels: Kernels = "torch"

    def __post_init__(self) -> None:
        if self.cheap_step not in ("row", "gram_row"):
            raise ValueError(f"cheap_step={self.cheap_step!r} is neither 'row' nor 'gram_row'")
        if self.ns_kernels not in ("torch", "triton"):
            raise ValueError(f"ns_kernels={self.ns_kernels!r} is neither 'torch' nor 'triton'")
        if not _is_number(self.gram_decay) or not 0.0 <= self.gram_decay < 1.0:
            raise ValueError(f"gram_decay={self.gram_decay!r} isn't a number in [0, 1)")
        if not _is_number(self.gram_damping) or not LEAST_DAMPING <= self.gram_damping < math.inf:
            raise ValueError(f"gram_damping={self.gram_damping!r} isn't a finite number >= {LEAST_DAMPING}")
        if self.refresh not in ("exchange", "gather"):
            raise ValueError(f"refresh={self.refresh!r} is neither 'exchange' nor 'gather'")
        if self.comm_dtype not in (torch.bfloat16, torch.float32, torch.float64):
            raise ValueError(f"comm_dtype={self.comm_dtype} isn't torch.bfloat16, torch.float32 or torch.float64")
        if isinstance(self.bucket_bytes, bool) or not isinstance(self.bucket_bytes, int) or self.bucket_bytes < 1:
            raise ValueError(f"bucket_bytes={self.bucket_bytes!r} isn't a positive number of bytes")
        if isinstance(self.ahead_bytes, bool) or not isinstance(self.ahead_bytes, int) or self.ahead_bytes < 0:
            raise ValueError(f"ahead_bytes={self.ahead_bytes!r} isn't a number of bytes >= 0")


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


class Workspace(Protocol):
    """Bytes that the arithmetic on one parameter has allocated at a time, at most. Shapes are of what a rank holds.

    The formulas lie with the arithmetic (`rowmuon.entries` brings them together); a plan only asks.
    """

    @property
    def dtype(self) -> torch.dtype:
        """Of what the orthogonalisation returns."""

    def momentum(self, num_rows: int, num_cols: int) -> int:
        """Taking the gradient into the momentum."""

    def part(self, num_rows: int, num_cols: int, sent: torch.dtype, received: torch.dtype) -> int:
        """Writing the direction to a buffer of dtype ``sent``, or applying a result of dtype ``received``."""

    def part_ahead(self, num_rows: int, num_cols: int, sent: torch.dtype) -> int:
        """Writing the direction before the momentum has taken the gradient."""

    def rows(self, num_rows: int, num_cols: int) -> tuple[int, int]:
        """A row step: scratch that serves one matrix after another, and the rest."""

    def gram(self, num_rows: int, num_cols: int, dtype: torch.dtype) -> int:
        """Adding up a Gram matrix of that dtype, beside it."""

    def gram_rows(self, num_rows: int, num_cols: int, dtype: torch.dtype) -> int:
        """A Gram row step with a factor of that dtype."""

    def stack(self, num_matrices: int, source_dtype: torch.dtype | None) -> int:
        """Orthogonalising a stack, beside the stack itself. None: in place."""


@dataclass(frozen=True)
class Entry:
    """One Muon parameter as the plan sees it.

    Args:
        name: for tables and error messages; not part of any decision.
        layout: its layout.
        dtype: of the momentum.
        device: device type; tensors of different types are never stacked.
        kernel: everything the orthogonalisation depends on besides shape (coefficients, eps, dtype), as plain data.
            Matrices are stacked only where it is equal.
        num_flops: of orthogonalising one of its matrices.
        workspace: what its arithmetic allocates; only `StepPlan.peak_bytes` asks for it.
        depth: about where in the model it lies, from 0 at its begin to 1. Backward comes to the deepest first.
        gram: what its Gram row steps keep; None if it takes plain row steps.
    """

    name: str
    layout: Layout
    dtype: torch.dtype
    device: str
    kernel: tuple
    num_flops: int
    workspace: Workspace | None = field(default=None, compare=False, repr=False)
    depth: float = 0.0
    gram: GramShape | None = None


# ------------------------------------------------------------------------------------------------ the whole step


@dataclass(frozen=True)
class SplitRows:
    """``members`` are entries whose rows are split between ``ranks``: their partial sums take one all-reduce.

    dtype: of the sums, float32 (float64 for a float64 momentum), whatever this rank's gradients are.
    """

    ranks: tuple[int, ...]
    dtype: torch.dtype
    members: tuple[int, ...]


@dataclass(frozen=True)
class StepPlan:
    """One step: ``buckets`` are refreshed; the entries in ``rows`` take a row step."""

    entries: tuple[Entry, ...]
    buckets: tuple[Bucket, ...]
    rows: tuple[int, ...]
    options: PlanOptions

    @cached_property
    def schedule(self) -> Schedule:
        return make_schedule(self.buckets, self.options.bucket_bytes)

    def split_rows(self, rank: int) -> list[SplitRows]:
        """The entries in ``rows`` whose row norms need a sum over other ranks, by process group (and sums' dtype)."""
        groups: dict[tuple, list[int]] = {}
        for index in self.rows:
            entry = self.entries[index]
            if entry.layout.column_axes:
                dtype = torch.promote_types(entry.dtype, torch.float32)
                ranks = entry.layout.ranks_along(entry.layout.column_axes, rank)
                groups.setdefault((ranks, dtype, entry.device), []).append(index)
        return [SplitRows(ranks, dtype, tuple(members)) for (ranks, dtype, _), members in groups.items()]

    @cached_property
    def gram_rows(self) -> tuple[int, ...]:
        """The entries in ``rows`` that take a Gram row step."""
        return tuple(index for index in self.rows if self.entries[index].gram is not None)

    @cached_property
    def renewed(self) -> tuple[int, ...]:
        """The entries that refresh and whose Gram factors are renewed then."""
        rows = set(self.rows)
        return tuple(i for i, entry in enumerate(self.entries) if entry.gram is not None and i not in rows)

    @cached_property
    def renewals(self) -> tuple[Renewal, ...]:
        """What renews the Gram factors of the entries in ``renewed``, in the order in which all ranks do it."""
        return tuple(make_renewals(self.entries, self.renewed, self.options))

    def gram_state_bytes(self, rank: int) -> int:
        """Of what Gram row steps keep on a rank, beside the momentum: the factors, and its rows of the means."""
        total = 0
        for entry in self.entries:
            if entry.gram is not None:
                total += entry.gram.state_bytes(mean_layout(entry.layout, entry.gram).box(rank).shape[1])
        return total

    @cached_property
    def ahead(self) -> tuple[int, ...]:
        """The buckets that are sent out during backward, or else before anything else in the step, in this order.

        Of those that travel, the first two, which are under way together in every step, and as many more as
        `PlanOptions.ahead_bytes` allows. The same on all ranks.
        """
        chosen: list[int] = []
        held = 0
        for i, bucket in enumerate(self.buckets if self.options.ahead_bytes else ()):
            if travels(bucket):
                held += _bytes_under_way(bucket)
                if len(chosen) >= 2 and held > self.options.ahead_bytes:
                    break
                chosen.append(i)
        return tuple(chosen)

    def num_flops(self, rank: int) -> int:
        """FLOPs of this rank's orthogonalisations, and of what Gram row steps multiply there and in between."""
        orthogonalizing = sum(len(bucket.route(rank).owned) * bucket.num_flops for bucket in self.buckets)
        return orthogonalizing + gram_flops(self, rank)

    def num_orthogonalizations(self, rank: int) -> int:
        return sum(len(bucket.route(rank).owned) for bucket in self.buckets)

    def peak_bytes(self, rank: int) -> int:
        """Most bytes that this rank's step has allocated at a time, beside parameters, gradients and state.

        Send and receive buffers, stacks and the temporaries of the arithmetic, of Muon's parameters; AdamW's fused
        kernel takes none. What a communication library allocates for itself isn't known here.

        Raises:
            ValueError: an entry without `Entry.workspace`.
        """
        return peak_bytes(self, rank)

    def num_collectives(self, rank: int) -> int:
        return sum(1 for _ in self.collective_bytes(rank))

    def bytes_sent(self, rank: int) -> int:
        """Bytes that leave this rank: its own part excluded, padding included."""
        return sum(self.collective_bytes(rank))

    def collective_bytes(self, rank: int) -> Iterator[int]:
        """Bytes sent by this rank in each collective of the step.

        An all-reduce counts as reduce-scatter and all-gather: 2 (N-1)/N of its buffer.
        """
        for split in self.split_rows(rank):
            num_rows = sum(math.prod(self.entries[i].layout.box(rank).shape[:2]) for i in split.members)
            yield 2 * (len(split.ranks) - 1) * num_rows * split.dtype.itemsize // len(split.ranks)
        for bucket in self.buckets:
            yield from _bucket_bytes(bucket, rank)
        yield from gram_bytes(self, rank)


def _bucket_bytes(bucket: Bucket, rank: int) -> Iterator[int]:
    if bucket.kind == "local":
        return
    route, itemsize = bucket.route(rank), bucket.comm_dtype.itemsize
    here = route.group.index(rank)
    if bucket.kind == "gather":
        yield (len(route.group) - 1) * route.send_counts[0] * itemsize
        return
    if needs_exchange(bucket):
        yield (sum(route.send_counts) - route.send_counts[here]) * itemsize
        yield (sum(route.recv_counts) - route.recv_counts[here]) * itemsize
    if bucket.shares_replicas:
        for share in route.shares:
            yield (len(route.replicas) - 1) * share.count * itemsize


def _bytes_under_way(bucket: Bucket) -> int:
    """About what a bucket on its way out holds on a rank, of all that the one that owns most, if shards are even."""
    owned = Counter(matrix.owner for matrix in bucket.matrices)  # in a gather everyone owns all
    sent = -(-len(bucket.matrices) * bucket.matrix_numel // bucket.layout.num_shards)
    return (sent + max(owned.values()) * bucket.matrix_numel) * bucket.comm_dtype.itemsize


def build_plan(entries: Sequence[Entry], refreshing: Sequence[int], options: PlanOptions) -> StepPlan:
    """The plan of a step in which the entries ``refreshing`` (positions) refresh and all others take a row step.

    Where buckets may be sent out during backward, they are cut and ordered as it comes to their parameters.
    """
    chosen = set(refreshing)
    rows = tuple(i for i in range(len(entries)) if i not in chosen)
    families: dict[tuple, list[int]] = {}
    for i in sorted(chosen, key=lambda i: (-entries[i].depth if options.ahead_bytes else 0.0, i)):
        layout = entries[i].layout
        if layout.matrices_are_whole and (layout.num_replicas == 1 or options.refresh == "gather"):
            families.setdefault(("local", None, (), ()), []).append(i)
        else:
            kind = "exchange" if layout.matrices_are_whole else options.refresh
            families.setdefault((kind, layout.grid, layout.shard_axes, layout.replica_axes), []).append(i)
    buckets: list[Bucket] = []
    for (kind, *_), members in families.items():
        buckets += _family_buckets(kind, members, entries, options)
    if options.ahead_bytes:
        buckets.sort(key=lambda bucket: -min(entries[i].depth for i in bucket.layouts))
    return StepPlan(tuple(entries), tuple(buckets), rows, options)


def _family_buckets(kind: str, members: list[int], entries: Sequence[Entry], options: PlanOptions) -> list[Bucket]:
    """Buckets of the entries that are worked on by one set of process groups."""
    shares = False
    layouts = [(i, entries[i].layout) for i in members]
    matrices = [Matrix(i, k, layout.matrix_box(k)) for i, layout in layouts for k in range(layout.num_matrices)]
    if kind == "exchange":
        alone, together = (assign_owners(matrices, entries, share) for share in (False, True))
        shares = sharing_pays(alone, together, entries, options)
        matrices = together if shares else alone
    classes: dict[tuple, list[Matrix]] = {}
    for matrix in matrices:
        entry = entries[matrix.entry]
        classes.setdefault((entry.layout.matrix_shape, entry.dtype, entry.device, entry.kernel), []).append(matrix)
    buckets = []
    for ((num_rows, num_cols), dtype, _, _), of_class in sorted(
        classes.items(), key=lambda item: -entries[item[1][0].entry].num_flops * len(item[1])
    ):
        for part, largest in cut_into_buckets(of_class, kind, shares, entries, dtype, options):
            nothing_to_send = not shares and all(entries[m.entry].layout.matrices_are_whole for m in part)
            kind_here = "local" if kind == "exchange" and nothing_to_send else kind
            buckets.append(
                Bucket(
                    kind_here,  # type: ignore[arg-type]
                    num_rows,
                    num_cols,
                    dtype,
                    options.comm_dtype if kind_here != "local" else dtype,
                    entries[part[0].entry].num_flops,
                    tuple(part),
                    {matrix.entry: entries[matrix.entry].layout for matrix in part},
                    largest,
                    options.bucket_bytes,
                    shares,
                )
            )
    return buckets


def plan_hash(entries: Sequence[Entry], options: PlanOptions, extra: Sequence[object] = ()) -> int:
    """A number that ranks compare to make sure that they will do the same (63 bits; names don't enter)."""
    digest = hashlib.sha256()
    for entry in entries:
        what = (entry.layout, entry.dtype, entry.device, entry.kernel, entry.num_flops, entry.depth, entry.gram)
        digest.update(repr(what).encode())
    digest.update(repr((options, tuple(extra))).encode())
    return int.from_bytes(digest.digest()[:8], "big") >> 1


def explain_difference(numbers: Mapping[int, int]) -> str:
    """What is wrong if the ranks' plans differ; empty if they don't.

    Args:
        numbers: rank -> its `plan_hash`.
    """
    alike: dict[int, list[int]] = {}
    for rank, number in sorted(numbers.items()):
        alike.setdefault(number, []).append(rank)
    if len(alike) == 1:
        return ""
    most, *others = sorted(alike.values(), key=len, reverse=True)
    return (
        f"rank(s) {sorted(rank for ranks in others for rank in ranks)} would do something else in this step than "
        f"rank(s) {most}: their parameters, settings or step counts differ. Give every rank of a mesh the same "
        "parameters in the same order, the same groups and the same settings, and load the same checkpoint."
    )
