"""`rowdit plan` of Gram row steps: their state on every rank, and their bytes and FLOPs, which are the plan's."""

from __future__ import annotations

import pytest

from rowdit.cost import estimate, traffic
from rowdit.cost.fake import fake_mode, fake_model
from rowdit.cost.hardware import CLUSTERS
from rowdit.cost.memory import sharded_bytes
from rowdit.cost.mesh import RankMesh
from rowdit.cost.optimizer import optimizer_cost
from rowdit.cost.predict import predict
from rowdit.train.config import OptimizerConfig, RunConfig, TrainConfig
from toy_training import MODEL


@pytest.mark.parametrize("shape", [(1, 1), (4, 1), (6, 2)])
def test_gram_row_is_priced_as_planned(shape: tuple[int, int]) -> None:
    mesh = RankMesh(*shape)
    with fake_mode():
        model = fake_model(MODEL)
        row, gram = (
            optimizer_cost(model, OptimizerConfig(name="periodic", cheap_step=step), mesh)  # type: ignore[arg-type]
            for step in ("row", "gram_row")
        )
    for plan in (gram.refresh_plan, gram.row_plan):
        assert plan is not None
        ranks = range(mesh.world_size)
        assert traffic.bytes_sent(plan) == [plan.bytes_sent(rank) for rank in ranks]
        assert traffic.flops(plan) == [plan.num_flops(rank) for rank in ranks]
    assert gram.row.bytes_sent.max == 0 < gram.row.flops.max
    assert gram.refresh.flops.max > row.refresh.flops.max
    assert (gram.refresh.bytes_sent.max > row.refresh.bytes_sent.max) == (mesh.num_shards > 1)
    kept = sharded_bytes(gram.parameters, mesh)["optimizer"] - sharded_bytes(row.parameters, mesh)["optimizer"]
    assert kept == gram.row_plan.gram_state_bytes(0) > 0  # type: ignore[union-attr]


def test_its_products_and_sums_take_time() -> None:
    """On one rank products alone; on several the sums of a refresh are waited for. A step between sends nothing."""
    for ranks in (1, 4):
        row, gram = (
            predict(
                estimate(
                    RunConfig(
                        MODEL,
                        optimizer=OptimizerConfig("periodic", cheap_step=step),  # type: ignore[arg-type]
                        train=TrainConfig(batch_size=8),
                    ),
                    RankMesh(ranks),
                ),
                CLUSTERS["h100"],
            )
            for step in ("row", "gram_row")
        )
        assert gram.row.products > row.row.products == 0 == gram.row.exposed
        assert gram.refresh.products > row.refresh.products
        assert (gram.refresh.exposed > row.refresh.exposed) == (ranks > 1)
        assert gram.total > row.total
