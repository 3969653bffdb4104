"""Newton-Schulz on a CUDA device: `pytest -m gpu tests/gpu/test_newton_schulz_cuda.py`. Nobody has run it yet."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import rowmuon
from matrices import gaussian, hard_spectra, relative_error, with_spectrum
from reference import step as reference
from rowmuon.orthogonalize import newton_schulz, newton_schulz_bytes, resolve_coefficients

ROOT = Path(__file__).parents[2]
WAYS: list[dict[str, Any]] = [{}, {"compile": True}, {"kernels": "triton"}, {"kernels": "triton", "compile": True}]
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


@pytest.fixture(params=["ieee", "tf32"])
def float32(request: pytest.FixtureRequest) -> Iterator[str]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if request.param == "tf32" else "highest")
    yield request.param
    torch.set_float32_matmul_precision(before)


def on_small_sides(patch: pytest.MonkeyPatch) -> None:
    patch.setattr("rowmuon.symmetric._TRITON_LEAST_ROWS", 1)


@pytest.mark.parametrize("form", ["direct", "gram"])
@pytest.mark.parametrize("way", WAYS, ids=str)
@pytest.mark.parametrize("spectrum", hard_spectra(200))
def test_hard_spectra(
    monkeypatch: pytest.MonkeyPatch, float32: str, spectrum: str, way: dict[str, Any], form: Any
) -> None:
    """fp32 as on a CPU. Under TF32 what is below its rounding comes out as anything, but nothing too large."""
    on_small_sides(monkeypatch)
    matrix = with_spectrum(200, 500, hard_spectra(200)[spectrum])
    triples = resolve_coefficients("polar_express", None)
    exact = torch.from_numpy(reference.apply_to_singular_values(matrix.numpy(), triples))
    found = newton_schulz(matrix.cuda(), triples, dtype=torch.float32, form=form, **way).cpu()
    if float32 == "ieee":
        assert relative_error(found, exact) < 1e-4
    assert torch.linalg.matrix_norm(found.double(), 2) < 1.25


@pytest.mark.parametrize("way", WAYS, ids=str)
@pytest.mark.parametrize("shape", [(3, 1024, 1024), (2, 1030, 2500), (2, 2500, 1030)])
@pytest.mark.parametrize(("dtype", "most"), [(torch.bfloat16, 0.05), (torch.float32, 2e-5)])
def test_large_matrices(shape: tuple[int, ...], way: dict[str, Any], dtype: torch.dtype, most: float) -> None:
    matrices = gaussian(*shape).cuda()
    exact = newton_schulz(matrices, "keller_jordan", dtype=torch.float64)
    assert relative_error(newton_schulz(matrices, "keller_jordan", dtype=dtype, **way), exact) < most
    stack = matrices.to(dtype)
    assert newton_schulz(stack, "keller_jordan", dtype=dtype, out=stack, **way) is stack
    assert relative_error(stack, exact) < most


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_memory(way: dict[str, Any]) -> None:
    stack = gaussian(4, 1024, 4096).bfloat16().cuda()
    newton_schulz(stack, "keller_jordan", out=stack, **way)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    newton_schulz(stack, "keller_jordan", out=stack, **way)
    taken = torch.cuda.max_memory_allocated() - before
    assert taken <= newton_schulz_bytes(*stack.shape, 5, device_type="cuda") + (1 << 20)


def test_an_optimizer_takes_both() -> None:
    weight = gaussian(1024, 1024, dtype=torch.float32).cuda()
    results = []
    for kernels, compile in (("torch", False), ("triton", True)):
        parameter = torch.nn.Parameter(weight.clone())
        parameter.grad = gaussian(1024, 1024, dtype=torch.float32, seed=1).cuda()
        optimizer = rowmuon.PeriodicRowMuon([parameter], lr=0.02, period=2, ns_kernels=kernels, compile=compile)
        for _ in range(3):
            optimizer.step()
        results.append(parameter.detach() - weight)
    assert relative_error(results[1], results[0]) < 0.05


@pytest.mark.parametrize("path", ["tests/unit/rowmuon/test_symmetric_kernel.py"])
def test_the_kernel_on_this_device(path: str) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", path]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-10_000:] + done.stderr[-5_000:]


def test_the_benchmark_runs() -> None:
    command = [sys.executable, "benchmarks/newton_schulz.py", "--widths", "1024", "--products", "1024", "--rounds", "3"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-5_000:] + done.stderr[-5_000:]
    assert done.stdout.count("| 1024 x 4096") == 16
