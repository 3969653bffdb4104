"""The Gram row step's arithmetic on plain local tensors, against float64 by its definition."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from rowmuon import gram, update
from rowmuon.gram import GramShape
from rowmuon.packing import pack_, packed_columns, unpack_
from update_cases import STEP, NoHostRead, gaussian, relative_error

FP32, FP64, BF16 = torch.float32, torch.float64, torch.bfloat16


def spectrum(kind: str, size: int) -> Tensor:
    """A positive semidefinite matrix of trace 1, float64."""
    basis, _ = torch.linalg.qr(gaussian(size, size, seed=1))
    if kind == "gaussian":
        X = gaussian(4 * size, size)
        G = X.T @ X
    elif kind == "few":
        X = gaussian(3, size)
        G = X.T @ X
    else:
        values = {
            "decaying": torch.logspace(0, -9, size, dtype=FP64),
            "flat": torch.ones(size, dtype=FP64),
            "crowded": torch.cat([torch.ones(1, dtype=FP64), torch.full((size - 1,), 0.93, dtype=FP64)]),
        }[kind]
        G = (basis * values) @ basis.T
    return G / G.trace()


def factor(E: Tensor, damping: float, largest: float) -> Tensor:
    """By its definition."""
    values, vectors = torch.linalg.eigh(E.double())
    return (vectors * (values.clamp(min=0) / largest + damping).rsqrt()) @ vectors.T


def distance(found: Tensor, exact: Tensor) -> float:
    """In the spectral norm, relative."""
    return float(torch.linalg.matrix_norm(found.double() - exact, 2) / torch.linalg.matrix_norm(exact, 2))


KINDS = ["gaussian", "few", "decaying", "flat", "crowded"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("damping", [1.0, 1e-2, 1e-3, 1e-4, 1e-5])
def test_the_factor_is_the_damped_inverse_root(kind: str, damping: float) -> None:
    for size in (1, 2, 40, 100):
        E = spectrum(kind, size)
        for dtype, allowed in ((FP32, 1e-7 / damping + 1e-5), (FP64, 1e-9)):
            given = E.to(dtype).unsqueeze(0)
            estimate = float(gram._largest_eigenvalue(given))
            found = gram.factorize_(given.clone(), damping)[0]
            assert found.dtype == dtype
            assert distance(found, factor(E, damping, estimate)) < allowed, (size, dtype)


@pytest.mark.parametrize("kind", KINDS)
def test_a_rougher_factor_is_as_exact_as_asked(kind: str) -> None:
    E = spectrum(kind, 60).float().unsqueeze(0)
    exact = factor(E[0], 1e-3, float(gram._largest_eigenvalue(E)))
    for tolerance in (2**-7, 1e-3):
        assert distance(gram.factorize_(E.clone(), 1e-3, tolerance)[0], exact) < 2.1 * tolerance
    assert len(gram._cubics(1e-3, 2**-7)) == 5 and len(gram._cubics(1e-3, 1.2e-7)) == 7


@pytest.mark.parametrize("kind", KINDS)
def test_the_largest_eigenvalue_is_met_from_below(kind: str) -> None:
    for size in (1, 2, 40, 200):
        E = spectrum(kind, size)
        found = float(gram._largest_eigenvalue(E.float().unsqueeze(0))) / float(torch.linalg.eigvalsh(E)[-1])
        least = {"crowded": 0.93, "gaussian": 0.98}.get(kind, 0.998)
        assert least < found < 1 + 1e-5, size


def test_a_matrix_of_two_parts_that_know_nothing_of_each_other() -> None:
    """The start of the power iteration must not miss the one that has the largest eigenvalue."""
    for size in (2, 30, 200):
        for place in range(0, size, max(1, size // 7)):
            E = torch.eye(size) * 0.5
            E[place, place] = 1.0
            assert float(gram._largest_eigenvalue((E / E.trace()).unsqueeze(0)) * E.trace()) == pytest.approx(1, 1e-3)


def test_blocks_stand_for_themselves_and_zeros_give_the_identity() -> None:
    one, other = spectrum("few", 30).float(), spectrum("decaying", 30).float()
    found = gram.factorize_(torch.stack([one, torch.zeros(30, 30), other]), 1e-3)
    torch.testing.assert_close(found[1], torch.eye(30), rtol=0, atol=1e-6)
    for i, alone in ((0, one), (2, other)):
        assert distance(found[i], gram.factorize_(alone.clone().unsqueeze(0), 1e-3)[0].double()) < 1e-4


def test_many_blocks_are_worked_on_a_few_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    stack = torch.stack([spectrum(kind, 20) for kind in KINDS])
    whole = gram.factorize_(stack.clone(), 1e-3)
    monkeypatch.setattr(gram, "AT_ONCE", 2 * 20 * 20)
    torch.testing.assert_close(gram.factorize_(stack, 1e-3), whole, rtol=0, atol=1e-9)


# -------------------------------------------------------------------------------------------------------- G and E
def direction(momentum: Tensor, grad: Tensor, beta: float, nesterov: bool) -> Tensor:
    return ((1 - beta) * grad + beta * momentum).double() if nesterov else momentum.double()


def summed(
    momentum: Tensor, grad: Tensor | None, num_blocks: int, dtype: torch.dtype = FP32, **settings: Any
) -> Tensor:
    block = momentum.shape[1] // num_blocks
    total = torch.zeros(num_blocks, block, block, dtype=dtype)
    largest = gram.largest_entry(momentum, grad, nesterov=settings["nesterov"], dtype=dtype)
    gram.add_gram_(total, momentum, grad, largest, **settings)
    return total


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("num_blocks", [1, 3])
@pytest.mark.parametrize("scale", [1e-36, 1e-30, 1.0, 1e30])
def test_g_is_that_of_the_direction_at_any_scale(
    monkeypatch: pytest.MonkeyPatch, nesterov: bool, num_blocks: int, scale: float
) -> None:
    monkeypatch.setattr(update, "_CPU_BLOCK", 70)  # several blocks of rows
    momentum, grad = (gaussian(20, 12, seed=seed) * scale for seed in (0, 1))
    momentum, grad = momentum.float(), grad.float()
    U = direction(momentum, grad, 0.9, nesterov)
    U = U / U.abs().max()
    total = summed(momentum, grad, num_blocks, beta=0.9, nesterov=nesterov)
    ema = torch.zeros_like(packed(total))
    take(ema, total, 0.8)
    for found, part in zip(unpacked(ema, num_blocks), U.chunk(num_blocks, dim=1), strict=True):
        G = part.T @ part
        assert relative_error(found, G / G.trace()) < 1e-6


def test_a_maximised_gradient_and_a_missing_one() -> None:
    momentum, grad = gaussian(9, 6, dtype=FP32), gaussian(9, 6, dtype=FP32, seed=1)
    settings = {"beta": 0.9, "nesterov": True}
    down = summed(momentum, -grad, 1, **settings)
    assert torch.equal(summed(momentum, grad, 1, maximize=True, **settings), down)
    assert torch.equal(summed(momentum, None, 1, **settings), summed(momentum, None, 1, beta=0.9, nesterov=False))


def packed(matrices: Tensor) -> Tensor:
    """(num, b, b) -> (num b, columns)."""
    num, size, _ = matrices.shape
    out = matrices.new_empty(num, size, packed_columns(size))
    pack_(matrices.contiguous(), out)
    return out.flatten(0, 1)


def unpacked(rows: Tensor, num_blocks: int) -> Tensor:
    rows = rows.view(num_blocks, -1, rows.shape[1])
    out = rows.new_empty(num_blocks, rows.shape[1], rows.shape[1])
    unpack_(rows, out, 1 << 20)
    return out


def take(ema: Tensor, total: Tensor, decay: float, held: slice = slice(None)) -> None:
    """Into rows of a packed mean, as a rank does that holds them."""
    traces = total.diagonal(dim1=-2, dim2=-1).sum(-1).repeat_interleave(total.shape[-1])
    gram.update_gram_(ema[held], packed(total)[held], traces[held], decay=decay)


def test_e_is_a_mean_that_starts_with_the_first_g() -> None:
    """Row by row: two ranks that hold some rows each make what one makes."""
    grams = [spectrum(kind, 9).unsqueeze(0) for kind in ("gaussian", "few", "decaying")]
    ema, whole = (torch.zeros(9, packed_columns(9), dtype=FP64) for _ in range(2))
    take(ema, 7.0 * grams[0], 0.75)
    torch.testing.assert_close(unpacked(ema, 1), grams[0])
    take(ema, grams[1], 0.75)
    take(ema, 1e-30 * grams[2], 0.75)
    expected = 0.75 * (0.75 * grams[0] + 0.25 * grams[1]) + 0.25 * grams[2]
    torch.testing.assert_close(unpacked(ema, 1), expected)
    for total in (7.0 * grams[0], grams[1], 1e-30 * grams[2]):
        for held in (slice(0, 5), slice(5, 5), slice(5, 9)):
            take(whole, total, 0.75, held)
    assert torch.equal(whole, ema)


def test_a_column_of_zeros_does_not_begin_anew() -> None:
    """An input that was zero so far: its rows of E are zero, but they aren't the first ones."""
    first, second = torch.zeros(1, 4, 4, dtype=FP64), torch.eye(4, dtype=FP64)[None] / 4
    first[0, 0, 0] = 1.0
    ema = torch.zeros(4, packed_columns(4), dtype=FP64)
    take(ema, first, 0.75)
    take(ema, second, 0.75)
    torch.testing.assert_close(unpacked(ema, 1), 0.75 * first + 0.25 * second, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("bad", [0.0, float("nan"), float("inf")])
def test_e_stays_where_there_is_no_g(bad: float) -> None:
    """Of one block alone: the other takes its G."""
    first = torch.stack([spectrum("few", 5), spectrum("flat", 5)])
    for before in (torch.zeros_like(first), first):
        ema = packed(before)
        take(ema, torch.stack([torch.full((5, 5), bad), torch.eye(5)]).double(), 0.5)
        after = unpacked(ema, 2)
        assert torch.equal(ema[:5], packed(before)[:5]) and not torch.equal(after[1], before[1]) or before is first
        torch.testing.assert_close(after[1], torch.eye(5, dtype=FP64) / 5)


def test_entries_that_are_not_finite_reach_every_rank_as_infinity() -> None:
    momentum = gaussian(4, 4, dtype=FP32)
    for bad in (float("nan"), float("inf"), -float("inf")):
        momentum[1, 2] = bad
        largest = gram.largest_entry(momentum, momentum, nesterov=True, dtype=FP32)
        assert largest == float("inf")
        total = torch.zeros(1, 4, 4)
        gram.add_gram_(total, momentum, None, largest, beta=0.9, nesterov=False)
        ema = packed(torch.eye(4).unsqueeze(0) / 4)
        take(ema, total, 0.8)
        assert torch.equal(unpacked(ema, 1), torch.eye(4).unsqueeze(0) / 4)


# ----------------------------------------------------------------------------------------------- what sending rounds
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [64, 256])
def test_sums_in_bf16_move_eigenvalues_by_less_than_the_damping(kind: str, size: int) -> None:
    """Every rank's share of a Gram matrix is rounded once, entry by entry, and added up in float32.

    A rounded entry errs by up to 2^-9, but the errors of different entries know nothing of each other: together they
    have a spectral norm of about 1.2 * 2^-9 |G| / sqrt(size) in the Frobenius norm. Where few eigenvalues stand out,
    and the small ones are what the factor must know, that is 1e-4 to 3e-4 of the largest from 512 columns on, where
    the damping is 1e-3. Where none stands out it is up to 2^-9, of eigenvalues that are all much larger.
    """
    E = spectrum(kind, size)
    values, vectors = torch.linalg.eigh(E)
    U = torch.linalg.qr(gaussian(4 * size, size, seed=5))[0] * values.clamp(min=0).sqrt() @ vectors.T  # U^T U = E
    sent = sum((part.T @ part).bfloat16().double() for part in U.chunk(8))
    moved = float(torch.linalg.matrix_norm(sent - E, 2) / values[-1])
    assert 0 < moved < 1.5 * 2**-9 * float(E.norm() / values[-1]) / size**0.5
    changed = distance(factor(sent, 1e-3, float(values[-1])), factor(E, 1e-3, float(values[-1])))
    assert changed < (moved / 1e-3 if kind in ("few", "decaying") else 0.01)


