"""A refresh, for Gram row steps: Gram matrices are added up and taken into their means, and factors are renewed.

`rowmuon.stacks` says who does what, `rowmuon.gram` has the formulas, `rowmuon.runtime` sends. While the messages of one
stack are under way the next one is made, and while some factors go around the next ones are computed. Every rank sends
and receives in the same order, whatever it holds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rowmuon import gram
from rowmuon.buckets import Bucket
from rowmuon.exchange import Exchange, Messages, Work
from rowmuon.gram import GramState
from rowmuon.layout import ROWS
from rowmuon.packing import pack_, packed_columns, unpack_
from rowmuon.plan import PlanOptions
from rowmuon.shards import Shard, assemble, disassemble
from rowmuon.stacks import FactorRound, GramStack, Renewal, rows_held

__all__ = ["renew_factors"]

Phase = Callable[[str], AbstractContextManager[Any]]


def renew_factors(
    renewal: Renewal, shards: Sequence[Shard], options: PlanOptions, messages: Messages, phase: Phase
) -> None:
    """Takes Gram matrices into their means and renews the factors.

    Args:
        renewal: of the plan.
        shards: this rank's, by the plan's entries; every momentum has taken its gradient in.
        options: of the plan.
        messages: of this rank.
        phase: see `rowmuon.runtime.Phase`.
    """
    run = _Run(renewal, shards, options, messages, phase)
    run.update_means()
    run.renew()


@dataclass
class _Sums:
    """A stack whose rows are under way to the ranks that hold them of the means."""

    stack: GramStack
    received: Tensor  # (senders, rows held here, members, columns)
    traces: Tensor  # (members, blocks)
    exchange: Exchange | None = None
    arriving: Work | None = None
    adding: Work | None = None


@dataclass
class _Round:
    """A round whose blocks of the means are under way to their owners."""

    home: Tensor  # this rank's rows of all its factors, when they have come back
    received: Tensor | None
    exchange: Exchange
    arriving: Work


@dataclass
class _Gathered:
    """Factors that are under way to all."""

    bucket: Bucket
    received: Tensor
    work: Work
    sent: Tensor


class _Run:
    def __init__(
        self, renewal: Renewal, shards: Sequence[Shard], options: PlanOptions, messages: Messages, phase: Phase
    ) -> None:
        self.renewal, self.shards, self.options = renewal, shards, options
        self.messages, self.phase = messages, phase
        self.ranks = renewal.ranks(messages.rank)

    def state(self, index: int) -> GramState:
        state = self.shards[index].gram
        assert state is not None
        return state

    def empty(self, index: int, *size: int, dtype: torch.dtype) -> Tensor:
        return self.state(index).factor.new_empty(size, dtype=dtype)

    # ------------------------------------------------------------------------------------------------- the means

    def update_means(self) -> None:
        stacks = self.renewal.stacks
        with self.phase("newton_schulz"):
            largest = _largest_entries([self.shards[i] for i in self.renewal.members], self.renewal.dtype)
        if not self.renewal.is_local:
            with self.phase("gather"):
                self.messages.all_reduce(largest, self.ranks, maximum=True).wait()
        under_way: list[_Sums] = []
        for stack, tops in zip(stacks, largest.split([len(stack.members) for stack in stacks]), strict=True):
            with self.phase("newton_schulz"):
                packed, traces = self._grams(stack, tops)
            with self.phase("gather"):
                under_way.append(self._send_rows(stack, packed, traces))
            del packed, traces
            while len(under_way) > (0 if self.renewal.is_local or stack is stacks[-1] else 1):
                with self.phase("gather"):
                    self._take_rows(under_way.pop(0))

    def _grams(self, stack: GramStack, largest: Tensor) -> tuple[Tensor, Tensor]:
        """What this rank's rows of the momentum add to the Gram matrices, packed as it is sent, and to their traces.

        Args:
            largest: of each member, over all ranks.

        Returns:
            (rows, members, columns) and (members, blocks).
        """
        num, blocks, block = len(stack.members), stack.num_blocks, stack.block
        total = self.empty(stack.members[0], *stack.size, dtype=stack.dtype).zero_()
        for index, part, top in zip(stack.members, total.split(blocks), largest.unbind(), strict=True):
            shard = self.shards[index]
            momentum, grad = _momentum_and_grad(shard)
            h = shard.hyper
            gram.add_gram_(part, momentum, grad, top, beta=h.beta, nesterov=h.nesterov, maximize=h.maximize)
        columns = packed_columns(block)
        packed = total.new_empty(blocks * block, num, columns, dtype=stack.comm_dtype)
        pack_(total.view(num, blocks, block, block), packed.view(blocks, block, num, columns).permute(2, 0, 1, 3))
        return packed, total.diagonal(dim1=-2, dim2=-1).sum(-1).view(num, blocks)

    def _send_rows(self, stack: GramStack, packed: Tensor, traces: Tensor) -> _Sums:
        if self.renewal.is_local:
            return _Sums(stack, packed[None], traces)
        route = stack.route(self.messages.rank)
        if not stack.is_in_order:
            packed = torch.cat([packed[start:stop] for start, stop in rows_held(stack.layout, route.group)])
        start, stop = stack.layout.box(self.messages.rank).bounds[ROWS]
        received = packed.new_empty(len(route.group), stop - start, *packed.shape[1:])
        exchange = self.messages.exchange(packed.flatten(), route)
        exchange.expect(received.flatten(), comes_back=False)
        arriving = exchange.send_out(self.messages.counts)
        adding = self.messages.all_reduce(traces, self.ranks)
        return _Sums(stack, received, traces, exchange, arriving, adding)

    def _take_rows(self, sums: _Sums) -> None:
        """Adds up what has come, in the order of the ranks, and takes it into the means."""
        stack = sums.stack
        for work in (sums.arriving, sums.adding):
            if work is not None:
                work.wait()
        if sums.exchange is not None:
            sums.exchange.finish_sending()
        start, stop = stack.layout.box(self.messages.rank).bounds[ROWS]
        if start == stop:
            return
        total = sums.received.sum(0, dtype=stack.dtype) if len(sums.received) > 1 else sums.received[0]
        traces = sums.traces.repeat_interleave(stack.block, dim=1)[:, start:stop]
        for j, index in enumerate(stack.members):
            gram.update_gram_(self.state(index).ema, total[:, j], traces[j], decay=self.options.gram_decay)

    # ----------------------------------------------------------------------------------------------- the factors

    def renew(self) -> None:
        if self.renewal.is_local:
            for part in self.renewal.rounds:
                with self.phase("newton_schulz"):
                    self._factorize_here(part)
            return
        rounds = self.renewal.rounds
        going_around: list[_Gathered] = []
        with self.phase("gather"):
            coming = [self._send_means(rounds[0])]
        for i, part in enumerate(rounds):
            with self.phase("gather"):
                means = self._arrived(part, coming[0])
                coming += [self._send_means(following) for following in rounds[i + 1 : i + 2]]
            with self.phase("newton_schulz"):
                results = self._factorize(means)
            del means
            with self.phase("gather"):
                self._take_factors(going_around, num_kept=0)
                home = self._bring_home(part, results, coming.pop(0))
                del results
                for bucket in part.gathers:
                    going_around.append(self._send_factors(bucket, part, home))
                    self._take_factors(going_around, num_kept=1)
                del home
        with self.phase("gather"):
            self._take_factors(going_around, num_kept=0)

    def _factorize_here(self, part: FactorRound) -> None:
        """All blocks, which are whole here."""
        entries = list(part.there.layouts)
        blocks = [self.state(index).ema.view(-1, part.there.num_rows, part.there.num_cols) for index in entries]
        whole = self._whole(torch.cat(blocks) if len(blocks) > 1 else blocks[0])
        for index, result in zip(entries, whole.split([len(part) for part in blocks]), strict=True):
            self.state(index).factor.copy_(result)

    def _whole(self, means: Tensor) -> Tensor:
        """(num, b, columns) of packed means -> (num, b, b), their factors."""
        num, block, _ = means.shape
        whole = means.new_empty(num, block, block)
        unpack_(means, whole, gram.AT_ONCE)
        factor_dtype = self.state(self.renewal.members[0]).factor.dtype
        return gram.factorize_(whole, self.options.gram_damping, torch.finfo(factor_dtype).eps)

    def _factorize(self, means: Tensor) -> Tensor:
        """The same, packed and in the dtype of factors."""
        packed = means.new_empty(means.shape, dtype=self.state(self.renewal.members[0]).factor.dtype)
        if len(means):
            pack_(self._whole(means), packed)
        return packed

    def _send_means(self, part: FactorRound) -> _Round:
        """This rank's rows of the means, to the owners of their blocks."""
        bucket, first = part.there, part.there.matrices[0].entry
        route = bucket.route(self.messages.rank)
        send = self.empty(first, sum(route.send_counts), dtype=bucket.comm_dtype)
        for piece in route.mine:
            matrix = bucket.matrices[piece.matrix]
            held = bucket.layouts[matrix.entry].box(self.messages.rank)
            send[piece.offset : piece.offset + piece.numel].view(piece.box.shape[1:]).copy_(
                self.state(matrix.entry).ema[piece.box.slices(held)[1]]
            )
        received = self.empty(first, sum(route.recv_counts), dtype=bucket.comm_dtype)
        home = self.empty(first, sum(route.send_counts), dtype=part.back.comm_dtype)
        exchange = self.messages.exchange(send, route, home)
        exchange.expect(received, comes_back=True)
        return _Round(home, received, exchange, exchange.send_out(self.messages.counts))

    def _arrived(self, part: FactorRound, coming: _Round) -> Tensor:
        """(owned blocks, b, columns): the means that this rank makes factors of."""
        coming.arriving.wait()
        assert coming.received is not None
        received, coming.received = coming.received, None
        return assemble(part.there, part.there.route(self.messages.rank), received)

    def _bring_home(self, part: FactorRound, results: Tensor, came: _Round) -> Tensor:
        """Sends the owned factors to where the means have come from; this rank's rows of all of them, flat."""
        send = disassemble(part.back, part.there.route(self.messages.rank), results)
        came.exchange.send_back(send, self.messages.counts).wait()
        return came.home

    def _send_factors(self, bucket: Bucket, part: FactorRound, home: Tensor) -> _Gathered:
        """This rank's rows of some factors, to all."""
        route = bucket.route(self.messages.rank)
        send = home.new_empty(route.send_counts[0])
        there = part.there
        mine = {there.matrices[p.matrix]: p for p in there.route(self.messages.rank).mine}
        at = {(matrix.entry, matrix.index): piece.offset for matrix, piece in mine.items()}
        for piece in route.mine:
            matrix = bucket.matrices[piece.matrix]
            start = at[matrix.entry, matrix.index]
            send[piece.offset : piece.offset + piece.numel].copy_(home[start : start + piece.numel])
        received = send.new_empty(send.numel() * len(route.group))
        return _Gathered(bucket, received, self.messages.all_gather(received, send, route.group), send)

    def _take_factors(self, going_around: list[_Gathered], num_kept: int) -> None:
        """Of those that have set out, all but the youngest ``num_kept`` have arrived when this returns."""
        while len(going_around) > num_kept:
            done = going_around.pop(0)
            done.work.wait()
            bucket = done.bucket
            stack = assemble(bucket, bucket.route(self.messages.rank), done.received)
            sizes = [layout.num_matrices for layout in bucket.layouts.values()]
            for index, packed in zip(bucket.layouts, stack.split(sizes), strict=True):
                unpack_(packed, self.state(index).factor, gram.AT_ONCE)


def _largest_entries(shards: Sequence[Shard], dtype: torch.dtype) -> Tensor:
    """(number of shards,): `rowmuon.gram.largest_entry` of each."""
    found = [gram.largest_entry(*_momentum_and_grad(s), nesterov=s.hyper.nesterov, dtype=dtype) for s in shards]
    return torch.stack(found)


def _momentum_and_grad(shard: Shard) -> tuple[Tensor, Tensor | None]:
    """As (rows, columns). The momentum has taken the gradient in; without a gradient it stands for the direction."""
    grad = None if shard.grad is None else shard.grad.flatten(0, 1)
    return shard.momentum.flatten(0, 1), grad
