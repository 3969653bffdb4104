"""Seconds of a collective, from its bytes, its members and the links between them.

A ring passes every byte through each machine once, over all links of the machine at the same time: so between machines
it is as fast as all of a machine's links together, unless the links inside are slower. An all-to-all sends each pair's
part directly: what leaves the machine goes over the rank's own link.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rowdit.cost.hardware import Cluster


@dataclass(frozen=True)
class Members:
    """A process group as the links see it.

    num_ranks: all of it.
    per_node: of them on one machine, the most.
    """

    num_ranks: int
    per_node: int

    @staticmethod
    def of(ranks: Sequence[int], ranks_per_node: int) -> Members:
        """Ranks r with equal r // ranks_per_node share a machine."""
        nodes: dict[int, int] = {}
        for rank in ranks:
            nodes[rank // ranks_per_node] = nodes.get(rank // ranks_per_node, 0) + 1
        return Members(len(ranks), max(nodes.values()))

    @property
    def num_nodes(self) -> int:
        return -(-self.num_ranks // self.per_node)


def ring_seconds(bytes_sent: float, members: Members, cluster: Cluster) -> float:
    """An all-gather or a reduce-scatter in which each rank sends ``bytes_sent``; half of an all-reduce."""
    if members.num_ranks == 1:
        return 0.0
    inside, between = cluster.inside, cluster.between
    crossing = members.num_nodes - 1
    hops = (members.num_ranks - 1 - crossing) * inside.hop_seconds + crossing * between.hop_seconds
    speed = inside.speed if members.per_node > 1 else float("inf")
    if crossing:
        speed = min(speed, members.per_node * between.speed)
    return (between if crossing else inside).base_seconds + hops + bytes_sent / speed


def all_to_all_latency(members: Members, cluster: Cluster) -> float:
    """Seconds that an all-to-all takes beside moving its bytes."""
    if members.num_ranks == 1:
        return 0.0
    link = cluster.between if members.num_nodes > 1 else cluster.inside
    # The peers' messages overlap: what is left of each is the cost of posting it, a fraction of a hop.
    return link.base_seconds + link.hop_seconds + (members.num_ranks - 1) * _POST_SECONDS


def all_to_all_pace(members: Members, cluster: Cluster) -> float:
    """Seconds for each byte that a rank sends in an all-to-all, or receives, about as much for each peer."""
    if members.num_ranks == 1:
        return 0.0
    inside, between = cluster.inside, cluster.between
    away = (members.num_ranks - members.per_node) / (members.num_ranks - 1)
    return max((1 - away) / (inside.speed * inside.all_to_all), away / (between.speed * between.all_to_all))


_POST_SECONDS = 0.5e-6
"""Of posting one message of an all-to-all; assumed."""
