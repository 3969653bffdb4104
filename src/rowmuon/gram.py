"""The Gram row step: a cheap step between refreshes that balances directions as well as rows. Pure, on local tensors.

A refresh would step along U (U^T U)^(-1/2), the polar factor of U. The row step puts a diagonal in the place of
U U^T on the other side; the Gram row step puts what the last refreshes knew of U^T U in its own place, damped:

    at a refresh    G  = U^T U / tr(U^T U)                     n x n: the side of the input features
                    E <- decay E + (1 - decay) G               the first G is taken as it is
                    Q  = (E / lambda_max(E) + damping I)^(-1/2)
    at a step       D  = U Q,   W_i <- (1 - lr weight_decay) W_i - lr scale D_i / ||D_i||

U is what the refresh orthogonalises: momentum or Nesterov mix. With Q = I this is the row step, and like there rows
stay whole, so a rank that holds whole rows needs no other. Of a wide matrix E and Q may be block-diagonal: each of
``num_blocks`` equal blocks of columns has a G, E and Q of its own, all scaled by themselves. Of E, which is symmetric,
half is kept (`rowmuon.packing`), and of that a rank may hold any rows: they are averaged one by one.

Q comes from products alone. With X_0 = A = E / lambda_max + damping I, odd cubics p(s) = a s + b s^3 of the square
roots s of its eigenvalues, X_{k+1} = P_k X_k P_k with P_k = a_k I + b_k X_k, take all of them to 1, and Q is the
product of the P_k. Each cubic is the best one for the interval that the last has left: at a damping of 1e-3 five of
them come within 1.5 %, which does for a factor in bf16, and seven within fp32's precision. Source of these: J. Chen,
E. Chow, "A stable scaling of Newton-Schulz for improving the sign function computation of a Hermitian matrix",
ANL/MCS-P5059-0114, 2014. The step itself is ours; whitening one side of the gradient by an averaged Gram matrix is
Shampoo's (arXiv:1802.09568).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from rowmuon import update
from rowmuon.packing import packed_columns

__all__ = [
    "AT_ONCE",
    "LEAST_DAMPING",
    "GramShape",
    "GramState",
    "add_gram_",
    "add_gram_bytes",
    "factorize_",
    "factorize_bytes",
    "gram_row_step_",
    "gram_row_step_bytes",
    "largest_entry",
    "update_gram_",
]

LEAST_DAMPING = 1e-5
"""In fp32 Q errs by up to 1e-7 / damping of its norm (see `factorize_`): below this it means little."""

_NUM_POWERS = 32
_NUM_STARTS = 4
# The estimate of lambda_max lies below it, by a few percent where many eigenvalues lie just under it: for an eigenvalue
# above this, relative to the estimate, the first cubic would change sign.
_ROOM = 1.3


_STARTED = 1e-30  # least diagonal entry of E once there is a mean

AT_ONCE = 1 << 22
"""Elements of E that Q is computed of at a time, or one block: this bounds what is temporary, and keeps a device busy.
"""
_PER_MATRIX_BYTES = 64  # traces, masks, largest entries, at most


@dataclass(frozen=True)
class GramShape:
    """What the Gram row step keeps of one parameter, and what its products cost.

    Args:
        num_blocks, block: E and Q are (num_blocks, block, block); the parameter has num_blocks * block columns.
        factor_dtype: of Q and of D = U Q.
        damping: relative to the largest eigenvalue, >= `LEAST_DAMPING`.
    """

    num_blocks: int
    block: int
    factor_dtype: torch.dtype
    damping: float

    @property
    def dtype(self) -> torch.dtype:
        """Of G, E and the iteration for Q: fp32, or fp64. bf16 would round away more than the damping adds."""
        return torch.promote_types(self.factor_dtype, torch.float32)

    @property
    def size(self) -> tuple[int, int, int]:
        return self.num_blocks, self.block, self.block

    @property
    def numel(self) -> int:
        return self.num_blocks * self.block**2

    @property
    def packed_size(self) -> tuple[int, int]:
        """Of E as it is kept: the rows of one block after those of another."""
        return self.num_blocks * self.block, packed_columns(self.block)

    def state_bytes(self, num_rows: int) -> int:
        """Of Q, and of ``num_rows`` of the rows of E."""
        return self.numel * self.factor_dtype.itemsize + num_rows * self.packed_size[1] * self.dtype.itemsize

    def product_flops(self, num_rows: int) -> int:
        """FLOPs of U^T U at a refresh, and of U Q at a step, two for each multiply-add; of ``num_rows`` rows."""
        return 2 * num_rows * self.numel

    @property
    def block_flops(self) -> int:
        """FLOPs of computing one block of Q, as exact as its dtype is."""
        num_products = 3 * (len(_cubics(self.damping, torch.finfo(self.factor_dtype).eps)) - 1)
        return 2 * self.block**2 * (num_products * self.block + (_NUM_POWERS + 1) * _NUM_STARTS)


@dataclass
class GramState:
    """E and Q of one parameter.

    ema: this rank's rows of E, packed: (rows, columns) of `GramShape.packed_size`.
    factor: (num_blocks, b, b), the same on all ranks that hold a part of the parameter.
    """

    ema: Tensor
    factor: Tensor


@torch.no_grad()
def largest_entry(momentum: Tensor, grad: Tensor | None, *, nesterov: bool, dtype: torch.dtype) -> Tensor:
    """A bound on the entries of U, about the largest: 0-dim of ``dtype``, inf if an entry isn't finite.

    Args:
        momentum: (rows, n), which has taken the gradient in. Without any rows the result is 0.
        grad: (rows, n). None: the momentum stands for U.
    """
    largest = momentum.new_zeros((), dtype=dtype)
    for tensor in (momentum, grad) if nesterov and grad is not None else (momentum,):
        if tensor.numel():
            found = torch.linalg.vector_norm(tensor, ord=math.inf).to(dtype)
            largest = torch.maximum(largest, found)
    return torch.nan_to_num(largest, nan=math.inf, posinf=math.inf)  # a NaN gets lost in a maximum over ranks


@torch.no_grad()
def add_gram_(
    total: Tensor,
    momentum: Tensor,
    grad: Tensor | None,
    largest: Tensor,
    *,
    beta: float,
    nesterov: bool,
    maximize: bool = False,
) -> None:
    """total_j += (U_j / largest)^T (U_j / largest) of each block U_j of columns.

    Args:
        total: (num_blocks, b, b), contiguous, fp32 or fp64; updated.
        momentum: (rows, num_blocks b), which has taken the gradient in.
        grad: (rows, num_blocks b); never altered. None: the momentum stands for U.
        largest: from `largest_entry`, of all rows wherever they are; 0-dim. Else squares might under- or overflow.
        beta: Momentum, [0, 1).
    """
    scratch = update._Scratch()
    largest = torch.where(largest > 0, largest, 1)
    block = total.shape[-1]
    for m, g in update._blocks(momentum, momentum if grad is None else grad):
        u = scratch.take(0, m, total.dtype)
        if grad is None:
            u.copy_(m)
        else:
            update._write_direction(u, m, g.neg() if maximize else g, beta, nesterov)
        u.div_(largest)
        for j, part in enumerate(u.split(block, dim=1)):
            torch.addmm(total[j], part.T, part, out=total[j])


@torch.no_grad()
def update_gram_(ema: Tensor, total: Tensor, traces: Tensor, *, decay: float) -> None:
    """E <- decay E + (1 - decay) total / tr(total), row by row; the first total is taken as it is.

    A total of zeros, or one that isn't finite, leaves E as it was. Nothing is read back to the host.

    Args:
        ema: (rows, columns), of E as it is packed; all zeros where there has been no total yet. Updated.
        total: (rows, columns), the same rows of the sum over all ranks, packed; overwritten.
        traces: (rows,), of the block that a row belongs to, in the dtype of ``ema``.
        decay: [0, 1).
    """
    usable = (traces.isfinite() & (traces > 0))[:, None]
    total.div_(traces[:, None]).masked_fill_(~usable, 0.0)
    diagonal = ema[:, :1]
    weight = torch.where(diagonal > 0, 1 - decay, traces.new_ones(()))
    ema.lerp_(total, weight * usable)
    # A column of zeros mustn't look as if there had been no total yet. Beside a trace of 1 this is nothing.
    diagonal.copy_(torch.where(usable, diagonal.clamp_min(_STARTED), diagonal))


@torch.no_grad()
def factorize_(ema: Tensor, damping: float, tolerance: float = 0.0) -> Tensor:
    """E -> Q = (E / lambda_max(E) + damping I)^(-1/2), each block by itself, in place; the identity where E is zero.

    lambda_max is an estimate from 32 power iterations: exact to a percent on the spectra of momenta, and at most a
    tenth too low where hundreds of eigenvalues crowd below it. ``damping`` is relative to that. Given lambda_max, the
    result in fp32 differs from the exact one by at most 1e-5 + 1e-7 / damping of its spectral norm. Nothing is read
    back to the host.

    Args:
        ema: (num, b, b), symmetric, positive semidefinite, finite, of trace 1 or 0; overwritten and returned.
        damping: >= `LEAST_DAMPING`.
        tolerance: half of a relative error that the result may have beside those above; 0 is the eps of its dtype.
            bf16's saves two of seven cubics.
    """
    with _full_precision(ema):
        for part in ema.split(max(1, AT_ONCE // ema[0].numel())):
            _factorize_(part, _cubics(damping, max(tolerance, torch.finfo(ema.dtype).eps)), damping)
    return ema


def _factorize_(X: Tensor, cubics: Sequence[tuple[float, float]], damping: float) -> None:
    result = X
    largest = _largest_eigenvalue(X)
    known = largest > 0
    X.div_(torch.where(known, largest, 1))
    X.diagonal(dim1=-2, dim2=-1).add_(torch.where(known, damping, largest.new_ones(())).squeeze(-1))
    P, T, Q = (torch.empty_like(X) for _ in range(3))
    for k, (a, b) in enumerate(cubics):
        torch.mul(X, b, out=P)
        P.diagonal(dim1=-2, dim2=-1).add_(a)
        if k + 1 < len(cubics):
            torch.bmm(X, P, out=T)
            torch.bmm(T, P, out=X)
        if k == 0:
            P, Q = Q, P
        else:
            torch.bmm(Q, P, out=T)
            Q, T = T, Q
    result.copy_(Q)


@torch.no_grad()
def gram_row_step_(
    weights: Sequence[Tensor],
    momenta: Sequence[Tensor],
    grads: Sequence[Tensor],
    factors: Sequence[Tensor],
    *,
    lr: float | Tensor,
    weight_decay: float,
    beta: float,
    nesterov: bool,
    scales: Sequence[float],
    eps: float,
    maximize: bool = False,
) -> None:
    """Gram row step of matrices whose rows are whole here: W_i <- (1 - lr weight_decay) W_i - lr scale D_i / ||D_i||.

    Updates ``weights`` and ``momenta``. The product is computed in the dtype of the factor, everything else as in
    `rowmuon.update.row_step_`, whose arguments these are.

    Args:
        factors: For each matrix (rows, n) its Q, (num_blocks, b, b) with num_blocks b = n.
    """
    scratch = update._Scratch()
    for weight, momentum, grad, factor, scale in zip(weights, momenta, grads, factors, scales, strict=True):
        block = factor.shape[-1]
        for w, m, g in update._blocks(weight, momentum, grad):
            g = update._update_momentum_(m, g, beta, maximize)
            u, d = (scratch.take(slot, g, factor.dtype) for slot in (2, 3))
            update._write_direction(u, m, g, beta, nesterov)
            for j, part in enumerate(u.split(block, dim=1)):
                torch.mm(part, factor[j], out=d[:, j * block : (j + 1) * block])
            work = update._work_dtype(w, m, g)
            if d.dtype != work:
                d = scratch.take(0, g, work).copy_(d)
            norms = torch.linalg.vector_norm(d, dim=1, keepdim=True)
            update._apply_rows_(w, d, norms, lr, weight_decay, scale, eps, scratch)


# --------------------------------------------------------------------------------------------------- what they take


def add_gram_bytes(
    num_rows: int, num_cols: int, dtypes: update.Dtypes, dtype: torch.dtype, device_type: str, maximize: bool
) -> int:
    """Most bytes that `add_gram_` has allocated at a time; ``dtypes`` of M and G, ``dtype`` of the total."""
    return _direction_bytes(num_rows, num_cols, dtypes, dtype, [dtype], device_type, maximize)


def gram_row_step_bytes(
    num_rows: int, num_cols: int, dtypes: update.Dtypes, factor: torch.dtype, device_type: str, maximize: bool
) -> int:
    """The same of `gram_row_step_` on one matrix; ``dtypes`` of W and G, of M; ``factor``'s of Q."""
    weight, momentum = dtypes
    work = update._widest(torch.float32, weight, momentum)
    scratch = [factor, factor] + [work] * (factor != work) + [work] * (weight != work)
    # the first block's direction is written before there is any scratch but that for it and its product
    is_alone = num_cols == 0 or num_rows <= update._block_rows(num_cols, device_type)
    there = scratch[:2] if is_alone else scratch
    writing = _direction_bytes(num_rows, num_cols, (momentum, weight), factor, there, device_type, maximize)
    applying = update.block_bytes(num_rows, num_cols, scratch + [weight] * maximize, device_type)
    taking = update.momentum_bytes(num_rows, num_cols, (momentum, weight), device_type, maximize)
    return max(writing, applying, taking) + update.block_bytes(num_rows, 1, [work, work], device_type)


