"""Averages of any width after the run, from snapshots of a few power-function averages.

A power-function average of exponent gamma at time t weighs the weights of time tau by the profile

    p_{t, gamma}(tau) = (gamma + 1) tau^gamma / t^(gamma + 1),    0 <= tau <= t,

whose deviation over t is the width  sigma_rel = (gamma + 1)^(1/2) (gamma + 2)^(-1) (gamma + 3)^(-1/2).  A wanted
profile is approximated by the combination of the stored ones that is nearest in L2: with the inner products

    <p_{a, alpha}, p_{b, beta}> = (alpha + 1) (beta + 1) min(a, b)^(alpha + beta + 1)
                                  / ((alpha + beta + 1) a^(alpha + 1) b^(beta + 1))

the coefficients x solve  A x = b,  A_ij = <p_i, p_j>,  b_i = <p_i, p_wanted>, and the average is sum_i x_i theta_i.

Source: Karras et al., "Analyzing and Improving the Training Dynamics of Diffusion Models", arXiv:2312.02696, section 3
and appendix C. Times count updates.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

LARGEST_STD = math.sqrt(1 / 12)  # of gamma = 0, the plain mean of the run


@dataclass(frozen=True)
class Profile:
    """A power-function average: after how many updates, and its exponent."""

    num_updates: float
    gamma: float


def std_of_gamma(gamma: float) -> float:
    """The width sigma_rel of the exponent gamma >= 0.

    >>> round(std_of_gamma(6.94), 2), round(std_of_gamma(16.97), 2)
    (0.1, 0.05)
    """
    return math.sqrt(gamma + 1) / ((gamma + 2) * math.sqrt(gamma + 3))


def gamma_of_std(std: float) -> float:
    """The exponent of a width: the largest root of  (gamma + 2)^2 (gamma + 3) = (gamma + 1) / std^2.

    Args:
        std: sigma_rel, in (0, 0.288), where 0.288 = 12^(-1/2) is the plain mean's.

    Raises:
        ValueError: out of range.

    >>> round(gamma_of_std(0.1), 2), round(gamma_of_std(0.05), 2)
    (6.94, 16.97)
    """
    if not 0 < std < LARGEST_STD:
        raise ValueError(f"std = {std!r}: the relative width of an average must be in (0, {LARGEST_STD:.3f})")
    inverse = std**-2
    roots = np.roots([1.0, 7.0, 16.0 - inverse, 12.0 - inverse])
    return float(max(root.real for root in roots if abs(root.imag) < 1e-6 * max(1.0, abs(root))))


def inner_product(a: Profile, b: Profile) -> float:
    """The integral of the product of two profiles.

    >>> round(inner_product(Profile(2.0, 0.0), Profile(4.0, 0.0)), 6)  # 1/2 times 1/4 over [0, 2]
    0.25
    """
    # Ratios instead of powers of the times: t^(gamma + 1) overflows for long runs.
    early, late = (a, b) if a.num_updates <= b.num_updates else (b, a)
    ratio = (early.num_updates / late.num_updates) ** late.gamma
    return (a.gamma + 1) * (b.gamma + 1) * ratio / ((a.gamma + b.gamma + 1) * late.num_updates)


def solve_coefficients(stored: Sequence[Profile], wanted: Profile) -> np.ndarray:
    """The coefficients of the stored averages whose combination is nearest to the wanted profile.

    Args:
        stored: at least one.
        wanted: not later than the last one stored.

    Returns:
        (len(stored),) float64; negative ones occur. Their sum is the nearer to 1 the denser the snapshots are.

    Raises:
        ValueError: nothing stored, or a profile that reaches beyond what was stored.
    """
    if not stored:
        raise ValueError("there are no stored averages; train with train.ema_stds and train.ema_snapshot_every set")
    last = max(profile.num_updates for profile in stored)
    if wanted.num_updates > last:
        raise ValueError(f"an average at update {wanted.num_updates:g} was asked for, the last snapshot is at {last:g}")
    gram = np.array([[inner_product(a, b) for b in stored] for a in stored])
    right = np.array([inner_product(a, wanted) for a in stored])
    # Profiles of near times are nearly equal, so the system is badly conditioned. Scaled to a unit diagonal, the
    # directions that float64 can't tell from zero are left out.
    scale = 1 / np.sqrt(np.diag(gram))
    solution = np.linalg.lstsq(gram * scale[:, None] * scale, right * scale, rcond=1e-13)[0]
    return solution * scale
