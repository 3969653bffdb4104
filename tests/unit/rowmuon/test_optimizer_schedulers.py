"""Schedulers of ``torch.optim.lr_scheduler`` drive both kinds of group."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler as schedulers

import rowmuon
from optimizer_cases import assert_equal, give_grads, make_params, mixed_groups, mixed_optimizer, relative_difference

SHAPES = [(8, 8), (16, 4), (5,)]
NUM_STEPS = 10

MAKE: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "LambdaLR": lambda opt: schedulers.LambdaLR(opt, [lambda s: 1 / (1 + s), lambda s: 0.5**s]),
    "CosineAnnealingLR": lambda opt: schedulers.CosineAnnealingLR(opt, T_max=8, eta_min=1e-4),
    "OneCycleLR": lambda opt: schedulers.OneCycleLR(opt, max_lr=[0.1, 0.01], total_steps=NUM_STEPS + 1),
    "OneCycleLR, momentum kept": lambda opt: schedulers.OneCycleLR(opt, 0.1, total_steps=20, cycle_momentum=False),
    "CyclicLR": lambda opt: schedulers.CyclicLR(opt, base_lr=1e-3, max_lr=0.1, step_size_up=3),
    "SequentialLR": lambda opt: schedulers.SequentialLR(
        opt, [schedulers.LinearLR(opt, 0.1, total_iters=4), schedulers.ExponentialLR(opt, 0.8)], milestones=[4]
    ),
    "ReduceLROnPlateau": lambda opt: schedulers.ReduceLROnPlateau(opt, patience=1, factor=0.3),
}


def advance(scheduler: Any) -> None:
    scheduler.step(*((1.0,) if isinstance(scheduler, schedulers.ReduceLROnPlateau) else ()))


@pytest.mark.parametrize("make", MAKE.values(), ids=MAKE)
def test_schedulers_are_followed(make: Callable[[torch.optim.Optimizer], Any]) -> None:
    scheduled, by_hand, constant = (make_params(SHAPES) for _ in range(3))
    optimizer = mixed_optimizer(scheduled)
    scheduler = make(optimizer)
    follower, still = mixed_optimizer(by_hand), mixed_optimizer(constant)
    lrs = set()
    for step in range(NUM_STEPS):
        for group, driven in zip(follower.param_groups, optimizer.param_groups, strict=True):
            group["lr"] = driven["lr"]
            if group["algorithm"] == "muon":
                group["momentum"] = driven["momentum"]
        lrs.add(optimizer.param_groups[0]["lr"])
        for params, opt in ((scheduled, optimizer), (by_hand, follower), (constant, still)):
            give_grads(params, step)
            opt.step()
        advance(scheduler)
        assert_equal(scheduled, by_hand)
    assert len(lrs) > 1
    assert relative_difference(constant, scheduled, make_params(SHAPES)) > 0.05


@pytest.mark.parametrize("name", ["LambdaLR", "CosineAnnealingLR", "OneCycleLR", "SequentialLR"])
def test_a_resumed_schedule_goes_on(name: str) -> None:
    params = make_params(SHAPES)
    optimizer = mixed_optimizer(params)
    scheduler = MAKE[name](optimizer)
    for step in range(4):
        give_grads(params, step)
        optimizer.step()
        advance(scheduler)
    others = [torch.nn.Parameter(p.detach().clone()) for p in params]
    other = mixed_optimizer(others)
    resumed = MAKE[name](other)
    other.load_state_dict(optimizer.state_dict())
    resumed.load_state_dict(scheduler.state_dict())
    for step in range(4, NUM_STEPS):
        for each, opt, schedule in ((params, optimizer, scheduler), (others, other, resumed)):
            give_grads(each, step)
            opt.step()
            advance(schedule)
    assert_equal(others, params)
    assert other.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"]


@pytest.mark.parametrize("name", ["LambdaLR", "CosineAnnealingLR", "OneCycleLR", "SequentialLR"])
def test_a_tensor_lr_is_scheduled_in_place(name: str) -> None:
    by_float, by_tensor = make_params(SHAPES), make_params(SHAPES)
    settings = {"lr": torch.tensor(0.02)}
    groups = [{**group, "lr": torch.tensor(group.get("lr", 0.02))} for group in mixed_groups(by_tensor)]
    pair = [mixed_optimizer(by_float), rowmuon.PeriodicRowMuon(groups, **settings)]
    tensors = [group["lr"] for group in pair[1].param_groups]
    both = [MAKE[name](optimizer) for optimizer in pair]
    for step in range(NUM_STEPS):
        for params, optimizer, scheduler in zip((by_float, by_tensor), pair, both, strict=True):
            give_grads(params, step)
            optimizer.step()
            scheduler.step()
    assert all(group["lr"] is tensor for group, tensor in zip(pair[1].param_groups, tensors, strict=True))
    # lr is rounded to fp32
    assert relative_difference(by_tensor, by_float, make_params(SHAPES)) < 1e-4


def test_a_scheduler_after_a_skipped_step() -> None:
    params = make_params(SHAPES)
    optimizer = mixed_optimizer(params, skip_nonfinite=True)
    scheduler = MAKE["LambdaLR"](optimizer)
    give_grads(params, 0)
    params[0].grad[0, 0] = float("nan")
    optimizer.step()
    scheduler.step()
    assert optimizer.param_groups[0]["lr"] == 0.01
    assert optimizer.next_step_kind == "refresh"


@pytest.mark.parametrize("period", [((0, 3), (4, 1)), [[0, 3], [4, 1]]], ids=["tuples", "lists"])
def test_a_period_that_is_set_later_is_followed(period: Any) -> None:
    params = make_params(SHAPES)
    optimizer = mixed_optimizer(params, period=2, stagger=True)
    counted = [0]
    for step in range(6):
        if step == 1:
            optimizer.param_groups[0]["period"] = period
            optimizer.add_param_group({"params": make_params([(3, 3)]), "period": None})  # assigns phases anew
        give_grads(params, step)
        optimizer.step()
        counted.append(sum(counts.num_orthogonalizations for counts in optimizer.traffic.values()))
    # Both at first; each once in steps 1 to 3, as their phases say; then, with K = 1, both in every step.
    assert [b - a for a, b in itertools.pairwise(counted)] == [2, 1, 0, 1, 2, 2]


def test_settings_changed_in_a_group_are_followed() -> None:
    changed, fresh = make_params(SHAPES), make_params(SHAPES)
    optimizer = mixed_optimizer(changed, period=1)
    other = mixed_optimizer(fresh, period=1)
    new = {"ns_coefficients": "polar_express", "ns_steps": 4, "eps": 1e-6, "weight_decay": 0.5, "nesterov": False,
           "adjust_lr_fn": "match_rms_adamw"}  # fmt: skip
    for step in range(2):
        for params, opt in ((changed, optimizer), (fresh, other)):
            give_grads(params, step)
            opt.step()
    assert_equal(changed, fresh)
    optimizer.param_groups[0].update(new)
    rebuilt = mixed_optimizer(fresh, period=1, **new)
    rebuilt.load_state_dict({**other.state_dict(), "param_groups": rebuilt.state_dict()["param_groups"]})
    for params, opt in ((changed, optimizer), (fresh, rebuilt)):
        give_grads(params, 2)
        opt.step()
    assert_equal(changed[:2], fresh[:2])
