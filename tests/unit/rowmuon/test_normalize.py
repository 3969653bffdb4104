"""The normalisation of Newton-Schulz, and what torch.compile makes of it. A CPU's compiler stands in for a GPU's."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from matrices import gaussian
from rowmuon import normalize as module
from rowmuon import orthogonalize
from rowmuon.normalize import build, normalize

DTYPES = [torch.float32, torch.bfloat16, torch.float64]
SCALES = [1.0, 1e-30, 1e-38, 1e-44, 1e30, 3e37]


def scaled(dtype: torch.dtype) -> Tensor:
    """(6, 20, 30): random matrices with entries of up to about 4 times these scales."""
    return (gaussian(6, 20, 30) * torch.tensor(SCALES, dtype=torch.float64).view(6, 1, 1)).to(dtype)


def largest_error(found: Tensor, matrices: Tensor) -> float:
    norms = torch.linalg.vector_norm(matrices.double(), dim=(-2, -1), keepdim=True)
    exact = matrices.double() / norms.masked_fill(norms == 0, 1)  # 1e-44 is zero in bf16
    assert found.isfinite().all()
    return float((found.double() - exact).abs().max())


@pytest.fixture
def fresh() -> Iterator[None]:
    """Nothing compiled before; nothing kept."""
    torch._dynamo.reset()
    module._compiled.cache_clear()
    build.cache_clear()
    counters.clear()
    yield
    module._compiled.cache_clear()
    build.cache_clear()


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_compiled_is_right_at_any_scale(dtype: torch.dtype) -> None:
    matrices = scaled(dtype)
    found = module._normalized(matrices.flatten(1)).view(6, 20, 30)
    assert found.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    # Numbers under 1e-38 have fewer digits, but those that come in are taken as they are.
    assert largest_error(found, matrices) < (1e-15 if dtype == torch.float64 else 2e-7)


def test_zeros_give_zeros_and_nonfinite_shows() -> None:
    matrices = torch.ones(4, 6)
    matrices[1] = 0
    matrices[2, 3] = torch.inf
    matrices[3, 0] = torch.nan
    found = module._normalized(matrices)
    assert torch.equal(found[1], torch.zeros(6)) and found[0].isfinite().all()
    assert not found[2].isfinite().all() and not found[3].isfinite().all()


def test_powers_of_two_change_no_bit() -> None:
    matrices = gaussian(1, 50, dtype=torch.float32)
    expected = module._normalized(matrices)
    for exponent in (-100, -63, -1, 1, 2, 31, 100):
        assert torch.equal(module._normalized(torch.ldexp(matrices, torch.tensor(exponent))), expected)


@pytest.mark.slow
@torch.no_grad()
@pytest.mark.parametrize(("source", "dtype"), [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.bfloat16)])
def test_compiled(fresh: None, source: torch.dtype, dtype: torch.dtype) -> None:
    """The eager result to a rounding, for one matrix and for several, in place too; no shape compiles again."""
    build(source, dtype, torch.device("cpu"))
    compiled = counters["stats"]["unique_graphs"]
    assert compiled == (4 if source == dtype else 2)
    for shape in [(6, 20, 30), (1, 20, 30), (2, 7, 300), (1, 64, 64), (5, 1, 40)]:
        matrices = scaled(source) if shape == (6, 20, 30) else gaussian(*shape).to(source)
        result = torch.full(shape, torch.nan, dtype=dtype)
        normalize(result, matrices, 1e-7, on_cpu=False, compile=True)
        assert largest_error(result, matrices) < (2.0**-9 if dtype == torch.bfloat16 else 2e-7)
        if source == dtype:
            normalize(matrices, matrices, 1e-7, on_cpu=False, compile=True)
            assert torch.equal(matrices, result)
    assert counters["stats"]["unique_graphs"] == compiled


@pytest.mark.slow
def test_nothing_as_large_as_the_matrices_is_kept(fresh: None) -> None:
    from torch._inductor.utils import run_and_get_code

    matrices = gaussian(3, 1000, dtype=torch.float32)
    _, (code, *_) = run_and_get_code(
        module._compiled(False, False, torch.float32, torch.bfloat16), matrices, torch.empty_like(matrices).bfloat16()
    )
    sizes = re.findall(r"= empty_strided_\w+\(\((.*?)\),", code)
    assert sizes and all(size.replace(" ", "").endswith(",1") for size in sizes), sizes


def test_what_takes_the_eager_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counters and fake tensors, other strides, single elements; and nothing where it wasn't asked for."""
    monkeypatch.setattr(module, "_compiled", lambda *how: pytest.fail("compiled"))
    matrices = gaussian(3, 4, 5)
    how: dict[str, Any] = {"on_cpu": False, "compile": True}
    normalize(torch.empty_like(matrices), matrices, 1e-7, on_cpu=False)
    normalize(torch.empty_like(matrices), matrices.transpose(0, 2).contiguous().transpose(0, 2), 1e-7, **how)
    normalize(torch.empty(3, 1, 1), torch.ones(3, 1, 1), 1e-7, **how)
    with FlopCounterMode(display=False):
        normalize(torch.empty_like(matrices), matrices, 1e-7, **how)
    with FakeTensorMode():
        normalize(torch.empty(3, 4, 5), torch.ones(3, 4, 5), 1e-7, **how)
    orthogonalize.newton_schulz(matrices, "keller_jordan", compile=True)  # on a CPU


def test_a_device_takes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def compiled(*how: Any) -> Any:
        asked.append(how)
        return module._normalize_in_place if how[0] else module._normalize_into

    monkeypatch.setattr(module, "_compiled", compiled)
    monkeypatch.setattr("rowmuon.orthogonalize.compute_device", lambda tensor: "cuda")
    matrices = gaussian(3, 40, 50, dtype=torch.float32)
    expected = orthogonalize.newton_schulz(matrices, "keller_jordan", dtype=torch.float32)
    assert not asked
    found = orthogonalize.newton_schulz(matrices, "keller_jordan", dtype=torch.float32, compile=True)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
    orthogonalize.newton_schulz(matrices, "keller_jordan", dtype=torch.float32, compile=True, out=matrices)
    torch.testing.assert_close(matrices, expected, rtol=0, atol=1e-5)
    assert asked == [(False, False, torch.float32, torch.float32), (True, False, torch.float32, torch.float32)]


def test_a_compiler_that_fails_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*how: Any) -> Any:
        raise OSError("no compiler\nand more")

    monkeypatch.setattr(module, "_compiled", fail)
    with pytest.raises(RuntimeError, match=r"compile=True: .*float32 to torch.bfloat16 on cpu: no compiler\. .*False"):
        build.__wrapped__(torch.float32, torch.bfloat16, torch.device("cpu"))


def test_what_is_prepared(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    monkeypatch.setattr("rowmuon.normalize.build", lambda *how: asked.append(how))
    monkeypatch.setattr("rowmuon.symmetric_kernel.build", lambda *how: asked.append(how))
    prepare, cuda = orthogonalize.prepare_newton_schulz, torch.device("cuda")
    prepare(torch.float32, torch.bfloat16, torch.device("cpu"), kernels="triton", compile=True)
    prepare(torch.float32, torch.bfloat16, cuda, kernels="torch", compile=False)
    with FlopCounterMode(display=False):
        prepare(torch.float32, torch.bfloat16, cuda, kernels="triton", compile=True)
    assert not asked
    prepare(torch.float32, torch.bfloat16, cuda, kernels="triton", compile=True)
    assert asked == [(torch.bfloat16, cuda), (torch.float32, torch.bfloat16, cuda)]
