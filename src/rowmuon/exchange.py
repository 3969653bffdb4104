"""An exchange: every rank sends its rows to the owners of their matrices, who send back what becomes of them.

One buffer serves both ways, for what comes back takes the places of what was sent, unless it has another dtype.
Besides `runtime`, the only file that calls a collective.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from rowmuon.buckets import Route
from rowmuon.traffic import StepTraffic

__all__ = ["Exchange", "Messages", "Work", "explained"]

# Tags. Messages between two ranks with one tag arrive in the order in which they were sent.
_OUT, _BACK = 0x726F7701, 0x726F7702


@dataclass
class Work:
    """A collective under way, or the messages that make up one."""

    works: list[dist.Work | None]
    rank: int
    ranks: tuple[int, ...]

    def wait(self) -> None:
        with explained(self.rank, self.ranks):
            while self.works:  # once for each: a message that is waited for again never comes
                work = self.works.pop(0)
                if work is not None:
                    work.wait()


class Exchange:
    """One bucket's way to the owners and back.

    On gloo the messages between two ranks are sent and received one by one, in a fixed order: first everything that
    this rank will receive, on the way back too, then what it sends. gloo's own all-to-all asks for what it receives
    after it has begun to send, through the same connection, so a request waits behind a message of megabytes and the
    two directions of a link take turns. Other backends do an all-to-all each way.

    Args:
        mine: this rank's rows, in the order of ``route.mine``, and later what has come back, so not to be touched until
            then.
        route: of this rank.
        rank: this rank.
        group: the process group over ``route.group``.
        back: where what comes back goes, if not to ``mine``; of as many elements.
    """

    def __init__(
        self, mine: Tensor, route: Route, rank: int, group: dist.ProcessGroup, back: Tensor | None = None
    ) -> None:
        self._mine, self._route, self._rank, self._group = mine, route, rank, group
        self._back = mine if back is None else back
        self._here = route.group.index(rank)
        self._pairwise = _is_gloo(group, mine.device)
        self._received: Tensor | None = None
        self._arriving: list[dist.Work | None] = []
        self._sending: list[dist.Work | None] = []
        self._coming_back: list[dist.Work | None] | None = None

    def expect(self, received: Tensor, *, comes_back: bool) -> None:
        """Asks for what will arrive: ``received`` is to be filled, in the order of ``route.assemble``.

        A request waits behind whatever this rank has begun to send to the same peer before it. So it is best made for
        all buckets that set out together before the first of them does; on all ranks in one order.

        Without ``comes_back`` the way may end with `finish_sending`; else `expect_back` must follow.
        """
        self._received = received
        if self._pairwise:
            with explained(self._rank, self._route.group):
                self._arriving = self._receive(received.split(list(self._route.recv_counts)), _OUT)
                if comes_back:
                    self.expect_back()

    def send_out(self, counts: StepTraffic) -> Work:
        """Sends ``mine``. When the work is done, ``received`` is filled. Counts what is sent."""
        route, received = self._route, self._received
        assert received is not None, "expect() comes before send_out()"
        self._received = None
        _count(self._mine, route.send_counts[self._here], counts)
        with explained(self._rank, route.group):
            if not self._pairwise:
                return self._work([self._all_to_all(received, route.recv_counts, self._mine, route.send_counts)])
            mine, parts = self._mine.split(list(route.send_counts)), received.split(list(route.recv_counts))
            parts[self._here].copy_(mine[self._here])
            self._sending += self._send(mine, _OUT)
            return self._work(self._arriving)

    def expect_back(self) -> None:
        """Asks for what will come back. What an owner sends may be written over the rows that it was sent: it answers
        when it has them all."""
        if self._pairwise and self._coming_back is None:
            self._coming_back = self._receive(self._back.split(list(self._route.send_counts)), _BACK)

    def finish_sending(self) -> None:
        """Waits until everything has left ``mine``."""
        self._work(self._sending).wait()

    def send_back(self, results: Tensor, counts: StepTraffic) -> Work:
        """Sends ``results`` to where ``received`` came from, in the same order; then ``back`` is what has come back."""
        route = self._route
        _count(results, route.recv_counts[self._here], counts)
        with explained(self._rank, route.group):
            if not self._pairwise:
                return self._work([self._all_to_all(self._back, route.send_counts, results, route.recv_counts)])
            assert self._coming_back is not None, "expect_back() comes before send_back()"
            parts = results.split(list(route.recv_counts))
            self._back.split(list(route.send_counts))[self._here].copy_(parts[self._here])
            return self._work([*self._coming_back, *self._sending, *self._send(parts, _BACK)])

    def _work(self, works: list[dist.Work | None]) -> Work:
        return Work(works, self._rank, self._route.group)

    def _all_to_all(
        self, output: Tensor, output_counts: Sequence[int], source: Tensor, counts: Sequence[int]
    ) -> dist.Work | None:
        return dist.all_to_all_single(output, source, list(output_counts), list(counts), self._group, async_op=True)

    def _receive(self, parts: Sequence[Tensor], tag: int) -> list[dist.Work | None]:
        others = ((parts[i], self._route.group[i]) for i in self._others(-1))
        return [dist.irecv(part, peer, self._group, tag) for part, peer in others if part.numel()]

    def _send(self, parts: Sequence[Tensor], tag: int) -> list[dist.Work | None]:
        others = ((parts[i], self._route.group[i]) for i in self._others(1))
        return [dist.isend(part, peer, self._group, tag) for part, peer in others if part.numel()]

    def _others(self, direction: int) -> Iterator[int]:
        """The other members, each rank beginning with another one, so that no one is everyone's first."""
        num_members = len(self._route.group)
        return ((self._here + direction * step) % num_members for step in range(1, num_members))


