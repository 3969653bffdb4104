"""What holds for all inputs, tried on many: hypothesis chooses shapes, values and settings."""

from __future__ import annotations

from typing import Any

import hypothesis.strategies as st
import torch
from hypothesis import given, settings
from torch import Tensor, nn

import rowmuon
from optimizer_cases import assert_equal, copies, momentum_of

SIDES = st.integers(1, 20)
METHODS = st.fixed_dictionaries(
    {
        "period": st.sampled_from([1, 2, 3, None, ((0, 2), (3, 1))]),
        "nesterov": st.booleans(),
        "adjust_lr_fn": st.sampled_from([None, "match_rms_adamw"]),
        "row_scale": st.sampled_from([1.0, 0.25]),
        "momentum": st.sampled_from([0.0, 0.5, 0.95]),
    }
)
SEEDS = st.integers(0, 2**31)
NUM_STEPS = 4


def gradients(shape: tuple[int, ...], seed: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Uneven ones: row sizes differ by orders of magnitude, some rows and columns are zero."""
    generator = torch.Generator().manual_seed(seed)
    out = []
    for _ in range(NUM_STEPS):
        grad = torch.randn(shape, generator=generator, dtype=torch.float64)
        sizes = 10 ** (3 * torch.randn(shape[0], generator=generator, dtype=torch.float64)).clamp(-6, 6)
        keep = torch.rand(shape[0], generator=generator) > 0.1
        out.append((grad * (sizes * keep).reshape(-1, *[1] * (len(shape) - 1))).to(dtype))
    return out


def trained(start: list[Tensor], grads: list[list[Tensor]], group: dict[str, Any] | None = None, **options: Any):
    """(weights, optimizer) after the given gradients; grads[step][parameter]."""
    params = [nn.Parameter(tensor.clone()) for tensor in start]
    optimizer = rowmuon.PeriodicRowMuon([{"params": params, **(group or {})}], lr=0.02, **options)
    for step in grads:
        for parameter, grad in zip(params, step, strict=True):
            parameter.grad = grad
        optimizer.step()
    return params, optimizer


@settings(max_examples=40)
@given(SIDES, SIDES, SEEDS, st.integers(-25, 25), METHODS)
def test_a_gradients_scale_changes_nothing(m: int, n: int, seed: int, exponent: int, method: dict[str, Any]) -> None:
    # By a power of two, so that fp32 rounds alike: every bit is the same. Rows of 1e-6 times 2^-25 (and 0.05 of that in
    # the momentum) are far below what test_N1 asks for, and their squares still normal numbers.
    grads = gradients((m, n), seed)
    start = [torch.zeros(m, n)]
    weights, _ = trained(start, [[g] for g in grads], **method)
    scaled, _ = trained(start, [[g * 2.0**exponent] for g in grads], **method)
    assert_equal(scaled, weights)


@settings(max_examples=40)
@given(SIDES, SIDES, SEEDS, METHODS)
def test_rows_in_another_order_give_rows_in_that_order(m: int, n: int, seed: int, method: dict[str, Any]) -> None:
    grads = gradients((m, n), seed, torch.float64)
    order = torch.randperm(m, generator=torch.Generator().manual_seed(seed))
    options = {**method, "ns_dtype": torch.float64}
    weights, _ = trained([torch.zeros(m, n, dtype=torch.float64)], [[g] for g in grads], **options)
    permuted, _ = trained([torch.zeros(m, n, dtype=torch.float64)], [[g[order]] for g in grads], **options)
    torch.testing.assert_close(permuted[0], weights[0][order], rtol=0, atol=1e-12)


@settings(max_examples=40)
@given(st.integers(1, 8), SIDES, st.integers(1, 6), SEEDS, METHODS, st.booleans())
def test_chunks_are_separate_matrices(
    m: int, n: int, chunks: int, seed: int, method: dict[str, Any], as_stack: bool
) -> None:
    grads = gradients((chunks * m, n), seed)
    start = torch.randn(chunks * m, n, generator=torch.Generator().manual_seed(seed))
    if as_stack:
        whole, _ = trained([start.view(chunks, m, n)], [[g.view(chunks, m, n)] for g in grads], **method)
    else:
        whole, _ = trained([start], [[g] for g in grads], {"chunks": chunks}, **method)
    parts, _ = trained(list(start.chunk(chunks)), [list(g.chunk(chunks)) for g in grads], **method)
    assert_equal(whole[0].view(chunks * m, n).chunk(chunks), parts)


@settings(max_examples=40)
@given(SIDES, SIDES, SEEDS, METHODS, st.sampled_from([torch.float32, torch.bfloat16]), st.booleans())
def test_gradients_are_never_altered_and_momentum_by_its_rule_alone(
    m: int, n: int, seed: int, method: dict[str, Any], dtype: torch.dtype, maximize: bool
) -> None:
    grads = gradients((m, n), seed, dtype)
    before = copies(grads)
    parameter = nn.Parameter(torch.zeros(m, n, dtype=dtype))
    optimizer = rowmuon.PeriodicRowMuon([parameter], lr=0.02, maximize=maximize, **method)
    expected = torch.zeros(m, n, dtype=dtype)
    for grad in grads:
        parameter.grad = grad
        optimizer.step()
        expected.lerp_(-grad if maximize else grad, 1 - method["momentum"])
        assert parameter.grad is grad
        assert torch.equal(momentum_of(optimizer, parameter), expected)
    assert_equal(grads, before)


@settings(max_examples=30)
@given(SIDES, SIDES, SEEDS, METHODS)
def test_weights_only_move_and_decay(m: int, n: int, seed: int, method: dict[str, Any]) -> None:
    """The update doesn't depend on the weights; decay does nothing else than multiply."""
    grads = gradients((m, n), seed, torch.float64)
    start = torch.randn(m, n, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    options = {**method, "ns_dtype": torch.float64}
    for weight_decay in (0.0, 0.5):
        from_zero, _ = trained([torch.zeros_like(start)], [[g] for g in grads], weight_decay=weight_decay, **options)
        from_start, _ = trained([start], [[g] for g in grads], weight_decay=weight_decay, **options)
        kept = (1 - 0.02 * weight_decay) ** NUM_STEPS
        torch.testing.assert_close(from_start[0], from_zero[0] + kept * start, rtol=0, atol=1e-12)


@settings(max_examples=30)
@given(st.lists(st.tuples(SIDES, SIDES), min_size=1, max_size=6), SEEDS, st.sampled_from([1, 300, 1 << 20]))
def test_company_changes_nothing(shapes: list[tuple[int, int]], seed: int, bucket_bytes: int) -> None:
    """Parameters that share buckets give what each gives alone, bit for bit, whatever the buckets' size."""
    grads = [gradients(shape, seed + i) for i, shape in enumerate(shapes)]
    start = [torch.zeros(shape) for shape in shapes]
    per_step = [[g[step] for g in grads] for step in range(NUM_STEPS)]
    together, optimizer = trained(start, per_step, period=2, bucket_bytes=bucket_bytes)
    for i in range(len(shapes)):
        alone, _ = trained([start[i]], [[g] for g in grads[i]], period=2)
        assert_equal([together[i]], alone)
    assert optimizer.traffic["refresh"].num_orthogonalizations == 2 * len(shapes)
