"""The row step on plain local tensors, whole rows and split ones, against float64."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from reference import step as reference
from rowmuon import update
from rowmuon.update import (
    apply_direction_,
    apply_split_row_step_,
    momentum_direction_,
    row_step_,
    row_step_scale,
    split_row_sums_,
)
from update_cases import DTYPES, STEP, assert_same, gaussian, relative_error, row_step


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of 64 elements, so that small matrices take several, and rows longer than a block take one each."""
    monkeypatch.setattr(update, "_CPU_BLOCK", 64)


@pytest.mark.parametrize("maximize", [False, True])
@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-14), (torch.float32, 5e-7)])
@pytest.mark.parametrize("shape", [(13, 10), (3, 200), (40, 1), (1, 40)])
def test_row_step_against_reference(shape, dtype, tolerance, nesterov, maximize, small_blocks) -> None:
    weights, grads = gaussian(*shape), [gaussian(*shape, seed=seed) for seed in (1, 2, 3)]
    setting = reference.MuonSettings(
        lr=0.02, momentum=0.9, nesterov=nesterov, adjust_lr_fn="match_rms_adamw", row_scale=0.25, maximize=maximize,
        period=((0, None),), coefficients=[(0.0, 0.0, 0.0)],  # the first step only decays
    )  # fmt: skip
    exact = reference.run([weights.numpy()], [[grad.numpy()] for grad in grads], [setting])[-1][0]
    weight, momentum = weights.to(dtype), torch.zeros(shape, dtype=dtype)
    momentum_direction_(momentum, grads[0].to(dtype), beta=0.9, nesterov=nesterov, maximize=maximize)
    weight.mul_(1 - 0.02 * 0.1)
    for grad in grads[1:]:
        scale = 0.25 * row_step_scale(*shape, "match_rms_adamw")
        weight, momentum = row_step(weight, momentum, grad.to(dtype), scale, nesterov=nesterov, maximize=maximize)
    assert relative_error(weight - weights.to(dtype), torch.from_numpy(exact) - weights) < 100 * tolerance
    assert relative_error(weight, torch.from_numpy(exact)) < tolerance


def test_row_step_in_bf16_rounds_the_weight_once(small_blocks) -> None:
    weight, grad = gaussian(13, 10, dtype=torch.bfloat16), gaussian(13, 10, dtype=torch.bfloat16, seed=1)
    result, momentum = row_step(weight, torch.zeros_like(grad), grad)
    direction = grad.lerp(momentum, 0.9).float()
    exact = weight.float() * (1 - 0.02 * 0.1) - 0.02 * direction / direction.norm(dim=1, keepdim=True)
    # to half a last place, but for ties that fp32 decides
    assert ((result.float() - exact).abs() <= 2**-9 * 1.001 * 2 ** exact.abs().log2().ceil()).all()
    assert (result == exact.bfloat16()).float().mean() > 0.99


def test_row_step_in_bf16_does_not_lose_a_small_decay() -> None:
    """1 - 1e-3 is less than half a place from 1 in bf16: rounded on its own it would change nothing."""
    weight = gaussian(64, 64, dtype=torch.bfloat16)
    assert torch.equal(weight * (1 - 1e-3), weight)
    drift = 0.0
    for seed in range(40):
        grad = gaussian(64, 64, dtype=torch.bfloat16, seed=seed)
        arguments = {"lr": 0.1, "scale": 1.0, "beta": 0.0}
        decayed, _ = row_step(weight, torch.zeros_like(grad), grad, weight_decay=0.01, **arguments)
        kept, _ = row_step(weight, torch.zeros_like(grad), grad, weight_decay=0.0, **arguments)
        drift += float(((decayed - kept).double() * weight.double()).sum() / weight.double().square().sum()) / 40
    assert drift == pytest.approx(-1e-3, rel=0.2)


