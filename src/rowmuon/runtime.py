"""Runs a plan on this rank's tensors. The only file that calls a collective.

A refresh is a pipeline over the buckets. While one is orthogonalised, the next one's momentum is on its way in and the
previous one's rows are on their way home; whatever else the step has to do (row steps, AdamW) fills the first wait.
Every rank issues the same collectives in the same order, whatever it holds and whether its gradients exist.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rowmuon.buckets import Bucket, Piece, Route, needs_exchange, travels
from rowmuon.orthogonalize import newton_schulz
from rowmuon.plan import StepPlan
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


@dataclass(frozen=True)
class _Work:
    """A collective under way."""

    work: dist.Work | None
    rank: int
    ranks: tuple[int, ...]

    def wait(self) -> None:
        if self.work is not None:
            with _explained(self.rank, self.ranks):
                self.work.wait()


@dataclass
class Flight:
    """A bucket on its way through the pipeline."""

    bucket: Bucket
    route: Route
    work: _Work | None = None
    buffers: list[Tensor] = field(default_factory=list)  # kept until the collective that uses them is done
    received: Tensor | None = None
    home: Tensor | None = None  # this rank's rows, while they are passed on to the other replicas
    sharing_is_due: bool = False  # replicas still have to pass the result on

    def wait(self) -> Tensor:
        if self.work is not None:
            self.work.wait()
            self.work = None
        assert self.received is not None
        received, self.received = self.received, None
        self.buffers.clear()
        return received


class Runtime:
    """Executes plans for one rank.

    Args:
        rank: this process's global rank (0 where there is no process group).
        group_of: gives the process group over a tuple of global ranks.
        compile_rows: whether row steps are compiled, see `rowmuon.compiled`.
    """

    def __init__(
        self, rank: int, group_of: Callable[[tuple[int, ...]], dist.ProcessGroup], compile_rows: bool = False
    ) -> None:
        self.rank = rank
        self.group_of = group_of
        self.compile_rows = compile_rows  # may change between steps
        self._step_rows: Callable[[], None] | None = None  # of the whole rows of a step that is prepared

    # ------------------------------------------------------------------------------------------------ the step

    def prepare(self, plan: StepPlan, shards: Sequence[Shard]) -> None:
        """Whatever can fail for want of a tool, before the step changes or sends anything.

        Raises:
            RuntimeError: the row step can't be compiled here.
        """
        split = [shards[index] for part in plan.split_rows(self.rank) for index in part.members]
        self._step_rows = prepare_row_steps(self._whole(plan, shards), split, compile=self.compile_rows)

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
            fill: other local work, run while the first bucket is on its way.
            phase: a stop-watch.
            sent: buckets that `send` has sent out already, by their positions; the first ones that travel.
        """
        buckets, ahead = plan.buckets, dict(sent or {})
        with phase("row_step"):
            sums = self._start_split_rows(plan, shards, counts)
        with phase("gather"):
            arriving = ahead.pop(0, None) or self._send_ahead(buckets, 0, shards, counts)
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
        for i, bucket in enumerate(buckets):
            with phase("gather"):
                flight = arriving or self._send_out(bucket, shards, counts)
                arriving = ahead.pop(i + 1, None) or self._send_ahead(buckets, i + 1, shards, counts)
            self._orthogonalize(flight, plan, shards, counts, phase)
            returning.append(flight)
            with phase("gather"):
                self._land(returning, shards, counts, in_flight=1)
        with phase("gather"):
            self._land(returning, shards, counts, in_flight=0)

    def _land(self, returning: list[Flight], shards: Sequence[Shard], counts: StepTraffic, in_flight: int) -> None:
        """Applies what has come home, but leaves the youngest flights under way while the next bucket is computed."""
        for flight in returning[: len(returning) - in_flight]:
            if flight.sharing_is_due:
                self._start_sharing(flight, counts)
        while len(returning) > in_flight:
            if in_flight and returning[0].route.shares and len(returning) == in_flight + 1:
                break  # its results have only now set out for the other replicas
            self._apply(returning.pop(0), shards, counts)

    def _whole(self, plan: StepPlan, shards: Sequence[Shard]) -> list[Shard]:
        return [shards[index] for index in plan.rows if not plan.entries[index].layout.column_axes]

    def _start_split_rows(
        self, plan: StepPlan, shards: Sequence[Shard], counts: StepTraffic
    ) -> list[Callable[[], None]]:
        """Adds up the partial row sums of all parameters whose rows are split: one all-reduce per process group."""
        finishers: list[Callable[[], None]] = []
        for split in plan.split_rows(self.rank):
            ranks, members = split.ranks, split.members
            parts = [row_sums(shards[index], compile=self.compile_rows).to(split.dtype) for index in members]
            sizes = [part.numel() for part in parts]
            total = torch.cat(parts)
            del parts
            counts.num_collectives += 1
            counts.bytes_sent += 2 * (len(ranks) - 1) * total.numel() * total.element_size() // len(ranks)
            with _explained(self.rank, ranks):
                work = _Work(dist.all_reduce(total, group=self.group_of(ranks), async_op=True), self.rank, ranks)

            def finish(
                members: tuple[int, ...] = members,
                sizes: list[int] = sizes,
                total: Tensor = total,
                work: _Work = work,
            ) -> None:
                work.wait()
                for index, sums in zip(members, total.split(sizes), strict=True):
                    finish_split_rows(shards[index], sums, compile=self.compile_rows)

            finishers.append(finish)
        return finishers

    # --------------------------------------------------------------------------------------------- the pipeline

    def _send_ahead(
        self, buckets: Sequence[Bucket], index: int, shards: Sequence[Shard], counts: StepTraffic
    ) -> Flight | None:
        """Sends a bucket out before its turn, if there is one and it has a way to go; else it only takes memory."""
        if index < len(buckets) and travels(buckets[index]):
            return self._send_out(buckets[index], shards, counts)
        return None

    def _send_out(self, bucket: Bucket, shards: Sequence[Shard], counts: StepTraffic) -> Flight:
        for entry in bucket.layouts:
            take_gradient(shards[entry])
        return self.send(bucket, shards, counts)

    def send(self, bucket: Bucket, shards: Sequence[Shard] | Mapping[int, Shard], counts: StepTraffic) -> Flight:
        """Packs this rank's directions of a bucket and sends them to those who orthogonalise; changes no shard."""
        route = bucket.route(self.rank)
        if bucket.kind == "local":
            route = with_gradients(bucket, route, shards)
        flight = Flight(bucket, route)
        numel = route.send_counts[0] if bucket.kind == "gather" else sum(piece.numel for piece in route.mine)
        send = self._empty(numel, bucket, shards)
        for piece in route.mine:
            write_part(shards[bucket.matrices[piece.matrix].entry], piece, send)
        if bucket.kind == "gather":
            flight.received = self._empty(numel * len(route.group), bucket, shards)
            flight.work = self._all_gather(flight.received, send, route.group, counts)
        elif needs_exchange(bucket):
            flight.received = self._empty(sum(route.recv_counts), bucket, shards)
            flight.work = self._all_to_all(
                flight.received, send, route.recv_counts, route.send_counts, route.group, counts
            )
        else:
            flight.received = send
        flight.buffers.append(send)
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
            with phase("newton_schulz"):
                stack = newton_schulz(stack, coefficients, eps=eps, dtype=dtype, out=out)
            del out
        with phase("gather"):
            if bucket.kind != "exchange":
                slot = {position: i for i, position in enumerate(route.owned)}
                for piece in route.home:
                    matrix = bucket.matrices[piece.matrix]
                    part = stack[slot[piece.matrix]][piece.box.slices(matrix.box)[1:]]
                    apply_part(shards[matrix.entry], piece.box, part)
                return
            home_numel = sum(piece.numel for piece in route.home)
            numel = max([home_numel, *(share.start + share.count for share in route.shares)])
            if needs_exchange(bucket):
                send = disassemble(bucket, route, stack)
                del stack
                flight.received = self._empty(numel, bucket, shards)
                flight.work = self._all_to_all(
                    flight.received[:home_numel], send, route.send_counts, route.recv_counts, route.group, counts
                )
                flight.buffers.append(send)
                flight.sharing_is_due = bool(route.shares)  # none if this rank has no rows: then no replica of it has
            else:
                flight.received = self._empty(numel, bucket, shards)
                flight.received[:home_numel].copy_(stack.flatten())
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

    def _empty(self, numel: int, bucket: Bucket, shards: Sequence[Shard] | Mapping[int, Shard]) -> Tensor:
        return torch.empty(numel, dtype=bucket.comm_dtype, device=shards[bucket.matrices[0].entry].weight.device)

    # ---------------------------------------------------------------------------------------------- collectives

    def _all_gather(self, output: Tensor, part: Tensor, ranks: tuple[int, ...], counts: StepTraffic) -> _Work:
        counts.num_collectives += 1
        counts.bytes_sent += (len(ranks) - 1) * part.numel() * part.element_size()
        gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        with _explained(self.rank, ranks):
            return _Work(gather(output, part, group=self.group_of(ranks), async_op=True), self.rank, ranks)

    def _all_to_all(
        self,
        output: Tensor,
        send: Tensor,
        recv_counts: Sequence[int],
        send_counts: Sequence[int],
        ranks: tuple[int, ...],
        counts: StepTraffic,
    ) -> _Work:
        counts.num_collectives += 1
        counts.bytes_sent += (send.numel() - send_counts[ranks.index(self.rank)]) * send.element_size()
        group = self.group_of(ranks)
        with _explained(self.rank, ranks):
            work = dist.all_to_all_single(output, send, list(recv_counts), list(send_counts), group, async_op=True)
        return _Work(work, self.rank, ranks)

    def numbers_of_all(
        self, stages: Sequence[tuple[int, ...]], number: int, device: torch.device | str
    ) -> dict[int, int]:
        """Rank -> its number, of all ranks that the process groups ``stages``, one after another, reach."""
        known = torch.tensor([[self.rank, number]], dtype=torch.int64, device=device)
        gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        for ranks in stages:
            heard = known.new_empty(len(ranks) * known.shape[0], 2)
            with _explained(self.rank, ranks):
                gather(heard, known, group=self.group_of(ranks))
            known = heard
        return {int(rank): int(value) for rank, value in known.tolist()}


@contextmanager
def _explained(rank: int, ranks: Sequence[int]) -> Iterator[None]:
    """Says what a failed collective means. What comes out of gloo or NCCL names a socket."""
    try:
        yield
    except RuntimeError as error:
        raise RuntimeError(
            f"rank {rank}: a collective of the optimizer's over ranks {list(ranks)} failed. One of them has ended, or "
            "didn't come within the process group's timeout: look for the first error in the logs of the others. This "
            "step is half done; start again from a checkpoint."
        ) from error


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
