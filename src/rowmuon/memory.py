"""The most memory that a step takes on one rank, beside parameters, gradients and state.

`runtime.Runtime.execute` in bytes: the same buffers, made and dropped in the same order. The two change together, and
tests/unit/rowmuon/test_memory.py compares them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rowmuon import gram
from rowmuon.buckets import Bucket, Piece, Route, lies_in_order, needs_exchange, travels
from rowmuon.layout import ROWS
from rowmuon.packing import unpack_bytes
from rowmuon.stacks import FactorRound, GramStack, Renewal

if TYPE_CHECKING:
    from rowmuon.plan import Entry, StepPlan, Workspace

__all__ = ["peak_bytes"]


def peak_bytes(plan: StepPlan, rank: int) -> int:
    """See `StepPlan.peak_bytes`."""
    return _Account(plan, rank).run()


@dataclass
class _Flight:
    """Bytes that a bucket on its way holds."""

    bucket: Bucket
    route: Route
    buffers: int = 0  # dropped when the collective under way is done
    received: int = 0
    home: int = 0
    sharing_is_due: bool = False


class _Account:
    """Runs a step in bytes."""

    def __init__(self, plan: StepPlan, rank: int) -> None:
        self.plan = plan
        self.rank = rank
        self.now = self.peak = 0

    def make(self, num_bytes: int) -> int:
        self.now += num_bytes
        self.peak = max(self.peak, self.now)
        return num_bytes

    def use(self, num_bytes: Iterable[int]) -> None:
        """For temporaries, one after another."""
        self.peak = max(self.peak, self.now + max(num_bytes, default=0))

    def drop(self, num_bytes: int) -> None:
        self.now -= num_bytes

    # ------------------------------------------------------------------------------------------------ the step

    def run(self) -> int:
        sent, applied = self.plan.schedule.sent, (*self.plan.schedule.applied, len(self.plan.buckets))
        arriving = {i: self._send(self.plan.buckets[i]) for i in self.plan.ahead}
        for i in arriving:
            self._take_gradients(self.plan.buckets[i])
        sums = self._start_split_rows()
        self._send_ahead(range(sent[0]), arriving)
        gram_rows = self.plan.gram_rows
        self.use([self._row_bytes(index for index in self.plan.rows if index not in gram_rows)])
        self.use([self._gram_row_bytes(index) for index in gram_rows])
        self.drop(sums)
        returning: list[_Flight] = []
        for i, bucket in enumerate(self.plan.buckets):
            flight = arriving.pop(i, None) or self._send_out(self._open(bucket))
            self._send_ahead(range(sent[i], sent[i + 1]), arriving)
            self._orthogonalize(flight)
            returning.append(flight)
            self._land(returning, num_kept=i + 1 - applied[i + 1])
        for renewal in self.plan.renewals:
            _Renewing(self, renewal).run()
        assert self.now == 0
        return self.peak

    def _land(self, returning: list[_Flight], num_kept: int) -> None:
        for flight in returning[:-1] if num_kept else returning:
            if flight.sharing_is_due:
                self._start_sharing(flight)
        while len(returning) > num_kept:
            if num_kept and returning[0].route.shares and len(returning) == num_kept + 1:
                break
            self._apply(returning.pop(0))

    def _start_split_rows(self) -> int:
        total = 0
        for split in self.plan.split_rows(self.rank):
            parts = 0
            for index in split.members:
                self.use([self._row_bytes([index])])
                stack, rows, _ = self.plan.entries[index].layout.box(self.rank).shape
                parts += self.make(stack * rows * split.dtype.itemsize)
            total += self.make(parts)
            self.drop(parts)
        return total

    def _row_bytes(self, rows: Iterable[int]) -> int:
        scratch, rest = [0], [0]
        for index in rows:
            stack, num_rows, num_cols = self.plan.entries[index].layout.box(self.rank).shape
            kept, temporary = _workspace(self.plan.entries[index]).rows(stack * num_rows, num_cols)
            scratch.append(kept)
            rest.append(temporary)
        return max(scratch) + max(rest)

    def _gram_row_bytes(self, index: int) -> int:
        entry = self.plan.entries[index]
        assert entry.gram is not None
        return _workspace(entry).gram_rows(*entry.layout.box(self.rank).shape[1:], entry.gram.factor_dtype)

    # --------------------------------------------------------------------------------------------- the pipeline

    def _send_ahead(self, which: Iterable[int], arriving: dict[int, _Flight]) -> None:
        chosen = [i for i in which if i not in arriving and travels(self.plan.buckets[i])]
        for i in chosen:
            arriving[i] = self._open(self.plan.buckets[i])
        for i in chosen:
            self._send_out(arriving[i])

    def _take_gradients(self, bucket: Bucket) -> None:
        for entry, layout in bucket.layouts.items():
            stack, num_rows, num_cols = layout.box(self.rank).shape
            self.use([_workspace(self.plan.entries[entry]).momentum(stack * num_rows, num_cols)])

    def _send_out(self, flight: _Flight) -> _Flight:
        self._take_gradients(flight.bucket)
        self._touch(flight.bucket, flight.route.mine, False)
        return flight

    def _send(self, bucket: Bucket) -> _Flight:
        """During backward."""
        flight = self._open(bucket)
        self._touch(bucket, flight.route.mine, True)
        return flight

    def _open(self, bucket: Bucket) -> _Flight:
        flight = _Flight(bucket, bucket.route(self.rank))
        route, itemsize = flight.route, bucket.comm_dtype.itemsize
        numel = route.send_counts[0] if bucket.kind == "gather" else sum(piece.numel for piece in route.mine)
        send = self.make((route.home_numel if needs_exchange(bucket) else numel) * itemsize)
        if bucket.kind == "gather":
            flight.buffers, flight.received = send, self.make(send * len(route.group))
        elif needs_exchange(bucket):
            flight.home, flight.received = send, self.make(sum(route.recv_counts) * itemsize)
        else:
            flight.received = send
        return flight

    def _orthogonalize(self, flight: _Flight) -> None:
        bucket, route, itemsize = flight.bucket, flight.route, flight.bucket.comm_dtype.itemsize
        workspace = _workspace(self.plan.entries[bucket.matrices[0].entry])
        received = self._wait(flight)
        numel = len(route.owned) * bucket.matrix_numel
        stack = numel * itemsize
        if received != stack or not lies_in_order(bucket, route):
            self.make(stack)
            self.drop(received)
        if bucket.comm_dtype == workspace.dtype:
            self.use([workspace.stack(len(route.owned), None)])
        else:
            self.use([workspace.stack(len(route.owned), bucket.comm_dtype)])
            result = self.make(numel * workspace.dtype.itemsize)
            self.drop(stack)
            stack = result
        if bucket.kind != "exchange":
            self._touch(bucket, route.home)
            self.drop(stack)
            return
        send = numel * itemsize
        if needs_exchange(bucket):
            if bucket.comm_dtype != workspace.dtype or not lies_in_order(bucket, route):
                self.make(send)
                self.drop(stack)
            flight.received, flight.home = flight.home, 0
            flight.buffers = send
            flight.sharing_is_due = bool(route.shares)
        else:
            flight.received = self.make(route.home_numel * itemsize)
            self.drop(stack)
            if route.shares:
                self._start_sharing(flight)

    def _start_sharing(self, flight: _Flight) -> None:
        flight.sharing_is_due = False
        flight.home = self._wait(flight)
        self._share(flight, 0)

    def _share(self, flight: _Flight, index: int) -> None:
        count = flight.route.shares[index].count * len(flight.route.replicas)
        flight.received = self.make(count * flight.bucket.comm_dtype.itemsize)

    def _apply(self, flight: _Flight) -> None:
        if flight.bucket.kind != "exchange":
            return
        shares = flight.route.shares
        arrivals: Sequence[Sequence[Piece]] = [share.pieces for share in shares] or [flight.route.home]
        for index, pieces in enumerate(arrivals):
            received = self._wait(flight)
            if index + 1 < len(shares):
                self._share(flight, index + 1)
            else:
                self.drop(flight.home)
            self._touch(flight.bucket, pieces)
            self.drop(received)

    def _wait(self, flight: _Flight) -> int:
        self.drop(flight.buffers)
        received, flight.buffers, flight.received = flight.received, 0, 0
        return received

    def _touch(self, bucket: Bucket, pieces: Iterable[Piece], ahead: bool = False) -> None:
        """Writing pieces to a buffer, ahead of the momentum or not, or applying them from one."""
        for piece in pieces:
            workspace = _workspace(self.plan.entries[bucket.matrices[piece.matrix].entry])
            received = bucket.comm_dtype if bucket.kind == "exchange" else workspace.dtype
            shape = piece.box.shape[1:]
            self.use([workspace.part(*shape, bucket.comm_dtype, received)])
            if ahead:
                self.use([workspace.part_ahead(*shape, bucket.comm_dtype)])


class _Renewing:
    """`rowmuon.renewal`."""

    def __init__(self, account: _Account, renewal: Renewal) -> None:
        self.account, self.renewal, self.rank = account, renewal, account.rank

    def run(self) -> None:
        self._update_means()
        if self.renewal.is_local:
            for part in self.renewal.rounds:
                self._factorize_here(part)
        else:
            self._renew()

    def _update_means(self) -> None:
        account, stacks, plan = self.account, self.renewal.stacks, self.account.plan
        largest = account.make(2 * len(self.renewal.members) * self.renewal.dtype.itemsize)  # and a copy of it
        under_way: list[tuple[GramStack, int]] = []
        for stack in stacks:
            total = account.make(stack.num_bytes)
            for index in stack.members:
                entry = plan.entries[index]
                account.use([_workspace(entry).gram(*entry.layout.box(self.rank).shape[1:], stack.dtype)])
            held = account.make(stack.layout.shape[0] * stack.row_numel * stack.comm_dtype.itemsize)
            account.drop(total)
            held += account.make(stack.size[0] * stack.dtype.itemsize)  # traces
            if not self.renewal.is_local:
                received = sum(stack.route(self.rank).recv_counts) * stack.comm_dtype.itemsize
                account.use([received + (0 if stack.is_in_order else held)])
                held += account.make(received)
            under_way.append((stack, held))
            while len(under_way) > (0 if self.renewal.is_local or stack is stacks[-1] else 1):
                self._take_rows(*under_way.pop(0))
        account.drop(largest)

    def _take_rows(self, stack: GramStack, held: int) -> None:
        start, stop = stack.layout.box(self.rank).bounds[ROWS]
        numel = 0 if self.renewal.is_local else (stop - start) * stack.row_numel
        # the traces of all rows; for those held here masks, weights and new diagonals
        few = stack.layout.shape[0] * len(stack.members) + 4 * (stop - start)
        self.account.use([(numel + few) * stack.dtype.itemsize])
        self.account.drop(held)

    def _factorize_here(self, part: FactorRound) -> None:
        bucket = part.there
        num, several = len(bucket.matrices), len(bucket.layouts) > 1
        means = self.account.make(num * bucket.matrix_numel * bucket.dtype.itemsize) if several else 0
        self._whole(part, num)
        self.account.drop(means)

    def _whole(self, part: FactorRound, num: int) -> None:
        """The factors of packed means, beside those."""
        bucket = part.there
        block, dtype = bucket.num_rows, bucket.dtype
        whole = num * block * block * dtype.itemsize
        self.account.use(
            [whole + max(unpack_bytes(num, block, dtype, gram.AT_ONCE), gram.factorize_bytes(num, block, dtype))]
        )

    def _renew(self) -> None:
        account, rounds = self.account, self.renewal.rounds
        going_around: list[tuple[Bucket, int]] = []
        self._send_means(rounds[0])
        for i, part in enumerate(rounds):
            route = part.there.route(self.rank)
            numel, sent = len(route.owned) * part.there.matrix_numel, sum(route.send_counts)
            size, result_size = part.there.comm_dtype.itemsize, part.back.comm_dtype.itemsize
            in_order = lies_in_order(part.there, route)
            account.use([0 if in_order else numel * size])  # then what was received is dropped, which is as large
            if i + 1 < len(rounds):
                self._send_means(rounds[i + 1])
            account.make(numel * result_size)
            if route.owned:
                self._whole(part, len(route.owned))
            account.drop(numel * size)
            self._take_factors(going_around, num_kept=0)
            account.use([0 if in_order else numel * result_size])
            account.drop(numel * result_size + sent * size)
            for bucket in part.gathers:
                count = bucket.route(self.rank).send_counts[0] * (1 + bucket.layout.num_shards)
                going_around.append((bucket, account.make(count * result_size)))
                self._take_factors(going_around, num_kept=1)
            account.drop(sent * result_size)
        self._take_factors(going_around, num_kept=0)

    def _send_means(self, part: FactorRound) -> None:
        route = part.there.route(self.rank)
        sent, received = sum(route.send_counts), sum(route.recv_counts)
        self.account.make((sent + received) * part.there.comm_dtype.itemsize + sent * part.back.comm_dtype.itemsize)

    def _take_factors(self, going_around: list[tuple[Bucket, int]], num_kept: int) -> None:
        while len(going_around) > num_kept:
            bucket, held = going_around.pop(0)
            stack = len(bucket.matrices) * bucket.matrix_numel * bucket.comm_dtype.itemsize
            most = max(layout.num_matrices for layout in bucket.layouts.values())
            unpacking = unpack_bytes(most, bucket.num_rows, bucket.comm_dtype, gram.AT_ONCE)
            in_order = lies_in_order(bucket, bucket.route(self.rank))
            self.account.use([(0 if in_order else stack) + unpacking])
            self.account.drop(held)


def _workspace(entry: Entry) -> Workspace:
    if entry.workspace is None:
        raise ValueError(f"the plan's entry {entry.name!r} has no workspace, so nothing is known of its memory")
    return entry.workspace
