"""The compiled row step: memory is passed over once.

A row goes through all of `rowmuon.update.row_step_` while it lies in the innermost cache: read g, m and w, write m and
w, five passes over memory where a fused AdamW makes seven. On a CPU that is `rowmuon.native`, a kernel of our own;
elsewhere, and for dtypes that it doesn't know, ``torch.compile``. Rows that are split between ranks take two passes by
nature: the sums must come back from the other ranks before anything is stepped.

Into ``torch.compile`` all settings enter as tensors and all sizes are symbols, so neither lr, momentum, decay,
Nesterov, `maximize` nor a new shape compiles again. Matrices are stepped `_AT_ONCE` a call, since a call costs as much
as a few thousand elements. Everything is compiled on memory of its own, and `prepare_row_step` and
`build_split_row_step` do so for all that a step takes before it touches a parameter, so a compiler that is missing or
fails is noticed while nothing has changed.
"""

from __future__ import annotations

import math
import subprocess
from collections.abc import Callable, Iterator, Sequence
from functools import cache, lru_cache, partial
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import _get_current_dispatch_mode

from rowmuon import native, update
from rowmuon.device import compute_device

__all__ = ["apply_split_row_step_", "build_split_row_step", "prepare_row_step", "row_step_", "split_row_sums_"]

_AT_ONCE = 4

# Inductor keeps a value that reads more than this many others, and computes a cheaper one anew wherever it is used. So
# M and U stay in a buffer of one row each. (Were M computed anew, the CPU's inductor of torch 2.13 would end in a
# KeyError in its outer loops: it takes the write of M for a read of W.)
_CPU_OPTIONS: dict[str, str | int | bool | Callable[..., Any]] = {"realize_reads_threshold": 3}


class _Matrix(NamedTuple):
    weight: Tensor
    momentum: Tensor
    grad: Tensor
    scale: float


@torch.no_grad()
def prepare_row_step(
    weights: Sequence[Tensor], momenta: Sequence[Tensor], grads: Sequence[Tensor], scales: Sequence[float]
) -> Callable[..., None]:
    """Compiles what `row_step_` of these matrices takes and isn't compiled yet. Reads and changes none of them.

    Returns:
        That step, to be called once with the other arguments of `row_step_`.

    Raises:
        RuntimeError: it can't be built here.
    """
    by_way: dict[tuple[Any, ...], list[_Matrix]] = {}
    sees_all = _get_current_dispatch_mode() is not None
    for matrix in map(_Matrix, weights, momenta, grads, scales):
        by_way.setdefault(("eager",) if sees_all else _way(matrix), []).append(matrix)
    for (way, *dtypes), members in by_way.items():
        if way == "native":
            _build_native(*dtypes)
        elif way == "compiled":
            for count in {len(batch) for batch in _batches(members)}:
                _build("whole", count, *dtypes)
    return partial(_step, by_way)


def _way(matrix: _Matrix) -> tuple[Any, ...]:
    """How it is stepped, and for which dtypes."""
    weight, momentum, grad, _ = matrix
    if native.takes(weight, momentum, grad):
        return "native", weight.dtype, momentum.dtype, grad.dtype
    if _can_compile(weight, momentum, grad):
        return "compiled", *_dtypes(weight, momentum, grad)
    return ("eager",)


def _step(by_way: dict[tuple[Any, ...], list[_Matrix]], **hyper: Any) -> None:
    for (way, *_), members in by_way.items():
        if way == "native":
            _native_step(members, **hyper)
        elif way == "compiled":
            for batch in _batches(members):
                _compiled("whole", len(batch), batch[0].weight.device.type)(*_whole_arguments(batch, **hyper))
        else:
            weights, momenta, grads, scales = zip(*members, strict=True)
            update.row_step_(weights, momenta, grads, scales=scales, **hyper)


def _least_norm(eps: float, work: torch.dtype) -> float:
    """See `rowmuon.update.row_step_`."""
    return min(eps, math.sqrt(torch.finfo(work).tiny))


