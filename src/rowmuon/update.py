"""The arithmetic of one optimizer step on local tensors: momentum, scales, decay, row step. Pure: no groups, no state.

W, G, M, U are (m, n): m output features (rows), n input features, as `torch.nn.Linear` stores them.

    M <- beta M + (1 - beta) G
    U  = (1 - beta) G + beta M  with Nesterov, else M
    W <- (1 - lr weight_decay) W
    W <- W - lr scale O         refresh:  O = NewtonSchulz(U), scale = spectral_scale(m, n)
    W <- W - lr scale R         row step: R_i = U_i / ||U_i||, scale = row_scale * row_step_scale(m, n)

`lr` is a float or a 0-dim tensor, which is never read back to the host. Names that end in _ write in place, and write
nothing but what their docstring names.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Literal

import torch
from torch import Tensor

AdjustLr = Literal["original", "match_rms_adamw"] | None

# Elements of a block of rows. On a CPU four blocks (gradient, momentum, weight, direction) should stay in the L2 caches
# from the first pass to the last; elsewhere a block only bounds what is temporary.
_CPU_BLOCK = 1 << 17
_DEVICE_BLOCK = 1 << 24


def spectral_scale(num_rows: int, num_cols: int, adjust_lr_fn: AdjustLr) -> float:
    """Factor on lr for an orthogonalised update of an (m, n) matrix.

    "original" and None: sqrt(max(1, m / n)), Keller Jordan's; "match_rms_adamw": 0.2 sqrt(max(m, n)), Moonshot's
    (arXiv:2502.16982), which gives the update the RMS of AdamW's. Both as torch.optim.Muon has them.

    Raises:
        ValueError: an unknown convention, or a side that isn't positive.

    Example:
        >>> spectral_scale(4096, 1024, "original")
        2.0
    """
    if num_rows < 1 or num_cols < 1:
        raise ValueError(f"a matrix of {num_rows} x {num_cols} has no scale: both sides must be at least 1")
    if adjust_lr_fn is None or adjust_lr_fn == "original":
        return math.sqrt(max(1.0, num_rows / num_cols))
    if adjust_lr_fn == "match_rms_adamw":
        return 0.2 * math.sqrt(max(num_rows, num_cols))
    raise ValueError(f"adjust_lr_fn={adjust_lr_fn!r} is unknown: take 'original', 'match_rms_adamw' or None")


def row_step_scale(num_rows: int, num_cols: int, adjust_lr_fn: AdjustLr) -> float:
    """Factor on lr for a row-normalised update of an (m, n) matrix, before `row_scale`.

    An exact polar factor has RMS 1 / sqrt(max(m, n)), a row-normalised matrix 1 / sqrt(n), so
    spectral_scale * sqrt(min(m, n) / m) gives both kinds of step the same RMS, and one lr serves both.

    Example:
        >>> row_step_scale(4096, 1024, "original")
        1.0
    """
    return spectral_scale(num_rows, num_cols, adjust_lr_fn) * math.sqrt(min(num_rows, num_cols) / num_rows)


def convert_lr(lr: float, num_rows: int, num_cols: int, source: AdjustLr, target: AdjustLr) -> float:
    """The lr under `target` that moves an (m, n) matrix as `lr` does under `source`.

    Example:
        >>> round(convert_lr(0.02, 1024, 1024, "original", "match_rms_adamw"), 6)
        0.003125
    """
    return lr * spectral_scale(num_rows, num_cols, source) / spectral_scale(num_rows, num_cols, target)


@torch.no_grad()
def momentum_direction_(
    momentum: Tensor,
    grad: Tensor,
    *,
    beta: float,
    nesterov: bool,
    maximize: bool = False,
    out: Tensor | None = None,
) -> Tensor:
    """Update `momentum` in place and return the direction U.

    Returns:
        `out` where it is given; else a new tensor with Nesterov, and without it `momentum` itself, to be read only.
    """
    dtype = torch.promote_types(momentum.dtype, grad.dtype)
    if out is None:
        if not nesterov:
            for m, g in _blocks(momentum, grad):
                _update_momentum_(m, g, beta, maximize)
            return momentum
        out = torch.empty_like(grad, dtype=dtype)
    for m, g, u in _blocks(momentum, grad, out):
        g = _update_momentum_(m, g, beta, maximize)
        u.copy_(_direction(m, g, beta, nesterov))
    return out


@torch.no_grad()
def update_momentum_(momentum: Tensor, grad: Tensor, *, beta: float, maximize: bool = False) -> None:
    """M <- beta M + (1 - beta) G, in place."""
    for m, g in _blocks(momentum, grad):
        _update_momentum_(m, g, beta, maximize)


@torch.no_grad()
def write_direction(
    momentum: Tensor, grad: Tensor, out: Tensor, *, beta: float, nesterov: bool, maximize: bool = False
) -> None:
    """Write U of an already updated `momentum` into `out` (any floating dtype, such as a send buffer's)."""
    for m, g, u in _blocks(momentum, grad, out):
        u.copy_(_direction(m, g.neg() if maximize and nesterov else g, beta, nesterov))


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
    """Row step of local matrices with whole rows: updates `weights` and `momenta`."""
    for weight, momentum, grad, scale in zip(weights, momenta, grads, scales, strict=True):
        for w, m, g in _blocks(weight, momentum, grad):
            g = _update_momentum_(m, g, beta, maximize)
            u = _direction(m, g, beta, nesterov)
            norms = torch.linalg.vector_norm(u, dim=1, keepdim=True, dtype=_sum_dtype(u))
            _apply_rows_(w, u, norms, lr, weight_decay, scale, eps)


@torch.no_grad()
def split_row_sums_(momentum: Tensor, grad: Tensor, *, beta: float, nesterov: bool, maximize: bool = False) -> Tensor:
    """Update `momentum`; return this part's sums of squares of U, one per row: (rows,) in fp32 (fp64 for fp64)."""
    sums = []
    for m, g in _blocks(momentum, grad):
        g = _update_momentum_(m, g, beta, maximize)
        u = _direction(m, g, beta, nesterov)
        sums.append(torch.linalg.vector_norm(u, dim=1, dtype=_sum_dtype(u)).square_())
    dtype = torch.promote_types(torch.promote_types(momentum.dtype, grad.dtype), torch.float32)
    return torch.cat(sums) if sums else momentum.new_zeros(momentum.shape[0], dtype=dtype)


@torch.no_grad()
def apply_split_row_step_(
    weight: Tensor,
    momentum: Tensor,
    grad: Tensor,
    sums: Tensor,
    *,
    lr: float | Tensor,
    weight_decay: float,
    beta: float,
    nesterov: bool,
    scale: float,
    eps: float,
    maximize: bool = False,
) -> None:
    """Second half of a row step whose rows are split: update `weight` from the sums over all parts."""
    norms = sums.sqrt().unsqueeze(1)
    for w, m, g, norm in _blocks(weight, momentum, grad, norms):
        u = _direction(m, g.neg() if maximize else g, beta, nesterov)
        _apply_rows_(w, u, norm.clone(), lr, weight_decay, scale, eps)


@torch.no_grad()
def apply_direction_(
    weight: Tensor, direction: Tensor, *, lr: float | Tensor, weight_decay: float, scale: float
) -> None:
    """W <- (1 - lr weight_decay) W - lr scale O."""
    for w, o in _blocks(weight, direction):
        if weight_decay != 0:
            w.mul_(1 - lr * weight_decay)
        if isinstance(lr, Tensor):
            w.addcmul_(o.to(w.dtype), (lr * -scale).to(w.dtype))
        else:
            w.add_(o, alpha=-lr * scale)


def _update_momentum_(m: Tensor, g: Tensor, beta: float, maximize: bool) -> Tensor:
    """M <- beta M + (1 - beta) G; returns G, negated when maximising."""
    if maximize:
        g = g.neg()
    if m.dtype == g.dtype:
        m.lerp_(g, 1 - beta)
    else:
        dtype = torch.promote_types(m.dtype, g.dtype)
        m.copy_(m.to(dtype).lerp(g.to(dtype), 1 - beta))
    return g


def _direction(m: Tensor, g: Tensor, beta: float, nesterov: bool) -> Tensor:
    if not nesterov:
        return m
    dtype = torch.promote_types(m.dtype, g.dtype)
    return g.to(dtype).lerp(m.to(dtype), beta)


def _apply_rows_(
    w: Tensor, u: Tensor, norms: Tensor, lr: float | Tensor, weight_decay: float, scale: float, eps: float
) -> None:
    step = norms.masked_fill_(norms == 0, eps).reciprocal_().mul_(lr * -scale)
    if weight_decay != 0:
        w.mul_(1 - lr * weight_decay)
    w.addcmul_(u, step)


def _sum_dtype(u: Tensor) -> torch.dtype:
    return torch.promote_types(u.dtype, torch.float32)


def _blocks(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """The same rows of every tensor, a block at a time."""
    first = tensors[0]
    if first.numel() == 0:
        return
    elements = _CPU_BLOCK if first.device.type == "cpu" else _DEVICE_BLOCK
    num_rows = max(1, elements // max(1, first[0].numel()))
    yield from zip(*(tensor.split(num_rows) for tensor in tensors), strict=True)
