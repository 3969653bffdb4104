"""AdamW groups are ``torch.optim.AdamW``, by its own kernels."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import rowmuon
from optimizer_cases import assert_equal, copies, give_grads, make_params, train

SHAPES = [(8, 8), (5,), (), (3, 2, 2)]


def both(options: dict[str, Any], torch_options: dict[str, Any] | None = None, dtype: torch.dtype = torch.float32):
    ours, theirs = make_params(SHAPES, dtype=dtype), make_params(SHAPES, dtype=dtype)
    optimizer = rowmuon.PeriodicRowMuon([{"params": ours, "algorithm": "adamw", **options}], lr=1.0, weight_decay=9.0)
    reference = torch.optim.AdamW(theirs, **(options if torch_options is None else torch_options))
    return ours, optimizer, theirs, reference


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize(
    "options",
    [
        {"fused": True},
        {"fused": False},
        {"fused": False, "foreach": False},
        {"foreach": True},
        {"foreach": True, "capturable": False, "amsgrad": True},
        {"fused": True, "amsgrad": True, "maximize": True},
        {"fused": True, "lr": torch.tensor(3e-3)},
        {"fused": False, "lr": torch.tensor(3e-3)},
        {"fused": True, "capturable": True},
        {"fused": True, "eps": 0.0, "betas": (0.0, 0.5)},
    ],
    ids=str,
)
def test_bit_for_bit(options: dict[str, Any], dtype: torch.dtype) -> None:
    options = {"lr": 3e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1, **options}
    ours, optimizer, theirs, reference = both(options, dtype=dtype)
    for step in range(6):
        for params, opt in ((ours, optimizer), (theirs, reference)):
            give_grads(params, step)
            if step == 3:
                params[0].grad = None
            opt.step()
    assert_equal(ours, theirs)
    for mine, other in zip(ours, theirs, strict=True):
        assert optimizer.state[mine].keys() == reference.state[other].keys()
        for key, value in reference.state[other].items():
            assert_equal([optimizer.state[mine][key]], [value])


def test_defaults_of_its_own_and_those_that_it_inherits() -> None:
    params = make_params([(4, 4), (5,)])
    groups = [{"params": params[:1]}, {"params": params[1:], "algorithm": "adamw"}]
    group = rowmuon.PeriodicRowMuon(groups, lr=0.5, weight_decay=0.3, maximize=True).param_groups[1]
    assert (group["lr"], group["weight_decay"], group["maximize"]) == (0.5, 0.3, True)
    assert (group["betas"], group["eps"]) == ((0.9, 0.95), 1e-8)
    assert not {"momentum", "nesterov", "period", "row_scale", "ns_steps", "chunks"} & set(group)


def test_fused_is_the_default() -> None:
    options = {"lr": 3e-3, "betas": (0.9, 0.95), "weight_decay": 0.1}
    ours, optimizer, theirs, reference = both(options, {**options, "fused": True})
    train(optimizer, ours, 5)
    train(reference, theirs, 5)
    assert_equal(ours, theirs)


def test_beside_muon_it_is_the_same() -> None:
    ours, optimizer, *_ = both({"lr": 3e-3})
    with_muon = make_params(SHAPES)
    (matrix,) = make_params([(6, 6)])
    groups = [{"params": [matrix]}, {"params": with_muon, "algorithm": "adamw", "lr": 3e-3}]
    other = rowmuon.PeriodicRowMuon(groups, lr=1.0, weight_decay=9.0, period=2, stagger=True)
    for step in range(5):
        give_grads(ours, step)
        give_grads(with_muon, step)
        give_grads([matrix], step)
        optimizer.step()
        other.step()
    assert_equal(with_muon, ours)


def test_complex_parameters_as_in_torch() -> None:
    pair = [nn.Parameter(torch.randn(4, dtype=torch.cfloat, generator=torch.Generator().manual_seed(0))) for _ in "ab"]
    optimizer = rowmuon.PeriodicRowMuon([{"params": pair[:1], "algorithm": "adamw", "lr": 0.1, "weight_decay": 0.1}])
    reference = torch.optim.AdamW(pair[1:], lr=0.1, betas=(0.9, 0.95), weight_decay=0.1)
    for step in range(3):
        for parameter, opt in zip(pair, (optimizer, reference), strict=True):
            parameter.grad = torch.full_like(parameter, 1.0 + step * 1j)
            opt.step()
    assert_equal(pair[:1], pair[1:])


def test_an_optimizer_of_adamw_groups_alone() -> None:
    ours, optimizer, *_ = both({"lr": 3e-3})
    start = copies(ours)
    train(optimizer, ours, 2)
    assert all(not torch.equal(a, b) for a, b in zip(ours, start, strict=True))
    assert sum(counts.num_orthogonalizations for counts in optimizer.traffic.values()) == 0
    assert "adamw" in optimizer.describe()
