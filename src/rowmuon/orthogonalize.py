"""Newton-Schulz orthogonalisation: the polar factor of a matrix by matrix products alone.

For U = A diag(s) B^T the polar factor is A B^T: every singular value becomes one. An odd polynomial applied to U
acts on its singular values alone,

    p(X) = a X + b (X X^T) X + c (X X^T)^2 X        s -> a s + b s^3 + c s^5,

so a few polynomials one after another, chosen to map (0, 1] near 1, approach it without a decomposition.

Source: Keller Jordan et al., "Muon: An optimizer for hidden layers in neural networks",
https://kellerjordan.github.io/posts/muon/ ; Amsel, Persson, Musco, Gower, "The Polar Express", arXiv:2505.16932.
"""

from __future__ import annotations

import difflib
import itertools
import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Literal, cast

import torch
from torch import Tensor

from rowmuon.device import compute_device

Triple = tuple[float, float, float]
Form = Literal["auto", "direct", "gram"]

_DEFAULT_NUM_STEPS = 5
_MAX_NUM_STEPS = 100
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
_CPU_BATCH_ELEMENTS = 1 << 20

# Optimal quintics for singular values in [1e-3, 1] as the paper prints them, before its safety factor.
_POLAR_EXPRESS_RAW: tuple[Triple, ...] = (
    (8.28721201814563, -23.595886519098837, 17.300387312530933),
    (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
    (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
    (3.3184196573706015, -2.488488024314874, 0.51004894012372),
    (2.300652019954817, -1.6689039845747493, 0.4188073119525673),
    (1.891301407787398, -1.2679958271945868, 0.37680408948524835),
    (1.8750014808534479, -1.2500016453999487, 0.3750001645474248),
    (1.875, -1.25, 0.375),
)
# Rounding may push a singular value above 1, where the next polynomial falls steeply: p(s / 1.01) instead of p(s)
# leaves room. The last one is where everything has arrived, and stays exact.
_POLAR_EXPRESS_SAFETY = 1.01


def _with_safety(triples: Sequence[Triple], factor: float) -> tuple[Triple, ...]:
    return (*((a / factor, b / factor**3, c / factor**5) for a, b, c in triples[:-1]), triples[-1])


COEFFICIENTS: Mapping[str, tuple[Triple, ...]] = MappingProxyType(
    {
        # One polynomial, steep at zero (3.4445^5 = 485), which sends (0.003, 1] to about [0.68, 1.13] in five steps and
        # doesn't converge. https://kellerjordan.github.io/posts/muon/, the default of torch.optim.Muon.
        "keller_jordan": ((3.4445, -4.7750, 2.0315),) * _DEFAULT_NUM_STEPS,
        # Converges; safety factor 1.01 on all but the last. arXiv:2505.16932, section 3.4 and its listing.
        "polar_express": _with_safety(_POLAR_EXPRESS_RAW, _POLAR_EXPRESS_SAFETY),
    }
)


def resolve_coefficients(ns_coefficients: str | Triple | Sequence[Triple], ns_steps: int | None) -> tuple[Triple, ...]:
    """Return one triple (a, b, c) for each Newton-Schulz iteration.

    Args:
        ns_coefficients: A name in `COEFFICIENTS`, one triple used in every iteration, or one triple per iteration.
        ns_steps: Number of iterations, 1 to 99. None: 5 for a name or a single triple, the length of a sequence.
            A named set that is shorter repeats its last triple; one that is longer is cut.

    Raises:
        ValueError: unknown name, a triple that isn't three finite numbers, `ns_steps` out of range, or a sequence
            whose length isn't `ns_steps`.

    Example:
        >>> resolve_coefficients((2.0, -1.5, 0.5), 2)
        ((2.0, -1.5, 0.5), (2.0, -1.5, 0.5))
        >>> len(resolve_coefficients("polar_express", None))
        5
    """
    if ns_steps is not None:
        _check_num_steps(ns_steps)
    if isinstance(ns_coefficients, str):
        named = COEFFICIENTS.get(ns_coefficients)
        if named is None:
            raise ValueError(_unknown_name("ns_coefficients", ns_coefficients, COEFFICIENTS))
        num_steps = _DEFAULT_NUM_STEPS if ns_steps is None else ns_steps
        return named[:num_steps] + named[-1:] * (num_steps - len(named))
    items = tuple(ns_coefficients)
    if items and not isinstance(items[0], Sequence):
        num_steps = _DEFAULT_NUM_STEPS if ns_steps is None else ns_steps
        return (_checked_triple(items),) * num_steps
    triples = tuple(_checked_triple(item) for item in items)
    if not triples:
        raise ValueError("ns_coefficients is empty: give at least one triple (a, b, c), or one of " + _names())
    if ns_steps is not None and ns_steps != len(triples):
        raise ValueError(
            f"ns_steps={ns_steps}, but ns_coefficients gives {len(triples)} iterations one triple each: "
            "make them agree or leave ns_steps out (None)"
        )
    _check_num_steps(len(triples))
    return triples


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
    the input, however small or large. A matrix of zeros gives zeros. The input is never altered, nothing is
    differentiable, and nothing is read back to the host.

    Args:
        matrices: (..., m, n), floating point. Leading dimensions are a batch; a matrix in a batch gives the same bits
            as alone on a CPU, and the same to rounding elsewhere.
        coefficients: As in `resolve_coefficients`, with one iteration per triple.
        eps: Stands in for a norm that is exactly zero, > 0; touches nothing else.
        dtype: Arithmetic and result: bfloat16, float32 or float64.
        form: "direct" multiplies every iteration into X; "gram" collects several iterations on the Gram matrix of the
            small side first, which takes fewer FLOPs where one side is over 1.5 times the other and errs at most about
            twice as much; "auto" is "gram" where that is faster (from an aspect of 2 and a small side of 128).
        out: Optional result, (..., m, n) of `dtype`.

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


def _orthogonalize(result: Tensor, matrices: Tensor, triples: Sequence[Triple], form: Form, eps: float) -> None:
    """(B, m, n) -> `result` (B, m, n), a cache-sized part of the batch at a time where that is faster."""
    num_matrices, num_rows, num_cols = result.shape
    small, large = min(num_rows, num_cols), max(num_rows, num_cols)
    lengths = _run_lengths(triples, form, num_rows, num_cols)
    on_cpu = compute_device(result) == "cpu"
    if not on_cpu:
        size = num_matrices
    elif _num_parts(small, large) > 1:
        size = 1
    else:
        size = min(num_matrices, max(1, _CPU_BATCH_ELEMENTS // (num_rows * num_cols)))
    num_squares = 2 if max(lengths) == 1 else 4
    squares = [result.new_empty(size, small, small) for _ in range(num_squares)]
    spare = result.new_empty(size, num_rows, num_cols)
    for part, source in zip(result.split(size), matrices.split(size), strict=True):
        _normalize(part, source, eps)
        num = part.shape[0]
        _iterate(part, spare[:num], [square[:num] for square in squares], triples, lengths, on_cpu)


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
            o[end:, start:end].copy_(o[start:end, end:].T)


def _num_parts(r: int, k: int) -> int:
    """Parts of rows that a symmetric (r, k) (k, r) product pays to be cut into, on a CPU."""
    if 2 * r * r * k < _CPU_HALVE_FLOPS:
        return 1
    return 2 if r < 768 else 3


def _part_bounds(r: int, num_parts: int) -> list[tuple[int, int]]:
    cuts = [r * part // num_parts // 32 * 32 for part in range(num_parts)] + [r]
    return list(itertools.pairwise(cuts))


def _symmetric_flops(r: int, k: int, halve: bool) -> int:
    bounds = _part_bounds(r, _num_parts(r, k) if halve else 1)
    return sum(2 * (end - start) * (r - start) * k for start, end in bounds)


def _normalize(result: Tensor, matrices: Tensor, eps: float) -> None:
    """Write each of `matrices` over its Frobenius norm to `result`, rounded to its dtype once."""
    work = torch.float64 if matrices.dtype == torch.float64 else torch.float32
    X = matrices.to(work)
    # The largest entry comes out first: squares of 1e-25 underflow in fp32, and those of 1e25 overflow.
    # (amax and amin are many times faster here than an infinity norm, and need no copy as abs does.)
    dims = (-2, -1)
    largest = torch.maximum(X.amax(dims, keepdim=True), X.amin(dims, keepdim=True).neg_())
    X = X / largest.masked_fill_(largest == 0, eps)
    norm = torch.linalg.vector_norm(X, dim=dims, keepdim=True)
    result.copy_(X.div_(norm.masked_fill_(norm == 0, eps)))


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


def _check_num_steps(ns_steps: int) -> None:
    if isinstance(ns_steps, bool) or not isinstance(ns_steps, int) or not 1 <= ns_steps < _MAX_NUM_STEPS:
        raise ValueError(f"ns_steps={ns_steps!r} must be an int of 1 to {_MAX_NUM_STEPS - 1}")


def _checked_triple(values: object) -> Triple:
    try:
        triple = tuple(float(value) for value in cast(Sequence[float], values))
    except (TypeError, ValueError):
        triple = ()
    if len(triple) != 3 or not all(map(math.isfinite, triple)):
        raise ValueError(f"ns_coefficients: {values!r} isn't a triple (a, b, c) of finite numbers")
    return triple


def _names() -> str:
    return ", ".join(map(repr, COEFFICIENTS))


def _unknown_name(what: str, name: str, known: Mapping[str, object]) -> str:
    nearest = difflib.get_close_matches(name, known, n=1, cutoff=0.3)
    hint = f"; did you mean {nearest[0]!r}?" if nearest else ""
    return f"{what}={name!r} is unknown: take one of {', '.join(map(repr, known))}{hint}"
