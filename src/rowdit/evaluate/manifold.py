"""Precision, recall, density and coverage: how much two sets of features overlap, by their nearest neighbours.

The manifold of a set is the union of the balls around its vectors, each as wide as the distance to the vector's k-th
nearest neighbour in the set.

    precision   share of the samples that lie in the manifold of the real ones        (are samples good?)
    recall      share of the real ones that lie in the manifold of the samples        (is all of it there?)
    density     in how many real balls a sample lies, over k, averaged      (as precision, less moved by one outlier)
    coverage    share of the real balls in which there is a sample                    (recall, by the real balls alone)

All four depend on the number of vectors: compare at equal numbers, and beside what real images score.

Source: Kynkaanniemi et al., arXiv:1904.06991 (precision, recall, k = 3); Naeem et al., arXiv:2002.09797 (density,
coverage, k = 5).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

BLOCK_ROWS = 1000  # distances in memory at once: BLOCK_ROWS x N float64


@dataclass(frozen=True)
class Overlap:
    """The four numbers. Precision, recall and coverage are in 0..1; density isn't bounded by 1."""

    precision: float
    recall: float
    density: float
    coverage: float


def overlap(real: Tensor, samples: Tensor, *, k: int = 3, k_density: int = 5) -> Overlap:
    """Precision, recall, density and coverage of samples against real features.

    Args:
        real: (N, D) features, finite.
        samples: (M, D) features, finite.
        k: neighbours that make a ball's radius, for precision and recall.
        k_density: the same for density and coverage.

    Raises:
        ValueError: shapes that don't fit, values that aren't finite, or no more vectors than neighbours.

    Example:
        >>> ring = torch.tensor([[0.0, 0.0], [1.0, 0.0], [0.0, 1.0], [1.0, 1.0]])
        >>> overlap(ring, ring + 0.1, k=1, k_density=1).precision
        1.0
    """
    for name, features in (("real", real), ("samples", samples)):
        if features.ndim != 2 or len(features) <= max(k, k_density):
            raise ValueError(
                f"{name} has shape {tuple(features.shape)}; (N, D) with more than {max(k, k_density)} vectors is "
                "needed: use more images"
            )
        if not features.isfinite().all():
            raise ValueError(f"{name} holds features that aren't finite; check the images that they are of")
    if real.shape[1] != samples.shape[1]:
        raise ValueError(
            f"feature dimensions differ: {real.shape[1]} and {samples.shape[1]}; use the same network for both"
        )
    if min(k, k_density) < 1:
        raise ValueError(f"k is {k} and k_density {k_density}; a ball needs at least 1 neighbour")
    centre = real.double().mean(0)  # distances are the same, and less is lost to rounding
    real, samples = real.double() - centre, samples.double() - centre
    real_radii, sample_radii = squared_radii(real, (k, k_density)), squared_radii(samples, (k,))

    in_real = torch.zeros(len(samples), dtype=torch.bool, device=real.device)
    in_samples = torch.zeros(len(real), dtype=torch.bool, device=real.device)
    covered = torch.zeros(len(real), dtype=torch.bool, device=real.device)
    num_balls = 0
    for start in range(0, len(real), BLOCK_ROWS):
        rows = slice(start, start + BLOCK_ROWS)
        squared = squared_distances(real[rows], samples)
        in_real |= (squared <= real_radii[0][rows, None]).any(0)
        in_samples[rows] = (squared <= sample_radii[0]).any(1)
        inside = squared <= real_radii[1][rows, None]
        covered[rows] = inside.any(1)
        num_balls += int(inside.sum())
    return Overlap(
        precision=float(in_real.double().mean()),
        recall=float(in_samples.double().mean()),
        density=num_balls / (k_density * len(samples)),
        coverage=float(covered.double().mean()),
    )


def squared_radii(features: Tensor, ks: tuple[int, ...]) -> tuple[Tensor, ...]:
    """For each k, (N,): the squared distance of each vector to its k-th nearest neighbour, itself left out."""
    radii = [features.new_empty(len(features)) for _ in ks]
    for start in range(0, len(features), BLOCK_ROWS):
        squared = squared_distances(features[start : start + BLOCK_ROWS], features)
        row = torch.arange(len(squared), device=features.device)
        squared[row, start + row] = torch.inf
        nearest = squared.topk(max(ks), dim=1, largest=False).values
        for radius, k in zip(radii, ks, strict=True):
            radius[start : start + len(squared)] = nearest[:, k - 1]
    return tuple(radii)


def squared_distances(a: Tensor, b: Tensor) -> Tensor:
    """(N, M): |a_i - b_j|^2 of (N, D) and (M, D) float64, at least 0."""
    squared = a.square().sum(1)[:, None] + b.square().sum(1)
    return squared.addmm_(a, b.T, alpha=-2).clamp_(min=0)
