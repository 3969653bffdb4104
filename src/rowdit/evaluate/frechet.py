"""The Frechet distance between two sets of features, seen as Gaussians.

Source: Dowson and Landau, "The Frechet distance between multivariate normal distributions", 1982; for images
Heusel et al., arXiv:1706.08500, equation 6.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

ROWS_AT_ONCE = 5000  # features that are float64 at the same time


class FeatureStatistics:
    """Count, sum and sum of outer products of feature vectors, in float64 on the CPU.

    The sums of disjoint sets add up, so parts may be made on different ranks or machines, in any order, and merged;
    the result depends on the order by float64 rounding only.

    Args:
        dim: length of a feature vector, at least 1.

    Example:
        >>> statistics = FeatureStatistics(2)
        >>> statistics.update(torch.tensor([[0.0, 1.0], [2.0, 1.0]])).num
        2
        >>> statistics.covariance.tolist()
        [[2.0, 0.0], [0.0, 0.0]]
    """

    def __init__(self, dim: int) -> None:
        if dim < 1:
            raise ValueError(f"dim must be at least 1, got {dim}")
        self.dim = dim
        self.num = 0
        self.sum = torch.zeros(dim, dtype=torch.float64)
        self.outer_sum = torch.zeros(dim, dim, dtype=torch.float64)

    @classmethod
    def from_features(cls, features: Tensor) -> FeatureStatistics:
        """Statistics of one (N, D) tensor."""
        if features.ndim != 2:
            raise ValueError(f"features must have shape (N, D), got {tuple(features.shape)}")
        statistics = cls(features.shape[1])
        for rows in features.split(ROWS_AT_ONCE):
            statistics.update(rows)
        return statistics

    def update(self, features: Tensor) -> FeatureStatistics:
        """Add feature vectors; returns itself.

        Args:
            features: (N, dim), any float type and device, finite. N may be 0.

        Raises:
            ValueError: the shape isn't (N, dim), or a value isn't finite. Nothing is added then.
        """
        if features.ndim != 2 or features.shape[1] != self.dim:
            raise ValueError(f"features must have shape (N, {self.dim}), got {tuple(features.shape)}")
        features = features.detach().cpu().double()
        bad_rows = (~features.isfinite().all(dim=1)).nonzero()
        if len(bad_rows):
            raise ValueError(
                f"{len(bad_rows)} of {len(features)} feature vectors aren't finite (first: row {int(bad_rows[0])}); "
                "check the images that they were computed from"
            )
        self.num += len(features)
        self.sum += features.sum(dim=0)
        self.outer_sum += features.T @ features
        return self

    def merge(self, other: FeatureStatistics) -> FeatureStatistics:
        """Add the statistics of another, disjoint set; returns itself."""
        _check_same_dim(self, other)
        self.num += other.num
        self.sum += other.sum
        self.outer_sum += other.outer_sum
        return self

    @property
    def mean(self) -> Tensor:
        """(D,) float64."""
        self._check_num(1, "a mean")
        return self.sum / self.num

    @property
    def covariance(self) -> Tensor:
        """(D, D) float64: the unbiased estimate, divided by n - 1 as in `numpy.cov`."""
        self._check_num(2, "a covariance")
        mean = self.mean
        covariance = (self.outer_sum - self.num * torch.outer(mean, mean)) / (self.num - 1)
        return (covariance + covariance.T) / 2

    def _check_num(self, minimum: int, what: str) -> None:
        if self.num < minimum:
            raise ValueError(f"{what} needs at least {minimum} feature vectors, got {self.num}; use more images")

    def tensors(self) -> dict[str, Tensor]:
        """The state as tensors, for a safetensors file or an all-reduce."""
        return {"num": torch.tensor(self.num), "sum": self.sum, "outer_sum": self.outer_sum}

    @classmethod
    def from_tensors(cls, tensors: dict[str, Tensor]) -> FeatureStatistics:
        """The inverse of `tensors`.

        Raises:
            ValueError: a tensor is missing or its shape is wrong.
        """
        missing = [name for name in ("num", "sum", "outer_sum") if name not in tensors]
        if missing:
            raise ValueError(
                f"feature statistics lack {', '.join(missing)}; found {', '.join(sorted(tensors)) or 'nothing'}"
            )
        dim = tensors["sum"].numel()
        if tensors["sum"].shape != (dim,) or tensors["outer_sum"].shape != (dim, dim):
            shapes = {name: tuple(tensors[name].shape) for name in ("sum", "outer_sum")}
            raise ValueError(f"feature statistics have shapes {shapes}, expected (D,) and (D, D)")
        statistics = cls(dim)
        statistics.num = int(tensors["num"])
        statistics.sum = tensors["sum"].double().clone()
        statistics.outer_sum = tensors["outer_sum"].double().clone()
        return statistics

    def save(self, path: Path | str) -> None:
        """Write a safetensors file."""
        save_file(self.tensors(), path)

    @classmethod
    def load(cls, path: Path | str) -> FeatureStatistics:
        """Read what `save` wrote."""
        return cls.from_tensors(load_file(path))


@dataclass(frozen=True)
class Moments:
    """Mean and covariance that others computed: what is left of features where these alone were published.

    Args:
        mean: (D,) float64, finite.
        covariance: (D, D) float64, finite, symmetric.

    Raises:
        ValueError: shapes that don't fit, values that aren't finite, or a matrix that isn't symmetric.
    """

    mean: Tensor
    covariance: Tensor

    def __post_init__(self) -> None:
        dim = self.mean.numel()
        if self.mean.shape != (dim,) or self.covariance.shape != (dim, dim):
            shapes = f"{tuple(self.mean.shape)} and {tuple(self.covariance.shape)}"
            raise ValueError(f"mean and covariance have shapes {shapes}, expected (D,) and (D, D)")
        if not (self.mean.isfinite().all() and self.covariance.isfinite().all()):
            raise ValueError("mean or covariance holds values that aren't finite")
        if not torch.allclose(self.covariance, self.covariance.T, rtol=1e-5, atol=1e-8):
            raise ValueError("the covariance isn't symmetric")

    @property
    def dim(self) -> int:
        return len(self.mean)

    @property
    def num(self) -> None:
        """Of how many vectors they are isn't known."""
        return None


