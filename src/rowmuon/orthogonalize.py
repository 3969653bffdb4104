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
import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Literal, cast

import torch
from torch import Tensor

Triple = tuple[float, float, float]
Form = Literal["auto", "direct", "gram"]

_DEFAULT_NUM_STEPS = 5
_MAX_NUM_STEPS = 100
_DTYPES = (torch.bfloat16, torch.float32, torch.float64)

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
    coefficients: Sequence[Triple],
    *,
    eps: float = 1e-7,
    dtype: torch.dtype = torch.bfloat16,
    form: Form = "auto",
    out: Tensor | None = None,
) -> Tensor:
    """Orthogonalise each matrix: X_0 = U / ||U||_F, X_{k+1} = a_k X_k + b_k X_k X_k^T X_k + c_k (X_k X_k^T)^2 X_k.

    The norm is taken in fp32 (fp64 for fp64) before the cast to `dtype`, so the result doesn't depend on the scale of
    the input, however small or large. A matrix of zeros gives zeros. The input is never altered; nothing is
    differentiable; nothing is read back to the host.

    Args:
        matrices: (..., m, n), floating point. Leading dimensions are a batch.
        coefficients: One triple per iteration, as `resolve_coefficients` returns them.
        eps: Stands in for a norm that is exactly zero, > 0; touches nothing else.
        dtype: Arithmetic and result: bfloat16, float32 or float64.
        form: "direct" iterates on X; "gram" on X X^T of the small side, which needs fewer FLOPs when one side is
            longer than 1.5 times the other; "auto" takes what is faster and as accurate.
        out: Optional result, (..., m, n) of `dtype`.

    Returns:
        (..., m, n) of `dtype`.

    Raises:
        ValueError: fewer than two dimensions, not floating point, an unsupported `dtype` or `form`, a wrong `out`.
    """
    _check_arguments(matrices, coefficients, dtype, form, out)
    with torch.no_grad():
        if matrices.numel() == 0:
            return matrices.new_empty(matrices.shape, dtype=dtype) if out is None else out
        X = _normalize(matrices, eps, dtype)
        X = X.reshape(-1, *X.shape[-2:])
        X = _direct(X, coefficients).reshape(matrices.shape)
        return X if out is None else out.copy_(X)


def newton_schulz_flops(num_rows: int, num_cols: int, num_steps: int, form: Form = "direct") -> int:
    """FLOPs of `newton_schulz` on one matrix, two per multiply-add.

    With r the small side and X the long one, a direct iteration is X X^T (2 r^2 X), its square (2 r^3) and the product
    with X (2 r^2 X).
    """
    r, long = min(num_rows, num_cols), max(num_rows, num_cols)
    return num_steps * (4 * r * r * long + 2 * r**3)


def _direct(X: Tensor, coefficients: Sequence[Triple]) -> Tensor:
    """(B, m, n) -> (B, m, n). Overwrites X."""
    tall = X.shape[-2] > X.shape[-1]
    r = min(X.shape[-2:])
    gram = X.new_empty(X.shape[0], r, r)
    poly = torch.empty_like(gram)
    spare = torch.empty_like(X)
    for a, b, c in coefficients:
        # gram = X X^T, poly = b gram + c gram^2, spare = a X + poly X; a tall X has them on its other side.
        torch.bmm(X.mT, X, out=gram) if tall else torch.bmm(X, X.mT, out=gram)
        torch.baddbmm(gram, gram, gram, beta=b, alpha=c, out=poly)
        left, right = (X, poly) if tall else (poly, X)
        torch.baddbmm(X, left, right, beta=a, out=spare)
        X, spare = spare, X
    return X


def _normalize(matrices: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
    """Each matrix over its Frobenius norm, in `dtype`; a new, contiguous tensor."""
    work = torch.float64 if matrices.dtype == torch.float64 else torch.float32
    X = matrices.to(work)
    # The largest entry comes out first: squares of 1e-25 underflow in fp32, and those of 1e25 overflow.
    largest = torch.linalg.vector_norm(X, math.inf, dim=(-2, -1), keepdim=True)
    X = X / largest.masked_fill_(largest == 0, eps)
    norm = torch.linalg.vector_norm(X, dim=(-2, -1), keepdim=True)
    X.div_(norm.masked_fill_(norm == 0, eps))
    return X.to(dtype).contiguous()


def _check_arguments(
    matrices: Tensor, coefficients: Sequence[Triple], dtype: torch.dtype, form: str, out: Tensor | None
) -> None:
    if matrices.ndim < 2 or not matrices.is_floating_point():
        raise ValueError(
            f"newton_schulz takes floating-point matrices (..., m, n), not {matrices.dtype} {tuple(matrices.shape)}"
        )
    if len(coefficients) == 0 or not isinstance(coefficients[0], Sequence) or isinstance(coefficients, str):
        raise ValueError(
            f"coefficients={coefficients!r} isn't one triple (a, b, c) per iteration: "
            "resolve_coefficients makes that from a name or one triple"
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
    return cast(Triple, triple)


def _names() -> str:
    return ", ".join(map(repr, COEFFICIENTS))


def _unknown_name(what: str, name: str, known: Mapping[str, object]) -> str:
    nearest = difflib.get_close_matches(name, known, n=1, cutoff=0.3)
    hint = f"; did you mean {nearest[0]!r}?" if nearest else ""
    return f"{what}={name!r} is unknown: take one of {', '.join(map(repr, known))}{hint}"
