"""The Triton kernel against float64: in Triton's interpreter on a CPU (`make test-triton`), or on a GPU as it is.

The interpreter runs the kernel's own code, a program at a time; what it can't show is what the compiler makes of it. So
the kernel is compiled too, for GPUs that needn't be there.
"""

from __future__ import annotations

import importlib.util
import inspect
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import rowmuon
from matrices import gaussian, hard_spectra, relative_error, with_spectrum
from optimizer_cases import copies, make_params, relative_difference, train
from reference import step as reference
from rowmuon import symmetric, symmetric_kernel
from rowmuon.orthogonalize import COEFFICIENTS, newton_schulz, resolve_coefficients

if importlib.util.find_spec("triton") is None:
    pytest.skip("Triton isn't installed: `make test-triton` brings it", allow_module_level=True)

from triton.runtime.errors import InterpreterError
from triton.runtime.interpreter import interpreter_builder

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
if not INTERPRETED and not torch.cuda.is_available():
    pytest.skip("needs a CUDA device or TRITON_INTERPRET=1, as in `make test-triton`", allow_module_level=True)

DEVICE = "cpu" if INTERPRETED else "cuda"
TILES = [16, 128] if INTERPRETED else [128]
# Half a unit in the last place. The interpreter cuts bf16 off where a GPU rounds: a whole one.
ROUNDING = {torch.float32: 2.0**-24, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8 * (2 if INTERPRETED else 1)}


def inside(shape: tuple[int, ...], dtype: torch.dtype, order: str) -> Tensor:
    """A view (B, r, c) of that order of memory, with NaN all around it."""
    num, rows, cols = shape
    if order == "columns":
        return inside((num, cols, rows), dtype, "rows").mT
    step = 2 if order == "every other" else 1
    around = torch.full((num + 2, rows + 3, step * cols + 5), torch.nan, dtype=dtype, device=DEVICE)
    return around[1:-1, 1:-2, 2 : 2 + step * cols : step]


def put(value: Tensor, dtype: torch.dtype, order: str) -> Tensor:
    view = inside(tuple(value.shape), dtype, order)
    return view.copy_(value.to(dtype))


Multiply = Callable[..., None]


def check_product(
    multiply: Multiply,
    shape: tuple[int, int, int],
    dtype: torch.dtype = torch.float32,
    order: str = "rows",
    other: Tensor | None = None,
    **how: float,
) -> None:
    """alpha X Y + beta S + shift I of views with NaN around them, into one: right inside, untouched outside."""
    num, rows, depth = shape
    X = put(gaussian(num, rows, depth), dtype, order)
    Y = X.mT if other is None else put(other, dtype, order)
    beta, alpha, shift = how.get("beta"), how.get("alpha", 1.0), how.get("shift", 0.0)
    S = None if beta is None else put((lambda R: R + R.mT)(gaussian(num, rows, rows, seed=1)), dtype, order)
    exact = alpha * X.double() @ Y.double() + shift * torch.eye(rows, dtype=torch.float64, device=DEVICE)
    exact = exact if S is None else exact + beta * S.double()
    out = inside((num, rows, rows), dtype, order)
    multiply(X, Y, out, S, beta or 0.0, alpha, shift)
    # What is added up in fp32 errs by some of its roundings of the largest sums on the way.
    sums = abs(alpha) * X.double().abs() @ Y.double().abs() + abs(shift)
    sums = sums if S is None else sums + abs(beta or 0.0) * S.double().abs()
    error = (out.double() - exact).abs()
    assert bool((error <= ROUNDING[dtype] * exact.abs() + 16 * 2.0**-24 * sums).all()), float(error.max())
    tile = torch.arange(rows, device=DEVICE) // symmetric_kernel.TILE
    off_diagonal = tile[:, None] != tile
    if not other:
        assert torch.equal(out[:, off_diagonal], out.mT[:, off_diagonal])
    base = out._base
    assert base is not None
    assert int(base.isnan().sum()) == base.numel() - out.numel(), "written outside"


