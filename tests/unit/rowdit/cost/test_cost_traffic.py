"""The sums over all ranks at once are those of the plan, rank by rank."""

from __future__ import annotations

import pytest

from rowdit.cost import RankMesh, traffic
from rowdit.cost.fake import fake_mode, fake_model
from rowdit.cost.optimizer import optimizer_cost
from rowdit.models import DiTConfig
from rowdit.train.config import OptimizerConfig
from rowmuon.plan import StepPlan, build_plan

ODD = DiTConfig(8, 3, 2, hidden_size=36, depth=3, num_heads=3, num_classes=5, mlp_ratio=2.5)
EVEN = DiTConfig(8, 4, 2, hidden_size=32, depth=2, num_heads=2, num_classes=7)
MESHES = [(1, 1), (2, 1), (3, 1), (4, 1), (7, 1), (64, 1), (300, 1), (4, 2), (12, 3), (8, 8), (6, 6), (48, 8)]


def plans(config: DiTConfig, mesh: RankMesh, refresh: str, bucket_bytes: int, flops_per_byte: float) -> list[StepPlan]:
    import dataclasses

    with fake_mode():
        cost = optimizer_cost(fake_model(config), OptimizerConfig("periodic"), mesh, refresh)  # type: ignore[arg-type]
    assert cost.refresh_plan is not None and cost.row_plan is not None
    options = dataclasses.replace(cost.refresh_plan.options, bucket_bytes=bucket_bytes, flops_per_byte=flops_per_byte)
    entries = cost.refresh_plan.entries
    return [build_plan(entries, range(len(entries)), options), build_plan(entries, (), options)]


@pytest.mark.parametrize(("world_size", "num_replicas"), MESHES)
@pytest.mark.parametrize("config", [ODD, EVEN], ids=["odd", "even"])
def test_bytes_flops_and_peaks_of_every_rank(config: DiTConfig, world_size: int, num_replicas: int) -> None:
    mesh = RankMesh(world_size, num_replicas)
    shared = set()
    for refresh in ("exchange", "gather"):
        # small buckets, so that there are many; replicas that share the work, and replicas that don't
        for bucket_bytes, flops_per_byte in ((1 << 12, 0.0), (64 << 20, 1e9)):
            for plan in plans(config, mesh, refresh, bucket_bytes, flops_per_byte):
                shared |= {bucket.shares_replicas for bucket in plan.buckets}
                assert traffic.bytes_sent(plan) == [plan.bytes_sent(rank) for rank in range(world_size)]
                assert traffic.flops(plan) == [plan.num_flops(rank) for rank in range(world_size)]
                most = max(map(plan.num_orthogonalizations, range(world_size)))
                assert traffic.most_orthogonalizations(plan) == most
                ranks = traffic.representative_ranks(plan, at_most=4)
                peak = max(map(plan.peak_bytes, range(world_size)))
                assert 0.95 * peak <= max(map(plan.peak_bytes, ranks)) <= peak
    assert (True in shared) == (num_replicas > 1)


def test_a_spread() -> None:
    spread = traffic.Spread.of([1, 2, 6])
    assert (spread.mean, spread.max) == (3.0, 6)