@pytest.mark.parametrize("grad_dtype", DTYPES)
@pytest.mark.parametrize("momentum_dtype", DTYPES)
@pytest.mark.parametrize("weight_dtype", DTYPES)
def test_row_step_in_any_mix_of_dtypes(weight_dtype, momentum_dtype, grad_dtype, small_blocks) -> None:
    weight, grad = gaussian(13, 10, dtype=weight_dtype), gaussian(13, 10, dtype=grad_dtype, seed=1)
    momentum = gaussian(13, 10, dtype=momentum_dtype, seed=2)
    exact, _ = row_step(weight.double(), momentum.double(), grad.double())
    result, new_momentum = row_step(weight, momentum, grad)
    assert result.dtype == weight_dtype and new_momentum.dtype == momentum_dtype
    # The step is 0.3 % of the weight; what is between is done in fp32 at least, the rest as it is stored.
    step_eps = max(torch.finfo(dtype).eps for dtype in (momentum_dtype, grad_dtype, torch.float64))
    assert relative_error(result, exact) < max(torch.finfo(weight_dtype).eps, 0.01 * step_eps)


@pytest.mark.parametrize("dtype", DTYPES)
def test_N2_zero_rows_stay(dtype, small_blocks) -> None:
    weight, grad = gaussian(13, 10, dtype=dtype), gaussian(13, 10, dtype=dtype, seed=1)
    grad[[0, 5, 12]] = 0
    result, momentum = row_step(weight, torch.zeros_like(grad), grad, weight_decay=0.0)
    assert torch.equal(result[[0, 5, 12]], weight[[0, 5, 12]])
    assert result.isfinite().all() and not torch.equal(result, weight)
    result, _ = row_step(weight, momentum, torch.zeros_like(grad), weight_decay=0.0)
    assert torch.equal(result[[0, 5, 12]], weight[[0, 5, 12]])
    zeros = torch.zeros_like(weight)
    assert torch.equal(row_step(zeros, zeros, zeros)[0], zeros)


@pytest.mark.parametrize("shape", [(0, 8), (8, 0), (0, 0)])
def test_S3_no_rows_is_a_no_op(shape) -> None:
    nothing = torch.zeros(shape)
    assert row_step(nothing, nothing, nothing)[0].shape == shape
    assert torch.equal(split_row_sums_(nothing, nothing, beta=0.9, nesterov=True), torch.zeros(shape[0]))
    sums = torch.zeros(shape[0])
    apply_split_row_step_(nothing, nothing, nothing, sums, scale=1.0, **STEP)
    apply_direction_(nothing, nothing, lr=0.1, weight_decay=0.1, scale=1.0)


@pytest.mark.parametrize("scale", [1e-9, 1e-10, 1e-15, 1e15])
def test_N1_row_step_is_scale_invariant(scale: float) -> None:
    weight, grad = gaussian(16, 64, dtype=torch.float32), gaussian(16, 64, dtype=torch.float32, seed=1)
    grad = grad / grad.norm()
    expected, _ = row_step(weight, torch.zeros_like(grad), grad, weight_decay=0.0)
    result, _ = row_step(weight, torch.zeros_like(grad), grad * scale, weight_decay=0.0)
    assert relative_error(result - weight, expected - weight) < 2e-5


def test_rows_too_small_to_square_fade_instead_of_exploding() -> None:
    weight = torch.zeros(1, 64)
    steps = []
    for exponent in range(-140, -30, 10):
        grad = torch.full((1, 64), 2.0**exponent)
        result, _ = row_step(weight, grad, grad, lr=1.0, weight_decay=0.0)
        steps.append(float(result.norm()))
    assert steps == sorted(steps) and max(steps) <= 1.0001 and steps[-1] == pytest.approx(1.0)


@settings(max_examples=40)
@given(exponent=st.integers(-50, 40), num_rows=st.integers(1, 9), num_cols=st.integers(1, 9), seed=st.integers(0, 99))
def test_powers_of_two_change_no_bit(exponent: int, num_rows: int, num_cols: int, seed: int) -> None:
    weight, grad = gaussian(num_rows, num_cols, dtype=torch.float32), gaussian(num_rows, num_cols, seed=seed).float()
    momentum = gaussian(num_rows, num_cols, seed=seed + 1).float()
    factor = 2.0**exponent
    result, new_momentum = row_step(weight, momentum, grad)
    scaled, scaled_momentum = row_step(weight, momentum * factor, grad * factor)
    assert torch.equal(scaled, result)
    assert torch.equal(scaled_momentum, new_momentum * factor)


