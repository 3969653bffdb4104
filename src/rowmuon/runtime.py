"""Runs a plan on this rank's tensors. With `exchange`, the only file that calls a collective.

A refresh is a pipeline over the buckets. While one is orthogonalised, the next ones' momentum is on its way in and the
previous ones' rows are on their way home; whatever else the step has to do (row steps, AdamW) fills the first wait.
Every rank issues the same collectives in the same order, whatever it holds and whether its gradients exist.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rowmuon.buckets import Bucket, Piece, Route, needs_exchange, travels
from rowmuon.exchange import Exchange, Messages, Work, explained
from rowmuon.factors import prepare_gram_row_steps
from rowmuon.orthogonalize import newton_schulz, prepare_newton_schulz
from rowmuon.plan import StepPlan
from rowmuon.renewal import renew_factors
from rowmuon.shards import (
    Shard,
    apply_part,
    assemble,
    disassemble,
    finish_split_rows,
    prepare_row_steps,
    row_sums,
    take_gradient,
    with_gradients,
    write_part,
)
from rowmuon.traffic import StepTraffic

__all__ = ["Flight", "Phase", "Runtime", "add_over", "all_finite"]

Phase = Callable[[str], AbstractContextManager[Any]]
"""Entered around the parts of a step with their names, for a stop-watch or a profiler: "gather" (packing, sending,
waiting for and applying what a refresh moves), "newton_schulz", "row_step" and "adamw". They never nest."""

Shards = Sequence[Shard] | Mapping[int, Shard]  # by the plan's entries


@dataclass
class Flight:
    """A bucket on its way through the pipeline."""

    bucket: Bucket
    route: Route
    work: Work | None = None
    buffers: list[Tensor] = field(default_factory=list)  # kept until the collective that uses them is done
    packed: Tensor | None = None  # what will be sent, until it is
    received: Tensor | None = None
    exchange: Exchange | None = None
    home: Tensor | None = None  # this rank's rows: to be sent out, coming back, or being passed on to other replicas
    sharing_is_due: bool = False  # replicas still have to pass the result on

    def wait(self) -> Tensor:
        if self.work is not None:
            self.work.wait()
            self.work = None
        assert self.received is not None
        received, self.received = self.received, None
        self.buffers.clear()
        return received

    def expect_back(self) -> None:
        """Once it is certain that it will go all the way; on all ranks in the order in which they were sent."""
        if self.exchange is not None:
            self.exchange.expect_back()

    def give_up(self) -> None:
        """Waits for what is under way, and goes no further."""
        self.wait()
        if self.exchange is not None:
            self.exchange.finish_sending()


class Runtime:
    """Executes plans for one rank.

    Args:
        rank: this process's global rank (0 where there is no process group).
        group_of: gives the process group over a tuple of global ranks.
        compile: row steps (`rowmuon.compiled`) and, on GPUs, the normalisation of Newton-Schulz.
    """

    def __init__(
        self, rank: int, group_of: Callable[[tuple[int, ...]], dist.ProcessGroup], compile: bool = False
    ) -> None:
        self.rank = rank
        self.group_of = group_of
        self.compile = compile  # may change between steps
        self._step_rows: Callable[[], None] | None = None  # of the whole rows of a step that is prepared

    # ------------------------------------------------------------------------------------------------ the step

    def prepare(self, plan: StepPlan, shards: Sequence[Shard]) -> None:
        """Whatever can fail for want of a tool, before the step changes or sends anything.

        Raises:
            RuntimeError: what a step needs can't be compiled here.
        """
        for bucket in plan.buckets:
            first = bucket.matrices[0].entry
            if plan.entries[first].device not in ("cpu", "fake"):
                *_, dtype = plan.entries[first].kernel
                how: Any = {"kernels": plan.options.ns_kernels, "compile": self.compile}
                prepare_newton_schulz(bucket.comm_dtype, dtype, shards[first].local_weight.device, **how)
        split = [shards[index] for part in plan.split_rows(self.rank) for index in part.members]
        gram_rows = prepare_gram_row_steps([shards[index] for index in plan.gram_rows])
        rows = prepare_row_steps(self._whole(plan, shards), split, compile=self.compile)

        def step_rows() -> None:
            rows()
            gram_rows()

        self._step_rows = step_rows

    def execute(
        self,
        plan: StepPlan,
        shards: Sequence[Shard],
        counts: StepTraffic,
        fill: Callable[[], None] | None = None,
        phase: Phase = nullcontext,
        sent: Mapping[int, Flight] | None = None,
    ) -> None:
        """One step of all Muon parameters.

        Args:
            plan, shards: what to do, and this rank's tensors by the plan's entries.
            counts: of this kind of step.
            fill: other local work, run while the first buckets are on their way.
            phase: a stop-watch.
            sent: buckets that `send` has sent out already, by their positions; the first ones that travel.
        """
        out, applied = plan.schedule.sent, (*plan.schedule.applied, len(plan.buckets))
        arriving = dict(sent or {})
        for early in arriving.values():
            early.expect_back()
        with phase("row_step"):
            sums = self._start_split_rows(plan, shards, counts)
        with phase("gather"):
            self._send_ahead(plan, range(out[0]), arriving, shards, counts)
        if fill is not None:
            with phase("adamw"):
                fill()
        with phase("row_step"):
            assert self._step_rows is not None, "prepare() comes before execute()"
            self._step_rows()
            self._step_rows = None  # and its views of parameters go
            while sums:
                sums.pop(0)()  # and its buffers go
        returning: list[Flight] = []
        for i, bucket in enumerate(plan.buckets):
            with phase("gather"):
                flight = arriving.pop(i, None) or self._send_out(self._open(bucket, shards), shards, counts)
                self._send_ahead(plan, range(out[i], out[i + 1]), arriving, shards, counts)
            self._orthogonalize(flight, plan, shards, counts, phase)
            returning.append(flight)
            with phase("gather"):
                self._land(returning, shards, counts, num_kept=i + 1 - applied[i + 1])
        for renewal in plan.renewals:
            renew_factors(renewal, shards, plan.options, self._messages(counts), phase)

    def _land(self, returning: list[Flight], shards: Sequence[Shard], counts: StepTraffic, num_kept: int) -> None:
        """Applies what has come home, but leaves the youngest flights under way while the next bucket is computed."""
        for flight in returning[:-1] if num_kept else returning:
            if flight.sharing_is_due:
                self._start_sharing(flight, counts)
        while len(returning) > num_kept:
            if num_kept and returning[0].route.shares and len(returning) == num_kept + 1:
                break  # its results have only now set out for the other replicas
            self._apply(returning.pop(0), shards, counts)

    def _whole(self, plan: StepPlan, shards: Sequence[Shard]) -> list[Shard]:
        """Those that take a plain row step and have whole rows here."""
        others = {*plan.gram_rows}
        return [shards[i] for i in plan.rows if i not in others and not plan.entries[i].layout.column_axes]

    def _start_split_rows(
        self, plan: StepPlan, shards: Sequence[Shard], counts: StepTraffic
    ) -> list[Callable[[], None]]:
        """Adds up the partial row sums of all parameters whose rows are split: one all-reduce per process group."""
        finishers: list[Callable[[], None]] = []
        for split in plan.split_rows(self.rank):
            ranks, members = split.ranks, split.members
            parts = [row_sums(shards[index], compile=self.compile).to(split.dtype) for index in members]
            sizes = [part.numel() for part in parts]
            total = torch.cat(parts)
            del parts
            work = self._messages(counts).all_reduce(total, ranks)

            def finish(
                members: tuple[int, ...] = members,
                sizes: list[int] = sizes,
                total: Tensor = total,
                work: Work = work,
            ) -> None:
                work.wait()
                for index, sums in zip(members, total.split(sizes), strict=True):
                    finish_split_rows(shards[index], sums, compile=self.compile)

            finishers.append(finish)
        return finishers

    # --------------------------------------------------------------------------------------------- the pipeline

    def _send_ahead(
        self,
        plan: StepPlan,
        which: Iterable[int],
        arriving: dict[int, Flight],
        shards: Sequence[Shard],
        counts: StepTraffic,
    ) -> None:
        """Sends those buckets out before their turn that have a way to go; the others would only take memory."""
        chosen = [i for i in which if i not in arriving and travels(plan.buckets[i])]
        for i in chosen:
            arriving[i] = self._open(plan.buckets[i], shards)
        for i in chosen:
            self._send_out(arriving[i], shards, counts)

    def _send_out(self, flight: Flight, shards: Sequence[Shard], counts: StepTraffic) -> Flight:
        for entry in flight.bucket.layouts:
            take_gradient(shards[entry])
        return self._pack_and_send(flight, shards, counts)

    def send(self, bucket: Bucket, shards: Mapping[int, Shard], counts: StepTraffic) -> Flight:
        """Packs this rank's directions of a bucket and sends them out; changes no shard, and may still be given up."""
        return self._pack_and_send(self._open(bucket, shards, comes_back=False), shards, counts)

    def _open(self, bucket: Bucket, shards: Shards, comes_back: bool = True) -> Flight:
        """Makes a bucket's buffers, and asks for what will arrive in them, before anything is sent."""
        route = bucket.route(self.rank)
        if bucket.kind == "local":
            route = with_gradients(bucket, route, shards)
        flight = Flight(bucket, route)
        numel = route.send_counts[0] if bucket.kind == "gather" else sum(piece.numel for piece in route.mine)
        flight.packed = self._empty(route.home_numel if needs_exchange(bucket) else numel, bucket, shards)
        if bucket.kind == "gather":
            flight.received = self._empty(numel * len(route.group), bucket, shards)
        elif needs_exchange(bucket):
            flight.received = self._empty(sum(route.recv_counts), bucket, shards)
            flight.exchange = self._exchange(flight.packed[:numel], route)
            flight.exchange.expect(flight.received, comes_back=comes_back)
        return flight

    def _pack_and_send(self, flight: Flight, shards: Shards, counts: StepTraffic) -> Flight:
        packed, flight.packed = flight.packed, None
        assert packed is not None
        for piece in flight.route.mine:
            write_part(shards[flight.bucket.matrices[piece.matrix].entry], piece, packed)
        if flight.exchange is not None:
            flight.home = packed
            flight.work = flight.exchange.send_out(counts)
        elif flight.received is not None:
            flight.work = self._all_gather(flight.received, packed, flight.route.group, counts)
            flight.buffers.append(packed)
        else:
            flight.received = packed
        return flight

    def _orthogonalize(
        self, flight: Flight, plan: StepPlan, shards: Sequence[Shard], counts: StepTraffic, phase: Phase
    ) -> None:
        """Puts a bucket's matrices together, orthogonalises them, and sends every rank its rows."""
        bucket, route = flight.bucket, flight.route
        with phase("gather"):
            received = flight.wait()
            stack = assemble(bucket, route, received)
            del received
        coefficients, eps, dtype = plan.entries[bucket.matrices[0].entry].kernel
        counts.num_orthogonalizations += stack.shape[0]
        if stack.shape[0]:
            out = stack if stack.dtype == dtype else None
            how: Any = {"kernels": plan.options.ns_kernels, "compile": self.compile}
            with phase("newton_schulz"):
                stack = newton_schulz(stack, coefficients, eps=eps, dtype=dtype, out=out, **how)
            del out
        with phase("gather"):
            if bucket.kind != "exchange":
                slot = {position: i for i, position in enumerate(route.owned)}
                for piece in route.home:
                    matrix = bucket.matrices[piece.matrix]
                    part = stack[slot[piece.matrix]][piece.box.slices(matrix.box)[1:]]
                    apply_part(shards[matrix.entry], piece.box, part)
                return
            if flight.exchange is not None:
                send = disassemble(bucket, route, stack)
                del stack
                flight.received, flight.home = flight.home, None
                flight.work = flight.exchange.send_back(send, counts)
                flight.exchange = None
                flight.buffers.append(send)
                flight.sharing_is_due = bool(route.shares)  # none if this rank has no rows: then no replica of it has
            else:
                flight.received = self._empty(route.home_numel, bucket, shards)
                flight.received[: stack.numel()].copy_(stack.flatten())
                del stack
                if route.shares:
                    self._start_sharing(flight, counts)

    def _start_sharing(self, flight: Flight, counts: StepTraffic) -> None:
        """Begins to pass what this replica has orthogonalised on to the other replicas."""
        flight.sharing_is_due = False
        flight.home = flight.wait()
        self._share(flight, 0, counts)

    def _share(self, flight: Flight, index: int, counts: StepTraffic) -> None:
        assert flight.home is not None
        share, replicas = flight.route.shares[index], flight.route.replicas
        flight.received = flight.home.new_empty(share.count * len(replicas))
        part = flight.home[share.start : share.start + share.count]
        flight.work = self._all_gather(flight.received, part, replicas, counts)
        flight.buffers.append(part)

    def _apply(self, flight: Flight, shards: Sequence[Shard], counts: StepTraffic) -> None:
        """Applies the rows that have come back."""
        bucket, route = flight.bucket, flight.route
        if bucket.kind != "exchange":
            return
        arrivals = [share.pieces for share in route.shares] or [route.home]
        for index, pieces in enumerate(arrivals):
            received = flight.wait()
            if index + 1 < len(route.shares):
                self._share(flight, index + 1, counts)
            else:
                flight.home = None
            self._apply_pieces(bucket, pieces, received, shards)
            del received

    def _apply_pieces(self, bucket: Bucket, pieces: Sequence[Piece], received: Tensor, shards: Sequence[Shard]) -> None:
        for piece in pieces:
            part = received[piece.offset : piece.offset + piece.numel].view(piece.box.shape)
            apply_part(shards[bucket.matrices[piece.matrix].entry], piece.box, part)

    def _empty(self, numel: int, bucket: Bucket, shards: Shards) -> Tensor:
        return torch.empty(numel, dtype=bucket.comm_dtype, device=shards[bucket.matrices[0].entry].weight.device)

    # ---------------------------------------------------------------------------------------------- collectives

    def _messages(self, counts: StepTraffic) -> Messages:
        return Messages(self.rank, self.group_of, counts)

    def _all_gather(self, output: Tensor, part: Tensor, ranks: tuple[int, ...], counts: StepTraffic) -> Work:
        return self._messages(counts).all_gather(output, part, ranks)

    def _exchange(self, mine: Tensor, route: Route) -> Exchange:
        return Exchange(mine, route, self.rank, self.group_of(route.group))

    def numbers_of_all(
        self, stages: Sequence[tuple[int, ...]], numbers: Sequence[int], device: torch.device | str
    ) -> dict[int, tuple[int, ...]]:
        """Rank -> its numbers, as many on each, of all ranks that the process groups ``stages``, one after another,
        reach."""
        known = torch.tensor([[self.rank, *numbers]], dtype=torch.int64, device=device)
        gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        for ranks in stages:
            heard = known.new_empty(len(ranks) * known.shape[0], known.shape[1])
            with explained(self.rank, ranks):
                gather(heard, known, group=self.group_of(ranks))
            known = heard
        return {int(rank): tuple(values) for rank, *values in known.tolist()}


def all_finite(tensors: Sequence[Tensor], device: torch.device, group: dist.ProcessGroup | None) -> bool:
    """Whether ``tensors`` are finite on all ranks of a process group (None: the default one, if there is any): one
    scalar all-reduce and one host read."""
    bad = torch.zeros((), dtype=torch.float32, device=device)
    for tensor in tensors:
        bad += torch.logical_not(torch.isfinite(tensor).all()).to(device)
    if dist.is_available() and dist.is_initialized():
        add_over(bad, group)
    return not bool(bad.item())


def add_over(tensor: Tensor, group: dist.ProcessGroup | None, *, maximum: bool = False) -> None:
    """Adds ``tensor`` over a process group (None: the default one), in place, or takes the maximum."""
    dist.all_reduce(tensor, op=dist.ReduceOp.MAX if maximum else dist.ReduceOp.SUM, group=group)
