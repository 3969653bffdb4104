"""Newton-Schulz orthogonalisation: the polar factor of a matrix by matrix products alone.

For U = A diag(s) B^T the polar factor is A B^T: every singular value becomes one. An odd polynomial applied to U
acts on its singular values alone,

    p(X) = a X + b (X X^T) X + c (X X^T)^2 X        s -> a s + b s^3 + c s^5,

so a few polynomials one after another, chosen to map (0, 1] near 1, approach it without a decomposition.

Source: Keller Jordan et al., "Muon: An optimizer for hidden layers in neural networks",
https://kellerjordan.github.io/posts/muon/ ; Amsel, Persson, Musco, Gower, "The Polar Express", arXiv:2505.16932.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, cast

import torch
from torch import Tensor
from torch.utils._python_dispatch import _get_current_dispatch_mode

from rowmuon import normalize, symmetric_kernel
from rowmuon.coefficients import COEFFICIENTS, Triple, resolve_coefficients
from rowmuon.device import compute_device
from rowmuon.symmetric import (
    Kernels,
    Way,
    check_kernels,
    mirrored_elements,
    num_parts,
    product_flops,
    symmetric_product_,
    way_on,
)

__all__ = [
    "COEFFICIENTS",
    "Form",
    "Kernels",
    "Triple",
    "newton_schulz",
    "newton_schulz_bytes",
    "newton_schulz_flops",
    "prepare_newton_schulz",
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

# On a CPU small matrices gain by sharing calls, as long as a batch stays in the cache (measured on two AVX-512 cores).
_CPU_BATCH_ELEMENTS = 1 << 20

# Elsewhere this only bounds what is temporary: 32 MiB of bf16 are more than enough to keep a device busy at a time.
_DEVICE_BATCH_ELEMENTS = 1 << 24


def newton_schulz(
    matrices: Tensor,
    coefficients: str | Triple | Sequence[Triple],
    *,
    eps: float = 1e-7,
    dtype: torch.dtype = torch.bfloat16,
    form: Form = "auto",
    out: Tensor | None = None,
    kernels: Kernels = "torch",
    compile: bool = False,
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
        kernels: On CUDA, "triton" computes only half of each symmetric product of 1024 rows or more, by a kernel of our
            own (`rowmuon.symmetric`); "torch" leaves all products to the vendor's library. No other device knows a
            difference. fp32 is multiplied as ``torch.set_float32_matmul_precision`` says on both.
        compile: On other devices than a CPU, the normalisation by ``torch.compile`` (`rowmuon.normalize`).

    Returns:
        (..., m, n) of `dtype`.

    Raises:
        ValueError: fewer than two dimensions, not floating point, an unsupported `dtype`, `form` or `kernels`, a wrong
            `out`.
        RuntimeError: what `kernels` or `compile` ask for can't be built here.

    Example:
        >>> U = torch.diag(torch.tensor([3.0, 4e-2]))
        >>> X = newton_schulz(U, resolve_coefficients("polar_express", 8), dtype=torch.float32)
        >>> bool((X - torch.eye(2)).abs().max() < 1e-5)
        True
    """
    triples = resolve_coefficients(coefficients, None)
    _check_arguments(matrices, dtype, form, out)
    check_kernels(kernels, dtype)
    in_place = out is not None and out.is_contiguous()
    result = cast(Tensor, out) if in_place else matrices.new_empty(matrices.shape, dtype=dtype)
    if matrices.numel() > 0:
        with torch.no_grad():
            shape = matrices.shape[-2:]
            stack = matrices.reshape(-1, *shape)
            _orthogonalize(result.view(-1, *shape), stack, triples, form, eps, kernels, compile)
    return result if out is None or in_place else out.copy_(result)


