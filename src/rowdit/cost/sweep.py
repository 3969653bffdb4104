"""How a step's time changes with the period, the ranks and the way of refreshing, as a table and as a plot."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from rowdit.cost.estimate import estimate
from rowdit.cost.hardware import Cluster
from rowdit.cost.mesh import RankMesh
from rowdit.cost.optimizer import Refresh
from rowdit.cost.predict import StepTime, predict
from rowdit.cost.text import table
from rowdit.train.config import RunConfig

PERIODS = (1, 2, 3, 4, 6, 8)
WORLD_SIZES = (8, 64, 256, 1024, 4096)
MODES: tuple[Refresh, ...] = ("gather", "exchange")


@dataclass(frozen=True)
class Point:
    """One number of ranks and one way of refreshing.

    Args:
        world_size, num_replicas: the mesh.
        refresh: "gather" or "exchange".
        time: with refreshes only, K = 1.
        bytes_sent: of a refresh, mean over the ranks.
    """

    world_size: int
    num_replicas: int
    refresh: str
    time: StepTime
    bytes_sent: float

    def at(self, period: int) -> StepTime:
        """The time at K = ``period``: the same steps in another proportion."""
        return dataclasses.replace(self.time, refresh_share=1 / period)


def sweep(
    config: RunConfig, cluster: Cluster, images_per_rank: int, num_shards: int | None, world_sizes: Sequence[int]
) -> list[Point]:
    """A point for each number of ranks and each way, with the same images on each rank.

    Args:
        config: a run of "muon" or "periodic"; its period and batch aren't used.
        cluster: which machines.
        images_per_rank: of one step.
        num_shards: ranks of a replica; None shards over all. Numbers of ranks that it doesn't divide are left out.
        world_sizes: numbers of ranks.
    """
    points = []
    for world_size in world_sizes:
        if num_shards is not None and world_size % num_shards:
            continue
        mesh = RankMesh(world_size, world_size // num_shards if num_shards else 1)
        train = dataclasses.replace(config.train, batch_size=images_per_rank * world_size)
        for mode in MODES:
            found = estimate(dataclasses.replace(config, train=train), mesh, refresh=mode)
            time = dataclasses.replace(predict(found, cluster), refresh_share=1.0)
            sent = found.optimizer.refresh.bytes_sent.mean
            points.append(Point(world_size, mesh.num_replicas, mode, time, sent))
    return points


def sweep_table(points: Iterable[Point], periods: Sequence[int] = PERIODS) -> str:
    """A row a point: the step at K = 1, the optimizer's share of it, and what other K save of the step."""
    head = ("ranks", "refresh", "ms, K = 1", "optimizer", *(f"K = {k} saves" for k in periods if k != 1))
    rows = []
    for point in points:
        first = point.at(1)
        saved = [f"{100 * (1 - point.at(k).total / first.total):.1f} %" for k in periods if k != 1]
        share = f"{100 * first.optimizer / first.total:.1f} %"
        held = f"{point.num_replicas} x {point.world_size // point.num_replicas}" if point.num_replicas > 1 else ""
        ranks = held or str(point.world_size)
        rows.append((ranks, point.refresh, f"{1e3 * first.total:,.1f}", share, *saved))
    return table(head, rows, left=2)


def sweep_dict(points: Iterable[Point], periods: Sequence[int] = PERIODS) -> list[dict[str, Any]]:
    """The same as plain data."""
    return [
        {
            "world_size": point.world_size,
            "num_replicas": point.num_replicas,
            "refresh_mode": point.refresh,
            "refresh_bytes_sent": point.bytes_sent,
            "rest_seconds": point.time.rest,
            "seconds": {str(k): point.at(k).total for k in periods},
            "optimizer_seconds": {str(k): point.at(k).optimizer for k in periods},
        }
        for point in points
    ]
