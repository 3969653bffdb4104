"""The arithmetic of one step on plain local tensors, against float64 and against torch's own operations."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch.optim._muon import _adjust_lr

from reference import step as reference
from rowmuon import update
from rowmuon.orthogonalize import COEFFICIENTS, newton_schulz
from rowmuon.update import (
    apply_direction_,
    convert_lr,
    momentum_direction_,
    row_step_scale,
    spectral_scale,
    update_momentum_,
    write_direction,
)
from update_cases import DTYPES, NoHostRead, assert_same, gaussian, relative_error, row_step

CONVENTIONS = [None, "original", "match_rms_adamw"]


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of 64 elements, so that small matrices take several, and rows longer than a block take one each."""
    monkeypatch.setattr(update, "_CPU_BLOCK", 64)


# Scales


@pytest.mark.parametrize("convention", CONVENTIONS)
@pytest.mark.parametrize("shape", [(64, 64), (64, 16), (16, 64), (1, 9), (9, 1), (6912, 1152)])
def test_spectral_scale_is_torchs(shape, convention) -> None:
    assert spectral_scale(*shape, convention) == pytest.approx(
        _adjust_lr(1.0, convention, torch.Size(shape)), rel=1e-15
    )


def test_row_step_scale() -> None:
    """0.2 sqrt(n), and 1: the factor that torch puts on tall matrices is what their row steps would overshoot by."""
    for num_rows, num_cols in [(64, 16), (16, 64), (32, 32), (1, 8)]:
        assert row_step_scale(num_rows, num_cols, "match_rms_adamw") == pytest.approx(0.2 * math.sqrt(num_cols))
        assert row_step_scale(num_rows, num_cols, "original") == pytest.approx(1.0)
        assert row_step_scale(num_rows, num_cols, None) == row_step_scale(num_rows, num_cols, "original")


@pytest.mark.parametrize("convention", CONVENTIONS)
@pytest.mark.parametrize("shape", [(64, 16), (16, 64), (96, 16), (128, 512)])
def test_N4_both_kinds_of_step_have_the_same_rms(shape, convention) -> None:
    direction = gaussian(*shape)
    refresh = spectral_scale(*shape, convention) * newton_schulz(direction, "keller_jordan", dtype=torch.float64)
    row = row_step_scale(*shape, convention) * torch.from_numpy(reference.normalize_rows(direction.numpy()))
    # Five of Keller Jordan's quintics leave singular values of 0.68 to 1.13, their RMS between 0.8 and 1.05.
    assert 0.8 <= refresh.square().mean().sqrt() / row.square().mean().sqrt() <= 1.05
    exact = spectral_scale(*shape, convention) * torch.from_numpy(reference.polar_factor(direction.numpy()))
    assert float(exact.norm()) == pytest.approx(float(row.norm()), rel=1e-12)


@pytest.mark.parametrize("shape", [(64, 16), (16, 64), (40, 40)])
@pytest.mark.parametrize("source", CONVENTIONS)
@pytest.mark.parametrize("target", CONVENTIONS)
def test_convert_lr_gives_the_same_update(shape, source, target) -> None:
    converted = convert_lr(0.03, *shape, source, target)
    weight, direction = gaussian(*shape), gaussian(*shape, seed=1)
    other = weight.clone()
    apply_direction_(weight, direction, lr=0.03, weight_decay=0.0, scale=spectral_scale(*shape, source))
    apply_direction_(other, direction, lr=converted, weight_decay=0.0, scale=spectral_scale(*shape, target))
    torch.testing.assert_close(weight, other, rtol=1e-13, atol=1e-15)
    assert convert_lr(converted, *shape, target, source) == pytest.approx(0.03, rel=1e-14)


@pytest.mark.parametrize("lr", [float("nan"), float("inf"), -0.1])
def test_convert_lr_refuses_what_is_no_learning_rate(lr: float) -> None:
    with pytest.raises(ValueError, match="isn't a finite number >= 0"):
        convert_lr(lr, 4, 4, "original", "match_rms_adamw")