def newton_schulz_flops(
    num_rows: int,
    num_cols: int,
    num_steps: int,
    form: Form = "direct",
    *,
    coefficients: str | Triple | Sequence[Triple] = "keller_jordan",
    device_type: str | None = None,
    kernels: Kernels = "torch",
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
        kernels: As in `newton_schulz`: "triton" mirrors on "cuda".
    """
    small, large = min(num_rows, num_cols), max(num_rows, num_cols)
    if small == 0:
        return 0
    lengths = _run_lengths(resolve_coefficients(coefficients, num_steps), form, num_rows, num_cols)
    way = way_on(device_type, kernels)
    gram = product_flops(small, large, way)
    square = product_flops(small, small, way)
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
    source = source_dtype or dtype
    normalizing = normalize.normalize_bytes(size if on_cpu else num_matrices, num_rows, num_cols, source, on_cpu=on_cpu)
    if on_cpu:
        mirroring = 2 * max(mirrored_elements(small, k) for k in (small, numel // small)) * dtype.itemsize
        temporary = iterating + max(normalizing, mirroring)
    else:
        temporary = max(iterating, normalizing)
    return temporary + (0 if source_dtype is None else num_matrices * numel * dtype.itemsize)


def prepare_newton_schulz(
    source_dtype: torch.dtype, dtype: torch.dtype, device: torch.device, *, kernels: Kernels, compile: bool
) -> None:
    """Compiles what `newton_schulz` takes for such matrices and isn't compiled yet, on memory of its own.

    Raises:
        RuntimeError: it can't be built here.
    """
    if device.type in ("cpu", "meta") or _get_current_dispatch_mode() is not None:
        return
    if kernels == "triton" and device.type == "cuda":
        symmetric_kernel.build(dtype, device)
    if compile:
        normalize.build(source_dtype, dtype, device)


def _orthogonalize(
    result: Tensor,
    matrices: Tensor,
    triples: Sequence[Triple],
    form: Form,
    eps: float,
    kernels: Kernels,
    compile: bool,
) -> None:
    """(B, m, n) -> `result` (B, m, n), which may be `matrices`; a part of the batch at a time."""
    num_matrices, num_rows, num_cols = result.shape
    small = min(num_rows, num_cols)
    lengths = _run_lengths(triples, form, num_rows, num_cols)
    device = compute_device(result)
    on_cpu, way = device == "cpu", way_on(device, kernels)
    if not on_cpu:
        normalize.normalize(result, matrices, eps, on_cpu=False, compile=compile)
    size = _batch_size(num_matrices, num_rows, num_cols, on_cpu)
    squares = [result.new_empty(size, small, small) for _ in range(_num_squares(lengths))]
    spare = result.new_empty(size, num_rows, num_cols)
    for part, source in zip(result.split(size), matrices.split(size), strict=True):
        if on_cpu:
            normalize.normalize(part, source, eps, on_cpu=True)  # right before its use: it's in the cache then
        num = part.shape[0]
        _iterate(part, spare[:num], [square[:num] for square in squares], triples, lengths, way)


def _batch_size(num_matrices: int, num_rows: int, num_cols: int, on_cpu: bool) -> int:
    """Matrices that are iterated on at a time: on a CPU those that stay in its cache."""
    small, large = min(num_rows, num_cols), max(num_rows, num_cols)
    if on_cpu and num_parts(small, large) > 1:
        return 1
    elements = _CPU_BATCH_ELEMENTS if on_cpu else _DEVICE_BATCH_ELEMENTS
    return min(num_matrices, max(1, elements // (num_rows * num_cols)))


def _num_squares(lengths: Sequence[int]) -> int:
    return 2 if max(lengths) == 1 else 4


def _iterate(
    X: Tensor, spare: Tensor, squares: list[Tensor], triples: Sequence[Triple], lengths: Sequence[int], way: Way
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
        symmetric_product_(X.mT if tall else X, X if tall else X.mT, R, way)
        if length == 1:
            a, b, c = next(steps)
            symmetric_product_(R, R, P, way, add=R, beta=b, alpha=c)
            torch.baddbmm(X, X if tall else P, P if tall else X, beta=a, out=spare)
        else:
            Q = _collect(R, P, squares[2], squares[3], [next(steps) for _ in range(length)], way)
            torch.bmm(X if tall else Q, Q if tall else X, out=spare)
        X, spare = spare, X
    if X is not first:
        first.copy_(X)


def _collect(R: Tensor, P: Tensor, Q: Tensor, T: Tensor, triples: Sequence[Triple], way: Way) -> Tensor:
    """Return Q = P_k ... P_1 for the Gram matrix R. All four (B, r, r) are overwritten; all products are symmetric."""
    for index, (a, b, c) in enumerate(triples):
        symmetric_product_(R, R, P, way, add=R, beta=b, alpha=c, shift=a)
        if index + 1 < len(triples):
            symmetric_product_(R, P, T, way)
            symmetric_product_(T, P, R, way)
        if index == 0:
            P, Q = Q, P
        else:
            symmetric_product_(Q, P, T, way)
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
