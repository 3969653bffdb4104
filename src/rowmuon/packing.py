"""The half of a symmetric matrix that says it all, in rows of equal length.

Row i of b keeps X[i, i], X[i, i + 1], ..., X[i, i + h] with h = ceil(b / 2). Where that runs over the end of row i of
X in memory it goes on at the begin of row i + 1, which is left of the diagonal: so those are the entries whose mirror
images lie further right of it than h. Every pair occurs once, the diagonal is column 0, and all rows are as long, so
whoever holds a share of the rows holds that share of the matrix. Packing is one copy of a strided view.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["pack_", "packed_columns", "unpack_", "unpack_bytes"]


def packed_columns(size: int) -> int:
    """Columns of what is kept of a symmetric matrix of that many rows and columns."""
    return 1 + -(-size // 2)


def pack_(matrices: Tensor, out: Tensor) -> None:
    """Writes half of each matrix to ``out``; entries that stand for nothing are zero.

    Args:
        matrices: (..., b, b), symmetric, contiguous.
        out: (..., b, `packed_columns` of b), any strides and dtype.
    """
    size = matrices.shape[-1]
    out[..., :-1, :].copy_(_band(matrices))
    out[..., -1, :].zero_()
    out[..., -1, 0].copy_(matrices[..., -1, -1])
    _forget_twins(out, size)


def unpack_(packed: Tensor, out: Tensor, at_once: int) -> None:
    """The inverse of `pack_`: whole matrices, symmetric to the last bit.

    Args:
        packed: (num, b, `packed_columns` of b), any strides.
        out: (num, b, b), any dtype.
        at_once: elements of what is worked on at a time, or one matrix.
    """
    size = out.shape[-1]
    num = min(len(packed), max(1, at_once // size**2))
    scratch = torch.zeros(num, size, size, dtype=packed.dtype, device=packed.device)
    for part, result in zip(packed.split(max(1, num)), out.split(max(1, num)), strict=True):
        half = scratch[: len(part)]  # what isn't of the band stays zero
        _band(half).copy_(part[:, :-1])
        diagonal = half.diagonal(dim1=-2, dim2=-1)
        diagonal.copy_(part[:, :, 0]).mul_(0.5)
        torch.add(half, half.mT, out=result)


def unpack_bytes(num_matrices: int, size: int, dtype: torch.dtype, at_once: int) -> int:
    """Most bytes that `unpack_` has allocated at a time; ``dtype`` of what is packed."""
    return min(num_matrices, max(1, at_once // size**2)) * size**2 * dtype.itemsize


def _band(matrices: Tensor) -> Tensor:
    """(..., b, b) -> (..., b - 1, columns): a view of all packed rows but the last."""
    *batch, size, _ = matrices.shape
    steps = matrices.stride()
    return matrices.as_strided(
        (*batch, size - 1, packed_columns(size)), (*steps[:-2], size + 1, 1), matrices.storage_offset()
    )


def _forget_twins(packed: Tensor, size: int) -> None:
    """Of an odd number of rows the last column has each of its pairs twice."""
    if size % 2:
        packed[..., size // 2 :, -1].zero_()
