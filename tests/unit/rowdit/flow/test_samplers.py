from __future__ import annotations

import math

import pytest
import torch

from rowdit.flow import SAMPLERS, euler, heun, interpolate, time_grid

MEAN, STD = 0.7, 0.3


def gaussian_velocity(x, t):
    """Exact velocity of the flow whose data are N(MEAN, STD^2): x_t is N((1 - t) MEAN, (1 - t)^2 STD^2 + t^2), and x
    keeps its quantile. So noise z ends at MEAN + STD z."""
    variance = (1 - t) ** 2 * STD**2 + t**2
    return -MEAN + (x - (1 - t) * MEAN) * (t - (1 - t) * STD**2) / variance


def grid(num_steps: int):
    return torch.linspace(1, 0, num_steps + 1, dtype=torch.float64)


PROBLEMS = {
    "gaussian flow": (
        gaussian_velocity,
        torch.tensor([-1.5, 0.2, 2.0], dtype=torch.float64),
        lambda z: MEAN + STD * z,
    ),
    # dx/dt = -x^2 from x(1) = z: 1/x grows with t, so x(0) = 1 / (1/z - 1).
    "riccati": (lambda x, t: -(x**2), torch.tensor([0.3, 0.5], dtype=torch.float64), lambda z: 1 / (1 / z - 1)),
    # dx/dt = cos(2 t) x.
    "time-dependent": (
        lambda x, t: torch.cos(2 * t) * x,
        torch.tensor([1.0, -2.0], dtype=torch.float64),
        lambda z: z * math.exp(-math.sin(2) / 2),
    ),
}


@pytest.mark.parametrize("problem", PROBLEMS)
@pytest.mark.parametrize(("sampler", "order"), [(euler, 1), (heun, 2)])
def test_order_of_convergence(sampler, order, problem):
    velocity, start, solution = PROBLEMS[problem]
    errors = [(sampler(velocity, start, grid(n)) - solution(start)).norm().item() for n in (100, 200, 400)]
    for coarse, fine in zip(errors[:-1], errors[1:], strict=True):
        assert math.log2(coarse / fine) == pytest.approx(order, abs=0.1)


@pytest.mark.parametrize("sampler", SAMPLERS.values(), ids=SAMPLERS)
@pytest.mark.parametrize("num_steps", [1, 7])
def test_a_straight_path_is_followed_exactly(sampler, num_steps):
    generator = torch.Generator().manual_seed(0)
    x, noise = torch.randn(2, 1, 4, 4, generator=generator), torch.randn(2, 1, 4, 4, generator=generator)
    states = []
    result = sampler(
        lambda state, t: noise - x, noise, time_grid(num_steps), lambda i, t, state: states.append((i, t, state))
    )
    torch.testing.assert_close(result, x, rtol=1e-6, atol=1e-6)
    for step, (i, t, state) in enumerate(states):
        assert i == step
        torch.testing.assert_close(state, interpolate(x, noise, t.expand(2)), rtol=1e-6, atol=1e-6)
    assert [t.item() for _, t, _ in states] == time_grid(num_steps)[1:].tolist() and states[-1][2] is result


def test_heun_is_exact_for_a_velocity_linear_in_time():
    start = torch.tensor([1.0], dtype=torch.float64)
    torch.testing.assert_close(heun(lambda x, t: 2 * t, start, grid(3)), torch.tensor([0.0], dtype=torch.float64))


@pytest.mark.parametrize(("sampler", "evaluations"), [(euler, 1), (heun, 2)])
def test_number_of_evaluations_and_their_times(sampler, evaluations):
    seen = []

    def velocity(x, t):
        assert t.shape == ()
        seen.append(t.item())
        return torch.zeros_like(x)

    sampler(velocity, torch.zeros(1), time_grid(4))
    expected = [1.0, 0.75, 0.5, 0.25] if evaluations == 1 else [1.0, 0.75, 0.75, 0.5, 0.5, 0.25, 0.25, 0.0]
    assert seen == expected


@pytest.mark.parametrize("sampler", SAMPLERS.values(), ids=SAMPLERS)
def test_the_start_is_left_alone_and_the_dtype_kept(sampler):
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        start = torch.ones(3, dtype=dtype)
        assert sampler(lambda x, t: x, start, time_grid(2)).dtype == dtype
        assert torch.equal(start, torch.ones(3, dtype=dtype))


@pytest.mark.parametrize("sampler", SAMPLERS.values(), ids=SAMPLERS)
def test_there_and_back(sampler):
    start = torch.tensor([0.4, -1.0], dtype=torch.float64)
    there = sampler(gaussian_velocity, start, grid(2000))
    torch.testing.assert_close(sampler(gaussian_velocity, there, grid(2000).flip(0)), start, rtol=1e-2, atol=1e-3)


def test_grids():
    assert time_grid(1).tolist() == [1.0, 0.0]
    ten = time_grid(10)
    assert ten.dtype == torch.float32 and ten[0] == 1 and ten[-1] == 0
    torch.testing.assert_close(ten.double(), 1 - torch.arange(11, dtype=torch.float64) / 10, rtol=0, atol=6e-8)
    with pytest.raises(ValueError, match="num_steps is 0"):
        time_grid(0)
    for bad in (torch.ones(1), torch.ones(2, 2)):
        with pytest.raises(ValueError, match="times has shape"):
            euler(gaussian_velocity, torch.zeros(1), bad)
