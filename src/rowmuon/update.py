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

import functools
import math
from collections.abc import Iterator, Sequence
from typing import Literal

import torch
from torch import Tensor

from rowmuon.device import compute_device

AdjustLr = Literal["original", "match_rms_adamw"] | None
Dtypes = Sequence[torch.dtype]

# Elements of a block of rows. On a CPU the blocks of gradient, momentum, weight and direction stay in the caches from
# the first operation to the last, so main memory is passed over once; of 2^15 to 2^20 this is the fastest on two cores
# with 1 MiB of L2 each. Elsewhere a block only bounds what is temporary: 64 MiB of fp32.
_CPU_BLOCK = 1 << 19
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

    Raises:
        ValueError: lr isn't a finite number >= 0, or a convention or shape that isn't one.
    """
    if not 0.0 <= lr < math.inf:
        raise ValueError(f"lr={lr!r} isn't a finite number >= 0")
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

    Args:
        momentum: (rows, n), any floating dtype.
        grad: (rows, n), any floating dtype; never altered.
        beta: Momentum, [0, 1).
        out: Optional result, (rows, n), any floating dtype: a buffer to send from, say.

    Returns:
        `out` where it is given. Else a new tensor with Nesterov, and without it `momentum` itself, to be read only:
        there is nothing to compute, and `newton_schulz` never writes to its input.
    """
    if out is None:
        if not nesterov:
            update_momentum_(momentum, grad, beta=beta, maximize=maximize)
            return momentum
        out = torch.empty_like(grad, dtype=torch.promote_types(momentum.dtype, grad.dtype))
    for m, g, u in _blocks(momentum, grad, out):
        g = _update_momentum_(m, g, beta, maximize)
        _write_direction(u, m, g, beta, nesterov)
    return out


@torch.no_grad()
def update_momentum_(momentum: Tensor, grad: Tensor, *, beta: float, maximize: bool = False) -> None:
    """M <- beta M + (1 - beta) G, in place."""
    for m, g in _blocks(momentum, grad):
        _update_momentum_(m, g, beta, maximize)


@torch.no_grad()
def write_direction(
    momentum: Tensor, grad: Tensor, out: Tensor, *, beta: float, nesterov: bool, maximize: bool = False, taken: bool
) -> None:
    """Write U to `out`, in its dtype. If the momentum hasn't `taken` the gradient, as if it had, to the last bit."""
    scratch = _Scratch()
    for m, g, u in _blocks(momentum, grad, out):
        if not taken:
            m = scratch.take(0, m, m.dtype).copy_(m)
            g = _update_momentum_(m, g, beta, maximize)
        elif maximize:
            g = g.neg()
        _write_direction(u, m, g, beta, nesterov)


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
    """Row step of matrices whose rows are whole here: momentum, direction, decay, W_i <- W_i - lr scale U_i / ||U_i||.

    Updates `weights` and `momenta`. A block of rows goes through all of it before the next is touched. A row of zeros
    takes no step but the decay; no rows at all is a no-op. Sums and weights are computed in fp32 (fp64 for fp64), and
    a bf16 weight is rounded once, after decay and step.

    Args:
        weights: Local tensors (rows, n); rows and n may differ from one to the next, as may dtypes.
        momenta: As `weights`, shape by shape.
        grads: As `weights`, shape by shape; never altered.
        lr: >= 0; a float or a 0-dim tensor.
        weight_decay: >= 0, decoupled: the decay is lr * weight_decay.
        beta: Momentum, [0, 1).
        scales: For each matrix row_scale * row_step_scale(m, n) of the whole matrix (not of this part of it).
        eps: Least norm that is divided by, > 0, but never above sqrt(smallest normal) = 1.1e-19 in fp32: under that
            squares underflow, and a sum of them says nothing. So it touches no norm that was computed right.
        maximize: Step along the gradient instead of against it.
    """
    scratch = _Scratch()
    # The largest blocks first, so that the scratch is made once.
    matrices = sorted(zip(weights, momenta, grads, scales, strict=True), key=lambda matrix: -_block_numel(matrix[0]))
    for weight, momentum, grad, scale in matrices:
        for w, m, g in _blocks(weight, momentum, grad):
            u, norms = _momentum_and_norms_(m, g, beta, nesterov, maximize, _work_dtype(w, m, g), scratch)
            _apply_rows_(w, u, norms, lr, weight_decay, scale, eps, scratch)


