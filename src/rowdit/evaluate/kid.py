"""The kernel (inception) distance: an unbiased estimate of the squared MMD under a cubic kernel.

Source: Binkowski et al., "Demystifying MMD GANs", arXiv:1801.01401, section 4.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rowdit import streams

SUBSET_SIZE = 1000
NUM_SUBSETS = 10


def kernel_distance(
    x: Tensor, y: Tensor, *, subset_size: int = SUBSET_SIZE, num_subsets: int = NUM_SUBSETS, seed: int = 0
) -> float:
    """Return the mean of `kernel_distances`: the kernel distance averaged over random subsets.

    Unbiased: slightly negative as often as positive for equal distributions, whatever the number of images.
    """
    return float(kernel_distances(x, y, subset_size=subset_size, num_subsets=num_subsets, seed=seed).mean())


def kernel_distances(
    x: Tensor, y: Tensor, *, subset_size: int = SUBSET_SIZE, num_subsets: int = NUM_SUBSETS, seed: int = 0
) -> Tensor:
    """Return (num_subsets,) float64: the unbiased squared MMD of random subsets, under k(a, b) = (a.b / D + 1)^3.

    Args:
        x: (N, D) features, finite, N >= 2.
        y: (M, D) features, finite, M >= 2.
        subset_size: vectors drawn from each set without replacement; at most min(N, M) are taken.
        num_subsets: how many subsets; their spread tells how sure the mean is.
        seed: subset s is a function of (seed, s) alone.

    Raises:
        ValueError: shapes that don't fit, fewer than two vectors, or values that aren't finite.
    """
    _check_features("x", x)
    _check_features("y", y)
    if x.shape[1] != y.shape[1]:
        raise ValueError(
            f"feature dimensions differ: {x.shape[1]} and {y.shape[1]}; use the same feature network for both"
        )
    size = min(subset_size, len(x), len(y))
    if size < 2 or num_subsets < 1:
        raise ValueError(
            f"subset_size must be at least 2 and num_subsets at least 1, got {subset_size} and {num_subsets}"
        )
    x, y = x.detach().cpu().double(), y.detach().cpu().double()
    distances = []
    for subset in range(num_subsets):
        x_rows = streams.permutation(seed, "kid_x", subset, len(x))[:size]
        y_rows = streams.permutation(seed, "kid_y", subset, len(y))[:size]
        distances.append(unbiased_mmd2(x[torch.from_numpy(x_rows)], y[torch.from_numpy(y_rows)]))
    return torch.stack(distances)


def unbiased_mmd2(x: Tensor, y: Tensor) -> Tensor:
    """Return the U-statistic of the squared MMD of (N, D) and (M, D) float64 features, a scalar."""
    num_x, num_y = len(x), len(y)
    kernel_xx, kernel_yy, kernel_xy = cubic_kernel(x, x), cubic_kernel(y, y), cubic_kernel(x, y)
    within_x = (kernel_xx.sum() - kernel_xx.trace()) / (num_x * (num_x - 1))
    within_y = (kernel_yy.sum() - kernel_yy.trace()) / (num_y * (num_y - 1))
    return within_x + within_y - 2 * kernel_xy.mean()


def cubic_kernel(x: Tensor, y: Tensor) -> Tensor:
    """Return (N, M): (x.y / D + 1)^3."""
    return (x @ y.T).div_(x.shape[1]).add_(1).pow_(3)


def _check_features(name: str, features: Tensor) -> None:
    if features.ndim != 2 or len(features) < 2:
        raise ValueError(f"{name} must have shape (N, D) with N >= 2, got {tuple(features.shape)}; use more images")
    if not features.isfinite().all():
        raise ValueError(f"{name} holds features that aren't finite; check the images that they were computed from")
