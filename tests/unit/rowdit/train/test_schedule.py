"""Learning-rate schedules."""

from __future__ import annotations

import pytest
import torch

from rowdit.train.config import TrainConfig
from rowdit.train.schedule import apply_lr_factor_, lr_factor


def test_warm_up_is_linear_and_does_not_start_at_zero() -> None:
    config = TrainConfig(steps=100, warmup_steps=4)
    assert [lr_factor(step, config) for step in range(6)] == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]


def test_cosine_meets_its_ends_and_its_middle() -> None:
    config = TrainConfig(steps=110, warmup_steps=10, schedule="cosine", final_lr_factor=0.2)
    assert lr_factor(10, config) == 1.0
    assert lr_factor(60, config) == pytest.approx(0.6)
    assert lr_factor(110, config) == pytest.approx(0.2)


def test_trapezoid_is_constant_then_linear() -> None:
    config = TrainConfig(steps=100, schedule="trapezoid", decay_fraction=0.2)
    assert lr_factor(80, config) == 1.0
    assert lr_factor(90, config) == pytest.approx(0.5)
    assert lr_factor(100, config) == 0.0


def test_each_group_keeps_its_own_base_rate() -> None:
    a, b = torch.nn.Parameter(torch.ones(1)), torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([{"params": [a], "lr": 0.1}, {"params": [b], "lr": 0.02}], lr=1.0)
    for factor in (0.5, 0.25):  # the second must not multiply the first's result
        apply_lr_factor_(optimizer, factor)
        assert [group["lr"] for group in optimizer.param_groups] == [0.1 * factor, 0.02 * factor]


def test_inverse_square_root() -> None:
    """Constant up to `reference_steps`, then halved each time the steps are four times as many."""
    config = TrainConfig(steps=10_000, schedule="inverse_sqrt", warmup_steps=10, reference_steps=100)
    factors = [lr_factor(step, config) for step in (0, 9, 10, 100, 400, 1600)]
    assert factors == pytest.approx([0.1, 1.0, 1.0, 1.0, 0.5, 0.25])