def test_no_rows_and_zeros() -> None:
    for momentum in (torch.zeros(0, 4), torch.zeros(3, 4)):
        total = summed(momentum, momentum, 1, beta=0.9, nesterov=True)
        assert not total.any() and bool(total.isfinite().all())


# --------------------------------------------------------------------------------------------------------- the step
@pytest.mark.parametrize("dtype", [FP32, BF16, FP64])
@pytest.mark.parametrize("num_blocks", [1, 2])
@pytest.mark.parametrize("nesterov", [False, True])
def test_the_step(monkeypatch: pytest.MonkeyPatch, dtype: Any, num_blocks: int, nesterov: bool) -> None:
    monkeypatch.setattr(update, "_CPU_BLOCK", 70)
    weight, momentum, grad = (gaussian(11, 20, seed=seed).to(dtype) for seed in range(3))
    momentum[3], grad[3] = 0, 0  # a row of zeros takes no step but the decay
    block = 20 // num_blocks
    Q = torch.stack([factor(spectrum("few", block), 1e-2, 0.5) for _ in range(num_blocks)])
    Q = Q.to(BF16 if dtype == BF16 else dtype)
    w, m = weight.clone(), momentum.clone()
    hyper = {**STEP, "nesterov": nesterov}
    gram.gram_row_step_([w], [m], [grad], [Q], scales=[0.7], **hyper)

    M = 0.9 * momentum.double() + 0.1 * grad.double()
    U = direction(M, grad.double(), 0.9, nesterov)
    D = torch.cat([part @ q.double() for part, q in zip(U.chunk(num_blocks, 1), Q, strict=True)], 1)
    D = torch.nn.functional.normalize(D, dim=1, eps=1e-300)
    expected = weight.double() * (1 - 0.02 * 0.1) - 0.02 * 0.7 * D
    # of bf16 the products' rounding is seen in D, and the weight's own
    allowed = {FP32: 1e-6, BF16: 2**-7, FP64: 1e-12}[dtype]
    torch.testing.assert_close(m.double(), M, rtol=allowed, atol=allowed)
    torch.testing.assert_close(w.double(), expected, rtol=allowed, atol=allowed * 0.02)