def frechet_distance(a: FeatureStatistics | Moments, b: FeatureStatistics | Moments) -> float:
    """Return |mu_a - mu_b|^2 + tr(A + B - 2 (A B)^(1/2)), at least 0.

    tr (A B)^(1/2) is the sum of the square roots of the eigenvalues of A^(1/2) B A^(1/2), a symmetric matrix: no
    complex square root of a non-symmetric product is needed, and a rank-deficient covariance does no harm.

    The estimate is biased upwards, by about 1/n: compare only equal n, and beside the real-against-real floor.

    Raises:
        ValueError: the dimensions differ, or a set has fewer than 2 vectors.
    """
    _check_same_dim(a, b)
    covariance_a, covariance_b = a.covariance, b.covariance
    eigenvalues, eigenvectors = torch.linalg.eigh(covariance_a)
    # Rounding makes the zero eigenvalues of a rank-deficient covariance slightly negative.
    root_a = (eigenvectors * eigenvalues.clamp(min=0).sqrt()) @ eigenvectors.T
    product = root_a @ covariance_b @ root_a
    trace_root = torch.linalg.eigvalsh((product + product.T) / 2).clamp(min=0).sqrt().sum()
    distance = (a.mean - b.mean).square().sum() + covariance_a.trace() + covariance_b.trace() - 2 * trace_root
    return max(float(distance), 0.0)


def _check_same_dim(a: FeatureStatistics | Moments, b: FeatureStatistics | Moments) -> None:
    if a.dim != b.dim:
        raise ValueError(f"feature dimensions differ: {a.dim} and {b.dim}; use the same feature network for both")
