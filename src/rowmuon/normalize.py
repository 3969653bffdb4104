"""Matrices over their Frobenius norms, which Newton-Schulz starts from, however small or large they are.

On a CPU a few rows of all matrices at a time go through it, eagerly. On other devices it may go through
``torch.compile``: three reads of the matrices and one write, all in the dtype that they have, where the eager way makes
about ten, most of them over fp32. It is all that ``torch.compile`` is good for in Newton-Schulz: what comes after it
are products of the vendor's library, called by both ways alike, with the same copies for what is added to them.
"""

from __future__ import annotations

from functools import cache
from types import FunctionType
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _get_current_dispatch_mode

from rowmuon.device import compute_device

__all__ = ["build", "normalize", "normalize_bytes"]

_CPU_SLAB_ELEMENTS = 1 << 20  # in the dtype of the norm
_DEVICE_SLAB_ELEMENTS = 1 << 22

# Norms, largest entries and their masks, at most.
_PER_MATRIX_BYTES = 48


def normalize(result: Tensor, matrices: Tensor, eps: float, *, on_cpu: bool, compile: bool = False) -> None:
    """Write each of `matrices` (B, m, n) over its Frobenius norm to `result`, rounded to its dtype once.

    The norm is taken in fp32 (fp64 of fp64). `result` may be `matrices`.

    Args:
        eps: stands in for a norm that is exactly zero.
        on_cpu: cuts the eager way for a CPU's caches.
        compile: through ``torch.compile`` where that can be: not under a dispatch mode, and not for matrices that don't
            lie one after another in memory.
    """
    if compile and _can_compile(result, matrices):
        in_place = result.data_ptr() == matrices.data_ptr() and result.dtype == matrices.dtype
        arguments = (matrices.flatten(1),) if in_place else (matrices.flatten(1), result.flatten(1))
        _compiled(in_place, len(matrices) == 1, matrices.dtype, result.dtype)(*arguments)
    else:
        _normalize_eagerly(result, matrices, eps, on_cpu)


def normalize_bytes(num_matrices: int, num_rows: int, num_cols: int, source_dtype: torch.dtype, *, on_cpu: bool) -> int:
    """Most bytes that `normalize` has allocated at a time, beside what goes in and comes out."""
    slab_rows = _slab_rows(num_matrices, num_rows, num_cols, on_cpu)
    num_slabs = -(-num_rows // slab_rows)
    slab = num_matrices * slab_rows * num_cols * _work_dtype(source_dtype).itemsize
    return slab + _PER_MATRIX_BYTES * num_matrices * (1 + num_slabs)


def _normalize_eagerly(result: Tensor, matrices: Tensor, eps: float, on_cpu: bool) -> None:
    """A few rows of all matrices at a time, so that what is in fp32 stays small, and in a CPU's caches.

    What is largest comes out before squares are taken: those of 1e-25 underflow in fp32, and those of 1e25 overflow.
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


# ----------------------------------------------------------------------------------------------- what is compiled


@cache
@torch.no_grad()  # as `newton_schulz` calls it: what is compiled with gradients is another compilation
def build(source_dtype: torch.dtype, dtype: torch.dtype, device: torch.device) -> None:
    """Compiles what `normalize` takes from one dtype to another, once in a process, on memory of its own.

    Raises:
        RuntimeError: it can't be built here.
    """
    try:
        for num in (1, 3):
            matrices = torch.zeros(num, 1000, dtype=source_dtype, device=device)
            _compiled(False, num == 1, source_dtype, dtype)(matrices, torch.empty_like(matrices, dtype=dtype))
            if source_dtype == dtype:
                _compiled(True, num == 1, source_dtype, dtype)(matrices)
    except Exception as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise RuntimeError(
            f"compile=True: the normalisation of Newton-Schulz can't be built here from {source_dtype} to {dtype} on "
            f"{device}: {reason}. It needs Triton on a GPU; the same without it is compile=False."
        ) from error


def _can_compile(result: Tensor, matrices: Tensor) -> bool:
    """See `rowmuon.compiled._can_compile`; torch.compile takes a length of 1 for a constant."""
    if _get_current_dispatch_mode() is not None or compute_device(result) == "fake" or torch.compiler.is_compiling():
        return False
    dense = all(tensor.is_contiguous() and not tensor.is_neg() for tensor in (result, matrices))
    return dense and matrices[0].numel() > 1


@cache
def _compiled(in_place: bool, alone: bool, source_dtype: torch.dtype, dtype: torch.dtype) -> Any:
    """One with code of its own for each: torch counts compilations by the code, and gives up after eight."""
    function = _normalize_in_place if in_place else _normalize_into
    function = FunctionType(function.__code__.replace(), function.__globals__, function.__name__)
    return torch.compile(function, dynamic=True, fullgraph=True)


def _normalize_in_place(matrices: Tensor) -> None:
    matrices.copy_(_normalized(matrices))


def _normalize_into(matrices: Tensor, result: Tensor) -> None:
    result.copy_(_normalized(matrices))


def _normalized(matrices: Tensor) -> Tensor:
    """(B, numel), of which each row is a matrix, over their norms.

    A power of two, taken twice, brings the largest entry to between 1/4 and 4. It is exact, and unlike the entry itself
    it can be divided by on a GPU, whose fast division gives zero where the divisor is over 2^126.
    """
    X = matrices.to(_work_dtype(matrices.dtype))
    largest = X.abs().amax(dim=1, keepdim=True)
    half = torch.exp2(torch.floor(-0.5 * torch.log2(torch.where(largest == 0, 1.0, largest))))
    X = X * half * half
    norm = X.square().sum(dim=1, keepdim=True).sqrt()
    return X / torch.where(norm == 0, 1.0, norm)
