"""Faults of sharding that users of other Muon implementations met and that one process can show. Each test is named
after its row of the project's list; those that need ranks are in tests/distributed."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import rowmuon
from optimizer_cases import assert_equal, copies, give_grads, make_params, momentum_of, train
from rowmuon.groups import complete_group
from rowmuon.layout import ROWS, Grid, Layout, Split
from rowmuon.plan import Entry, PlanOptions, build_plan
from rowmuon.runtime import Runtime
from rowmuon.shards import Hyper, make_shard
from rowmuon.traffic import StepTraffic


@pytest.mark.parametrize("rank", [2, 3])
def test_S3_row_step_on_an_empty_local_shard(rank: int) -> None:
    # (3, 64) over 4 ranks by torch.chunk's rule: ranks 0, 1, 2 hold a row each, rank 3 holds (0, 64).
    layout = Layout((3, 64), 0, 1, Grid((4,), (0, 1, 2, 3)), (Split(0, ROWS, 4, 3, 1),))
    num_rows = layout.box(rank).shape[1]
    parameter = nn.Parameter(torch.ones(num_rows, 64))
    parameter.grad = torch.full_like(parameter, 2.0)
    momentum = torch.zeros_like(parameter)
    group = complete_group({"params": [parameter]}, rowmuon.PeriodicRowMuon(make_params([(2, 2)])).defaults)
    shard = make_shard(parameter, momentum, layout, rank, group, Hyper.of(group))
    entry = Entry("weight", layout, parameter.dtype, "cpu", (), 0)
    counts = StepTraffic()
    runtime = Runtime(rank, lambda ranks: pytest.fail("a row step asked for a process group"))
    plan = build_plan([entry], [], PlanOptions())
    runtime.prepare(plan, [shard])
    runtime.execute(plan, [shard], counts)
    assert counts == StepTraffic()
    assert bool(torch.isfinite(parameter).all())
    assert (parameter.numel() == 0) == (rank == 3)
    if rank == 2:  # the test sees updates where there are rows
        assert bool((parameter < 1).all()) and bool((momentum > 0).all())


@pytest.mark.parametrize("shape", [(0, 64), (64, 0), (0, 8, 8), (0, 4, 3, 3)], ids=str)
def test_S3_an_empty_parameter_is_a_no_op(shape: tuple[int, ...]) -> None:
    params = make_params([shape, (4, 4)])
    optimizer = rowmuon.PeriodicRowMuon(params, lr=0.02, period=2)
    start = copies(params)
    assert train(optimizer, params, 2) == ["refresh", "row"]
    assert params[0].shape == shape and not torch.equal(params[1], start[1])


def test_S10_fused_experts_are_separate_matrices() -> None:
    (fused,) = make_params([(4 * 16, 32)])
    parts = [nn.Parameter(part.clone()) for part in fused.detach().chunk(4)]
    optimizer = rowmuon.PeriodicRowMuon([{"params": [fused], "chunks": 4}], lr=0.02, period=2)
    separate = rowmuon.PeriodicRowMuon(parts, lr=0.02, period=2)
    (tall,) = make_params([(4 * 16, 32)])
    as_one = rowmuon.PeriodicRowMuon([tall], lr=0.02, period=2)
    for step in range(4):
        give_grads([fused], step)
        tall.grad = fused.grad.clone()
        for part, grad in zip(parts, fused.grad.chunk(4), strict=True):
            part.grad = grad.clone()
        for opt in (optimizer, separate, as_one):
            opt.step()
        assert_equal(fused.chunk(4), parts)
    assert not torch.allclose(fused, tall, atol=1e-3)
    assert optimizer.traffic["refresh"].num_orthogonalizations == 2 * 4


def test_S12_a_flat_parameter_in_a_muon_group_names_fsdp2() -> None:
    flat = nn.Parameter(torch.zeros(64 * 64))
    with pytest.raises(ValueError, match=r"'_flat_param'.*\(4096,\).*AdamW.*FSDP2"):
        rowmuon.PeriodicRowMuon([("_flat_param", flat)])
    model = nn.Module()
    model.register_parameter("_flat_param", flat)
    with pytest.raises(ValueError, match="'_flat_param'.*needs a matrix"):
        rowmuon.param_groups(model, [rowmuon.Rule(".*", "muon")])


def test_S12_lr_zero_stays_zero() -> None:
    params = make_params([(8, 8), (8,), (6, 6)])
    groups = [
        {"params": [params[0]], "lr": 0.0},
        {"params": [params[1]], "algorithm": "adamw", "lr": 0.0},
        {"params": [params[2]]},
    ]
    optimizer = rowmuon.PeriodicRowMuon(groups, lr=0.02, weight_decay=0.1, period=2)
    start = copies(params)
    train(optimizer, params, 3)
    assert [group["lr"] for group in optimizer.param_groups] == [0.0, 0.0, 0.02]
    assert_equal(params[:2], start[:2])
    assert not torch.equal(params[2], start[2])
    optimizer.load_state_dict(optimizer.state_dict())
    assert [group["lr"] for group in optimizer.param_groups] == [0.0, 0.0, 0.02]
    assert float(momentum_of(optimizer, params[0]).abs().max()) > 0


def test_S16_equal_convolutions_are_each_their_own_matrix() -> None:
    convolutions = make_params([(8, 4, 3, 3), (8, 4, 3, 3)])
    matrices = [nn.Parameter(weight.detach().reshape(8, 36).clone()) for weight in convolutions]
    optimizer = rowmuon.PeriodicRowMuon(convolutions, lr=0.02, period=2)
    flat = rowmuon.PeriodicRowMuon(matrices, lr=0.02, period=2)
    assert [bucket.matrix_numel for bucket in optimizer.plan("refresh").buckets] == [8 * 36]
    for step in range(4):
        give_grads(convolutions, step)
        for matrix, weight in zip(matrices, convolutions, strict=True):
            matrix.grad = weight.grad.reshape(8, 36).clone()
        optimizer.step()
        flat.step()
        assert_equal([weight.reshape(8, 36) for weight in convolutions], matrices)