@pytest.fixture(params=TILES)
def multiply(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Multiply:
    monkeypatch.setattr(symmetric_kernel, "TILE", request.param)
    return symmetric_kernel.multiply


SHAPES = [(1, 1, 1), (3, 5, 70), (2, 16, 16), (2, 17, 33), (1, 48, 20), (2, 77, 130), (1, 130, 40), (1, 257, 9)]


@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize("shape", SHAPES)
def test_against_float64(multiply: Multiply, shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    check_product(multiply, shape, dtype)
    check_product(multiply, shape, dtype, beta=-4.775, alpha=2.0315, shift=3.4445)


@pytest.mark.parametrize("order", ["rows", "columns", "every other"])
@pytest.mark.parametrize("shape", [(2, 20, 33), (3, 40, 17)])
def test_strides(multiply: Multiply, shape: tuple[int, int, int], order: str) -> None:
    check_product(multiply, shape, order=order, beta=0.5, alpha=2.0)


@pytest.mark.parametrize("rows", range(1, 100, 7))
def test_every_number_of_tiles(monkeypatch: pytest.MonkeyPatch, rows: int) -> None:
    if not INTERPRETED:
        pytest.skip("tiles of 16 are for the interpreter")
    monkeypatch.setattr(symmetric_kernel, "TILE", 16)
    check_product(symmetric_kernel.multiply, (2, rows, 3))


def test_matrices_that_commute(multiply: Multiply) -> None:
    """R P and P R P, where P is a polynomial of R: what the Gram form multiplies."""
    R = gaussian(2, 50, 80)
    R = (R @ R.mT / 80).to(DEVICE)
    P = torch.eye(50, dtype=torch.float64, device=DEVICE) * 3.4 - 4.8 * R + 2 * R @ R
    for exact, left, right in [(R @ P, R, P), (P @ R @ P, P @ R, P)]:
        out = torch.full((2, 50, 50), torch.nan, device=DEVICE)
        multiply(left.float(), right.float(), out, None, 0.0, 1.0, 0.0)
        assert relative_error(out, exact) < 1e-6


def test_what_is_added_may_be_the_result(multiply: Multiply) -> None:
    X, S = gaussian(2, 40, 30, dtype=torch.float32).to(DEVICE), gaussian(2, 40, 40, dtype=torch.float32).to(DEVICE)
    S = S + S.mT
    expected = torch.empty_like(S)
    multiply(X, X.mT, expected, S, 0.5, 2.0, 1.0)
    multiply(X, X.mT, S, S, 0.5, 2.0, 1.0)
    assert torch.equal(S, expected)


def test_nothing(multiply: Multiply) -> None:
    for shape in [(0, 4, 5), (2, 0, 5)]:
        X = torch.zeros(shape, device=DEVICE)
        multiply(X, X.mT, X.new_empty(shape[0], shape[1], shape[1]), None, 0.0, 1.0, 0.0)
    out = torch.full((2, 4, 4), torch.nan, device=DEVICE)
    multiply(out[:, :, :0], out[:, :0], out, None, 0.0, 1.0, 3.0)
    assert torch.equal(out, 3 * torch.eye(4, device=DEVICE).expand(2, 4, 4))


# --------------------------------------------------------------------------------------------------- planted faults
FAULTS = {
    "not mirrored": ("if i != j:", "if i > j:"),
    "mirrored without transposing": ("tl.trans(result)", "result"),
    "rows of A not masked": ("(rows < num_rows)[:, None] & inside[None, :]", "(rows >= 0)[:, None] & inside[None, :]"),
    "columns of B not masked": (
        "inside[:, None] & (cols < num_rows)[None, :]",
        "inside[:, None] & (cols >= 0)[None, :]",
    ),
    "depth not masked": ("inside = steps < depth - start", "inside = steps < DEPTH"),
    "result not masked": ("result, mask=valid", "result, mask=(rows >= 0)[:, None] & (cols >= 0)[None, :]"),
    "mirror image not masked": ("mask=mirrored", "mask=(cols >= 0)[:, None] & (rows >= 0)[None, :]"),
    "a tile left out": ("tl.where(q < n - p, p + q, q - 1)", "tl.where(q < n - p, p + q, n - 1)"),
    "one batch for all": ("batch * a_batch", "0 * a_batch"),
    "shift on every element": ("rows[:, None] == cols[None, :]", "rows[:, None] >= 0 * cols[None, :]"),
    "beta left out": ("total += beta * tl.load", "total += tl.load"),
    "alpha applied to all": ("    result = total.to", "    total *= alpha\n    result = total.to"),
}


def refuse_nan(monkeypatch: pytest.MonkeyPatch) -> None:
    """An element that isn't masked must not be NaN, which surrounds all that may be read. What is read beyond the rows
    or columns and then masked where it is written shows nowhere else."""
    load = interpreter_builder.create_masked_load

    def checked(pointers: Any, mask: Any, *rest: Any) -> Any:
        found = load(pointers, mask, *rest)
        assert not (np.isnan(found.data) & mask.data).any(), "read outside"
        return found

    monkeypatch.setattr(interpreter_builder, "create_masked_load", checked)


@pytest.mark.skipif(not INTERPRETED, reason="a fault may read memory that isn't ours")
@pytest.mark.parametrize("fault", FAULTS)
def test_planted_faults_are_found(fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = inspect.getsource(symmetric_kernel)
    before, after = FAULTS[fault]
    assert source.count(before) == 1
    start = source.index("# ----", source.index("mask=mirrored"))  # the operator is there already
    path = tmp_path / "faulty_kernel.py"
    path.write_text(source[:start].replace(before, after))
    spec = importlib.util.spec_from_file_location("faulty_kernel", path)
    assert spec is not None and spec.loader is not None
    faulty = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(faulty)
    faulty.TILE = 16  # type: ignore[attr-defined]
    monkeypatch.setattr(symmetric_kernel, "TILE", 16)
    how = {"beta": -4.775, "alpha": 2.0315, "shift": 3.4445}
    refuse_nan(monkeypatch)
    check_product(symmetric_kernel.multiply, (2, 53, 70), **how)
    # Triton's error has ours in its text.
    with pytest.raises((AssertionError, InterpreterError), match="read outside|written outside|assert|tensor"):
        check_product(faulty.multiply, (2, 53, 70), **how)


# ---------------------------------------------------------------------------------------------------- Newton-Schulz


@pytest.fixture
def everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Products of any size, and in the interpreter on a CPU: in small tiles, as on a GPU."""
    monkeypatch.setattr(symmetric, "_TRITON_LEAST_ROWS", 1)
    if INTERPRETED:
        monkeypatch.setattr(symmetric_kernel, "TILE", 32)
        monkeypatch.setattr("rowmuon.orthogonalize.compute_device", lambda tensor: "cuda")


@pytest.mark.parametrize("shape", [(64, 64), (64, 160), (160, 64)])
@pytest.mark.parametrize("spectrum", hard_spectra(64))
def test_hard_spectra(everywhere: None, spectrum: str, shape: tuple[int, int]) -> None:
    """In fp32 the bounds of torch's products: a float64 SVD to 1e-4, as in test_gram_form.py."""
    matrix = with_spectrum(*shape, hard_spectra(64)[spectrum]).to(DEVICE)
    for name in ("keller_jordan", "polar_express"):
        triples = resolve_coefficients(name, None)
        exact = torch.from_numpy(reference.apply_to_singular_values(matrix.cpu().numpy(), triples))
        form: Any
        for form in ("direct", "gram"):
            found = newton_schulz(matrix, triples, dtype=torch.float32, form=form, kernels="triton")
            assert relative_error(found.cpu(), exact) < 1e-4


@pytest.mark.parametrize("form", ["direct", "gram"])
def test_batches_in_bf16(everywhere: None, form: Any) -> None:
    matrices = gaussian(3, 70, 150).to(DEVICE)
    matrices[1] *= 1e-30
    found = newton_schulz(matrices, "keller_jordan", form=form, kernels="triton")
    exact = newton_schulz(matrices, "keller_jordan", dtype=torch.float64)
    assert relative_error(found, exact) < (0.1 if INTERPRETED else 0.05)


def test_it_is_the_kernel_that_computes(everywhere: None, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[int, ...]] = []
    multiply = symmetric_kernel.multiply
    monkeypatch.setattr(symmetric_kernel, "multiply", lambda A, *rest: (calls.append(A.shape), multiply(A, *rest))[1])
    newton_schulz(gaussian(2, 40, 90).to(DEVICE), "keller_jordan", form="direct", kernels="triton")
    assert calls == [(2, 40, 90), (2, 40, 40)] * 5
    newton_schulz(gaussian(2, 40, 90).to(DEVICE), "keller_jordan", form="direct")
    assert len(calls) == 10


def test_in_a_graph_of_torch_compile(everywhere: None) -> None:
    matrices = gaussian(2, 40, 90, dtype=torch.float32).to(DEVICE)

    def orthogonalized(X: Tensor) -> Tensor:
        return newton_schulz(X, COEFFICIENTS["keller_jordan"], dtype=torch.float32, form="gram", kernels="triton")

    compiled = torch.compile(orthogonalized, fullgraph=True, backend="aot_eager")
    assert relative_error(compiled(matrices), orthogonalized(matrices)) < 1e-5


def test_an_optimizer_with_it(everywhere: None) -> None:
    made = [[p.to(DEVICE) for p in make_params([(40, 60), (60, 40), (33, 33)])] for _ in range(2)]
    params = [[torch.nn.Parameter(p.detach().clone()) for p in each] for each in made]
    start = copies(params[0])
    for each, kernels in zip(params, ("torch", "triton"), strict=True):
        optimizer = rowmuon.PeriodicRowMuon(each, lr=0.02, period=2, ns_dtype=torch.float32, ns_kernels=kernels)
        train(optimizer, each, 4)
    assert 0 < relative_difference(params[1], params[0], start) < 1e-4


def test_build(monkeypatch: pytest.MonkeyPatch) -> None:
    for dtype in (torch.bfloat16, torch.float32):
        symmetric_kernel.build(dtype, torch.device(DEVICE))


# ----------------------------------------------------------------------------------------------------- compilation
COMPILE = """
import re, torch
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile
from rowmuon import symmetric_kernel

kernel, interpreted = symmetric_kernel._kernel()
assert not interpreted
names, ones = kernel.arg_names, ("a_col", "b_row", "add_col", "out_col")
for arch, dtype, precision, instruction in [
    (80, "bf16", "ieee", r"mma\\.sync\\S*bf16\\.bf16\\.f32"),
    (80, "fp32", "tf32", r"mma\\.sync\\S*tf32\\.tf32\\.f32"),
    (90, "bf16", "ieee", r"wgmma\\S*f32\\.bf16\\.bf16"),
    (90, "fp32", "tf32", r"wgmma\\S*f32\\.tf32\\.tf32"),
    (90, "fp32", "ieee", r"fma\\.rn\\.f32"),
]:
    constants = symmetric_kernel._constants({"bf16": torch.bfloat16, "fp32": torch.float32}[dtype])
    constants = {**constants, "HAS_ADD": True, "PRECISION": precision, "WIDEN": False, **dict.fromkeys(ones, 1)}
    types = {n: "constexpr" if n in constants else "*" + dtype if n.endswith("_ptr") else "i32" for n in names}
    types |= dict.fromkeys(("alpha", "beta", "shift"), "fp32")
    aligned = {(i,): [["tt.divisibility", 16]] for i, n in enumerate(names) if types[n] in ("i32", "*" + dtype)}
    source = ASTSource(kernel, types, {(names.index(n),): v for n, v in constants.items()}, aligned)
    options = {"num_warps": symmetric_kernel._NUM_WARPS, "num_stages": symmetric_kernel._NUM_STAGES}
    made = compile(source, target=GPUTarget("cuda", arch, 32), options=options)
    print(arch, dtype, precision, made.metadata.shared, len(made.asm["cubin"]))
    assert re.search(instruction, made.asm["ptx"]), "not on the units that it should use"
    assert "cp.async" in made.asm["ptx"], "operands aren't fetched ahead"
    assert made.metadata.shared <= 99 << 10, "more shared memory than GPUs have"
"""


def test_it_compiles_for_gpus_that_are_not_here(tmp_path: Path) -> None:
    """To machine code for sm_80 and sm_90: on tensor cores, fetching ahead, within the shared memory."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", COMPILE], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(done.stdout.splitlines()) == 5
