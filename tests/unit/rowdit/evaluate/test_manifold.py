"""Precision, recall, density, coverage against their definitions, vector by vector."""

from __future__ import annotations

import pytest
import torch

from rowdit.evaluate import manifold
from rowdit.evaluate.manifold import overlap


def slow_overlap(real, samples, k, k_density):
    """The four definitions, one distance at a time."""

    def radius(vectors, index, neighbours):
        others = sorted((vectors[index] - v).norm().item() for j, v in enumerate(vectors) if j != index)
        return others[neighbours - 1]

    def inside(vector, centres, radii):
        return [(vector - c).norm().item() <= r for c, r in zip(centres, radii, strict=True)]

    real_radii = [radius(real, i, k) for i in range(len(real))]
    sample_radii = [radius(samples, i, k) for i in range(len(samples))]
    wide = [radius(real, i, k_density) for i in range(len(real))]
    in_balls = [inside(s, real, wide) for s in samples]
    return {
        "precision": sum(any(inside(s, real, real_radii)) for s in samples) / len(samples),
        "recall": sum(any(inside(r, samples, sample_radii)) for r in real) / len(real),
        "density": sum(map(sum, in_balls)) / (k_density * len(samples)),
        "coverage": sum(any(row[i] for row in in_balls) for i in range(len(real))) / len(real),
    }


@pytest.mark.parametrize("block_rows", [1000, 7])
def test_by_definition(monkeypatch, block_rows):
    monkeypatch.setattr(manifold, "BLOCK_ROWS", block_rows)
    generator = torch.Generator().manual_seed(0)
    real = torch.randn(40, 3, generator=generator, dtype=torch.float64)
    samples = 0.7 * torch.randn(31, 3, generator=generator, dtype=torch.float64) + 0.5
    got = overlap(real, samples, k=3, k_density=5)
    expected = slow_overlap(real, samples, 3, 5)
    assert 0.2 < expected["recall"] < expected["precision"] < 1
    for name, value in expected.items():
        assert getattr(got, name) == pytest.approx(value, abs=1e-12), name


def test_what_they_tell_apart():
    generator = torch.Generator().manual_seed(0)

    def blob(num, centre):
        return torch.randn(num, 8, generator=generator) + 20 * centre

    real = torch.cat([blob(200, 0), blob(200, 1)])
    same = overlap(real, torch.cat([blob(200, 0), blob(200, 1)]))
    assert min(same.precision, same.recall, same.coverage) > 0.8 and 0.8 < same.density < 1.2
    half = overlap(real, blob(400, 0))  # good samples, but one of two modes is missing
    assert half.precision > 0.8 and 0.4 < half.recall < 0.52 and 0.4 < half.coverage < 0.52
    wrong = overlap(real, torch.cat([blob(200, 0), blob(200, -1)]))  # half of the samples are of no real kind
    assert 0.4 < wrong.precision < 0.52
    assert overlap(real, blob(400, 5)) == manifold.Overlap(0.0, 0.0, 0.0, 0.0)


def test_far_from_the_origin_nothing_is_lost():
    generator = torch.Generator().manual_seed(0)
    real, samples = torch.randn(2, 50, 4, generator=generator, dtype=torch.float64).unbind()
    assert overlap(real + 1e6, samples + 1e6) == overlap(real, samples)


def test_bad_input():
    x = torch.randn(10, 3)
    with pytest.raises(ValueError, match=r"samples has shape \(5, 3\); .* more than 5 vectors is needed"):
        overlap(x, x[:5])
    with pytest.raises(ValueError, match="real holds features that aren't finite"):
        overlap(torch.full((10, 3), torch.nan), x)
    with pytest.raises(ValueError, match="feature dimensions differ: 3 and 2"):
        overlap(x, x[:, :2])
    with pytest.raises(ValueError, match="k is 0"):
        overlap(x, x, k=0)
