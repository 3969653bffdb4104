"""`rowdit plan` of Gram row steps: their state on every rank, and their bytes and FLOPs, which are the plan's."""

from __future__ import annotations

import pytest

from rowdit.cost import traffic
from rowdit.cost.fake import fake_mode, fake_model
from rowdit.cost.memory import sharded_bytes
from rowdit.cost.mesh import RankMesh
from rowdit.cost.optimizer import optimizer_cost
from rowdit.train.config import OptimizerConfig
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
    assert kept == gram.row_plan.gram_state_bytes > 0  # type: ignore[union-attr]