def test_bad_scales() -> None:
    with pytest.raises(ValueError, match="adjust_lr_fn='match_rms'"):
        spectral_scale(4, 4, "match_rms")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="0 x 4"):
        row_step_scale(0, 4, None)


# Momentum and direction


@pytest.mark.parametrize("maximize", [False, True])
@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_momentum_and_direction(dtype, nesterov, maximize, small_blocks) -> None:
    momentum, grad = gaussian(13, 10, dtype=dtype), gaussian(13, 10, dtype=dtype, seed=1)
    before = grad.clone()
    sign = -1 if maximize else 1
    expected = momentum.clone().lerp_(sign * grad, 0.1)
    direction = momentum_direction_(momentum, grad, beta=0.9, nesterov=nesterov, maximize=maximize)
    assert torch.equal(grad, before)
    assert_same(momentum, expected)
    assert_same(direction, (sign * grad).lerp(momentum, 0.9) if nesterov else momentum)
    # Without Nesterov there is nothing to compute and nothing is copied; with it, never the same memory.
    assert (direction is momentum) == (not nesterov)


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("out_dtype", DTYPES)
@pytest.mark.parametrize("grad_dtype", DTYPES)
@pytest.mark.parametrize("momentum_dtype", DTYPES)
def test_direction_in_any_mix_of_dtypes(momentum_dtype, grad_dtype, out_dtype, nesterov, small_blocks) -> None:
    momentum, grad = gaussian(13, 10, dtype=momentum_dtype), gaussian(13, 10, dtype=grad_dtype, seed=1)
    exact_momentum = momentum.double().lerp(grad.double(), 0.1)
    out = torch.empty(13, 10, dtype=out_dtype)
    assert momentum_direction_(momentum, grad, beta=0.9, nesterov=nesterov, out=out) is out
    exact = grad.double().lerp(exact_momentum, 0.9) if nesterov else exact_momentum
    eps = max(torch.finfo(dtype).eps for dtype in (momentum_dtype, grad_dtype, out_dtype))
    assert relative_error(momentum, exact_momentum) < torch.finfo(momentum_dtype).eps
    assert relative_error(out, exact) < 1.5 * eps


@pytest.mark.parametrize("nesterov", [False, True])
def test_direction_in_two_halves(nesterov, small_blocks) -> None:
    """Parts may be asked for once the momentum is there: rows, columns, another dtype."""
    momentum, grad = gaussian(13, 10), gaussian(13, 10, seed=1)
    whole_momentum = momentum.clone()
    whole = momentum_direction_(whole_momentum, grad, beta=0.9, nesterov=nesterov, maximize=True)
    update_momentum_(momentum, grad, beta=0.9, maximize=True)
    assert torch.equal(momentum, whole_momentum)
    for part in ((slice(3, 9), slice(None)), (slice(None), slice(2, 7))):
        out = torch.empty_like(momentum[part])
        write_direction(momentum[part], grad[part], out, beta=0.9, nesterov=nesterov, maximize=True, taken=True)
        assert torch.equal(out, whole[part])


@pytest.mark.parametrize("dtypes", list(itertools.product(DTYPES, repeat=3)))
@pytest.mark.parametrize("nesterov", [False, True])
def test_direction_ahead_of_the_momentum(nesterov, dtypes, small_blocks) -> None:
    """The same bits as once the momentum has taken the gradient, which it hasn't after it either."""
    momentum, grad = gaussian(13, 10, dtype=dtypes[0]), gaussian(13, 10, dtype=dtypes[1], seed=1)
    for part in ((slice(3, 9), slice(None)), (slice(None), slice(2, 7))):
        for maximize in (False, True):
            here, ahead, after = momentum.clone(), *(torch.empty(13, 10, dtype=dtypes[2])[part] for _ in range(2))
            settings = {"beta": 0.9, "nesterov": nesterov, "maximize": maximize}
            write_direction(here[part], grad[part], ahead, **settings, taken=False)
            assert torch.equal(here, momentum)
            update_momentum_(here, grad, beta=0.9, maximize=maximize)
            write_direction(here[part], grad[part], after, **settings, taken=True)
            assert torch.equal(ahead, after)