@pytest.mark.parametrize("maximize", [False, True])
def test_with_the_identity_it_is_the_row_step(maximize: bool) -> None:
    tensors = [
        (gaussian(7, 10, dtype=FP32, seed=i), gaussian(7, 10, dtype=FP32, seed=9), gaussian(7, 10, dtype=FP32))
        for i in range(2)
    ]
    found, expected = ([(w.clone(), m.clone(), g) for w, m, g in tensors] for _ in range(2))
    hyper = {**STEP, "scales": [0.5, 2.0], "maximize": maximize}
    gram.gram_row_step_(*zip(*found, strict=True), [torch.eye(5).repeat(2, 1, 1)] * 2, **hyper)
    update.row_step_(*zip(*expected, strict=True), **hyper)
    for (w, m, _), (v, n, _) in zip(found, expected, strict=True):
        assert torch.equal(m, n)
        torch.testing.assert_close(w, v, rtol=1e-6, atol=1e-7)


def test_lr_may_be_a_tensor_and_nothing_is_read_by_the_host() -> None:
    weight, momentum, grad = (gaussian(6, 8, dtype=FP32, seed=seed) for seed in range(3))
    w, v, Q = weight.clone(), weight.clone(), torch.eye(8).unsqueeze(0)
    gram.gram_row_step_([w], [momentum.clone()], [grad], [Q], scales=[1.0], **STEP)
    with NoHostRead():
        hyper = {**STEP, "lr": torch.tensor(STEP["lr"])}
        gram.gram_row_step_([v], [momentum], [grad], [Q], scales=[1.0], **hyper)
        total = summed(momentum, grad, 2, beta=0.9, nesterov=True)
        ema = torch.zeros_like(packed(total))
        take(ema, total, 0.8)
        gram.factorize_(unpacked(ema, 2), 1e-3)
    torch.testing.assert_close(v, w)


