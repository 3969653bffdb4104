"""Symmetric products by Triton: the tiles on and above the diagonal, and their mirror images.

One program computes a tile, adds what is to be added while it is still in registers, and writes it to both of its
places. Triton is imported when the kernel is first used, and never before.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    import triton.language as tl

__all__ = ["TILE", "build", "multiply"]

TILE = 128  # rows and columns; what is computed, and so the FLOPs of a plan, depend on it

# Operands take 32 KiB a stage, so 96 KiB of shared memory; GPUs from Ampere on have 99 or more.
_NUM_WARPS, _NUM_STAGES = 8, 3


@cache
def build(dtype: torch.dtype, device: torch.device) -> None:
    """Compiles the kernel for operands of `dtype`, once in a process, on memory of its own.

    Raises:
        RuntimeError: Triton isn't here, or can't compile for this device.
    """
    A, out = (torch.zeros(1, TILE, TILE, dtype=dtype, device=device) for _ in range(2))
    try:
        for add in (None, A):
            multiply(A, A, out, add, 1.0, 1.0, 0.0)
    except Exception as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise RuntimeError(
            f'kernels="triton": symmetric products of {dtype} on {device} can\'t be built: {reason}. CUDA builds of '
            "torch for Linux bring a Triton that fits (elsewhere: pip install 'rowmuon[triton]'); kernels=\"torch\" "
            "(ns_kernels of the optimizer) needs none."
        ) from error


def multiply(A: Tensor, B: Tensor, out: Tensor, add: Tensor | None, beta: float, alpha: float, shift: float) -> None:
    """See `rowmuon.symmetric.symmetric_product_`, which also checks the arguments."""
    num, rows, depth = A.shape
    num_tiles = -(-rows // TILE)
    if num * rows == 0:
        return
    kernel, interpreted = _kernel()
    other = out if add is None else add  # None has no strides, and isn't read
    kernel[(num * num_tiles * (num_tiles + 1) // 2,)](
        *(A, B, other, out),
        *(rows, depth),
        *(float(beta), float(alpha), float(shift)),
        *(*A.stride(), *B.stride(), *other.stride(), *out.stride()),
        HAS_ADD=add is not None,
        PRECISION=_precision(),
        **_constants(A.dtype),
        WIDEN=interpreted,
        num_warps=_NUM_WARPS,
        num_stages=_NUM_STAGES,
    )


def _constants(dtype: torch.dtype) -> dict[str, int]:
    return {"TILE": TILE, "DEPTH": 64 if dtype.itemsize == 2 else 32}


def _precision() -> str:
    """Of products of fp32, as torch's are set: by ``set_float32_matmul_precision`` or ``torch.backends``."""
    return "tf32" if torch.backends.cuda.matmul.fp32_precision == "tf32" else "ieee"


@cache
def _kernel() -> tuple[Any, bool]:
    """The kernel, and whether it runs in Triton's interpreter (``TRITON_INTERPRET=1``), which takes CPU tensors."""
    global tl  # where Triton looks up what a kernel calls tl
    import triton
    import triton.language as tl

    kernel = triton.jit(_symmetric_product)
    return kernel, not isinstance(kernel, triton.JITFunction)


def _symmetric_product(  # type: ignore[no-untyped-def]
    a_ptr,
    b_ptr,
    add_ptr,
    out_ptr,
    num_rows,
    depth,
    beta,
    alpha,
    shift,
    a_batch,
    a_row,
    a_col,
    b_batch,
    b_row,
    b_col,
    add_batch,
    add_row,
    add_col,
    out_batch,
    out_row,
    out_col,
    HAS_ADD: tl.constexpr,
    PRECISION: tl.constexpr,
    TILE: tl.constexpr,
    DEPTH: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """One program for each tile (i, j), i <= j, of each matrix.

    Row i of n has n - i tiles, and row n - 1 - i has the i + 1 that are missing to n + 1. So programs are counted
    through pairs of rows (p, n - 1 - p) of n + 1 tiles each; the middle row of an odd n is alone.
    """
    n = tl.cdiv(num_rows, TILE)
    tiles = n * (n + 1) // 2
    batch = (tl.program_id(0) // tiles).to(tl.int64)
    tile = tl.program_id(0) % tiles
    p = tile // (n + 1)
    q = tile % (n + 1)
    i = tl.where(q < n - p, p, n - 1 - p)
    j = tl.where(q < n - p, p + q, q - 1)

    # 64 bits: a matrix, or a batch of them, may have more elements than 32 can count.
    rows = (i * TILE + tl.arange(0, TILE)).to(tl.int64)
    cols = (j * TILE + tl.arange(0, TILE)).to(tl.int64)
    steps = tl.arange(0, DEPTH)
    a_ptrs = a_ptr + batch * a_batch + rows[:, None] * a_row + steps[None, :].to(tl.int64) * a_col
    b_ptrs = b_ptr + batch * b_batch + steps[:, None].to(tl.int64) * b_row + cols[None, :] * b_col
    total = tl.zeros((TILE, TILE), dtype=tl.float32)
    for start in range(0, depth, DEPTH):
        inside = steps < depth - start
        a = tl.load(a_ptrs, mask=(rows < num_rows)[:, None] & inside[None, :], other=0.0)
        b = tl.load(b_ptrs, mask=inside[:, None] & (cols < num_rows)[None, :], other=0.0)
        if WIDEN:  # the interpreter multiplies bf16 as if it were integers; in fp32 products of them are exact
            a = a.to(tl.float32)
            b = b.to(tl.float32)
        total = tl.dot(a, b, total, input_precision=PRECISION)
        a_ptrs += DEPTH * a_col
        b_ptrs += DEPTH * b_row
    total *= alpha

    valid = (rows < num_rows)[:, None] & (cols < num_rows)[None, :]
    if HAS_ADD:
        add_ptrs = add_ptr + batch * add_batch + rows[:, None] * add_row + cols[None, :] * add_col
        total += beta * tl.load(add_ptrs, mask=valid, other=0.0).to(tl.float32)
    total += tl.where(rows[:, None] == cols[None, :], shift, 0.0)
    result = total.to(out_ptr.dtype.element_ty)
    out_ptr += batch * out_batch
    tl.store(out_ptr + rows[:, None] * out_row + cols[None, :] * out_col, result, mask=valid)
    if i != j:
        mirrored = (cols < num_rows)[:, None] & (rows < num_rows)[None, :]
        tl.store(out_ptr + cols[:, None] * out_row + rows[None, :] * out_col, tl.trans(result), mask=mirrored)


# ------------------------------------------------------------------------------------- the operator of torch.compile
_LIBRARY = torch.library.Library("rowmuon", "DEF")
_LIBRARY.define(
    "symmetric_product_(Tensor A, Tensor B, Tensor(a!) out, Tensor? add, float beta, float alpha, float shift) -> ()",
    tags=(torch.Tag.pt2_compliant_tag,),
)
_LIBRARY.impl("symmetric_product_", multiply, "CompositeExplicitAutograd")
_LIBRARY.impl("symmetric_product_", lambda *arguments: None, "Meta")