def factorize_bytes(num_matrices: int, block: int, dtype: torch.dtype) -> int:
    """The same of `factorize_` on (num_matrices, block, block)."""
    num = min(num_matrices, max(1, AT_ONCE // block**2))
    vectors = _NUM_STARTS * block * (3 * num * dtype.itemsize + 4 * torch.int64.itemsize)
    return max(3 * num * block**2 * dtype.itemsize, vectors) + _PER_MATRIX_BYTES * num_matrices


def _direction_bytes(
    num_rows: int,
    num_cols: int,
    dtypes: update.Dtypes,
    written: torch.dtype,
    scratch: list[torch.dtype],
    device_type: str,
    maximize: bool,
) -> int:
    """What writing U in the dtype ``written`` takes beside ``scratch``; ``dtypes`` of M and G."""
    momentum, grad = dtypes
    both = update._widest(momentum, grad)
    mixed = [] if written == momentum == grad else [both] + [both for dtype in dtypes if dtype != both]
    return update.block_bytes(num_rows, num_cols, scratch + mixed + [grad] * maximize, device_type)


def _largest_eigenvalue(G: Tensor) -> Tensor:
    """(num, b, b), positive semidefinite -> (num, 1, 1), from below; zero for a matrix of zeros.

    Power iterations from a few starts that no structure of G has anything to do with, the same on every rank.
    """
    num, block, _ = G.shape
    k = torch.arange(1, _NUM_STARTS * block + 1, device=G.device)
    start = (k * k * 1103515245 + k * 12345) % (1 << 31)
    V = (start.to(G.dtype) / (1 << 30) - 1).view(block, _NUM_STARTS).expand(num, -1, -1).contiguous()
    for _ in range(_NUM_POWERS):
        V = torch.bmm(G, V)
        V /= torch.linalg.vector_norm(V, dim=1, keepdim=True).clamp_min_(torch.finfo(G.dtype).tiny)
    V = torch.bmm(G, V)
    return torch.linalg.vector_norm(V, dim=1, keepdim=True).amax(dim=2, keepdim=True)


@lru_cache(maxsize=64)
def _cubics(damping: float, eps: float) -> tuple[tuple[float, float], ...]:
    """(a, b) of each p(s) = a s + b s^3, which take the interval [sqrt(damping), sqrt(_ROOM + damping)] to 1 +- eps."""
    low, high = math.sqrt(damping), math.sqrt(_ROOM + damping)
    cubics: list[tuple[float, float]] = []
    while high - low > 2 * eps:
        scale = math.sqrt(3 / (high * high + low * high + low * low))
        height = 4 / (2 + low * high * (low + high) * scale**3)
        a, b = 1.5 * height * scale, -0.5 * height * scale**3
        cubics.append((a, b))
        low = a * low + b * low**3
        if low >= 1 - 2 * eps or high - low <= 2 * eps:
            break
        high = 2 - low
    return tuple(cubics)


@contextmanager
def _full_precision(tensor: Tensor) -> Iterator[None]:
    """fp32 products in fp32: TF32 rounds away as much as the damping adds."""
    before = torch.get_float32_matmul_precision()
    if before == "highest" or tensor.device.type == "cpu":
        yield
        return
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
