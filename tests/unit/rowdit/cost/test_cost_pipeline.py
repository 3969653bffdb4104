"""A refresh's seconds against arithmetic by hand.

A link moves 100 bytes a second each way, a rank computes 10 FLOP, and memory costs nothing.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch

from rowdit.cost.collectives import Members
from rowdit.cost.hardware import CLUSTERS, Cluster, Link
from rowdit.cost.pipeline import OptimizerTime, refresh_time
from rowdit.cost.traffic import rank_works
from rowmuon.layout import ROWS, Grid, Layout, Split
from rowmuon.plan import Entry, PlanOptions, StepPlan, build_plan

LINK = Link(100.0, 1.0, 0.0, 0.0)
SLOW: Cluster = dataclasses.replace(
    CLUSTERS["h100"],
    peak_flops=10.0,
    matmul=1.0,
    newton_schulz=1.0,
    memory_rate=1e30,
    memory=1.0,
    ranks_per_node=1,
    inside=LINK,
    between=LINK,
)


def plan_of(
    shapes: list[tuple[int, int]], flops: int, refresh: str = "exchange", num_ranks: int = 4, limit: int = 64 << 20
) -> StepPlan:
    grid = Grid((num_ranks,), tuple(range(num_ranks)))
    entries = [
        Entry(
            f"w{i}",
            Layout(shape, 0, 1, grid, (Split(0, ROWS, num_ranks, shape[0], 1),)),
            torch.float32,
            "cpu",
            (),
            flops,
        )
        for i, shape in enumerate(shapes)
    ]
    options = PlanOptions(refresh, torch.float32, limit)  # type: ignore[arg-type]
    return build_plan(entries, range(len(entries)), options)


def time_of(plan: StepPlan, cluster: Cluster = SLOW, fill: float = 0.0) -> OptimizerTime:
    num_ranks = len(plan.entries[0].layout.grid.ranks)  # type: ignore[union-attr]
    groups = Members(num_ranks, 1), Members(1, 1)
    return refresh_time(plan, rank_works(plan), groups, cluster, fill)


def test_one_matrix_goes_to_its_owner_and_comes_home() -> None:
    """8 x 50 of 4 bytes: 400 from each rank. The owner receives 1,200 and sends as many back; 20 FLOP in between."""
    time = time_of(plan_of([(8, 50)], flops=20))
    assert time.exposed == pytest.approx(12.0 + 12.0, abs=1e-4)
    assert time.traffic == pytest.approx(24.0, abs=1e-4)
    assert time.total == pytest.approx(26.0, abs=1e-4)


def test_four_matrices_take_no_longer_than_one() -> None:
    """Each has an owner of its own, in one bucket."""
    time = time_of(plan_of([(8, 50)] * 4, flops=20))
    assert (time.products, time.total) == pytest.approx((2.0, 26.0), abs=1e-4)


def test_buckets_of_other_owners_travel_at_the_same_time() -> None:
    """Two shapes are two buckets, with one owner each; the links and processors of both are busy together."""
    shapes = [(8, 50), (4, 100)]
    plan = plan_of(shapes, flops=20)
    assert len(plan.buckets) == 2
    assert {m.owner for bucket in plan.buckets for m in bucket.matrices} == {(0, 0), (0, 2)}
    time = time_of(plan)
    # The others have sent everything after 8 s, while each owner receives for 12. Neither computes for the other.
    assert time.products == pytest.approx(2.0)
    assert time.total == pytest.approx(26.0, abs=1e-4)
    assert time.traffic == pytest.approx(48.0, abs=1e-4)


def test_links_that_are_full_take_turns() -> None:
    """Four owners in each of two buckets: every link is busy both ways, so out and home can't pass each other."""
    plan = plan_of([(8, 50)] * 8, flops=1, limit=8 * 50 * 4)
    assert len(plan.buckets) == 2
    assert time_of(plan).total == pytest.approx(48.0, abs=1e-3)


def test_computing_hides_the_next_bucket() -> None:
    plan = plan_of([(8, 50)] * 8, flops=300, limit=8 * 50 * 4)
    time = time_of(plan)
    assert time.products == pytest.approx(60.0)
    assert time.exposed == pytest.approx(12.0 + 12.0, abs=1e-3)  # the first's way out and the last's home


def test_what_fills_the_first_wait() -> None:
    plan = plan_of([(8, 50)], flops=20)
    assert time_of(plan, fill=5.0).total == pytest.approx(time_of(plan).total)
    assert time_of(plan, fill=15.0).total == pytest.approx(time_of(plan).total + 3.0, abs=1e-4)


def test_a_gather_takes_the_links_of_all() -> None:
    """Each rank sends its 400 bytes to three others, and orthogonalises everything."""
    plan = plan_of([(8, 50), (4, 100)], flops=20, refresh="gather")
    time = time_of(plan)
    assert time.products == pytest.approx(4.0)
    assert time.traffic == pytest.approx(24.0)
    assert time.total == pytest.approx(24.0 + 2.0)  # the first is computed while the second travels


def test_ranks_without_a_matrix_are_one_kind() -> None:
    plan = plan_of([(4096, 4)] * 3, flops=20, num_ranks=4096)
    kinds = rank_works(plan)
    owners = [kind for kind in kinds if kind[0].owned]
    assert len(kinds) == 2 and len(owners) == 1
    (idle,) = (kind for kind in kinds if not kind[0].owned)
    assert idle[0].received == 0 and idle[0].sent == 3 * 4 * 4
    assert owners[0][0].received == 4095 * 4 * 4 and owners[0][0].sent == 2 * 4 * 4
