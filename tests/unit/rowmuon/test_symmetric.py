"""Symmetric products as a GPU would compute them, without one: what is counted, what is refused, what is traced.

The kernel itself is in test_symmetric_kernel.py.
"""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

import rowmuon
from matrices import gaussian, relative_error
from optimizer_cases import assert_equal, copies, give_grads, make_params, momentum_of
from rowmuon import symmetric, symmetric_kernel
from rowmuon.orthogonalize import COEFFICIENTS, newton_schulz, newton_schulz_bytes, newton_schulz_flops

KELLER_JORDAN = COEFFICIENTS["keller_jordan"]
SIZES = [1, 20, 128, 129, 300, 512]


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Products of any size pay, in tiles of 32."""
    monkeypatch.setattr(symmetric, "_TRITON_LEAST_ROWS", 1)
    monkeypatch.setattr(symmetric_kernel, "TILE", 32)


def on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """CPU tensors take the path of a GPU's."""
    monkeypatch.setattr("rowmuon.orthogonalize.compute_device", lambda tensor: "cuda")


@pytest.mark.parametrize("r", SIZES)
def test_flops_are_those_of_tiles_on_and_above_the_diagonal(small: None, r: int) -> None:
    tile = torch.arange(r) // 32
    assert symmetric.product_flops(r, 7, "triton") == 2 * 7 * int((tile[:, None] <= tile).sum())


def test_large_products_cost_little_more_than_half() -> None:
    assert symmetric.product_flops(4096, 1, "triton") == 2 * 4096**2 * 33 // 64
    assert symmetric.product_flops(1024, 1, "triton") == 2 * 1024**2 * 9 // 16
    assert symmetric.product_flops(1023, 1, "triton") == 2 * 1023**2


@pytest.mark.parametrize("shape", [(40, 70), (100, 40), (70, 300), (300, 150)])
@pytest.mark.parametrize("form", ["direct", "gram", "auto"])
def test_flops_of_newton_schulz_are_those_counted(small: None, shape: tuple[int, int], form: Any) -> None:
    """On meta and on fake tensors, and on ones with data under a counter, which takes products of torch."""
    expected = newton_schulz_flops(*shape, 5, form, device_type="cuda", kernels="triton")
    assert expected < newton_schulz_flops(*shape, 5, form, device_type="cuda")
    assert newton_schulz_flops(*shape, 5, form, device_type="cpu", kernels="triton") == newton_schulz_flops(
        *shape, 5, form, device_type="cpu"
    )
    with FlopCounterMode(display=False) as counter:
        newton_schulz(torch.zeros(2, *shape, device="meta"), KELLER_JORDAN, form=form, kernels="triton")
    assert counter.get_total_flops() == 2 * expected
    with FakeTensorMode(), FlopCounterMode(display=False) as counter:
        newton_schulz(torch.zeros(2, *shape), KELLER_JORDAN, form=form, kernels="triton")
    assert counter.get_total_flops() == 2 * expected
    with pytest.MonkeyPatch.context() as patch, FlopCounterMode(display=False) as counter:
        on_a_gpu(patch)
        newton_schulz(torch.zeros(2, *shape), KELLER_JORDAN, form=form, kernels="triton")
    assert counter.get_total_flops() == 2 * expected


@pytest.mark.parametrize("form", ["direct", "gram"])
def test_what_a_counter_sees_is_the_same(small: None, monkeypatch: pytest.MonkeyPatch, form: Any) -> None:
    matrices = gaussian(3, 70, 150)
    expected = newton_schulz(matrices, KELLER_JORDAN, form=form, dtype=torch.float32)
    on_a_gpu(monkeypatch)
    with FlopCounterMode(display=False):
        found = newton_schulz(matrices, KELLER_JORDAN, form=form, dtype=torch.float32, kernels="triton")
    assert relative_error(found, expected) < 1e-5


@pytest.mark.parametrize("shape", [(2, 300, 700), (1, 1030, 1030)])
def test_it_takes_no_more_memory(shape: tuple[int, ...]) -> None:
    from rowdit.cost.live_bytes import LiveBytes

    stack = torch.zeros(shape, dtype=torch.bfloat16, device="meta")
    with LiveBytes() as live:
        newton_schulz(stack, KELLER_JORDAN, out=stack, kernels="triton")
    assert live.peak <= newton_schulz_bytes(*shape, 5, device_type="cuda")