@torch.no_grad()
def split_row_sums_(momentum: Tensor, grad: Tensor, *, beta: float, nesterov: bool, maximize: bool = False) -> Tensor:
    """First half of a row step whose rows are split between ranks: update `momentum`, sum the local squares of U.

    Returns:
        (rows,) in fp32 (fp64 for fp64), to be summed over the ranks and handed to `apply_split_row_step_`.
    """
    scratch = _Scratch()
    sums = momentum.new_empty(momentum.shape[0], dtype=_work_dtype(momentum, grad))
    if momentum.numel() == 0:
        return sums.zero_()
    for m, g, part in _blocks(momentum, grad, sums.unsqueeze(1)):
        _, norms = _momentum_and_norms_(m, g, beta, nesterov, maximize, sums.dtype, scratch)
        torch.square(norms, out=part)
    return sums


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
    """Second half: update `weight` from `sums`, (rows,), of the squares of whole rows. Arguments as in `row_step_`."""
    scratch = _Scratch()
    for w, m, g, part in _blocks(weight, momentum, grad, sums.unsqueeze(1)):
        u = scratch.take(0, g, _work_dtype(w, m, g))
        _write_direction(u, m, g.neg() if maximize else g, beta, nesterov)
        _apply_rows_(w, u, part.sqrt().to(u.dtype), lr, weight_decay, scale, eps, scratch)


@torch.no_grad()
def apply_direction_(
    weight: Tensor, direction: Tensor, *, lr: float | Tensor, weight_decay: float, scale: float
) -> None:
    """W <- (1 - lr weight_decay) W, then W <- W - lr scale O, each rounded to the dtype of W.

    With a float lr these are torch.optim.Muon's own operations. In bf16 that shows: what is rounded differently here
    differs by as much as the update itself after 20 steps.

    Args:
        weight: (rows, n); updated.
        direction: O, (rows, n), any floating dtype; never altered.
        lr: >= 0; a float or a 0-dim tensor.
        scale: spectral_scale(m, n) of the whole matrix.
    """
    scratch = _Scratch()
    for w, o in _blocks(weight, direction):
        if weight_decay != 0:
            _decay_(w, lr, weight_decay, scratch)
        o = o.to(w.dtype)
        if isinstance(lr, Tensor):
            w.addcmul_(o, (lr * -scale).to(w.dtype))
        else:
            w.add_(o, alpha=-lr * scale)


def momentum_bytes(num_rows: int, num_cols: int, dtypes: Dtypes, device_type: str, maximize: bool) -> int:
    """Most bytes that `update_momentum_` has allocated at a time on (num_rows, num_cols); `dtypes` of M and G."""
    momentum, grad = dtypes
    work = _widest(torch.float32, momentum, grad)
    copies = [work for dtype in dtypes if dtype != work] if momentum != grad else []
    return block_bytes(num_rows, num_cols, copies + [grad] * maximize, device_type)


def part_bytes(num_rows: int, num_cols: int, dtypes: Dtypes, device_type: str, maximize: bool) -> int:
    """The same of `write_direction` or `apply_direction_`; `dtypes` of W and G, of M, of U to write, of O to apply."""
    weight, momentum, sent, received = dtypes
    both = _widest(momentum, weight)
    written = [] if sent == momentum == weight else [both] + [both for dtype in (momentum, weight) if dtype != both]
    applied = [weight] * (received != weight) + [torch.float32] * (weight.itemsize < 4)  # the decay by a tensor lr
    return max(
        block_bytes(num_rows, num_cols, needed, device_type) for needed in (written + [weight] * maximize, applied)
    )


def row_step_bytes(num_rows: int, num_cols: int, dtypes: Dtypes, device_type: str, maximize: bool) -> tuple[int, int]:
    """The same of a row step, split sums of rows left out: its scratch, and the rest; `dtypes` of W and G, of M."""
    weight, momentum = dtypes
    work, both = _widest(torch.float32, weight, momentum), _widest(momentum, weight)
    written = [both, both] if momentum != weight else [both] * (weight != work)
    temporary = max(
        momentum_bytes(num_rows, num_cols, (momentum, weight), device_type, maximize),
        block_bytes(num_rows, num_cols, written + [weight] * maximize, device_type),
    )
    norms = block_bytes(num_rows, 1, [work, work], device_type)
    return block_bytes(num_rows, num_cols, [work] * (1 + (weight != work)), device_type), temporary + norms


def block_bytes(num_rows: int, num_cols: int, dtypes: Dtypes, device_type: str) -> int:
    numel = min(num_rows, _block_rows(num_cols, device_type)) * num_cols if num_cols else 0
    return numel * sum(dtype.itemsize for dtype in dtypes)