@settings(max_examples=40)
@given(num_rows=st.integers(1, 30), num_cols=st.integers(1, 30), seed=st.integers(0, 99), block=st.integers(1, 400))
def test_rows_are_equal_under_permutation_and_in_any_blocks(num_rows, num_cols, seed, block) -> None:
    weight, momentum, grad = (gaussian(num_rows, num_cols, seed=seed + i).float() for i in range(3))
    order = torch.randperm(num_rows, generator=torch.Generator().manual_seed(seed))
    result, new_momentum = row_step(weight, momentum, grad)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(update, "_CPU_BLOCK", block)
        permuted, permuted_momentum = row_step(weight[order], momentum[order], grad[order])
    assert_same(permuted, result[order])
    assert_same(permuted_momentum, new_momentum[order])


@settings(max_examples=20)
@given(chunks=st.integers(1, 5), size=st.integers(1, 6), num_cols=st.integers(1, 9), seed=st.integers(0, 99))
def test_chunks_are_separate_matrices(chunks: int, size: int, num_cols: int, seed: int) -> None:
    """One call with the scale of a chunk, or each chunk as a matrix of its own; and several matrices in one call."""
    weight, momentum, grad = (gaussian(chunks * size, num_cols, seed=seed + i).float() for i in range(3))
    scale = row_step_scale(size, num_cols, "match_rms_adamw")
    together, _ = row_step(weight, momentum, grad, scale)
    separate, moved = weight.clone(), momentum.clone()
    row_step_(separate.split(size), moved.split(size), grad.split(size), scales=[scale] * chunks, **STEP)
    assert_same(together, separate)


@settings(max_examples=30)
@given(
    cuts=st.lists(st.integers(0, 20), max_size=4), nesterov=st.booleans(), maximize=st.booleans(),
    dtype=st.sampled_from(DTYPES), seed=st.integers(0, 99), block=st.integers(1, 300),
)  # fmt: skip
def test_S13_split_rows_are_whole_rows(cuts, nesterov, maximize, dtype, seed, block) -> None:
    """Columns cut anywhere, empty parts too: the sums of the parts give the unsplit step."""
    weight, momentum, grad = (gaussian(8, 20, seed=seed + i).to(dtype) for i in range(3))
    grad[3], momentum[3] = 0, 0
    same = {"nesterov": nesterov, "maximize": maximize}
    expected, expected_momentum = row_step(weight, momentum, grad, 0.7, **same)
    bounds = [0, *sorted(cuts), 20]
    sizes = [end - start for start, end in zip(bounds, bounds[1:], strict=False)]
    parts = [tuple(x.split(sizes, dim=1)) for x in (weight, momentum, grad)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(update, "_CPU_BLOCK", block)
        sums = [split_row_sums_(m, g, beta=0.9, **same) for m, g in zip(parts[1], parts[2], strict=True)]
        assert {part.dtype for part in sums} == {torch.float64 if dtype == torch.float64 else torch.float32}
        total = torch.stack(sums).sum(0)
        for w, m, g in zip(*parts, strict=True):
            apply_split_row_step_(w, m, g, total, scale=0.7, **{**STEP, **same})
    assert torch.equal(momentum, expected_momentum)
    # A sum in another order; a bf16 weight may then round the other way.
    tolerance = {torch.float64: 1e-14, torch.float32: 2e-6, torch.bfloat16: 2**-8}[dtype]
    torch.testing.assert_close(weight, expected, rtol=tolerance, atol=tolerance * 1e-2)


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("maximize", [False, True])
def test_gradients_are_never_altered(nesterov, maximize) -> None:
    weight, momentum, grad = gaussian(13, 10), gaussian(13, 10, seed=1), gaussian(13, 10, seed=2)
    before = grad.clone()
    same = {"nesterov": nesterov, "maximize": maximize}
    row_step_([weight], [momentum], [grad], **{**STEP, "scales": [1.0], **same})
    split_row_sums_(momentum, grad, beta=0.9, **same)
    kept, sums = momentum.clone(), torch.ones(13, dtype=torch.float64)
    apply_split_row_step_(weight, momentum, grad, sums, scale=1.0, **{**STEP, **same})
    assert torch.equal(momentum, kept) and torch.equal(sums, torch.ones(13, dtype=torch.float64))
    apply_direction_(weight, momentum, lr=0.1, weight_decay=0.1, scale=1.0)
    assert torch.equal(momentum, kept) and torch.equal(grad, before)
