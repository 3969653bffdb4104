"""The Gram form of Newton-Schulz, and the direct one beside it, on spectra that are hard for both."""

from __future__ import annotations

import math

import pytest
import torch

from matrices import gaussian, hard_spectra, relative_error, singular_vectors, with_spectrum
from reference import step as reference
from rowmuon.orthogonalize import COEFFICIENTS, newton_schulz, resolve_coefficients

KELLER_JORDAN = COEFFICIENTS["keller_jordan"]


@pytest.mark.parametrize("shape", [(128, 128), (128, 256), (512, 128)])
@pytest.mark.parametrize("name", ["keller_jordan", "polar_express"])
@pytest.mark.parametrize("spectrum", hard_spectra(128))
def test_against_svd_on_hard_spectra(spectrum: str, name: str, shape) -> None:
    """Both forms against the polynomials of the singular values of a float64 SVD.

    Steps of slope 3.4 to 8.3 enlarge a rounding by some hundreds: 1e-16 to 2e-13, 6e-8 to 4e-5. In bf16 what is under
    its rounding, 0.4 % of the norm, comes out as anything from 0 to 1.2; what is over it comes out right, where the
    Gram form may be off by 0.27 for a single large value among tiny ones. Nothing comes out too large.
    """
    triples = resolve_coefficients(name, None)
    values = hard_spectra(128)[spectrum].double()
    matrix = with_spectrum(*shape, values)
    exact = torch.from_numpy(reference.apply_to_singular_values(matrix.numpy(), triples))
    left, right = singular_vectors(*shape, 128)
    large = values > 0.02 * values.norm()
    for form, most in (("direct", 0.03), ("gram", 0.3)):
        assert relative_error(newton_schulz(matrix, triples, dtype=torch.float64, form=form), exact) < 1e-11
        assert relative_error(newton_schulz(matrix, triples, dtype=torch.float32, form=form), exact) < 1e-4
        result = newton_schulz(matrix, triples, form=form).double()
        error = (left * ((result - exact) @ right)).sum(0)  # of each singular value
        assert error[large].abs().max() < most
        assert torch.linalg.matrix_norm(result, 2) < 1.25


@pytest.mark.parametrize("shape", [(128, 256), (512, 128)])
@pytest.mark.parametrize("name", ["keller_jordan", "polar_express"])
@pytest.mark.parametrize("spectrum", hard_spectra(128))
def test_gram_form_on_hard_spectra(spectrum: str, name: str, shape) -> None:
    """Against the direct form in float64. On these the direct form itself errs by up to 3e-5 in fp32 and, where most
    singular values are noise, 0.7 in bf16. Equal singular values make the diagonal of the Gram matrix constant: then
    its rounding is the same in every row, a common factor, and doesn't even out."""
    triples = resolve_coefficients(name, None)
    matrix = with_spectrum(*shape, hard_spectra(128)[spectrum])
    exact = newton_schulz(matrix, triples, dtype=torch.float64, form="direct")
    assert relative_error(newton_schulz(matrix, triples, dtype=torch.float64, form="gram"), exact) < 1e-12
    assert relative_error(newton_schulz(matrix, triples, dtype=torch.float32, form="gram"), exact) < 2e-4
    direct = relative_error(newton_schulz(matrix, triples, form="direct"), exact)
    gram = relative_error(newton_schulz(matrix, triples, form="gram"), exact)
    assert gram < 1.25 * direct + (0.15 if spectrum == "equal" else 0.025)


def test_gram_form_without_restart_would_fail() -> None:
    """Why the Gram form returns to X: on 1/k in bf16 five iterations on the small side alone are far off."""
    from rowmuon import orthogonalize

    matrix = with_spectrum(128, 512, hard_spectra(128)["1/k"])
    exact = newton_schulz(matrix, KELLER_JORDAN, dtype=torch.float64)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(orthogonalize, "_GRAM_MAX_GROWTH", math.inf)
        assert relative_error(newton_schulz(matrix, KELLER_JORDAN, form="gram"), exact) > 1.0
    assert relative_error(newton_schulz(matrix, KELLER_JORDAN, form="gram"), exact) < 0.05


@pytest.mark.parametrize("num_steps", [1, 2, 3, 4, 6, 9, 20])
def test_gram_form_with_any_number_of_steps(num_steps: int) -> None:
    matrix = gaussian(12, 40)
    for name in COEFFICIENTS:
        triples = resolve_coefficients(name, num_steps)
        direct = newton_schulz(matrix, triples, dtype=torch.float64, form="direct")
        gram = newton_schulz(matrix, triples, dtype=torch.float64, form="gram")
        assert relative_error(gram, direct) < 1e-9


def test_auto_is_one_of_the_two() -> None:
    for shape, form in [((128, 256), "gram"), ((300, 150), "gram"), ((128, 255), "direct"), ((64, 640), "direct")]:
        matrix = gaussian(*shape)
        assert torch.equal(newton_schulz(matrix, KELLER_JORDAN), newton_schulz(matrix, KELLER_JORDAN, form=form))
