from __future__ import annotations

import math

import pytest
import torch

from rowdit.flow import SAMPLERS, dpm_solver_2m, euler, heun, interpolate, time_grid

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


def gaussian_path(z, t):
    """Where noise z is at time t: the quantile is kept."""
    return (1 - t) * MEAN + z * math.sqrt((1 - t) ** 2 * STD**2 + t**2)


def test_dpm_solver_has_order_two_away_from_the_ends():
    z = torch.tensor([-1.5, 0.2, 2.0], dtype=torch.float64)
    errors = []
    for n in (50, 100, 200, 400):
        times = torch.linspace(0.9, 0.1, n + 1, dtype=torch.float64)
        end = dpm_solver_2m(gaussian_velocity, gaussian_path(z, 0.9), times)
        errors.append((end - gaussian_path(z, 0.1)).norm().item())
    for coarse, fine in zip(errors[:-1], errors[1:], strict=True):
        assert math.log2(coarse / fine) == pytest.approx(2, abs=0.1)


@pytest.mark.parametrize("problem", PROBLEMS)
def test_dpm_solver_on_the_whole_grid(problem):
    """The error is (a + b log n) / n^2: times n^2, it grows by the same amount at every doubling of n."""
    velocity, start, solution = PROBLEMS[problem]
    scaled = []
    for n in (200, 400, 800, 1600):
        error = dpm_solver_2m(velocity, start, grid(n)) - solution(start)
        scaled.append(error * n**2)
    growth = [b - a for a, b in zip(scaled[:-1], scaled[1:], strict=True)]
    torch.testing.assert_close(growth[1], growth[0], rtol=0.06, atol=0)
    torch.testing.assert_close(growth[2], growth[1], rtol=0.04, atol=0)


def test_dpm_solver_is_the_published_update():
    """The step in the paper's own letters: alpha = 1 - t, sigma = t, lambda = log(alpha / sigma)."""
    times = torch.tensor([0.8, 0.7, 0.45, 0.3, 0.1], dtype=torch.float64)
    x = torch.tensor([0.3, -1.0], dtype=torch.float64)
    alpha, sigma = 1 - times, times
    lam = torch.log(alpha / sigma)
    expected, before = x, None
    for i in range(1, len(times)):
        h = lam[i] - lam[i - 1]
        x0 = expected - sigma[i - 1] * gaussian_velocity(expected, times[i - 1])
        d = x0
        if before is not None:
            r = (lam[i - 1] - lam[i - 2]) / h
            d = (1 + 1 / (2 * r)) * x0 - 1 / (2 * r) * before
        expected = sigma[i] / sigma[i - 1] * expected - alpha[i] * (torch.exp(-h) - 1) * d
        before = x0
    torch.testing.assert_close(dpm_solver_2m(gaussian_velocity, x, times), expected, rtol=1e-12, atol=1e-12)


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


@pytest.mark.parametrize(("sampler", "evaluations"), [(euler, 1), (heun, 2), (dpm_solver_2m, 1)])
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
        for sampler in SAMPLERS.values():
            with pytest.raises(ValueError, match="times has shape"):
                sampler(gaussian_velocity, torch.zeros(1), bad)


def test_the_shifted_grid():
    even, shifted = time_grid(8), time_grid(8, shift=3.0)
    torch.testing.assert_close(shifted, 3 * even / (1 + 2 * even))
    assert shifted[0] == 1 and shifted[-1] == 0 and (shifted[1:-1] > even[1:-1]).all()
    assert torch.equal(time_grid(8, shift=1.0), even)
    for bad in (0.0, -1.0, math.nan, math.inf):
        with pytest.raises(ValueError, match=f"shift is {bad}"):
            time_grid(8, shift=bad)
