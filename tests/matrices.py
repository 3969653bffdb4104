"""Matrices for tests: random ones, ones with given singular values, and how far apart two are."""

from __future__ import annotations

import torch
from torch import Tensor


def gaussian(*shape: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> Tensor:
    """Drawn in float64, then cast: the same numbers for every dtype."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def singular_vectors(num_rows: int, num_cols: int, num_values: int) -> tuple[Tensor, Tensor]:
    """Orthonormal columns, (num_rows, num_values) and (num_cols, num_values), in float64."""
    left = torch.linalg.qr(gaussian(num_rows, num_values, seed=1))[0]
    return left, torch.linalg.qr(gaussian(num_cols, num_values, seed=2))[0]


def with_spectrum(num_rows: int, num_cols: int, values: Tensor) -> Tensor:
    """(num_rows, num_cols) in float64 with these singular values, largest first."""
    left, right = singular_vectors(num_rows, num_cols, values.numel())
    return left * values.double() @ right.mT


def relative_error(value: Tensor, exact: Tensor) -> float:
    """||value - exact|| / ||exact||, in Frobenius norms."""
    return float((value.double() - exact.double()).norm() / exact.double().norm())


def hard_spectra(r: int) -> dict[str, Tensor]:
    """Singular values by name, (r,): conditions of 1e1 to 1e8, without full rank, tiny, huge."""
    k = torch.arange(1, r + 1)
    spectra = {f"condition 1e{n}": torch.logspace(0, -n, r) for n in range(1, 9)}
    spectra |= {"1/k": 1 / k, "1/k^2": 1 / k**2, "half rank": (k <= r // 2).double(), "rank 8": (k <= 8).double()}
    spectra |= {
        "one spike": torch.where(k == 1, 1.0, 1e-3),
        "equal": torch.ones(r),
        "tiny": torch.logspace(-30, -32, r),
    }
    return spectra | {"huge": torch.logspace(30, 28, r)}
