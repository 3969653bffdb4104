"""Newton-Schulz orthogonalisation: the polar factor of a matrix by matrix products alone.

For U = A diag(s) B^T the polar factor is A B^T: every singular value becomes one. An odd polynomial applied to U
acts on its singular values alone,

    p(X) = a X + b (X X^T) X + c (X X^T)^2 X        s -> a s + b s^3 + c s^5,

so a few polynomials one after another, chosen to map (0, 1] near 1, approach it without a decomposition.

Source: Keller Jordan et al., "Muon: An optimizer for hidden layers in neural networks",
https://kellerjordan.github.io/posts/muon/ ; Amsel, Persson, Musco, Gower, "The Polar Express", arXiv:2505.16932.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Literal, cast

import torch
from torch import Tensor

from rowmuon.coefficients import COEFFICIENTS, Triple, resolve_coefficients
from rowmuon.device import compute_device

__all__ = [
    "COEFFICIENTS",
    "Form",
    "Triple",
    "newton_schulz",
    "newton_schulz_bytes",
    "newton_schulz_flops",
    "resolve_coefficients",
]

Form = Literal["auto", "direct", "gram"]

_DTYPES = (torch.bfloat16, torch.float32, torch.float64)

# Rounding leaves eigenvalues of the Gram matrix below zero, and every R <- P R P multiplies those by a^2. A run of
# iterations ends before they have grown this much: then bf16 stays as accurate as the direct form on every spectrum
# tried (see the tests), at the price of two products with X.
_GRAM_MAX_GROWTH = 150.0
_GRAM_MIN_ASPECT = 2.0
_GRAM_MIN_SIDE = 128  # below it the direct form's fewer, larger products win

# Measured on two AVX-512 cores. Smaller symmetric products lose more to calls than the mirrored half saves, and small
# matrices gain by sharing calls, as long as a batch stays in the cache.
_CPU_HALVE_FLOPS = 1 << 28
_CPU_TILED_ELEMENTS = 1 << 16
_CPU_BATCH_ELEMENTS = 1 << 20
_CPU_SLAB_ELEMENTS = 1 << 20  # of the normalisation, in fp32

# Elsewhere these only bound what is temporary: 32 MiB of bf16 are more than enough to keep a device busy at a time.
_DEVICE_BATCH_ELEMENTS = 1 << 24
_DEVICE_SLAB_ELEMENTS = 1 << 22


def newton_schulz(
    matrices: Tensor,
    coefficients: str | Triple | Sequence[Triple],
    *,
    eps: float = 1e-7,
    dtype: torch.dtype = torch.bfloat16,
    form: Form = "auto",
    out: Tensor | None = None,
) -> Tensor:
    """Orthogonalise each matrix: X_0 = U / ||U||_F, X_{k+1} = a_k X_k + b_k X_k X_k^T X_k + c_k (X_k X_k^T)^2 X_k.

    The norm is taken in fp32 (fp64 for fp64) before the cast to `dtype`, so the result doesn't depend on the scale of
    the input, however small or large. A matrix of zeros gives zeros. The input is never altered (unless it is `out`),
    nothing is differentiable, and nothing is read back to the host.

    Args:
        matrices: (..., m, n), floating point. Leading dimensions are a batch. A matrix in a batch gives the same as
            alone up to rounding in `dtype`: products of several matrices may add in another order than one's.
        coefficients: As in `resolve_coefficients`, with one iteration per triple.
        eps: Stands in for a norm that is exactly zero, > 0; touches nothing else.
        dtype: Arithmetic and result: bfloat16, float32 or float64.
        form: "direct" multiplies every iteration into X; "gram" collects several iterations on the Gram matrix of the
            small side first, which takes fewer FLOPs where one side is over 1.5 times the other and errs at most about
            twice as much; "auto" is "gram" where that is faster (from an aspect of 2 and a small side of 128).
        out: Optional result, (..., m, n) of `dtype`. May be `matrices` itself, which are then overwritten.

    Returns:
        (..., m, n) of `dtype`.

    Raises:
        ValueError: fewer than two dimensions, not floating point, an unsupported `dtype` or `form`, a wrong `out`.

    Example:
        >>> U = torch.diag(torch.tensor([3.0, 4e-2]))
        >>> X = newton_schulz(U, resolve_coefficients("polar_express", 8), dtype=torch.float32)
        >>> bool((X - torch.eye(2)).abs().max() < 1e-5)
        True
    """
    triples = resolve_coefficients(coefficients, None)
    _check_arguments(matrices, dtype, form, out)
    in_place = out is not None and out.is_contiguous()
    result = cast(Tensor, out) if in_place else matrices.new_empty(matrices.shape, dtype=dtype)
    if matrices.numel() > 0:
        with torch.no_grad():
            shape = matrices.shape[-2:]
            _orthogonalize(result.view(-1, *shape), matrices.reshape(-1, *shape), triples, form, eps)
    return result if out is None or in_place else out.copy_(result)


def newton_schulz_flops(
    num_rows: int,
    num_cols: int,
    num_steps: int,
    form: Form = "direct",
    *,
    coefficients: str | Triple | Sequence[Triple] = "keller_jordan",
    device_type: str | None = None,
) -> int:
    """FLOPs of `newton_schulz` on one matrix, two for each multiply-add, elementwise work left out.

    With r the small side, l the long one and full products, an iteration of the direct form takes 4 r^2 l + 2 r^3; a
    run of k iterations collected on the small side takes 4 r^2 l + (4 k - 3) 2 r^3.

    Args:
        num_steps: Iterations, 1 to 99.
        form: As in `newton_schulz`.
        coefficients: Decide where the Gram form goes back to X.
        device_type: "cpu": without the halves of large symmetric products that are mirrored there instead of computed.
            None, or any other device: every product in full.
    """
    small, large = min(num_rows, num_cols), max(num_rows, num_cols)
    if small == 0:
        return 0
    lengths = _run_lengths(resolve_coefficients(coefficients, num_steps), form, num_rows, num_cols)
    halve = device_type == "cpu"
    gram = _symmetric_flops(small, large, halve)
    square = _symmetric_flops(small, small, halve)
    return sum(gram + (4 * length - 3) * square + 2 * small * small * large for length in lengths)


def newton_schulz_bytes(
    num_matrices: int,
    num_rows: int,
    num_cols: int,
    num_steps: int,
    form: Form = "auto",
    *,
    coefficients: str | Triple | Sequence[Triple] = "keller_jordan",
    dtype: torch.dtype = torch.bfloat16,
    source_dtype: torch.dtype | None = None,
    device_type: str | None = None,
) -> int:
    """Most bytes that `newton_schulz` has allocated at a time on (num_matrices, num_rows, num_cols), beside its input.

    Args:
        num_steps, form, coefficients: As in `newton_schulz_flops`.
        dtype: As in `newton_schulz`.
        source_dtype: Of the input. None: the result is written over the input (`out=matrices`), so that all of it is
            temporary.
        device_type: "cpu", or anything else for every other device.
    """
    numel, small = num_rows * num_cols, min(num_rows, num_cols)
    if num_matrices * numel == 0:
        return 0
    on_cpu = device_type == "cpu"
    lengths = _run_lengths(resolve_coefficients(coefficients, num_steps), form, num_rows, num_cols)
    size = _batch_size(num_matrices, num_rows, num_cols, on_cpu)
    iterating = size * (numel + _num_squares(lengths) * small * small) * dtype.itemsize
    num_normalized = size if on_cpu else num_matrices
    slab_rows = _slab_rows(num_normalized, num_rows, num_cols, on_cpu)
    num_slabs = -(-num_rows // slab_rows)
    slab = num_normalized * slab_rows * num_cols * _work_dtype(source_dtype or dtype).itemsize
    normalizing = slab + _PER_MATRIX_BYTES * num_normalized * (1 + num_slabs)
    if on_cpu:
        mirroring = 2 * max(_mirrored(small, k) for k in (small, numel // small)) * dtype.itemsize
        temporary = iterating + max(normalizing, mirroring)
    else:
        temporary = max(iterating, normalizing)
    return temporary + (0 if source_dtype is None else num_matrices * numel * dtype.itemsize)


# Norms, largest entries and their masks, at most.
_PER_MATRIX_BYTES = 48


def _orthogonalize(result: Tensor, matrices: Tensor, triples: Sequence[Triple], form: Form, eps: float) -> None:
    """(B, m, n) -> `result` (B, m, n), which may be `matrices`; a part of the batch at a time."""
    num_matrices, num_rows, num_cols = result.shape
    small = min(num_rows, num_cols)
    lengths = _run_lengths(triples, form, num_rows, num_cols)
    on_cpu = compute_device(result) == "cpu"
    if not on_cpu:
        _normalize(result, matrices, eps, on_cpu)
    size = _batch_size(num_matrices, num_rows, num_cols, on_cpu)
    squares = [result.new_empty(size, small, small) for _ in range(_num_squares(lengths))]
    spare = result.new_empty(size, num_rows, num_cols)
    for part, source in zip(result.split(size), matrices.split(size), strict=True):
        if on_cpu:
            _normalize(part, source, eps, on_cpu)  # right before its use: it's in the cache then
        num = part.shape[0]
        _iterate(part, spare[:num], [square[:num] for square in squares], triples, lengths, on_cpu)


def _batch_size(num_matrices: int, num_rows: int, num_cols: int, on_cpu: bool) -> int:
    """Matrices that are iterated on at a time: on a CPU those that stay in its cache."""
    small, large = min(num_rows, num_cols), max(num_rows, num_cols)
    if on_cpu and _num_parts(small, large) > 1:
        return 1
    elements = _CPU_BATCH_ELEMENTS if on_cpu else _DEVICE_BATCH_ELEMENTS
    return min(num_matrices, max(1, elements // (num_rows * num_cols)))


def _num_squares(lengths: Sequence[int]) -> int:
    return 2 if max(lengths) == 1 else 4


def _iterate(
    X: Tensor, spare: Tensor, squares: list[Tensor], triples: Sequence[Triple], lengths: Sequence[int], halve: bool
) -> None:
    """(B, m, n) in place, in runs of iterations.

    With R = X X^T and P = a I + b R + c R^2 an iteration is X <- P X and so R <- P R P. A run of several keeps to the
    small side, Q <- Q P and R <- P R P, and ends with X <- Q X. A run of one adds a X inside the last product instead,
    which rounds less. A tall X has its Gram matrix on the other side: R = X^T X, X <- X Q.
    """
    tall = X.shape[-2] > X.shape[-1]
    first, R, P = X, squares[0], squares[1]
    steps = iter(triples)
    for length in lengths:
        _symmetric_product(X.mT if tall else X, X if tall else X.mT, R, halve)
        if length == 1:
            a, b, c = next(steps)
            _symmetric_product(R, R, P, halve, add=R, beta=b, alpha=c)
            torch.baddbmm(X, X if tall else P, P if tall else X, beta=a, out=spare)
        else:
            Q = _collect(R, P, squares[2], squares[3], [next(steps) for _ in range(length)], halve)
            torch.bmm(X if tall else Q, Q if tall else X, out=spare)
        X, spare = spare, X
    if X is not first:
        first.copy_(X)


def _collect(R: Tensor, P: Tensor, Q: Tensor, T: Tensor, triples: Sequence[Triple], halve: bool) -> Tensor:
    """Return Q = P_k ... P_1 for the Gram matrix R. All four (B, r, r) are overwritten; all products are symmetric."""
    for index, (a, b, c) in enumerate(triples):
        _symmetric_product(R, R, P, halve, add=R, beta=b, alpha=c)
        P.diagonal(dim1=-2, dim2=-1).add_(a)
        if index + 1 < len(triples):
            _symmetric_product(R, P, T, halve)
            _symmetric_product(T, P, R, halve)
        if index == 0:
            P, Q = Q, P
        else:
            _symmetric_product(Q, P, T, halve)
            Q, T = T, Q
    return Q


def _run_lengths(triples: Sequence[Triple], form: Form, num_rows: int, num_cols: int) -> tuple[int, ...]:
    """How many iterations to collect on the small side before each return to X; all ones is the direct form."""
    small, large = min(num_rows, num_cols), max(num_rows, num_cols)
    if form == "direct" or (form == "auto" and (large < _GRAM_MIN_ASPECT * small or small < _GRAM_MIN_SIDE)):
        return (1,) * len(triples)
    lengths, growth = [1], triples[0][0] ** 2
    for a, _, _ in triples[1:]:
        if growth > _GRAM_MAX_GROWTH:
            lengths.append(0)
            growth = 1.0
        lengths[-1] += 1
        growth *= a**2
    return tuple(lengths)


def _symmetric_product(
    A: Tensor, B: Tensor, out: Tensor, halve: bool, *, add: Tensor | None = None, beta: float = 1.0, alpha: float = 1.0
) -> None:
    """out = alpha A B, plus beta add, where that is known to be symmetric: (B, r, k), (B, k, r) -> (B, r, r)."""
    num_parts = _num_parts(A.shape[-2], A.shape[-1]) if halve else 1
    if num_parts == 1:
        if add is None:
            torch.bmm(A, B, out=out)
        else:
            torch.baddbmm(add, A, B, beta=beta, alpha=alpha, out=out)
        return
    for a, b, o, c in zip(A, B, out, out if add is None else add, strict=True):
        for start, end in _part_bounds(o.shape[0], num_parts):
            # These rows from their diagonal block on; what lies left of it is mirrored from the rows above.
            here = o[start:end, start:]
            if add is None:
                torch.mm(a[start:end], b[:, start:], out=here)
            else:
                torch.addmm(c[start:end, start:], a[start:end], b[:, start:], beta=beta, alpha=alpha, out=here)
            block, mirrored = o[start:end, end:], o[end:, start:end]
            if block.numel() >= _CPU_TILED_ELEMENTS:
                # By itself a block is transposed in tiles, 2.7 times as fast as between views of something larger.
                mirrored.copy_(torch.empty_like(mirrored).copy_(block.contiguous().T))
            else:
                mirrored.copy_(block.T)


def _num_parts(r: int, k: int) -> int:
    """Parts of rows that a symmetric (r, k) (k, r) product pays to be cut into, on a CPU."""
    if 2 * r * r * k < _CPU_HALVE_FLOPS:
        return 1
    return 2 if r < 768 else 3


def _part_bounds(r: int, num_parts: int) -> list[tuple[int, int]]:
    cuts = [r * part // num_parts // 32 * 32 for part in range(num_parts)] + [r]
    return list(itertools.pairwise(cuts))


def _mirrored(r: int, k: int) -> int:
    """Elements of the largest block that a symmetric (r, k) (k, r) product copies at a time to mirror it."""
    blocks = [(end - start) * (r - end) for start, end in _part_bounds(r, _num_parts(r, k))]
    return max(blocks) if max(blocks) >= _CPU_TILED_ELEMENTS else 0


def _symmetric_flops(r: int, k: int, halve: bool) -> int:
    bounds = _part_bounds(r, _num_parts(r, k) if halve else 1)
    return sum(2 * (end - start) * (r - start) * k for start, end in bounds)


def _normalize(result: Tensor, matrices: Tensor, eps: float, on_cpu: bool) -> None:
    """Write each of `matrices` (B, m, n) over its Frobenius norm to `result`, rounded to its dtype once.

    A few rows of all matrices at a time, so that what is in fp32 stays small, and in a CPU's caches. What is largest
    comes out before squares are taken: those of 1e-25 underflow in fp32, and those of 1e25 overflow.
    """
    num_matrices, num_rows, num_cols = matrices.shape
    num_rows = _slab_rows(num_matrices, num_rows, num_cols, on_cpu)
    slabs = matrices.split(num_rows, dim=-2)
    buffer = matrices.new_empty(slabs[0].numel(), dtype=_work_dtype(matrices.dtype))
    views = [buffer[: slab.numel()].view(slab.shape) for slab in slabs]
    maxima = torch.cat([_largest(slab) for slab in slabs], dim=-1)  # (B, 1, slabs)
    norms = torch.cat(
        [
            torch.linalg.vector_norm(torch.div(slab, _nonzero(part, eps), out=view), dim=(-2, -1), keepdim=True)
            for slab, part, view in zip(slabs, maxima.split(1, dim=-1), views, strict=True)
        ],
        dim=-1,
    )
    if len(slabs) == 1:
        result.copy_(views[0].div_(_nonzero(norms, eps)))
        return
    largest = _nonzero(maxima.amax(-1, keepdim=True), eps)
    norm = _nonzero(torch.linalg.vector_norm(norms * (maxima / largest), dim=-1, keepdim=True), eps)
    for part, slab, view in zip(result.split(num_rows, dim=-2), slabs, views, strict=True):
        part.copy_(torch.div(slab, largest, out=view).div_(norm))


def _largest(X: Tensor) -> Tensor:
    """The largest magnitude of each matrix, (B, 1, 1) in the dtype of the norm."""
    # amax and amin are many times faster than an infinity norm on a CPU, and need no copy as abs does.
    largest = torch.maximum(X.amax((-2, -1), keepdim=True), X.amin((-2, -1), keepdim=True).neg_())
    return largest.to(_work_dtype(X.dtype))


def _nonzero(divisor: Tensor, eps: float) -> Tensor:
    return divisor.masked_fill(divisor == 0, eps)


def _slab_rows(num_matrices: int, num_rows: int, num_cols: int, on_cpu: bool) -> int:
    elements = _CPU_SLAB_ELEMENTS if on_cpu else _DEVICE_SLAB_ELEMENTS
    return min(num_rows, max(1, elements // (num_matrices * num_cols)))


def _work_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _check_arguments(matrices: Tensor, dtype: torch.dtype, form: str, out: Tensor | None) -> None:
    if matrices.ndim < 2 or not matrices.is_floating_point():
        raise ValueError(
            f"newton_schulz takes floating-point matrices (..., m, n), not {matrices.dtype} {tuple(matrices.shape)}"
        )
    if dtype not in _DTYPES:
        raise ValueError(f"dtype={dtype} isn't supported: take one of {', '.join(map(str, _DTYPES))}")
    if form not in ("auto", "direct", "gram"):
        raise ValueError(f"form={form!r} is unknown: take 'auto', 'direct' or 'gram'")
    if out is not None and (out.shape != matrices.shape or out.dtype != dtype):
        raise ValueError(f"out has {out.dtype} {tuple(out.shape)}; it must have {dtype} {tuple(matrices.shape)}")
