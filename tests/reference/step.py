"""What PeriodicRowMuon means: slow, obvious, float64, one number after another where that is clearer. No torch.

    M <- beta M + (1 - beta) G                                 G is minus the gradient where it is maximised
    U <- (1 - beta) G + beta M  with Nesterov, else M
    W <- W (1 - lr weight_decay)
    refresh:   W <- W - lr s_spectral NewtonSchulz(U)
    row step:  W <- W - lr row_scale s_row U_i / ||U_i||       for each row i; a row of zeros stays where it is
    Gram row step: the same with U Q instead of U, see `gram_factors`

The first step is a refresh, then every K-th; a schedule ((0, 3), (8000, 1)) starts anew with a refresh at each change.
A parameter without a gradient stays as it is, with its momentum; its steps are counted all the same. At a refresh its
momentum stands for U in the mean of Gram matrices.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

Array = np.ndarray[Any, np.dtype[np.float64]]
KELLER_JORDAN = ((3.4445, -4.7750, 2.0315),) * 5


@dataclass(frozen=True)
class MuonSettings:
    """Of one parameter. `lr` may give a value for every step."""

    lr: float | Sequence[float] = 1e-3
    weight_decay: float = 0.1
    momentum: float = 0.95
    nesterov: bool = True
    coefficients: Sequence[tuple[float, float, float]] = KELLER_JORDAN
    adjust_lr_fn: str | None = None
    period: int | None | Sequence[tuple[int, int | None]] = 3
    row_scale: float = 1.0
    chunks: int = 1
    stack_dims: int | None = None
    maximize: bool = False
    cheap_step: str = "row"
    gram_decay: float = 0.8
    gram_damping: float = 1e-3


@dataclass(frozen=True)
class AdamWSettings:
    """Of one parameter."""

    lr: float | Sequence[float] = 1e-3
    weight_decay: float = 0.1
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    maximize: bool = False


Settings = MuonSettings | AdamWSettings


def run(
    weights: Sequence[Array], gradients: Sequence[Sequence[Array | None]], settings: Sequence[Settings]
) -> list[list[Array]]:
    """Weights after each step.

    Args:
        weights: One array per parameter, of its own shape: (m, n), a stack (..., m, n) or a convolution (m, n, kh, kw).
        gradients: gradients[step][parameter].
        settings: One per parameter.
    """
    weights = [np.array(weight, dtype=np.float64) for weight in weights]
    states: list[dict[str, Any]] = [{} for _ in weights]
    history = []
    for step, grads in enumerate(gradients):
        for i, (grad, setting) in enumerate(zip(grads, settings, strict=True)):
            if grad is None:
                refreshes = isinstance(setting, MuonSettings) and is_refresh(setting.period, step)
                if refreshes and setting.cheap_step == "gram_row" and "momentum" in states[i]:
                    update_grams(states[i], states[i]["momentum"], setting)
                continue
            grad = np.asarray(grad, dtype=np.float64)
            one_step = adamw_step if isinstance(setting, AdamWSettings) else muon_step
            weights[i] = one_step(weights[i], grad, states[i], setting, step)
        history.append([weight.copy() for weight in weights])
    return history


def muon_step(weight: Array, grad: Array, state: dict[str, Any], s: MuonSettings, step: int) -> Array:
    """New weight; `state` is updated."""
    lr = s.lr if isinstance(s.lr, float) else s.lr[step]
    grad = -grad if s.maximize else grad
    old = state.get("momentum", np.zeros_like(grad))
    momentum = s.momentum * old + (1 - s.momentum) * grad
    direction = (1 - s.momentum) * grad + s.momentum * momentum if s.nesterov else momentum
    state["momentum"] = momentum

    refresh = is_refresh(s.period, step)
    balanced = direction
    if s.cheap_step == "gram_row":
        if refresh:
            update_grams(state, direction, s)
        else:
            balanced = multiply_blocks(direction, gram_factors(state, s))
    new = []
    for w, u in zip(matrices(weight, s), matrices(direction if refresh else balanced, s), strict=True):
        num_rows, num_cols = w.shape
        w = w * (1 - lr * s.weight_decay)
        scale = spectral_scale(num_rows, num_cols, s.adjust_lr_fn)
        if refresh:
            w = w - lr * scale * newton_schulz(u, s.coefficients)
        else:
            scale = scale * math.sqrt(min(num_rows, num_cols) / num_rows)
            w = w - lr * s.row_scale * scale * normalize_rows(u)
        new.append(w)
    return np.concatenate([w.reshape(-1) for w in new]).reshape(weight.shape)


def column_blocks(columns: int, rows: int, chunks: int) -> list[slice]:
    """Blocks of columns that have a Gram matrix of their own: as wide as a chunk is high, or one of all columns."""
    width = rows // chunks
    if columns <= width or columns % width:
        width = columns
    return [slice(start, start + width) for start in range(0, columns, width)]


def update_grams(state: dict[str, Any], direction: Array, s: MuonSettings) -> None:
    """E <- decay E + (1 - decay) U^T U / tr(U^T U) of each block U of columns; the first is taken as it is.

    Of zeros there is no such matrix: E stays as it was.
    """
    U = direction.reshape(direction.shape[0], -1)
    blocks = column_blocks(U.shape[1], U.shape[0], s.chunks)
    emas = state.setdefault("grams", [None for _ in blocks])
    for i, columns in enumerate(blocks):
        X = U[:, columns]
        if np.any(X):
            X = X / np.abs(X).max()
            gram = X.T @ X
            gram = gram / np.trace(gram)
            emas[i] = gram if emas[i] is None else s.gram_decay * emas[i] + (1 - s.gram_decay) * gram


def gram_factors(state: dict[str, Any], s: MuonSettings) -> list[Array | None]:
    """(E / lambda_max + damping I)^(-1/2) of each block; None for the identity, where there is no E."""
    factors: list[Array | None] = []
    for ema in state.get("grams", [None]):
        if ema is None:
            factors.append(None)
            continue
        values, vectors = np.linalg.eigh(ema)
        factors.append((vectors * (values / values[-1] + s.gram_damping) ** -0.5) @ vectors.T)
    return factors


def multiply_blocks(direction: Array, factors: Sequence[Array | None]) -> Array:
    """Each block of columns times its factor."""
    parts = np.split(direction.reshape(direction.shape[0], -1), len(factors), axis=1)
    parts = [part if factor is None else part @ factor for part, factor in zip(parts, factors, strict=True)]
    return np.concatenate(parts, axis=1).reshape(direction.shape)


def adamw_step(weight: Array, grad: Array, state: dict[str, Any], s: AdamWSettings, step: int) -> Array:
    """Loshchilov and Hutter, arXiv:1711.05101, algorithm 2; counts the gradients that it saw, as torch does."""
    lr = s.lr if isinstance(s.lr, float) else s.lr[step]
    grad = -grad if s.maximize else grad
    beta1, beta2 = s.betas
    count = state["count"] = state.get("count", 0) + 1
    first = state["first"] = beta1 * state.get("first", np.zeros_like(grad)) + (1 - beta1) * grad
    second = state["second"] = beta2 * state.get("second", np.zeros_like(grad)) + (1 - beta2) * grad**2
    corrected_first = first / (1 - beta1**count)
    corrected_second = second / (1 - beta2**count)
    weight = weight * (1 - lr * s.weight_decay)
    return weight - lr * corrected_first / (np.sqrt(corrected_second) + s.eps)


def is_refresh(period: int | None | Sequence[tuple[int, int | None]], step: int) -> bool:
    """Whether step `step`, counted from 0, is a full spectral step."""
    schedule = [(0, period)] if period is None or isinstance(period, int) else list(period)
    for start, every in reversed(schedule):
        if step >= start:
            return step == start or (every is not None and (step - start) % every == 0)
    raise ValueError(f"the schedule {schedule} doesn't begin at step 0")


def matrices(tensor: Array, s: MuonSettings) -> list[Array]:
    """The matrices that are orthogonalised one by one, in the order of memory.

    A 3-D tensor is a stack of matrices; with more dimensions it is a convolution, one matrix (out, in * kh * kw).
    Each is cut into `chunks` along its rows.
    """
    stack_dims = s.stack_dims
    if stack_dims is None:
        stack_dims = 1 if tensor.ndim == 3 else 0
    num = math.prod(tensor.shape[:stack_dims])
    num_rows = tensor.shape[stack_dims]
    stack = tensor.reshape(num, num_rows, -1)
    size = num_rows // s.chunks
    return [matrix[start : start + size] for matrix in stack for start in range(0, num_rows, size)]


def spectral_scale(num_rows: int, num_cols: int, adjust_lr_fn: str | None) -> float:
    """lr factor of an orthogonalised update."""
    if adjust_lr_fn == "match_rms_adamw":
        return 0.2 * math.sqrt(max(num_rows, num_cols))
    return math.sqrt(max(1, num_rows / num_cols))


def newton_schulz(matrix: Array, coefficients: Sequence[tuple[float, float, float]]) -> Array:
    """X <- a X + b (X X^T) X + c (X X^T)^2 X from X = U / ||U||_F; zeros from zeros."""
    norm = frobenius_norm(matrix)
    if norm == 0:
        return np.zeros_like(matrix)
    X = matrix / norm
    for a, b, c in coefficients:
        gram = X @ X.T
        X = a * X + b * gram @ X + c * gram @ gram @ X
    return X


def polar_factor(matrix: Array) -> Array:
    """What Newton-Schulz approaches: A B^T for A diag(s) B^T; singular values of zero are left out."""
    left, values, right = np.linalg.svd(matrix, full_matrices=False)
    kept = values > 1e-14 * max(values.max(), np.finfo(np.float64).tiny)
    return np.asarray(left[:, kept] @ right[kept])


def apply_to_singular_values(matrix: Array, coefficients: Sequence[tuple[float, float, float]]) -> Array:
    """Newton-Schulz by its definition on singular values: s <- a s + b s^3 + c s^5."""
    left, values, right = np.linalg.svd(matrix / frobenius_norm(matrix), full_matrices=False)
    for a, b, c in coefficients:
        values = a * values + b * values**3 + c * values**5
    return np.asarray(left * values @ right)


def normalize_rows(matrix: Array) -> Array:
    """Each row over its length; zeros from zeros."""
    rows = []
    for row in matrix:
        norm = frobenius_norm(row)
        rows.append(row / norm if norm > 0 else np.zeros_like(row))
    return np.array(rows).reshape(matrix.shape)


def frobenius_norm(values: Array) -> float:
    """math.hypot scales by the largest, so that no square under- or overflows."""
    return math.hypot(*values.reshape(-1))
