"""Power-function averages and what is put together from them, against direct integrals and a run's own average."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy.integrate import quad
from torch import nn

from rowdit.train.ema import PowerEma
from rowdit.train.posthoc import Profile, gamma_of_std, inner_product, solve_coefficients, std_of_gamma


def _density(profile: Profile, tau: float) -> float:
    if not 0 <= tau <= profile.num_updates:
        return 0.0
    return (profile.gamma + 1) * tau**profile.gamma / profile.num_updates ** (profile.gamma + 1)


def _densities(profile: Profile, times: np.ndarray) -> np.ndarray:
    """Without the end of the profile."""
    return (profile.gamma + 1) * (times / profile.num_updates) ** profile.gamma / profile.num_updates


@pytest.mark.parametrize("gamma", [0.5, 3.0, 6.94, 16.97, 60.0])
def test_the_width_is_the_deviation_of_the_profile(gamma: float) -> None:
    profile = Profile(1.0, gamma)
    mean, square = (quad(lambda tau, k=k: tau**k * _density(profile, tau), 0, 1)[0] for k in (1, 2))
    assert std_of_gamma(gamma) == pytest.approx((square - mean**2) ** 0.5, rel=1e-6)
    assert gamma_of_std(std_of_gamma(gamma)) == pytest.approx(gamma, rel=1e-9)


@pytest.mark.parametrize("std", [0.0, -0.1, 0.2887, 1.0, float("nan")])
def test_a_width_that_no_profile_has_is_refused(std: float) -> None:
    with pytest.raises(ValueError, match="must be in"):
        gamma_of_std(std)


@pytest.mark.parametrize(("a", "b"), [((7, 2.0), (11, 5.0)), ((11, 5.0), (7, 2.0)), ((4, 0.3), (4, 9.0))])
def test_inner_products_are_the_integrals(a: tuple[float, float], b: tuple[float, float]) -> None:
    one, other = Profile(*a), Profile(*b)
    end = min(a[0], b[0])
    integral = quad(lambda tau: _density(one, tau) * _density(other, tau), 0, end)[0]
    assert inner_product(one, other) == pytest.approx(integral, rel=1e-6)


def test_long_runs_do_not_overflow() -> None:
    assert 0 < inner_product(Profile(10**9, 200.0), Profile(10**9 - 1, 17.0)) < 1


def test_the_combination_is_the_nearest_one() -> None:
    """Against least squares on a fine grid of times, which knows no inner products."""
    stored = [Profile(t, gamma) for t in (250.0, 500.0, 750.0, 1000.0) for gamma in (6.94, 16.97)]
    wanted = Profile(1000.0, gamma_of_std(0.075))
    found = solve_coefficients(stored, wanted)
    times = (np.arange(200_000) + 0.5) * 1000 / 200_000
    columns = np.stack([np.where(times <= p.num_updates, _densities(p, times), 0) for p in stored], axis=1)
    target = _densities(wanted, times)
    direct = np.linalg.lstsq(columns, target, rcond=None)[0]
    error = np.linalg.norm(columns @ found - target) / np.linalg.norm(target)
    assert error <= 1.01 * np.linalg.norm(columns @ direct - target) / np.linalg.norm(target)
    assert error < 0.05 and found.sum() == pytest.approx(1, abs=0.02)  # four times are few


def test_a_stored_average_is_found_again() -> None:
    stored = [Profile(t, gamma) for t in (50.0, 100.0) for gamma in (6.94, 16.97)]
    np.testing.assert_allclose(solve_coefficients(stored, stored[2]), [0, 0, 1, 0], atol=1e-6)


def test_what_was_not_stored_is_refused() -> None:
    with pytest.raises(ValueError, match="at update 20 was asked for, the last snapshot is at 10"):
        solve_coefficients([Profile(10, 7.0)], Profile(20, 7.0))
    with pytest.raises(ValueError, match="no stored averages"):
        solve_coefficients([], Profile(1, 7.0))


def test_an_average_of_another_width_is_the_one_that_would_have_been_kept() -> None:
    """A walk of 400 updates: the average of width 0.07, kept all along, against the one put together afterwards."""
    torch.manual_seed(0)
    model = nn.Linear(16, 16, bias=False)
    kept = PowerEma(model, 0.07)
    averages = [PowerEma(model, std) for std in (0.05, 0.10)]
    snapshots: list[tuple[Profile, torch.Tensor]] = []
    start = model.weight.detach().clone()
    for update in range(1, 401):
        with torch.no_grad():
            model.weight.add_(torch.randn_like(model.weight), alpha=0.1)
        for average in (kept, *averages):
            average.update(model)
        if update % 40 == 0:
            snapshots += [(Profile(update, a.gamma), a.weights["weight"].clone()) for a in averages]
    coefficients = solve_coefficients([p for p, _ in snapshots], Profile(400, kept.gamma))
    stack = torch.stack([weights for _, weights in snapshots])
    together = torch.einsum("s,sij->ij", torch.from_numpy(coefficients).float(), stack)
    way = float((model.weight.detach() - start).norm())
    assert float((together - kept.weights["weight"]).norm()) / way < 0.01  # updates are steps, profiles are integrals
    nearest = min(float((a.weights["weight"] - kept.weights["weight"]).norm()) / way for a in averages)
    assert nearest > 0.03  # so it isn't one of the two that were kept


def test_the_first_update_forgets_the_initial_weights() -> None:
    model = nn.Linear(2, 2)
    average = PowerEma(model, 0.1)
    nn.init.constant_(model.weight, 3.0)
    average.update(model)
    assert bool((average.weights["weight"] == 3.0).all())
