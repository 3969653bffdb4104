"""Newton-Schulz on batches and other inputs: what it leaves alone, what it refuses, how many FLOPs it takes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from matrices import gaussian, relative_error
from reference import step as reference
from rowmuon.orthogonalize import COEFFICIENTS, newton_schulz, newton_schulz_flops, resolve_coefficients

KELLER_JORDAN = COEFFICIENTS["keller_jordan"]


SHAPES = [(7, 12, 20), (2, 3, 20, 12), (9, 130, 300), (2, 420, 840), (1, 1, 5, 5)]
SHAPES += [(num, rows, cols) for num in (2, 7, 33) for rows, cols in ((7, 10), (10, 7), (1, 9), (31, 31), (65, 130))]


# Another order of sums is another rounding, which the iterations enlarge: as much as against float64 (6e-8 and 4e-3
# by some hundreds in the worst direction, evened out over a matrix; a single row has one direction only).
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("dtype", "most"), [(torch.float64, 1e-12), (torch.float32, 2e-5), (torch.bfloat16, 0.05)])
def test_a_batch_is_its_matrices(shape, dtype: torch.dtype, most: float) -> None:
    batch = gaussian(*shape, dtype=torch.float64 if dtype == torch.float64 else torch.float32)
    result = newton_schulz(batch, KELLER_JORDAN, dtype=dtype).flatten(0, -3)
    for matrix, got in zip(batch.flatten(0, -3), result, strict=True):
        alone = newton_schulz(matrix, KELLER_JORDAN, dtype=dtype)
        assert relative_error(got, alone) < most * (3 if 1 in matrix.shape else 1)


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