def test_a_plan_counts_the_same(small: None) -> None:
    with FakeTensorMode():
        params = [torch.nn.Parameter(torch.zeros(shape)) for shape in [(64, 64), (64, 64), (96, 200), (130, 40)]]
        for parameter in params:
            parameter.grad = torch.zeros_like(parameter)
        plain, ours = (rowmuon.Muon(params, ns_kernels=kernels) for kernels in ("torch", "triton"))
        with FlopCounterMode(display=False) as counter:
            ours.step()
        assert counter.get_total_flops() == ours.plan("refresh").num_flops(0) < plain.plan("refresh").num_flops(0)


def test_a_whole_graph_has_the_operator(small: None, monkeypatch: pytest.MonkeyPatch) -> None:
    on_a_gpu(monkeypatch)
    seen = []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        seen.extend(str(node.target) for node in graph.graph.nodes)
        return lambda *arguments: [torch.zeros(2, 40, 60)]  # what it computes needs the kernel

    compiled = torch.compile(
        lambda X: newton_schulz(X, KELLER_JORDAN, dtype=torch.float32, kernels="triton"),
        fullgraph=True,
        backend=backend,
    )
    assert compiled(torch.zeros(2, 40, 60)).shape == (2, 40, 60)
    assert sum("symmetric_product_" in target for target in seen) == 10


# --------------------------------------------------------------------------------------------------- what is refused


def test_unknown_kernels() -> None:
    with pytest.raises(ValueError, match="kernels='cublas' is neither 'torch' nor 'triton'"):
        newton_schulz(torch.zeros(2, 2), KELLER_JORDAN, kernels="cublas")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="ns_kernels='cublas' is neither"):
        rowmuon.Muon(make_params([(2, 2)]), ns_kernels="cublas")


def test_float64_is_torchs() -> None:
    with pytest.raises(ValueError, match="kernels='triton' computes in bfloat16 and float32; .* take kernels='torch'"):
        newton_schulz(torch.zeros(2, 2), KELLER_JORDAN, dtype=torch.float64, kernels="triton")
    with pytest.raises(ValueError, match="take ns_kernels='torch'"):
        rowmuon.Muon(make_params([(2, 2)]), ns_kernels="triton", ns_dtype=torch.float64)


def test_a_cpu_knows_no_difference() -> None:
    matrix = gaussian(1100, 1030, dtype=torch.float32)
    assert torch.equal(
        newton_schulz(matrix, KELLER_JORDAN[:2], kernels="triton"), newton_schulz(matrix, KELLER_JORDAN[:2])
    )


def test_without_triton_an_error_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.setattr(symmetric_kernel, "_kernel", symmetric_kernel._kernel.__wrapped__)  # not what is kept of it
    with pytest.raises(RuntimeError, match=r"triton.*rowmuon\[triton\].*ns_kernels"):
        symmetric_kernel.build.__wrapped__(torch.float32, torch.device("cpu"))


def test_what_cannot_be_built_stops_a_step_before_it_changes_anything(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def fail(*arguments: Any, **how: Any) -> None:
        asked.append((arguments, how))
        raise RuntimeError("no kernel")

    monkeypatch.setattr("rowmuon.entries.compute_device", lambda tensor: "cuda")
    monkeypatch.setattr("rowmuon.runtime.prepare_newton_schulz", fail)
    params = make_params([(8, 8), (4, 8)])
    optimizer = rowmuon.Muon(params, ns_kernels="triton", ns_dtype=torch.float32)
    give_grads(params, 0)
    before = copies(params)
    with pytest.raises(RuntimeError, match="no kernel"):
        optimizer.step()
    assert_equal(params, before)
    assert not any(momentum_of(optimizer, p).any() for p in params)
    ((source, dtype, device), how) = asked[0]
    assert (dtype, device.type, how) == (torch.float32, "cpu", {"kernels": "triton", "compile": False})
    assert source == params[0].dtype
