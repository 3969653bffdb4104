"""The kernel distance against a naive double loop, and its statistical promises."""

from __future__ import annotations

import itertools

import pytest
import torch

from rowdit.evaluate import kernel_distance, kernel_distances
from rowdit.evaluate.kid import unbiased_mmd2


def features(num: int, dim: int = 8, seed: int = 0, shift: float = 0.0) -> torch.Tensor:
    return torch.randn(num, dim, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) + shift


def naive_mmd2(x: torch.Tensor, y: torch.Tensor) -> float:
    def kernel(a: list[float], b: list[float]) -> float:
        return (sum(p * q for p, q in zip(a, b, strict=True)) / len(a) + 1) ** 3

    def mean(pairs: list[tuple[list[float], list[float]]]) -> float:
        return sum(kernel(a, b) for a, b in pairs) / len(pairs)

    xs, ys = x.tolist(), y.tolist()
    within_x = mean(list(itertools.permutations(xs, 2)))
    within_y = mean(list(itertools.permutations(ys, 2)))
    return within_x + within_y - 2 * mean(list(itertools.product(xs, ys)))


def test_agrees_with_a_double_loop():
    x, y = features(9, seed=1), features(13, seed=2, shift=0.5)
    assert float(unbiased_mmd2(x, y)) == pytest.approx(naive_mmd2(x, y), rel=1e-10)


def test_without_subsets_it_is_the_whole_sets_estimate():
    x, y = features(12, seed=1).float(), features(12, seed=2, shift=0.5).float()
    expected = naive_mmd2(x.double(), y.double())
    assert kernel_distance(x, y, subset_size=12, num_subsets=3) == pytest.approx(expected, rel=1e-10)


def test_unbiased_at_every_size():
    # Equal distributions: the mean over many independent subsets is zero within its own error.
    x, y = features(4000, seed=3), features(4000, seed=4)
    for subset_size in (10, 100):
        values = torch.stack(
            [unbiased_mmd2(x[i : i + subset_size], y[i : i + subset_size]) for i in range(0, 4000, subset_size)]
        )
        assert abs(float(values.mean())) < 4 * float(values.std()) / len(values) ** 0.5


def test_grows_with_the_distance():
    x = features(300, seed=5)
    distances = [kernel_distance(x, features(300, seed=6, shift=shift)) for shift in (0.0, 0.2, 0.5, 1.0)]
    assert distances == sorted(distances)
    assert distances[-1] > 1


def test_subsets_are_functions_of_seed_and_number():
    x, y = features(50, seed=7), features(60, seed=8)
    first = kernel_distances(x, y, subset_size=20, num_subsets=5, seed=1)
    assert torch.equal(first, kernel_distances(x, y, subset_size=20, num_subsets=5, seed=1))
    assert torch.equal(first[:3], kernel_distances(x, y, subset_size=20, num_subsets=3, seed=1))
    assert not torch.equal(first, kernel_distances(x, y, subset_size=20, num_subsets=5, seed=2))
    assert len(set(first.tolist())) == 5


def test_bad_input_is_named():
    good = features(10)
    with pytest.raises(ValueError, match=r"x must have shape \(N, D\) with N >= 2, got \(1, 8\)"):
        kernel_distance(good[:1], good)
    with pytest.raises(ValueError, match="y holds features that aren't finite"):
        kernel_distance(good, good * float("nan"))
    with pytest.raises(ValueError, match="feature dimensions differ: 8 and 7"):
        kernel_distance(good, good[:, :7])
    with pytest.raises(ValueError, match="subset_size must be at least 2 and num_subsets at least 1, got 10 and 0"):
        kernel_distance(good, good, subset_size=10, num_subsets=0)
