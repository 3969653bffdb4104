"""Newton-Schulz: coefficients, both forms, every dtype, against float64 and against torch's own."""

from __future__ import annotations

import math

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor
from torch.optim._muon import _zeropower_via_newtonschulz
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from reference import step as reference
from rowmuon.orthogonalize import (
    COEFFICIENTS,
    newton_schulz,
    newton_schulz_flops,
    resolve_coefficients,
)

KELLER_JORDAN = COEFFICIENTS["keller_jordan"]
SHAPES = {"wide": (24, 80), "tall": (80, 24), "square": (48, 48), "one row": (1, 40), "one column": (40, 1)}
FORMS = ["direct", "gram"]


def gaussian(*shape: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def with_spectrum(num_rows: int, num_cols: int, values: Tensor) -> Tensor:
    left = torch.linalg.qr(gaussian(num_rows, values.numel(), seed=1))[0]
    right = torch.linalg.qr(gaussian(num_cols, values.numel(), seed=2))[0]
    return left * values.double() @ right.mT


def relative_error(value: Tensor, exact: Tensor) -> float:
    return float((value.double() - exact.double()).norm() / exact.double().norm())


def map_values(values: np.ndarray, triples) -> np.ndarray:
    for a, b, c in triples:
        values = a * values + b * values**3 + c * values**5
    return values


# Coefficients


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


# The result


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


# The Gram form


def hard_spectra(r: int) -> dict[str, Tensor]:
    k = torch.arange(1, r + 1)
    spectra = {f"condition 1e{n}": torch.logspace(0, -n, r) for n in (1, 2, 4, 6, 8)}
    spectra |= {"1/k": 1 / k, "1/k^2": 1 / k**2, "half rank": (k <= r // 2).double(), "rank 8": (k <= 8).double()}
    spectra |= {
        "one spike": torch.where(k == 1, 1.0, 1e-3),
        "equal": torch.ones(r),
        "tiny": torch.logspace(-30, -32, r),
    }
    return spectra | {"huge": torch.logspace(30, 28, r)}


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


# Batches, memory, counts


@pytest.mark.parametrize("shape", [(7, 12, 20), (2, 3, 20, 12), (9, 130, 300), (2, 420, 840), (1, 1, 5, 5)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_batch_is_its_matrices(shape, dtype: torch.dtype) -> None:
    batch = gaussian(*shape, dtype=torch.float32)
    result = newton_schulz(batch, KELLER_JORDAN, dtype=dtype)
    flat = batch.flatten(0, -3)
    single = torch.stack([newton_schulz(matrix, KELLER_JORDAN, dtype=dtype) for matrix in flat])
    assert torch.equal(result.flatten(0, -3), single)


def test_two_convolution_weights_arent_one_matrix() -> None:
    """S16: two (8, 4, 3, 3) weights in one batch, each its own (8, 36)."""
    weights = gaussian(2, 8, 4, 3, 3)
    result = newton_schulz(weights.flatten(2), KELLER_JORDAN, dtype=torch.float64)
    for weight, got in zip(weights, result, strict=True):
        exact = torch.from_numpy(reference.newton_schulz(weight.reshape(8, 36).numpy(), KELLER_JORDAN))
        assert relative_error(got, exact) < 1e-12


@pytest.mark.parametrize("shape", [(12, 20), (3, 12, 20), (150, 400)])
def test_input_is_never_altered(shape) -> None:
    for dtype in (torch.bfloat16, torch.float32, torch.float64):
        matrix = gaussian(*shape, dtype=dtype)
        before = matrix.clone()
        result = newton_schulz(matrix, KELLER_JORDAN, dtype=dtype)
        assert torch.equal(matrix, before)
        assert result.data_ptr() != matrix.data_ptr()


def test_out() -> None:
    matrix = gaussian(3, 12, 20)
    expected = newton_schulz(matrix, KELLER_JORDAN)
    out = torch.empty(3, 12, 20, dtype=torch.bfloat16)
    assert newton_schulz(matrix, KELLER_JORDAN, out=out) is out
    assert torch.equal(out, expected)
    strided = torch.full((3, 20, 24), 7.0, dtype=torch.bfloat16).mT[:, ::2]
    newton_schulz(matrix, KELLER_JORDAN, out=strided)
    assert torch.equal(strided, expected)


def test_strided_input() -> None:
    matrix = gaussian(40, 60)
    for view in (matrix.mT, matrix[::2, ::3], matrix.expand(2, 40, 60)):
        copy = view.clone(memory_format=torch.contiguous_format)
        assert torch.equal(newton_schulz(view, KELLER_JORDAN), newton_schulz(copy, KELLER_JORDAN))


@pytest.mark.parametrize("shape", [(0, 5), (5, 0), (0, 4, 5), (3, 0, 5)])
def test_nothing(shape) -> None:
    assert newton_schulz(torch.zeros(shape), KELLER_JORDAN).shape == shape


def test_no_graph_and_no_host_read() -> None:
    class NoHostRead(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            assert func is not torch.ops.aten._local_scalar_dense.default, "the host read a tensor"
            return func(*args, **(kwargs or {}))

    matrix = torch.randn(130, 260, requires_grad=True)
    with NoHostRead():
        result = newton_schulz(matrix, "polar_express")
    assert not result.requires_grad


@pytest.mark.parametrize(
    ("matrix", "arguments", "message"),
    [
        (torch.zeros(5), {}, r"\(\.\.\., m, n\), not torch.float32 \(5,\)"),
        (torch.zeros(5, 5, dtype=torch.int64), {}, "torch.int64"),
        (torch.zeros(5, 5, dtype=torch.complex64), {}, "torch.complex64"),
        (torch.zeros(5, 5), {"dtype": torch.float16}, "float16 isn't supported"),
        (torch.zeros(5, 5), {"form": "gramm"}, "form='gramm'"),
        (torch.zeros(5, 5), {"out": torch.zeros(5, 5)}, r"out has torch.float32 \(5, 5\)"),
        (torch.zeros(5, 5), {"out": torch.zeros(5, 4, dtype=torch.bfloat16)}, r"\(5, 4\); it must have"),
    ],
)
def test_bad_arguments(matrix: Tensor, arguments, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        newton_schulz(matrix, KELLER_JORDAN, **arguments)


FLOP_SHAPES = [(12, 20), (20, 12), (16, 16), (1, 7), (128, 512), (700, 300), (420, 1680), (800, 900)]


@pytest.mark.parametrize("shape", FLOP_SHAPES)
@pytest.mark.parametrize("form", ["direct", "gram", "auto"])
@pytest.mark.parametrize(("name", "num_steps"), [("keller_jordan", 5), ("polar_express", 7)])
def test_flops_are_those_counted(shape, form, name, num_steps) -> None:
    """Every product in full, as on any device but a CPU."""
    triples = resolve_coefficients(name, num_steps)
    with FlopCounterMode(display=False) as counter:
        newton_schulz(torch.zeros(2, *shape, device="meta"), triples, form=form)
    expected = newton_schulz_flops(*shape, num_steps, form, coefficients=name, device_type="meta")
    assert counter.get_total_flops() == 2 * expected
    assert expected == newton_schulz_flops(*shape, num_steps, form, coefficients=name)


@pytest.mark.parametrize("shape", FLOP_SHAPES)
@pytest.mark.parametrize("form", ["direct", "gram"])
def test_flops_are_those_counted_on_a_cpu(shape, form) -> None:
    """Halves of large products are mirrored instead of computed."""
    with FlopCounterMode(display=False) as counter:
        newton_schulz(torch.zeros(shape), KELLER_JORDAN[:3], form=form)
    expected = newton_schulz_flops(*shape, 3, form, device_type="cpu")
    assert counter.get_total_flops() == expected
    full = newton_schulz_flops(*shape, 3, form)
    assert (expected < full) == (min(shape) >= 420)


def test_flops_of_the_direct_form() -> None:
    """20 r^2 l + 10 r^3 in five steps."""
    assert newton_schulz_flops(100, 300, 5) == 20 * 100**2 * 300 + 10 * 100**3
    assert newton_schulz_flops(300, 100, 5) == newton_schulz_flops(100, 300, 5)
    assert newton_schulz_flops(300, 0, 5) == 0
    # 4 : 1 in two runs, 3 + 2: 8 r^2 l + 28 r^3, two thirds of the direct form's
    assert newton_schulz_flops(100, 400, 5, "gram") == 8 * 100**2 * 400 + 28 * 100**3
