"""Products that are known to be symmetric: X X^T, b R + c R R and, for matrices that commute, R P. Of what a general
product computes, nearly half is known already then.

Three ways. "full" leaves everything to the library's product. "halves", on a CPU, cuts large products into rows of
blocks, of which those on and above the diagonal are computed and the others mirrored. "triton", on CUDA, does so in
tiles, by one kernel of our own: vendors' libraries have such a product for none of the dtypes of Newton-Schulz.
"""

from __future__ import annotations

import itertools
from typing import Literal

import torch
from torch import Tensor
from torch.utils._python_dispatch import _get_current_dispatch_mode

from rowmuon import symmetric_kernel
from rowmuon.device import compute_device

__all__ = [
    "Kernels",
    "Way",
    "check_kernels",
    "mirrored_elements",
    "num_parts",
    "product_flops",
    "symmetric_product_",
    "way_on",
]

Kernels = Literal["torch", "triton"]
Way = Literal["full", "halves", "triton"]

# Measured on two AVX-512 cores. Smaller products lose more to calls than the mirrored half saves.
_CPU_HALVE_FLOPS = 1 << 28
_CPU_TILED_ELEMENTS = 1 << 16

# Rows from which on Triton computes: 8 by 8 tiles, of which 36. Counted, not measured: of fewer tiles a large GPU
# computes all at a time, so that leaving half of them out makes nothing end earlier.
_TRITON_LEAST_ROWS = 1024

# As `compute_device` calls them. What stands for a tensor without data stands for a GPU's.
_TRITON_DEVICES = ("cuda", "fake", "meta")


def check_kernels(kernels: str, dtype: torch.dtype, name: str = "kernels") -> None:
    """Raises ValueError for a choice that isn't known, or not in that dtype."""
    if kernels not in ("torch", "triton"):
        raise ValueError(f"{name}={kernels!r} is neither 'torch' nor 'triton'")
    if kernels == "triton" and dtype == torch.float64:
        raise ValueError(f"{name}='triton' computes in bfloat16 and float32; for float64 take {name}='torch'")


def way_on(device: str | None, kernels: Kernels) -> Way:
    """How symmetric products are computed on a device, as `compute_device` names it."""
    if device == "cpu":
        return "halves"
    return "triton" if kernels == "triton" and device in _TRITON_DEVICES else "full"


def product_flops(r: int, k: int, way: Way) -> int:
    """FLOPs of a symmetric (r, k) (k, r) product, without what is mirrored."""
    if way == "triton" and r >= _TRITON_LEAST_ROWS:
        bounds = _tile_bounds(r)
    else:
        bounds = _part_bounds(r, num_parts(r, k) if way == "halves" else 1)
    return sum(2 * (end - start) * (r - start) * k for start, end in bounds)


def symmetric_product_(
    A: Tensor,
    B: Tensor,
    out: Tensor,
    way: Way,
    *,
    add: Tensor | None = None,
    beta: float = 1.0,
    alpha: float = 1.0,
    shift: float = 0.0,
) -> None:
    """out = alpha A B + shift I, plus beta add, where that is symmetric: (B, r, k), (B, k, r) -> (B, r, r).

    `out` must not overlap `A` or `B`; `add` must be symmetric too.
    """
    if way == "triton" and A.shape[-2] >= _TRITON_LEAST_ROWS:
        _product_in_tiles(A, B, out, add, beta, alpha, shift)
        return
    parts = num_parts(A.shape[-2], A.shape[-1]) if way == "halves" else 1
    if parts > 1:
        _product_in_parts(A, B, out, parts, add, beta, alpha)
    elif add is None:
        torch.bmm(A, B, out=out)
    else:
        torch.baddbmm(add, A, B, beta=beta, alpha=alpha, out=out)
    if shift:
        out.diagonal(dim1=-2, dim2=-1).add_(shift)


# --------------------------------------------------------------------------------------------------------- on a CPU


def _product_in_parts(
    A: Tensor, B: Tensor, out: Tensor, parts: int, add: Tensor | None, beta: float, alpha: float
) -> None:
    for a, b, o, c in zip(A, B, out, out if add is None else add, strict=True):
        for start, end in _part_bounds(o.shape[0], parts):
            # These rows from their diagonal block on; what lies left of it is mirrored from the rows above.
            here = o[start:end, start:]
            if add is None:
                torch.mm(a[start:end], b[:, start:], out=here)
            else:
                torch.addmm(c[start:end, start:], a[start:end], b[:, start:], beta=beta, alpha=alpha, out=here)
            block, mirrored = o[start:end, end:], o[end:, start:end]
            if block.numel() >= _CPU_TILED_ELEMENTS:
                # By itself a block is transposed in tiles, 2.7 times as fast as between views of something larger.
                mirrored.copy_(torch.empty_like(mirrored).copy_(block.contiguous().T))
            else:
                mirrored.copy_(block.T)


def num_parts(r: int, k: int) -> int:
    """Parts of rows that a symmetric (r, k) (k, r) product pays to be cut into, on a CPU."""
    if 2 * r * r * k < _CPU_HALVE_FLOPS:
        return 1
    return 2 if r < 768 else 3


def _part_bounds(r: int, parts: int) -> list[tuple[int, int]]:
    cuts = [r * part // parts // 32 * 32 for part in range(parts)] + [r]
    return list(itertools.pairwise(cuts))


def mirrored_elements(r: int, k: int) -> int:
    """Elements of the largest block that a symmetric (r, k) (k, r) product copies at a time to mirror it, on a CPU."""
    blocks = [(end - start) * (r - end) for start, end in _part_bounds(r, num_parts(r, k))]
    return max(blocks) if max(blocks) >= _CPU_TILED_ELEMENTS else 0


# --------------------------------------------------------------------------------------------------------- on CUDA


def _product_in_tiles(
    A: Tensor, B: Tensor, out: Tensor, add: Tensor | None, beta: float, alpha: float, shift: float
) -> None:
    """By the kernel; in a graph of torch.compile by the operator that stands for it.

    What has no data, or must be seen operation by operation (a counter of FLOPs or bytes), goes through products of
    torch, of the same elements.
    """
    if torch.compiler.is_compiling():
        torch.ops.rowmuon.symmetric_product_(A, B, out, add, beta, alpha, shift)
    elif _get_current_dispatch_mode() is not None or compute_device(A) in ("fake", "meta"):
        _tiles_by_torch(A, B, out, add, beta, alpha, shift)
    else:
        symmetric_kernel.multiply(A, B, out, add, beta, alpha, shift)


def _tiles_by_torch(
    A: Tensor, B: Tensor, out: Tensor, add: Tensor | None, beta: float, alpha: float, shift: float
) -> None:
    for start, end in _tile_bounds(A.shape[1]):
        here = out[:, start:end, start:]
        if add is None:
            torch.bmm(A[:, start:end], B[:, :, start:], out=here)
            if alpha != 1:
                here.mul_(alpha)
        else:
            torch.baddbmm(add[:, start:end, start:], A[:, start:end], B[:, :, start:], beta=beta, alpha=alpha, out=here)
        out[:, end:, start:end].copy_(out[:, start:end, end:].mT)
    if shift:
        out.diagonal(dim1=-2, dim2=-1).add_(shift)


def _tile_bounds(r: int) -> list[tuple[int, int]]:
    """Of the rows of tiles, of which the columns from their first row on are computed."""
    cuts = [*range(0, r, symmetric_kernel.TILE), r]
    return list(itertools.pairwise(cuts))
