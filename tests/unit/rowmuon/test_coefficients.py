"""Coefficients of Newton-Schulz: the named sets do what their sources say, and bad ones are refused."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from rowmuon.coefficients import COEFFICIENTS, resolve_coefficients

KELLER_JORDAN = COEFFICIENTS["keller_jordan"]


def map_values(values: np.ndarray, triples) -> np.ndarray:
    for a, b, c in triples:
        values = a * values + b * values**3 + c * values**5
    return values


def test_keller_jordans_are_torchs_default() -> None:
    torchs = torch.optim.Muon([torch.nn.Parameter(torch.zeros(2, 2))]).param_groups[0]
    assert (torchs["ns_coefficients"],) * torchs["ns_steps"] == KELLER_JORDAN


def test_keller_jordans_range() -> None:
    """What it does to singular values that aren't tiny: [0.68, 1.13] (its author's stated aim is about [0.7, 1.2])."""
    values = map_values(np.linspace(0.01, 1.0, 20001), KELLER_JORDAN)
    assert 0.67 < values.min() < 0.70 and 1.10 < values.max() < 1.21


@pytest.mark.parametrize(("num_steps", "error"), [(5, 0.16), (6, 0.006), (7, 1e-5), (8, 1e-14), (12, 1e-14)])
def test_polar_express_converges(num_steps: int, error: float) -> None:
    """On the interval that it was made for."""
    values = map_values(np.geomspace(1e-3, 1.0, 20001), resolve_coefficients("polar_express", num_steps))
    assert np.abs(values - 1).max() < error


def test_polar_express_leaves_room_for_rounding() -> None:
    """Singular values of up to 1.01 are as safe as those of 1, in every iteration but the last."""
    values = np.linspace(0, 1.01, 10001)
    for triple in COEFFICIENTS["polar_express"][:-1]:
        values = map_values(values, [triple])
        assert values.max() < 2.0 and values.min() >= 0.0
        values = np.linspace(0, min(values.max() * 1.01, 2.0), 10001)


def test_resolve_coefficients() -> None:
    polar = COEFFICIENTS["polar_express"]
    triple = (2.0, -1.5, 0.5)
    assert resolve_coefficients("keller_jordan", None) == KELLER_JORDAN
    assert resolve_coefficients("keller_jordan", 7) == KELLER_JORDAN[:1] * 7
    assert resolve_coefficients("polar_express", None) == polar[:5]
    assert resolve_coefficients("polar_express", 3) == polar[:3]
    assert resolve_coefficients("polar_express", 10) == polar + polar[-1:] * 2
    assert resolve_coefficients(triple, None) == (triple,) * 5
    assert resolve_coefficients(list(triple), 2) == (triple,) * 2
    assert resolve_coefficients([triple, [1, 0, 0]], None) == (triple, (1.0, 0.0, 0.0))
    assert resolve_coefficients([triple], 1) == (triple,)


@pytest.mark.parametrize(
    ("coefficients", "steps", "message"),
    [
        ("polar_expres", None, "did you mean 'polar_express'"),
        ("xyz", None, "'keller_jordan', 'polar_express'"),
        ("keller_jordan", 0, "ns_steps=0"),
        ("keller_jordan", -3, "ns_steps=-3"),
        ("keller_jordan", 100, "1 to 99"),
        ("keller_jordan", 5.0, "ns_steps=5.0"),
        ("keller_jordan", True, "ns_steps=True"),
        ((1.0, 2.0), None, "isn't a triple"),
        ((1.0, 2.0, math.nan), None, "finite"),
        ([(1.0, 2.0, 3.0), (1.0, 2.0)], None, r"\(1.0, 2.0\) isn't a triple"),
        ([(1.0, 2.0, 3.0)] * 2, 5, "ns_steps=5, but ns_coefficients gives 2"),
        ([(1.0, 2.0, 3.0)] * 100, None, "1 to 99"),
        ([], None, "empty"),
    ],
)
def test_bad_coefficients(coefficients, steps, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        resolve_coefficients(coefficients, steps)
