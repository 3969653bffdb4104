"""The row step through ``torch.compile``: `rowmuon.update.row_step_` in two passes over each block of rows.

The first pass takes the gradient into the momentum and sums the squares of each row of U, the second steps. The block
stays in the caches from one to the other. (One function for both is what the CPU's inductor of torch 2.13 fails on.)

All settings enter as 0-dim tensors and all sizes are symbols, so neither lr, momentum, decay, Nesterov, `maximize` nor
a new shape compiles again: each pass is compiled once for each combination of dtypes, on memory of its own. So a
compiler that is missing or fails is noticed before any weight or momentum has changed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from rowmuon import update
from rowmuon.device import compute_device

__all__ = ["row_step_"]

# What the passes are compiled on. Large, so that inductor makes parallel loops of them; not square, or rows and columns
# would be one symbol, and other shapes another compilation.
_SAMPLE_SHAPE = (512, 1024)


@torch.no_grad()
def row_step_(
    weights: Sequence[Tensor],
    momenta: Sequence[Tensor],
    grads: Sequence[Tensor],
    *,
    lr: float | Tensor,
    weight_decay: float,
    beta: float,
    nesterov: bool,
    scales: Sequence[float],
    eps: float,
    maximize: bool = False,
) -> None:
    """`rowmuon.update.row_step_`, compiled; the same arguments and, up to rounding, the same results.

    The momentum may differ from the eager one by a rounding to its dtype, the step of a weight by a few roundings (up
    to 8 eps of lr * scale) to the narrower dtype of momentum and gradient: between its steps the eager path rounds to
    these, this one stays in fp32. A bf16 weight is rounded once on both. Matrices and remainders of a single row or
    column are done eagerly, since torch.compile takes a 1 for a constant; so are fake tensors.

    Raises:
        RuntimeError: torch.compile can't build it here. Nothing has changed then.
    """
    matrices = list(zip(weights, momenta, grads, scales, strict=True))
    for dtypes in {(w.dtype, m.dtype, g.dtype, w.device) for w, m, g, _ in matrices if _can_compile(w)}:
        _build(*dtypes)
    eager: list[tuple[Tensor, Tensor, Tensor, float]] = []
    for weight, momentum, grad, scale in matrices:
        if not _can_compile(weight):
            eager.append((weight, momentum, grad, scale))
            continue
        work = update._work_dtype(weight, momentum, grad)
        # Two tensors even where they are equal: one that is passed twice would be another compilation.
        mix, nesterov_mix = _scalar(1 - beta, work), _scalar(1 - beta if nesterov else 0.0, work)
        sign = _scalar(-1.0 if maximize else 1.0, work)
        keep, step = _scalar(1 - lr * weight_decay, work), _scalar(lr * scale, work)
        floor = _scalar(min(eps, math.sqrt(torch.finfo(work).tiny)), work)
        momentum_and_sums_, step_ = _passes()
        for w, m, g in update._blocks(weight.detach(), momentum.detach(), grad.detach()):
            if w.shape[0] == 1:  # what is left over
                eager.append((w, m, g, scale))
                continue
            sums = momentum_and_sums_(m, g, mix, nesterov_mix, sign)
            step_(w, m, g, sums, nesterov_mix, sign, keep, step, floor)
    if eager:
        weights, momenta, grads, scales = zip(*eager, strict=True)
        hyper = {"lr": lr, "weight_decay": weight_decay, "beta": beta, "nesterov": nesterov, "eps": eps}
        update.row_step_(weights, momenta, grads, scales=scales, maximize=maximize, **hyper)  # type: ignore[arg-type]


def _can_compile(weight: Tensor) -> bool:
    return min(weight.shape) > 1 and compute_device(weight) != "fake"


def _scalar(value: float | Tensor, dtype: torch.dtype) -> Tensor:
    """0-dim, on the CPU unless it is a tensor that lies elsewhere."""
    if isinstance(value, Tensor):
        return value.detach().reshape(()).to(dtype)
    return torch.tensor(value, dtype=dtype, device="cpu")


def _momentum_and_sums_(momentum: Tensor, grad: Tensor, mix: Tensor, nesterov_mix: Tensor, sign: Tensor) -> Tensor:
    """M <- M + mix (G - M), in place; the sum of squares of each row of U = M + nesterov_mix (G - M)."""
    g = grad.to(mix.dtype) * sign
    m = momentum.to(mix.dtype)
    m = m + mix * (g - m)
    u = m + nesterov_mix * (g - m)
    momentum.copy_(m)
    return u.square().sum(dim=1)


def _step_(
    weight: Tensor,
    momentum: Tensor,
    grad: Tensor,
    sums: Tensor,
    nesterov_mix: Tensor,
    sign: Tensor,
    keep: Tensor,
    step: Tensor,
    floor: Tensor,
) -> None:
    """W_i <- keep W_i - step U_i / max(sqrt(sum_i), floor), in place."""
    g = grad.to(step.dtype) * sign
    m = momentum.to(step.dtype)
    u = m + nesterov_mix * (g - m)
    factor = step / sums.sqrt().clamp_min(floor)
    weight.copy_(weight.to(step.dtype) * keep - u * factor.unsqueeze(1))


@cache
def _passes() -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Both passes; made on first use, because torch.compile loads half of torch."""
    momentum_and_sums_ = torch.compile(_momentum_and_sums_, dynamic=True, fullgraph=True)
    return momentum_and_sums_, torch.compile(_step_, dynamic=True, fullgraph=True)


@cache
def _build(weight: torch.dtype, momentum: torch.dtype, grad: torch.dtype, device: torch.device) -> None:
    """Compiles both passes for these dtypes, or raises RuntimeError. Takes seconds, once in a process."""
    w, m, g = (torch.zeros(_SAMPLE_SHAPE, dtype=dtype, device=device) for dtype in (weight, momentum, grad))
    work = update._work_dtype(w, m, g)
    one = [_scalar(1.0, work) for _ in range(5)]
    momentum_and_sums_, step_ = _passes()
    try:
        step_(w, m, g, momentum_and_sums_(m, g, *one[:3]), *one)
    except Exception as error:
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise RuntimeError(
            f"compile=True: torch.compile can't build the row step for {weight} weights, {momentum} momentum and "
            f"{grad} gradients on {device}: {reason[0]}. It needs a working C++ compiler (g++ or clang++) on a CPU and "
            "Triton on a GPU; the same step without either is compile=False."
        ) from error