# ------------------------------------------------------------------------------------------------------- what it costs
@pytest.mark.parametrize("dtype", [BF16, FP64])
@pytest.mark.parametrize(("num_rows", "num_blocks", "block"), [(13, 1, 12), (8, 3, 8), (0, 1, 4), (5, 1, 1)])
def test_flops_are_counted_exactly(num_rows: int, num_blocks: int, block: int, dtype: torch.dtype) -> None:
    shape = GramShape(num_blocks, block, dtype, 1e-3)
    assert shape.dtype == (FP64 if dtype == FP64 else FP32)
    momentum = torch.ones(num_rows, num_blocks * block)
    Q = torch.ones(shape.size, dtype=dtype)
    with FlopCounterMode(display=False) as counter:
        summed(momentum, momentum, num_blocks, shape.dtype, beta=0.9, nesterov=True)
    assert counter.get_total_flops() == shape.product_flops(num_rows)
    with FlopCounterMode(display=False) as counter:
        gram.gram_row_step_([momentum.clone()], [momentum.clone()], [momentum], [Q], scales=[1.0], **STEP)
    assert counter.get_total_flops() == shape.product_flops(num_rows)
    with FlopCounterMode(display=False) as counter:
        gram.factorize_(torch.ones(shape.size, dtype=shape.dtype), shape.damping, torch.finfo(dtype).eps)
    assert counter.get_total_flops() == num_blocks * shape.block_flops
    assert shape.packed_size == (num_blocks * block, packed_columns(block))
    kept = num_blocks * block**2 * dtype.itemsize + 3 * packed_columns(block) * shape.dtype.itemsize
    assert shape.state_bytes(3) == kept
