"""Newton-Schulz in every dtype and form, against float64 and against torch's own; its independence of scale."""

from __future__ import annotations

import math

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch.optim._muon import _zeropower_via_newtonschulz

from matrices import gaussian, relative_error, with_spectrum
from reference import step as reference
from rowmuon.orthogonalize import COEFFICIENTS, newton_schulz, resolve_coefficients

KELLER_JORDAN = COEFFICIENTS["keller_jordan"]
SHAPES = {"wide": (24, 80), "tall": (80, 24), "square": (48, 48), "one row": (1, 40), "one column": (40, 1)}
FORMS = ["direct", "gram"]


# float64 rounds at 1e-16 and fp32 at 6e-8, and five quintics with slopes of up to 8 enlarge that by 10 to 100. bf16
# rounds at 4e-3, which evens out over a matrix; a single row has one singular value, and all of it shows there.
TOLERANCES = {torch.float64: 1e-12, torch.float32: 2e-5, torch.bfloat16: 0.05}


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("name", ["keller_jordan", "polar_express"])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_against_reference(shape, form, name, dtype) -> None:
    triples = resolve_coefficients(name, None)
    matrix = gaussian(*shape)
    exact = torch.from_numpy(reference.newton_schulz(matrix.numpy(), triples))
    result = newton_schulz(matrix, triples, dtype=dtype, form=form)
    assert result.dtype == dtype and result.shape == shape
    assert relative_error(result, exact) < TOLERANCES[dtype] * (3 if 1 in shape else 1)


def test_acts_on_singular_values_alone() -> None:
    matrix = gaussian(30, 70)
    exact = torch.from_numpy(reference.apply_to_singular_values(matrix.numpy(), KELLER_JORDAN))
    assert relative_error(newton_schulz(matrix, KELLER_JORDAN, dtype=torch.float64), exact) < 1e-12


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("shape", [(40, 40), (40, 100), (100, 40)])
def test_polar_express_gives_the_polar_factor(shape, form: str) -> None:
    """Singular values of 1 to 1e-3, over a Frobenius norm of about 2.5, are inside what 12 steps converge for."""
    matrix = with_spectrum(*shape, torch.logspace(0, -2.5, 40))
    triples = resolve_coefficients("polar_express", 12)
    exact = torch.from_numpy(reference.polar_factor(matrix.numpy()))
    assert relative_error(newton_schulz(matrix, triples, dtype=torch.float64, form=form), exact) < 1e-9
    assert relative_error(newton_schulz(matrix, triples, dtype=torch.float32, form=form), exact) < 1e-4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [*SHAPES.values(), (128, 512), (400, 136)])
def test_against_torch(shape, dtype: torch.dtype) -> None:
    """Two bf16 iterations that round in another order; (128, 512) and (400, 136) take the Gram form."""
    matrix = gaussian(*shape, dtype=dtype)
    theirs = _zeropower_via_newtonschulz(matrix.clone(), KELLER_JORDAN[0], 5, 1e-7)
    assert relative_error(newton_schulz(matrix, KELLER_JORDAN), theirs) < 0.035


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_any_float_comes_in(dtype: torch.dtype) -> None:
    matrix = gaussian(20, 30).to(dtype)
    exact = torch.from_numpy(reference.newton_schulz(matrix.double().numpy(), KELLER_JORDAN))
    assert relative_error(newton_schulz(matrix, KELLER_JORDAN, dtype=torch.float32), exact) < 2e-5


# Large symmetric products are cut into two or three parts and mirrored; sizes that no part divides.
@pytest.mark.parametrize("shape", [(525, 533), (401, 1003), (900, 401), (777, 779)])
def test_large_matrices(shape) -> None:
    matrix = gaussian(*shape, dtype=torch.float32)
    wide = matrix if shape[0] < shape[1] else matrix.mT
    exact = torch.from_numpy(reference.newton_schulz(wide.double().numpy(), KELLER_JORDAN[:3]))
    exact = exact if wide is matrix else exact.mT
    for form in FORMS:
        result = newton_schulz(matrix, KELLER_JORDAN[:3], dtype=torch.float32, form=form)
        assert relative_error(result, exact) < 1e-5


# Scale


@pytest.mark.parametrize("scale", [1e-9, 1e-10, 1e-25, 1e-37, 1e25, 1e37])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_N1_scale_invariant(scale: float, dtype: torch.dtype) -> None:
    matrix = gaussian(64, 64)
    matrix = (matrix / matrix.norm() * scale).to(dtype)
    exact = torch.from_numpy(reference.newton_schulz(matrix.double().numpy(), KELLER_JORDAN))
    result = newton_schulz(matrix, KELLER_JORDAN, dtype=torch.float32)
    # Numbers under 1e-38 have fewer digits in fp32 and bf16, and the reference sees what came in.
    assert relative_error(result, exact) < 2e-5


@settings(max_examples=30)
@given(exponent=st.integers(-90, 90), num_rows=st.integers(1, 12), num_cols=st.integers(1, 12), seed=st.integers(0, 99))
def test_powers_of_two_change_no_bit(exponent: int, num_rows: int, num_cols: int, seed: int) -> None:
    matrix = gaussian(num_rows, num_cols, dtype=torch.float32, seed=seed)
    scaled = torch.ldexp(matrix, torch.tensor(exponent))
    for dtype in (torch.bfloat16, torch.float32):
        assert torch.equal(
            newton_schulz(scaled, "polar_express", dtype=dtype), newton_schulz(matrix, "polar_express", dtype=dtype)
        )


@settings(max_examples=30)
@given(num_rows=st.integers(1, 12), num_cols=st.integers(1, 12), seed=st.integers(0, 99))
def test_rotations_and_transposition_commute(num_rows: int, num_cols: int, seed: int) -> None:
    matrix = gaussian(num_rows, num_cols, seed=seed)
    result = newton_schulz(matrix, KELLER_JORDAN, dtype=torch.float64)
    order = torch.randperm(num_rows, generator=torch.Generator().manual_seed(seed))
    permuted = newton_schulz(matrix[order], KELLER_JORDAN, dtype=torch.float64)
    assert relative_error(permuted, result[order]) < 1e-10
    rotation = torch.linalg.qr(gaussian(num_cols, num_cols, seed=seed + 1))[0]
    rotated = newton_schulz(matrix @ rotation, KELLER_JORDAN, dtype=torch.float64)
    assert relative_error(rotated, result @ rotation) < 1e-10
    assert relative_error(newton_schulz(matrix.mT, KELLER_JORDAN, dtype=torch.float64), result.mT) < 1e-10


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_N2_zeros_give_zeros(dtype: torch.dtype, form: str) -> None:
    assert torch.equal(
        newton_schulz(torch.zeros(8, 20), KELLER_JORDAN, dtype=dtype, form=form), torch.zeros(8, 20, dtype=dtype)
    )
    batch = gaussian(3, 8, 20, dtype=dtype)
    batch[1] = 0
    batch[2, 5] = 0
    result = newton_schulz(batch, KELLER_JORDAN, dtype=dtype, form=form)
    assert result.isfinite().all()
    assert (result[1] == 0).all() and (result[2, 5] == 0).all()
    assert torch.equal(result[0], newton_schulz(batch[0], KELLER_JORDAN, dtype=dtype, form=form))


def test_nonfinite_input_shows() -> None:
    matrix = gaussian(8, 8)
    matrix[3, 3] = math.inf
    assert not newton_schulz(matrix, KELLER_JORDAN).isfinite().all()