def test_direction_without_elements() -> None:
    for shape in [(0, 5), (5, 0)]:
        assert momentum_direction_(torch.zeros(shape), torch.zeros(shape), beta=0.9, nesterov=True).shape == shape


# lr


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("lr", [0.0, 1e-3, 0.05])
def test_lr_may_be_a_tensor_and_is_never_read(lr, dtype, weight_decay, small_blocks) -> None:
    weight, momentum, grad = (gaussian(13, 10, seed=seed).to(dtype) for seed in range(3))
    lr_dtype = torch.float64 if dtype == torch.float64 else torch.float32
    same = {"weight_decay": weight_decay}
    # In bf16 a last place of an entry may go the other way.
    tolerance = {torch.float64: 1e-14, torch.float32: 1e-6, torch.bfloat16: 2**-8}[dtype]
    for tensor in (torch.tensor(lr, dtype=lr_dtype), torch.tensor([lr], dtype=lr_dtype)):
        expected, _ = row_step(weight, momentum, grad, 0.7, lr=lr, **same)
        with NoHostRead():
            result, _ = row_step(weight, momentum, grad, 0.7, lr=tensor, **same)
        torch.testing.assert_close(result, expected, rtol=tolerance, atol=tolerance * 1e-2)
        expected, result = weight.clone(), weight.clone()
        apply_direction_(expected, grad, lr=lr, scale=0.7, **same)
        with NoHostRead():
            apply_direction_(result, grad, lr=tensor, scale=0.7, **same)
        torch.testing.assert_close(result, expected, rtol=tolerance, atol=tolerance * 1e-2)
    if lr == 0.0:
        assert torch.equal(result, weight)


# Applying an orthogonalised direction


@pytest.mark.parametrize("dtype", DTYPES)
def test_apply_direction_is_torchs_arithmetic(dtype) -> None:
    weight, direction = gaussian(13, 10, dtype=dtype), gaussian(13, 10, dtype=torch.bfloat16, seed=1)
    expected = weight.clone()
    expected.mul_(1 - 0.02 * 0.1).add_(direction, alpha=-0.02 * 0.7)
    apply_direction_(weight, direction, lr=0.02, weight_decay=0.1, scale=0.7)
    assert torch.equal(weight, expected)


# bf16 without Nesterov is left out: there torch 2.13 overwrites its momentum with the normalised one.
@pytest.mark.parametrize(("dtype", "nesterov"), [(torch.float32, True), (torch.float32, False), (torch.bfloat16, True)])
@pytest.mark.parametrize("convention", [None, "match_rms_adamw"])
@pytest.mark.parametrize("shape", [(24, 80), (80, 24), (48, 48), (1, 40), (40, 1), (128, 384), (512, 136)])
def test_twenty_refreshes_are_torch_muon(shape, convention, dtype, nesterov) -> None:
    """Both normalise and round to bf16 in another order, and five quintics don't contract: 0.03 and 0.15."""
    weight = gaussian(*shape, dtype=dtype)
    start, momentum = weight.clone(), torch.zeros_like(weight)
    parameter = torch.nn.Parameter(weight.clone())
    muon = torch.optim.Muon([parameter], lr=0.02, nesterov=nesterov, adjust_lr_fn=convention)
    scale = spectral_scale(*shape, convention)
    for seed in range(20):
        grad = gaussian(*shape, dtype=dtype, seed=seed + 1)
        parameter.grad = grad.clone()
        muon.step()
        direction = momentum_direction_(momentum, grad, beta=0.95, nesterov=nesterov)
        update_ = newton_schulz(direction, COEFFICIENTS["keller_jordan"])
        apply_direction_(weight, update_, lr=0.02, weight_decay=0.1, scale=scale)
    theirs = parameter.detach().double() - start.double()
    assert relative_error(weight.double() - start.double(), theirs) < (0.03 if dtype == torch.float32 else 0.15)