@dataclass(frozen=True)
class Messages:
    """What a rank sends in a step, counted.

    Args:
        rank: this process's global rank.
        group_of: gives the process group over a tuple of global ranks.
        counts: of this kind of step.
    """

    rank: int
    group_of: Callable[[tuple[int, ...]], dist.ProcessGroup]
    counts: StepTraffic

    def all_reduce(self, tensor: Tensor, ranks: tuple[int, ...], *, maximum: bool = False) -> Work:
        """Adds a tensor up over ranks, in place, or takes the maximum."""
        self.counts.num_collectives += 1
        self.counts.bytes_sent += 2 * (len(ranks) - 1) * tensor.numel() * tensor.element_size() // len(ranks)
        op = dist.ReduceOp.MAX if maximum else dist.ReduceOp.SUM
        with explained(self.rank, ranks):
            work = dist.all_reduce(tensor, op=op, group=self.group_of(ranks), async_op=True)
        return Work([work], self.rank, ranks)

    def all_gather(self, output: Tensor, part: Tensor, ranks: tuple[int, ...]) -> Work:
        """``output`` gets the parts of all ranks, in their order."""
        self.counts.num_collectives += 1
        self.counts.bytes_sent += (len(ranks) - 1) * part.numel() * part.element_size()
        gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        with explained(self.rank, ranks):
            gathered = gather(output, part, group=self.group_of(ranks), async_op=True)
        return Work([gathered], self.rank, ranks)

    def exchange(self, mine: Tensor, route: Route, back: Tensor | None = None) -> Exchange:
        """Not yet begun."""
        return Exchange(mine, route, self.rank, self.group_of(route.group), back)


def _count(buffer: Tensor, staying: int, counts: StepTraffic) -> None:
    counts.num_collectives += 1
    counts.bytes_sent += (buffer.numel() - staying) * buffer.element_size()


def _is_gloo(group: dist.ProcessGroup, device: torch.device) -> bool:
    return device.type == "cpu" and group._get_backend(device).name() == "gloo"


@contextmanager
def explained(rank: int, ranks: Sequence[int]) -> Iterator[None]:
    """Says what a failed collective means. What comes out of gloo or NCCL names a socket."""
    try:
        yield
    except RuntimeError as error:
        raise RuntimeError(
            f"rank {rank}: a collective of the optimizer's over ranks {list(ranks)} failed. One of them has ended, or "
            "didn't come within the process group's timeout: look for the first error in the logs of the others. This "
            "step is half done; start again from a checkpoint."
        ) from error