def _decay_(w: Tensor, lr: float | Tensor, weight_decay: float, scratch: _Scratch) -> None:
    factor = 1 - lr * weight_decay
    work = _work_dtype(w)
    if w.dtype == work or not isinstance(factor, Tensor):
        w.mul_(factor)
    else:
        # A 0-dim tensor would first be rounded to the dtype of w, and 1 - 1e-4 is 1 in bf16. A float isn't.
        w.copy_(scratch.take(0, w, work).copy_(w).mul_(factor))


def _update_momentum_(m: Tensor, g: Tensor, beta: float, maximize: bool) -> Tensor:
    """M <- beta M + (1 - beta) G; returns G, negated where it is to be maximised."""
    if maximize:
        g = g.neg()
    if m.dtype == g.dtype:
        m.lerp_(g, 1 - beta)
    else:
        work = _work_dtype(m, g)
        m.copy_(m.to(work).lerp_(g.to(work), 1 - beta))
    return g


def _write_direction(u: Tensor, m: Tensor, g: Tensor, beta: float, nesterov: bool) -> None:
    """U = (1 - beta) G + beta M, or M, from the momentum as it is stored; rounded to the wider dtype of m and g."""
    if not nesterov:
        u.copy_(m)
    elif u.dtype == m.dtype == g.dtype:
        torch.lerp(g, m, beta, out=u)
    else:
        dtype = torch.promote_types(m.dtype, g.dtype)
        u.copy_(torch.lerp(g.to(dtype), m.to(dtype), beta))


def _momentum_and_norms_(
    m: Tensor, g: Tensor, beta: float, nesterov: bool, maximize: bool, work: torch.dtype, scratch: _Scratch
) -> tuple[Tensor, Tensor]:
    """Update a block of the momentum; return U, (rows, n), and the norms of its rows, (rows, 1), in `work`."""
    g = _update_momentum_(m, g, beta, maximize)
    if not nesterov and m.dtype == work:
        u = m
    else:
        u = scratch.take(0, g, work)
        _write_direction(u, m, g, beta, nesterov)
    return u, torch.linalg.vector_norm(u, dim=1, keepdim=True)


def _apply_rows_(
    w: Tensor,
    u: Tensor,
    norms: Tensor,
    lr: float | Tensor,
    weight_decay: float,
    scale: float,
    eps: float,
    scratch: _Scratch,
) -> None:
    """W_i <- (1 - lr weight_decay) W_i - lr scale U_i / norm_i of a block of rows. Overwrites `norms`."""
    norms.clamp_min_(min(eps, math.sqrt(torch.finfo(norms.dtype).tiny)))
    value = -scale
    if isinstance(lr, Tensor):
        norms.div_(lr)  # lr = 0 gives infinite norms and steps of zero
    else:
        value *= lr
    x = w if w.dtype == u.dtype else scratch.take(1, w, u.dtype).copy_(w)
    if weight_decay != 0:
        x.mul_(1 - lr * weight_decay)
    x.addcdiv_(u, norms, value=value)
    if x is not w:
        w.copy_(x)


def _work_dtype(*tensors: Tensor) -> torch.dtype:
    return _widest(torch.float32, *(tensor.dtype for tensor in tensors))


def _widest(*dtypes: torch.dtype) -> torch.dtype:
    return functools.reduce(torch.promote_types, dtypes)


def _blocks(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """The same rows of every tensor, a block at a time; nothing where there is nothing in them."""
    first = tensors[0]
    if first.numel() == 0:
        return
    num_rows = _block_rows(first.shape[1], compute_device(first))
    if first.shape[0] <= num_rows:
        yield tensors
    else:
        yield from zip(*(tensor.split(num_rows) for tensor in tensors), strict=True)


def _block_numel(tensor: Tensor) -> int:
    num_rows, num_cols = tensor.shape
    return min(num_rows, _block_rows(num_cols, compute_device(tensor))) * num_cols if num_cols else 0


def _block_rows(num_cols: int, device_type: str) -> int:
    return max(1, (_CPU_BLOCK if device_type == "cpu" else _DEVICE_BLOCK) // num_cols)


class _Scratch:
    """Buffers for one block each, kept over the blocks and matrices of one call: fresh memory costs page faults."""

    def __init__(self) -> None:
        self._buffers: dict[tuple[int, torch.dtype, torch.device], Tensor] = {}

    def take(self, slot: int, like: Tensor, dtype: torch.dtype) -> Tensor:
        """An uninitialised tensor of the shape of `like`; the same memory for the same slot every time."""
        key = (slot, dtype, like.device)
        buffer = self._buffers.get(key)
        if buffer is None or buffer.numel() < like.numel():
            buffer = self._buffers[key] = like.new_empty(like.numel(), dtype=dtype)
        return buffer[: like.numel()].view(like.shape)
