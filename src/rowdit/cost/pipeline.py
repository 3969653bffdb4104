"""Seconds of a refresh: the pipeline of `rowmuon.runtime` run by arithmetic, for all kinds of ranks side by side."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rowdit.cost.collectives import Members, all_to_all_latency, all_to_all_pace, ring_seconds
from rowdit.cost.hardware import Cluster
from rowdit.cost.traffic import RankWork, gathered_bytes
from rowmuon.buckets import Bucket, travels
from rowmuon.plan import StepPlan

MOMENTUM_BYTES = 3 * 4  # read gradient and momentum, write momentum


@dataclass(frozen=True)
class OptimizerTime:
    """Seconds of one kind of optimizer step, until the last rank is done.

    memory: momentum, row steps, packing, applying, and AdamW's parameters.
    products: Newton-Schulz, and the products of Gram row steps, on the rank with most.
    exposed: the rest: waiting for messages that nothing hides, and for ranks that are still computing what they send.
    traffic: of all messages, hidden or not; of each, where it takes longest.
    """

    memory: float
    products: float
    exposed: float
    traffic: float

    @property
    def total(self) -> float:
        return self.memory + self.products + self.exposed


def refresh_time(
    plan: StepPlan,
    ranks: Sequence[tuple[RankWork, ...]],
    groups: tuple[Members, Members],
    cluster: Cluster,
    fill: float,
) -> OptimizerTime:
    """A refresh by the plan's own schedule: the next buckets are on their way while one is orthogonalised, and those
    before come home. What ``overlap="backward"`` sends before the step isn't counted as sent then.

    Args:
        ranks: kinds of ranks, see `rowdit.cost.traffic.rank_works`.
        groups: a shard group and a replica group, as the links see them.
        fill: seconds of work that waits for nobody (AdamW's parameters).
    """
    pipeline = _Pipeline(plan, ranks, groups, cluster, fill)
    pipeline.run()
    memory = fill + sum(stage.pack + stage.apply for stage in pipeline.stages)
    products = max(rank.products for rank in pipeline.ranks)
    end = max(rank.now for rank in pipeline.ranks)
    return OptimizerTime(memory, products, max(0.0, end - memory - products), pipeline.traffic)


class _Rank:
    """Clocks: where its work stands, and when its link is free, out and in."""

    def __init__(self, works: tuple[RankWork, ...]) -> None:
        self.works = works
        self.now = self.out_free = self.in_free = self.products = 0.0


@dataclass(frozen=True)
class _Stage:
    """A bucket: seconds of packing its momentum and of applying what comes home, and of orthogonalising a matrix."""

    kind: str
    travels: bool
    pack: float
    apply: float
    matrix: float
    gathered: int

    @staticmethod
    def of(bucket: Bucket, num_shards: int, cluster: Cluster) -> _Stage:
        held = len(bucket.matrices) * bucket.matrix_numel / num_shards
        size = bucket.comm_dtype.itemsize
        pack = held * (MOMENTUM_BYTES + size) / cluster.memory_speed
        apply = held * (2 * 4 + size) / cluster.memory_speed
        matrix = bucket.num_flops / (cluster.matmul_speed * cluster.newton_schulz)
        return _Stage(bucket.kind, travels(bucket), pack, apply, matrix, gathered_bytes(bucket))


class _Pipeline:
    """Each way of a rank's link moves bytes in the order in which their messages were started. A rank has a bucket when
    its link has moved what it receives and the links of all who send have moved what they send."""

    def __init__(
        self,
        plan: StepPlan,
        ranks: Sequence[tuple[RankWork, ...]],
        groups: tuple[Members, Members],
        cluster: Cluster,
        fill: float,
    ) -> None:
        self.schedule, self.cluster, self.fill = plan.schedule, cluster, fill
        self.shards, self.replicas = groups
        self.stages = [_Stage.of(bucket, self.shards.num_ranks, cluster) for bucket in plan.buckets]
        self.ranks = [_Rank(works) for works in ranks]
        self.latency, self.pace = all_to_all_latency(self.shards, cluster), all_to_all_pace(self.shards, cluster)
        self.traffic = 0.0
        self.arrives: dict[int, list[float]] = {}  # bucket -> when, at each kind of rank
        self.home: dict[int, list[float]] = {}

    def run(self) -> None:
        sent, applied = self.schedule.sent, (*self.schedule.applied, len(self.stages))
        self.send_ahead(0, sent[0])
        for rank in self.ranks:
            rank.now += self.fill
        for i, stage in enumerate(self.stages):
            for rank in self.ranks:
                rank.now += 0.0 if stage.travels else stage.pack
            self.send_ahead(sent[i], sent[i + 1])
            self.orthogonalize(i)
            if stage.kind == "exchange":
                self.send_home(i)
            for j in range(applied[i], applied[i + 1]):
                for k, rank in enumerate(self.ranks):
                    if j in self.home:
                        rank.now = max(rank.now, self.home[j][k])
                    rank.now += self.stages[j].apply

    def send_ahead(self, start: int, end: int) -> None:
        for i in range(start, end):
            stage = self.stages[i]
            if not stage.travels:
                continue
            for rank in self.ranks:
                rank.now += stage.pack
            if stage.kind == "gather":
                self.arrives[i] = self.ring(stage, self.shards, [rank.now for rank in self.ranks])
            else:
                self.arrives[i] = self.exchange(i, back=False)

    def orthogonalize(self, i: int) -> None:
        for k, rank in enumerate(self.ranks):
            if i in self.arrives:
                rank.now = max(rank.now, self.arrives[i][k])
            seconds = rank.works[i].owned * self.stages[i].matrix
            rank.now += seconds
            rank.products += seconds

    def send_home(self, i: int) -> None:
        self.home[i] = self.exchange(i, back=True)
        if self.stages[i].gathered:
            self.home[i] = self.ring(self.stages[i], self.replicas, self.home[i])

    def exchange(self, i: int, *, back: bool) -> list[float]:
        """When a bucket has arrived at each kind of rank, at its owners or ``back``; where nothing comes, at once."""
        moved = [(r.works[i].received, r.works[i].sent) if back else (r.works[i].sent, r.works[i].received)
                 for r in self.ranks]  # fmt: skip
        all_sent = longest = 0.0
        for rank, (out, _) in zip(self.ranks, moved, strict=True):
            if out:
                rank.out_free = max(rank.out_free, rank.now) + out * self.pace
                all_sent = max(all_sent, rank.out_free)
        arrived = []
        for rank, (out, into) in zip(self.ranks, moved, strict=True):
            longest = max(longest, out * self.pace, into * self.pace)
            if into:
                rank.in_free = max(rank.in_free, rank.now) + into * self.pace
                arrived.append(max(rank.in_free, all_sent) + self.latency)
            else:
                arrived.append(rank.now)
        self.traffic += longest + self.latency if longest else 0.0
        return arrived

    def ring(self, stage: _Stage, members: Members, starts: Sequence[float]) -> list[float]:
        """When an all-gather has arrived that each kind of rank joins at its start. It takes both ways of all links."""
        seconds = ring_seconds(stage.gathered, members, self.cluster)
        clocks = (max(rank.out_free, rank.in_free) for rank in self.ranks)
        end = max(*starts, *clocks) + seconds
        for rank in self.ranks:
            rank.out_free = rank.in_free = end
        self.traffic += seconds
        return [end] * len(self.ranks)