def _native_step(members: Sequence[_Matrix], lr: float | Tensor, weight_decay: float, eps: float, **hyper: Any) -> None:
    lr = float(lr)  # a 0-dim tensor on the CPU too: nothing waits for it
    floor = _least_norm(eps, update._work_dtype(*members[0][:3]))
    matrices = [(weight, momentum, grad) for weight, momentum, grad, _ in members]
    steps = [lr * scale for *_, scale in members]
    native.row_step_(matrices, steps, decay=lr * weight_decay, floor=floor, **hyper)


@cache
def _build_native(weight: torch.dtype, momentum: torch.dtype, grad: torch.dtype) -> None:
    try:
        native.build(weight, momentum, grad)
    except (OSError, subprocess.SubprocessError) as error:
        raise _explained(error, weight, momentum, grad, "cpu") from error


@torch.no_grad()
def build_split_row_step(weight: Tensor, momentum: Tensor, grad: Tensor) -> None:
    """Compiles what `split_row_sums_` and `apply_split_row_step_` take; raises as `prepare_row_step` does."""
    if _can_compile(momentum, grad):
        _build("sums", 1, *_dtypes(momentum, momentum, grad))
    if _can_compile(weight, momentum, grad):
        _build("apply", 1, *_dtypes(weight, momentum, grad))


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
    these, this one stays in fp32. Squares are summed one after another in a few lanes, which shows where ten thousands
    of them are alike: 40 eps in rows of 65,536 equal elements (eager: 200). A bf16 weight is rounded once on both. What
    neither `native.takes` nor `_can_compile` wants is done eagerly.

    Raises:
        RuntimeError: it can't be built here. Nothing has changed then.
    """
    step = prepare_row_step(weights, momenta, grads, scales)
    step(lr=lr, weight_decay=weight_decay, beta=beta, nesterov=nesterov, eps=eps, maximize=maximize)


@torch.no_grad()
def split_row_sums_(momentum: Tensor, grad: Tensor, *, beta: float, nesterov: bool, maximize: bool = False) -> Tensor:
    """`rowmuon.update.split_row_sums_`, compiled. Raises and differs as `row_step_` does."""
    if not _can_compile(momentum, grad):
        return update.split_row_sums_(momentum, grad, beta=beta, nesterov=nesterov, maximize=maximize)
    _build("sums", 1, *_dtypes(momentum, momentum, grad))
    work = update._work_dtype(momentum, grad)
    settings = _settings((-1.0 if maximize else 1.0, 1 - beta, 1 - beta if nesterov else 0.0), work)
    return _compiled("sums", 1, momentum.device.type)(momentum.detach(), grad.detach(), settings)


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
    """`rowmuon.update.apply_split_row_step_`, compiled. Raises and differs as `row_step_` does."""
    if not _can_compile(weight, momentum, grad):
        hyper: Any = {"lr": lr, "weight_decay": weight_decay, "beta": beta, "nesterov": nesterov, "eps": eps}
        update.apply_split_row_step_(weight, momentum, grad, sums, scale=scale, maximize=maximize, **hyper)
        return
    _build("apply", 1, *_dtypes(weight, momentum, grad))
    work = update._work_dtype(weight, momentum, grad)
    settings = _settings(_step_settings(work, scale, lr, weight_decay, beta, nesterov, eps, maximize), work)
    _compiled("apply", 1, weight.device.type)(weight.detach(), momentum.detach(), grad.detach(), sums, settings)


def _can_compile(*tensors: Tensor) -> bool:
    """Whether matrices of one shape go through torch.compile. Others take the eager path: it knows no strides.

    A single row or column doesn't, since torch.compile takes a 1 for a constant. Nor do other strides than those of a
    matrix that is alone in its memory, row by row: each is another compilation, of which torch allows eight, and for a
    transposed weight and momentum under a gradient that isn't the CPU's inductor of torch 2.13 steps wrongly (it reads
    the momentum once more after it has written it). Nor a tensor that stands for its negative, which the CPU's inductor
    takes for that tensor. Nor fake tensors, nor anything under a dispatch mode (a counter of
    FLOPs or collectives): it is to see every operation, and torch.compile would refuse.
    """
    first = tensors[0]
    if min(first.shape) <= 1 or _get_current_dispatch_mode() is not None or compute_device(first) == "fake":
        return False
    return all(tensor.is_contiguous() and not tensor.is_neg() for tensor in tensors)


def _dtypes(weight: Tensor, momentum: Tensor, grad: Tensor) -> tuple[Any, ...]:
    return weight.dtype, momentum.dtype, grad.dtype, weight.device


def _batches(members: Sequence[_Matrix]) -> Iterator[Sequence[_Matrix]]:
    """`_AT_ONCE` at a time, and what is left over one by one: so two sizes are compiled and no more."""
    whole = len(members) - len(members) % _AT_ONCE
    for start in range(0, whole, _AT_ONCE):
        yield members[start : start + _AT_ONCE]
    for position in range(whole, len(members)):
        yield members[position : position + 1]


def _settings(values: Sequence[float | Tensor], dtype: torch.dtype) -> Tensor:
    """One 1-D tensor: on the CPU, unless a value is a tensor that lies elsewhere; never read back."""
    devices = [value.device for value in values if isinstance(value, Tensor)]
    if not devices:
        return torch.tensor(values, dtype=dtype, device="cpu")
    parts = [torch.as_tensor(value, dtype=dtype, device=devices[0]).detach().reshape(()) for value in values]
    return torch.stack(parts)


def _step_settings(
    work: torch.dtype,
    scale: float,
    lr: float | Tensor,
    weight_decay: float,
    beta: float,
    nesterov: bool,
    eps: float,
    maximize: bool,
) -> tuple[float | Tensor, ...]:
    """(sign of the gradient, share of the gradient in U, what the decay leaves of W, step, least norm)."""
    floor = _least_norm(eps, work)
    sign, share = -1.0 if maximize else 1.0, 1 - beta if nesterov else 0.0
    return sign, share, 1 - lr * weight_decay, lr * scale, floor


def _whole_arguments(batch: Sequence[_Matrix], *, beta: float, **hyper: Any) -> tuple[list[tuple[Tensor, ...]], Tensor]:
    """What `_row_steps_` takes."""
    work = update._work_dtype(*batch[0][:3])
    matrices: list[tuple[Tensor, ...]] = []
    for place, (weight, momentum, grad, _) in enumerate(batch):
        mix = _mix_column(place, weight.shape[0], 1 - beta, work, weight.device)
        matrices.append((weight.detach(), momentum.detach(), grad.detach(), mix))
    settings = [value for matrix in batch for value in _step_settings(work, matrix.scale, beta=beta, **hyper)]
    return matrices, _settings(settings, work).view(len(batch), -1)


@lru_cache(maxsize=64)
def _mix_column(place: int, num_rows: int, value: float, dtype: torch.dtype, device: torch.device) -> Tensor:
    """(num_rows, 1), all of them `value`: a column, since it holds rows and columns apart in inductor's eyes.

    Were they one long loop for the momentum, it couldn't be the same loop as that of the sums, and memory would be
    passed over twice. Each place of a call has its own: one tensor that is passed twice is another compilation.
    """
    return torch.full((num_rows, 1), value, dtype=dtype, device=device)


# ----------------------------------------------------------------------------------------------- what is compiled


def _row_steps_(matrices: Sequence[tuple[Tensor, ...]], all_settings: Tensor) -> None:
    """M <- M + mix (G - M), U = M + share (G - M), W_i <- keep W_i - step U_i / max(||U_i||, floor), in place."""
    for (weight, momentum, grad, mix), settings in zip(matrices, all_settings.unbind(), strict=True):
        sign, share, keep, step, floor = settings.unbind()
        g = grad.to(settings.dtype) * sign
        m = momentum.to(settings.dtype)
        m = m + mix * (g - m)
        u = m + share * (g - m)
        factor = step / u.square().sum(dim=1, keepdim=True).sqrt().clamp_min(floor)
        momentum.copy_(m)
        weight.copy_(weight.to(settings.dtype) * keep - u * factor)


def _row_sums_(momentum: Tensor, grad: Tensor, settings: Tensor) -> Tensor:
    """M <- M + mix (G - M), in place; the sum of squares of each row of U."""
    sign, mix, share = settings.unbind()
    g = grad.to(settings.dtype) * sign
    m = momentum.to(settings.dtype)
    m = m + mix * (g - m)
    u = m + share * (g - m)
    momentum.copy_(m)
    return u.square().sum(dim=1)


def _apply_(weight: Tensor, momentum: Tensor, grad: Tensor, sums: Tensor, settings: Tensor) -> None:
    """W_i <- keep W_i - step U_i / max(sqrt(sum_i), floor), in place."""
    sign, share, keep, step, floor = settings.unbind()
    g = grad.to(settings.dtype) * sign
    m = momentum.to(settings.dtype)
    u = m + share * (g - m)
    factor = step / sums.sqrt().clamp_min(floor)
    weight.copy_(weight.to(settings.dtype) * keep - u * factor.unsqueeze(1))


_FUNCTIONS: dict[str, Callable[..., Any]] = {"whole": _row_steps_, "sums": _row_sums_, "apply": _apply_}


@cache
def _compiled(name: str, count: int, device_type: str) -> Callable[..., Any]:
    """Made on first use, because torch.compile loads half of torch. One for each count: its graph is unrolled.

    With code of its own: torch counts compilations by the code, and gives up after eight.
    """
    function = _FUNCTIONS[name]
    function = FunctionType(function.__code__.replace(), function.__globals__, f"{function.__name__}of_{count}")
    options = _CPU_OPTIONS if device_type == "cpu" and name == "whole" else None
    return torch.compile(function, dynamic=True, fullgraph=True, options=options)


@cache
def _build(
    name: str, count: int, weight: torch.dtype, momentum: torch.dtype, grad: torch.dtype, device: torch.device
) -> None:
    """Compiles one of them for these dtypes, or raises RuntimeError. Takes seconds, once in a process."""
    arguments: tuple[Any, ...]
    # Every side of another length: equal ones would be one symbol, and other shapes another compilation. Large, so that
    # inductor makes parallel loops of them.
    shapes = [(512 + 16 * i, 1024 + 16 * i) for i in range(count)]
    made = [[torch.zeros(s, dtype=dtype, device=device) for dtype in (weight, momentum, grad)] for s in shapes]
    hyper: Any = {"lr": 0.0, "weight_decay": 0.0, "beta": 0.0, "nesterov": True, "eps": 1e-7, "maximize": False}
    if name == "whole":
        arguments = _whole_arguments([_Matrix(w, m, g, 1.0) for w, m, g in made], **hyper)
    else:
        ((w, m, g),) = made
        work = update._work_dtype(m, g) if name == "sums" else update._work_dtype(w, m, g)
        sums = torch.zeros(shapes[0][0], dtype=update._work_dtype(m, g), device=device)
        apply = (w, m, g, sums, _settings(_step_settings(work, 1.0, **hyper), work))
        arguments = (m, g, _settings((1.0, 1.0, 1.0), work)) if name == "sums" else apply
    try:
        _compiled(name, count, device.type)(*arguments)
    except Exception as error:
        raise _explained(error, weight, momentum, grad, device) from error


def _explained(error: Exception, weight: object, momentum: object, grad: object, device: object) -> RuntimeError:
    reason = str(error).strip().splitlines() or [type(error).__name__]
    return RuntimeError(
        f"compile=True: the row step can't be built here for {weight} weights, {momentum} momentum and {grad} "
        f"gradients on {device}: {reason[0]}. It needs a working C++ compiler (g++ or clang++) on a CPU and Triton on "
        "a GPU; the same step without either is compile=False."
    )
