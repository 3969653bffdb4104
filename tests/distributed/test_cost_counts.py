"""What `rowdit plan` says of a run's optimizer is what it does on real ranks under FSDP2 and HSDP, to the byte."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.distributed.fsdp import fully_shard

from ranks.checks import counted_step
from ranks.placing import mesh_of
from ranks.pool import device_type
from rowdit.cost import RankMesh, traffic
from rowdit.cost.fake import fake_mode, fake_model
from rowdit.cost.optimizer import optimizer_cost
from rowdit.models import DiT, DiTConfig
from rowdit.train.config import OptimizerConfig
from rowdit.train.optimizers import build_optimizer
from rowmuon.plan import plan_hash

MODEL = DiTConfig(8, 3, 2, hidden_size=36, depth=2, num_heads=3, num_classes=5, mlp_ratio=2.5)
OPTIMIZER = OptimizerConfig("periodic", period=2)


def two_steps(num_ranks: int, num_replicas: int) -> tuple[int, dict[str, int], dict[str, int]]:
    """Hash of the real plan; bytes sent by this rank and matrices that it orthogonalised, by kind of step."""
    shape = (num_ranks,) if num_replicas == 1 else (num_replicas, num_ranks // num_replicas)
    mesh = mesh_of(shape, None if num_replicas == 1 else ("replica", "shard"))
    model = DiT(MODEL).to(device_type())
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = build_optimizer(model, OPTIMIZER)
    image = torch.randn(4, 3, 8, 8, device=device_type())
    t = torch.rand(4, device=device_type())
    for _ in range(2):
        model(image, t, torch.zeros(4, dtype=torch.int64, device=device_type())).square().mean().backward()
        counted_step(optimizer)  # type: ignore[arg-type]
        optimizer.zero_grad()
    plan, done = optimizer.plan("refresh"), optimizer.traffic  # type: ignore[attr-defined]
    number = plan_hash(plan.entries, plan.options)
    counted = dict(done.items())
    sent = {kind: counts.bytes_sent for kind, counts in counted.items()}
    return number, sent, {kind: counts.num_orthogonalizations for kind, counts in counted.items()}


@pytest.mark.parametrize(("world_size", "num_replicas"), [(2, 1), (4, 1), (4, 2), (4, 4)])
def test_predicted_is_counted(ranks: Callable, world_size: int, num_replicas: int) -> None:
    found = ranks(world_size).run(two_steps, world_size, num_replicas)
    with fake_mode():
        cost = optimizer_cost(fake_model(MODEL), OPTIMIZER, RankMesh(world_size, num_replicas), device=device_type())
    plan = cost.refresh_plan
    assert plan is not None
    assert [number for number, _, _ in found] == [plan_hash(plan.entries, plan.options)] * world_size
    assert [sent["refresh"] for _, sent, _ in found] == traffic.bytes_sent(plan)
    assert [sent["row"] for _, sent, _ in found] == [0] * world_size
    assert max(sent["refresh"] for _, sent, _ in found) == cost.refresh.bytes_sent.max > 0
    assert max(number["refresh"] for *_, number in found) == cost.refresh.num_orthogonalizations
