"""The Frechet distance against closed forms and against scipy's matrix square root."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rowdit.evaluate import FeatureStatistics, frechet_distance


def statistics_of(mean: torch.Tensor, covariance: torch.Tensor) -> FeatureStatistics:
    """Statistics whose mean and unbiased covariance are exactly the given ones."""
    statistics = FeatureStatistics(len(mean))
    statistics.num = 101
    statistics.sum = 101 * mean.double()
    statistics.outer_sum = 100 * covariance.double() + 101 * torch.outer(mean.double(), mean.double())
    return statistics


def random_covariance(dim: int, seed: int, rank: int | None = None) -> torch.Tensor:
    factor = torch.randn(dim, rank or 2 * dim, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return factor @ factor.T / dim


def random_features(num: int, dim: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    mixing = torch.randn(dim, dim, generator=generator)
    return torch.randn(num, dim, generator=generator) @ mixing + torch.randn(dim, generator=generator)


def test_mean_and_covariance_are_numpys():
    features = random_features(50, 6, seed=0)
    statistics = FeatureStatistics.from_features(features)
    np.testing.assert_allclose(statistics.mean, features.double().mean(0), rtol=1e-12)
    np.testing.assert_allclose(statistics.covariance, np.cov(features.double().numpy(), rowvar=False), rtol=1e-10)


def test_covariance_survives_a_large_mean():
    # Sums lose (mean / deviation)^2 in relative accuracy: 1e6 * 1e-16 here, far from the features' own float32 noise.
    features = random_features(500, 3, seed=1).double()
    shifted = FeatureStatistics.from_features(features + 1000.0)
    expected = FeatureStatistics.from_features(features).covariance
    np.testing.assert_allclose(shifted.covariance, expected, rtol=1e-8, atol=1e-8 * float(expected.abs().max()))


def test_commuting_covariances_closed_form():
    a, b = torch.tensor([4.0, 9.0, 0.0]), torch.tensor([1.0, 16.0, 25.0])
    mean_a, mean_b = torch.tensor([1.0, 2.0, 3.0]), torch.tensor([1.0, 0.0, 3.5])
    expected = 4 + 0.25 + float((a.sqrt() - b.sqrt()).square().sum())
    rotation = torch.linalg.qr(torch.randn(3, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64))[0]
    rotated = [
        statistics_of(rotation @ mean.double(), rotation @ torch.diag(variances).double() @ rotation.T)
        for mean, variances in ((mean_a, a), (mean_b, b))
    ]
    assert frechet_distance(*rotated) == pytest.approx(expected, rel=1e-9)


def test_equal_covariances_leave_the_means():
    covariance = random_covariance(20, seed=3)
    mean = torch.randn(20, generator=torch.Generator().manual_seed(4))
    distance = frechet_distance(statistics_of(mean, covariance), statistics_of(torch.zeros(20), covariance))
    assert distance == pytest.approx(float(mean.double().square().sum()), rel=1e-9)


@pytest.mark.parametrize("rank", [None, 5], ids=["full_rank", "rank_deficient"])
def test_agrees_with_scipy_sqrtm(rank):
    linalg = pytest.importorskip("scipy.linalg")
    a, b = random_covariance(16, 5, rank), random_covariance(16, 6)
    mean = torch.linspace(-1, 1, 16)
    with np.errstate(all="ignore"):
        root = linalg.sqrtm((a @ b).numpy())
    expected = float(mean.double().square().sum()) + float(a.trace() + b.trace()) - 2 * np.trace(root).real
    # A singular product has a square root that is only accurate to the root of the precision, in scipy too.
    tolerance = 1e-8 if rank is None else 1e-5
    assert frechet_distance(statistics_of(mean, a), statistics_of(torch.zeros(16), b)) == pytest.approx(
        expected, rel=tolerance
    )


def test_same_set_gives_zero_even_when_rank_deficient():
    few = FeatureStatistics.from_features(random_features(10, 40, seed=7))
    scale = float(few.covariance.trace())
    assert 0 <= frechet_distance(few, few) <= 1e-6 * scale


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10_000), cuts=st.lists(st.integers(0, 60), min_size=1, max_size=5))
def test_merging_parts_in_any_order_gives_the_whole(seed, cuts):
    features = random_features(60, 4, seed)
    parts = torch.tensor_split(features, sorted(cuts))
    order = torch.randperm(len(parts), generator=torch.Generator().manual_seed(seed))
    merged = FeatureStatistics(4)
    for index in order.tolist():
        merged.merge(FeatureStatistics(4).update(parts[index]))
    whole = FeatureStatistics.from_features(features)
    assert merged.num == whole.num
    np.testing.assert_allclose(merged.sum, whole.sum, rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(merged.outer_sum, whole.outer_sum, rtol=1e-12, atol=1e-12)


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10_000))
def test_symmetric_and_not_negative(seed):
    a = FeatureStatistics.from_features(random_features(30, 5, seed))
    b = FeatureStatistics.from_features(random_features(40, 5, seed + 1))
    forward, backward = frechet_distance(a, b), frechet_distance(b, a)
    assert forward >= 0
    assert forward == pytest.approx(backward, rel=1e-7, abs=1e-7)


def test_save_and_load(tmp_path):
    statistics = FeatureStatistics.from_features(random_features(30, 5, seed=8))
    statistics.save(tmp_path / "a.safetensors")
    loaded = FeatureStatistics.load(tmp_path / "a.safetensors")
    assert loaded.num == 30
    assert torch.equal(loaded.mean, statistics.mean)
    assert torch.equal(loaded.covariance, statistics.covariance)


def test_features_are_not_written_to():
    features = random_features(5, 3, seed=9)
    before = features.clone()
    FeatureStatistics.from_features(features)
    assert torch.equal(features, before)


class TestBadInput:
    def test_one_image_has_no_covariance(self):
        one = FeatureStatistics.from_features(torch.zeros(1, 3))
        with pytest.raises(ValueError, match="at least 2 feature vectors, got 1"):
            frechet_distance(one, one)

    @pytest.mark.parametrize("value", [float("nan"), float("inf")])
    def test_not_finite_is_refused_and_adds_nothing(self, value):
        statistics = FeatureStatistics.from_features(torch.ones(4, 3))
        bad = torch.zeros(3, 3)
        bad[1, 2] = value
        with pytest.raises(ValueError, match=r"1 of 3 feature vectors aren't finite \(first: row 1\)"):
            statistics.update(bad)
        assert statistics.num == 4
        assert statistics.sum.tolist() == [4.0, 4.0, 4.0]

    def test_dimensions_must_agree(self):
        a, b = FeatureStatistics(3), FeatureStatistics(4)
        for action in (lambda: frechet_distance(a, b), lambda: a.merge(b)):
            with pytest.raises(ValueError, match="feature dimensions differ: 3 and 4"):
                action()
        with pytest.raises(ValueError, match=r"shape \(N, 3\), got \(2, 4\)"):
            a.update(torch.zeros(2, 4))

    def test_a_file_of_something_else(self):
        with pytest.raises(ValueError, match="lack num, outer_sum; found sum"):
            FeatureStatistics.from_tensors({"sum": torch.zeros(3)})
